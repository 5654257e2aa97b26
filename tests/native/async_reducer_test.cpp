/// AsyncReducer: each request for a tensor by name gets the sum of all workers, from any threads and in
/// whatever orders they ask, and a reason if there is none.
#include "coarse/client/async_reducer.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "contributions.hpp"
#include "fixture.hpp"

namespace coarse::test::async_reducer_test {
namespace {

constexpr std::uint32_t kNumTensors = 64;
constexpr std::uint32_t kNumElements = 300;
constexpr std::size_t kNumBytes = kNumElements * sizeof(float);

std::string nameOfTensor(std::uint32_t tensor) { return "tensor" + std::to_string(tensor); }

/// Counts ends of requests, and keeps the last failure.
class Ends {
 public:
  AsyncReducer::Done expect() {
    return [this](const char* failure) {
      const std::lock_guard lock(mutex_);
      if (failure != nullptr) failure_ = failure;
      ++count_;
      changed_.notify_all();
    };
  }
  /// @returns whether there were so many in time.
  bool wait(std::size_t count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(kPatienceSeconds),
                             [&] { return count_ >= count; });
  }
  std::string failure() {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t count_ = 0;
  std::string failure_;
};

/// Two workers with 64 tensors.
class AsyncReducers : public testing::Test {
 protected:
  explicit AsyncReducers(double timeoutSeconds = kPatienceSeconds) : cluster_(ClusterShape{}) {
    cluster_.start().addGroup(
        makePlan(1, 2, std::vector<TensorSpec>(kNumTensors, {kNumElements, DType::kFloat32, ReduceOp::kSum}),
                 kNumElements / 3));
    for (std::size_t rank = 0; rank < 2; ++rank) {
      reducers_.push_back(std::make_unique<AsyncReducer>(
          cluster_.client(rank), timeoutSeconds,
          [](WaitStatus status, std::uint32_t group, std::uint32_t tensor) {
            return "status " + std::to_string(static_cast<int>(status)) + " of " + std::to_string(group) +
                   "/" + std::to_string(tensor);
          }));
      for (std::uint32_t tensor = 0; tensor < kNumTensors; ++tensor)
        reducers_[rank]->add(nameOfTensor(tensor), 1, tensor, kNumBytes);
    }
  }

  Cluster cluster_;
  std::vector<std::unique_ptr<AsyncReducer>> reducers_;
};

/// Who has the result may end the reducer while the thread that asked for it still leaves reduce().
TEST_F(AsyncReducers, EndsBeforeItsCallersHaveLeft) {
  constexpr int kSessions = 200;
  Bytes buffer = contribution(DType::kFloat32, kNumElements, 0, 1);
  for (int session = 0; session < kSessions; ++session) {
    std::vector<Ends> ends(2);
    std::vector<std::thread> callers;
    for (std::size_t rank = 0; rank < 2; ++rank) {
      reducers_[rank] = std::make_unique<AsyncReducer>(
          cluster_.client(rank), kPatienceSeconds,
          [](WaitStatus, std::uint32_t, std::uint32_t) { return std::string("a status"); });
      reducers_[rank]->add(nameOfTensor(0), 1, 0, kNumBytes);
      callers.emplace_back([&, rank, reducer = reducers_[rank].get()] {
        reducer->reduce(nameOfTensor(0), buffer.data(), nullptr, kNumBytes, ends[rank].expect());
      });
    }
    for (Ends& each : ends) ASSERT_TRUE(each.wait(1));
    for (auto& reducer : reducers_) reducer.reset();  // a caller may still be in reduce()
    for (std::thread& caller : callers) caller.join();
    for (Ends& each : ends) ASSERT_EQ(each.failure(), "");
  }
}

class ImpatientReducers : public AsyncReducers {
 protected:
  ImpatientReducers() : AsyncReducers(kMomentSeconds) {}
};

TEST_F(AsyncReducers, ManyTensorsFromManyThreadsInOrdersOfTheirOwn) {
  constexpr std::size_t kThreads = 4;
  constexpr std::uint32_t kSteps = 5;
  std::vector<std::vector<Bytes>> buffers(2, std::vector<Bytes>(kNumTensors));
  for (std::uint32_t step = 1; step <= kSteps; ++step) {
    std::vector<Ends> ends(2);
    together(2 * kThreads, [&](std::size_t thread) {
      const std::size_t rank = thread / kThreads;
      std::vector<std::uint32_t> order(kNumTensors);
      std::iota(order.begin(), order.end(), 0u);
      std::shuffle(order.begin(), order.end(), std::mt19937_64(step * 8 + thread));
      for (const std::uint32_t tensor : order) {
        if (tensor % kThreads != thread % kThreads) continue;
        Bytes& buffer = buffers[rank][tensor];
        buffer = contribution(DType::kFloat32, kNumElements, rank, step + tensor);
        reducers_[rank]->reduce(nameOfTensor(tensor), buffer.data(), buffer.data(), kNumBytes,
                                ends[rank].expect());
      }
    });
    for (Ends& each : ends) {
      ASSERT_TRUE(each.wait(kNumTensors));
      ASSERT_EQ(each.failure(), "");
    }
    for (std::uint32_t tensor = 0; tensor < kNumTensors; ++tensor) {
      const Bytes expected = result(DType::kFloat32, ReduceOp::kSum, kNumElements, {0, 1}, step + tensor, 2);
      ASSERT_TRUE(buffers[0][tensor] == expected && buffers[1][tensor] == expected) << "tensor " << tensor;
    }
  }
}

TEST_F(AsyncReducers, ANameThatIsUnderWayTakesItsTurn) {
  constexpr std::uint32_t kTurns = 7;
  std::vector<std::vector<Bytes>> buffers(2);
  std::vector<Ends> ends(2);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    for (std::uint32_t turn = 0; turn < kTurns; ++turn)
      buffers[rank].push_back(contribution(DType::kFloat32, kNumElements, rank, turn));
    for (Bytes& buffer : buffers[rank])  // the first worker asks for all before the second one asks for any
      reducers_[rank]->reduce("tensor3", buffer.data(), buffer.data(), kNumBytes, ends[rank].expect());
  }
  for (std::size_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(ends[rank].wait(kTurns));
    ASSERT_EQ(ends[rank].failure(), "");
    for (std::uint32_t turn = 0; turn < kTurns; ++turn)
      ASSERT_TRUE(buffers[rank][turn] ==
                  result(DType::kFloat32, ReduceOp::kSum, kNumElements, {0, 1}, turn, 2));
  }
}

TEST_F(AsyncReducers, ForgetWhatIsNotUnderWay) {
  std::vector<Bytes> buffers;
  std::vector<Ends> ends(2);
  for (std::size_t rank = 0; rank < 2; ++rank)
    buffers.push_back(contribution(DType::kFloat32, kNumElements, rank, 1));
  const auto reduce = [&](std::size_t rank) {
    reducers_[rank]->reduce("tensor0", buffers[rank].data(), buffers[rank].data(), kNumBytes,
                            ends[rank].expect());
  };
  reduce(0);
  EXPECT_FALSE(reducers_[0]->remove("tensor0"));
  EXPECT_TRUE(reducers_[1]->remove("tensor1"));
  reduce(1);
  for (Ends& each : ends) ASSERT_TRUE(each.wait(1));
  for (std::size_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(ends[rank].failure(), "");
    EXPECT_TRUE(reducers_[rank]->remove("tensor0"));
    EXPECT_TRUE(reducers_[rank]->remove("tensor0"));
  }
  reduce(0);
  ASSERT_TRUE(ends[0].wait(2));
  EXPECT_EQ(ends[0].failure(), "no tensor was registered as tensor0");
  reducers_[0]->add("tensor0", 1, 0, kNumBytes);
}

TEST_F(AsyncReducers, LibrariesReachThemThroughC) {
  std::vector<Bytes> buffers;
  std::vector<Ends> ends(2);
  std::vector<AsyncReducer::Done> dones;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    buffers.push_back(contribution(DType::kFloat32, kNumElements, rank, 1));
    dones.push_back(ends[rank].expect());
  }
  for (std::size_t rank = 0; rank < 2; ++rank) {
    const CoarseAsyncReducer& library = reducers_[rank]->interface();
    ASSERT_EQ(library.version, COARSE_ASYNC_REDUCER_VERSION);
    const auto done = [](void* context, const char* failure) {
      (*static_cast<AsyncReducer::Done*>(context))(failure);
    };
    library.reduce(library.reducer, "tensor0", buffers[rank].data(), buffers[rank].data(), kNumBytes, nullptr,
                   0, done, &dones[rank]);
  }
  for (std::size_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(ends[rank].wait(1));
    ASSERT_TRUE(buffers[rank] == result(DType::kFloat32, ReduceOp::kSum, kNumElements, {0, 1}, 1, 2));
  }
}

TEST_F(AsyncReducers, WhatCannotBeReducedIsToldAtOnce) {
  Bytes buffer(kNumBytes);
  Ends unknown, wrongLength;
  reducers_[0]->reduce("nothing", buffer.data(), buffer.data(), kNumBytes, unknown.expect());
  reducers_[0]->reduce("tensor0", buffer.data(), buffer.data(), kNumBytes - 1, wrongLength.expect());
  ASSERT_TRUE(unknown.wait(1));
  EXPECT_EQ(unknown.failure(), "no tensor was registered as nothing");
  ASSERT_TRUE(wrongLength.wait(1));
  EXPECT_EQ(wrongLength.failure(), "tensor0 has 1200 bytes, not 1199");
  EXPECT_THROW(reducers_[0]->add("tensor0", 1, 0, kNumBytes), std::invalid_argument);
}

TEST_F(AsyncReducers, ClosingEndsWhatIsUnderWayAndWhatComesLater) {
  Bytes buffer(kNumBytes);
  Ends ends;
  for (int i = 0; i < 3; ++i)  // one is under way, two wait for their turn
    reducers_[0]->reduce("tensor1", buffer.data(), buffer.data(), kNumBytes, ends.expect());
  reducers_[0]->close();
  reducers_[0]->reduce("tensor2", buffer.data(), buffer.data(), kNumBytes, ends.expect());
  ASSERT_TRUE(ends.wait(4));
  EXPECT_EQ(ends.failure(), "the session is closed");
}

TEST_F(AsyncReducers, TheWeightOfALostWorkerGoesToTheOthers) {
  const Bytes given = contribution(DType::kFloat32, kNumElements, 0, 1);
  Bytes buffer = given;
  const std::vector<double> weights = {1, 3};
  Ends ends;
  reducers_[0]->reduce("tensor7", buffer.data(), buffer.data(), kNumBytes, ends.expect(), kPresent,
                       {weights.data(), weights.size()});
  cluster_.proxy(0).clientEnded(1);
  ASSERT_TRUE(eventually([&] { return !cluster_.proxy(0).takeDrained().empty(); }));
  cluster_.proxy(0).standInFor(1);
  ASSERT_TRUE(ends.wait(1));
  ASSERT_EQ(ends.failure(), "");
  for (std::size_t i = 0; i < kNumElements; ++i) {
    float own = 0, sum = 0;
    std::memcpy(&own, given.data() + i * sizeof own, sizeof own);
    std::memcpy(&sum, buffer.data() + i * sizeof sum, sizeof sum);
    ASSERT_EQ(sum, 4 * own);
  }
}

TEST_F(ImpatientReducers, AWorkerThatDoesNotComeIsWaitedForSoLong) {
  Bytes buffer(kNumBytes);
  Ends ends;
  reducers_[0]->reduce("tensor5", buffer.data(), buffer.data(), kNumBytes, ends.expect());
  ASSERT_TRUE(ends.wait(1));
  EXPECT_EQ(ends.failure(), "status 1 of 1/5");
  reducers_[0]->reduce("tensor6", buffer.data(), buffer.data(), kNumBytes, ends.expect());
  ASSERT_TRUE(ends.wait(2));
  EXPECT_EQ(ends.failure(), "status 1 of 1/5");
}

}  // namespace
}  // namespace coarse::test::async_reducer_test
