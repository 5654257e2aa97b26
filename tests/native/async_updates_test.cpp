/// AsyncUpdates: parameters are updated by the mean of all workers' gradients, and every worker gets them.
#include "coarse/client/async_updates.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fixture.hpp"

namespace coarse::test::async_updates_test {
namespace {

constexpr std::uint32_t kGroup = 1;
constexpr std::uint32_t kNumParameters = 16;
constexpr std::uint32_t kNumElements = 300;
constexpr std::size_t kNumBytes = kNumElements * sizeof(float);

using Values = std::vector<float>;

/// Counts ends of requests, and keeps the last failure.
class Ends {
 public:
  AsyncUpdates::Done expect() {
    return [this](const char* failure) {
      const std::lock_guard lock(mutex_);
      if (failure != nullptr) failure_ = failure;
      ++count_;
      changed_.notify_all();
    };
  }
  std::string wait(std::size_t count) {
    std::unique_lock lock(mutex_);
    const auto patience = std::chrono::duration<double>(kPatienceSeconds);
    return changed_.wait_for(lock, patience, [&] { return count_ >= count; }) ? failure_ : "it did not end";
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t count_ = 0;
  std::string failure_;
};

/// Two workers with parameters that momentum moves.
class SharedParameters : public testing::Test {
 protected:
  SharedParameters() : copied_(2 * kNumParameters), cluster_(ClusterShape{}), plan_(makeOptimizerPlan()) {
    cluster_.start().addGroup(plan_);
    for (std::size_t rank = 0; rank < 2; ++rank) {
      reducers_.push_back(std::make_unique<AsyncReducer>(
          cluster_.client(rank), kPatienceSeconds,
          [](WaitStatus, std::uint32_t, std::uint32_t) { return std::string("a wait failed"); }));
      updates_.push_back(std::make_unique<AsyncUpdates>(*reducers_[rank]));
      for (std::uint32_t i = 0; i < kNumParameters; ++i) updates_[rank]->add(nameOf(i), placeOf(rank, i));
    }
  }

  static std::string nameOf(std::uint32_t parameter) { return "parameter" + std::to_string(parameter); }
  static GroupPlan makeOptimizerPlan() {
    const std::vector<TensorSpec> specs(kNumParameters, {kNumElements, DType::kFloat32, ReduceOp::kMean});
    GroupPlan plan = makePlan(kGroup, 2, specs, kNumElements / 3);
    plan.hasOptimizer = true;
    plan.numStates = 1;
    return plan;
  }
  AsyncUpdates::Place placeOf(std::size_t rank, std::uint32_t parameter) {
    std::byte* const memory = cluster_.parameters(plan_) + plan_.keptArrays()[parameter].parameterOffset;
    UpdateSettings* const settings = cluster_.settings(plan_, rank) + parameter;
    return {kGroup, parameter, kNumBytes, memory, settings, rank == 0, &copied_[2 * parameter], 2, rank};
  }
  static UpdateSettings settingsOf(std::uint32_t step) {
    UpdateSettings settings;
    settings.rule = UpdateRule::kSgdMomentum;
    settings.stepSize = 1;
    settings.firstDecay = 0.5F;
    settings.updateNumber = step;
    return settings;
  }

  std::vector<std::atomic<std::uint32_t>> copied_;
  Cluster cluster_;
  GroupPlan plan_;
  std::vector<std::unique_ptr<AsyncReducer>> reducers_;
  std::vector<std::unique_ptr<AsyncUpdates>> updates_;
};

TEST_F(SharedParameters, MoveByTheMeanAndFromWhereTheFirstWorkerHasThem) {
  std::vector<std::vector<Values>> values(2, std::vector<Values>(kNumParameters, Values(kNumElements)));
  for (std::uint32_t i = 0; i < kNumParameters; ++i) values[0][i].assign(kNumElements, 64.F);
  float expected = 64, momentum = 0;
  for (std::uint32_t step = 1; step <= 4; ++step) {
    if (step == 3) {  // both are told another value
      expected = 1000;
      for (auto& own : values) own.assign(kNumParameters, Values(kNumElements, expected));
    }
    std::vector<Ends> ends(2);
    std::vector<std::vector<Values>> gradients(2);
    for (std::size_t rank = 0; rank < 2; ++rank)
      gradients[rank].assign(kNumParameters, Values(kNumElements, static_cast<float>(8 * step + 16 * rank)));
    together(4, [&](std::size_t thread) {
      const std::size_t rank = thread / 2;
      for (std::uint32_t i = 0; i < kNumParameters; ++i) {
        const std::uint32_t parameter = rank == 0 ? i : kNumParameters - 1 - i;
        if (parameter % 2 != thread % 2) continue;
        Values& value = values[rank][parameter];
        updates_[rank]->update(nameOf(parameter), gradients[rank][parameter].data(), value.data(),
                               value.data(), kNumBytes, settingsOf(step), ends[rank].expect());
      }
    });
    for (Ends& each : ends) ASSERT_EQ(each.wait(kNumParameters), "");
    momentum = 0.5F * momentum + static_cast<float>(8 * step + 8);
    expected -= momentum;
    for (const auto& own : values)
      for (const Values& value : own) ASSERT_EQ(value, Values(kNumElements, expected)) << "step " << step;
  }
}

TEST_F(SharedParameters, AreForgottenWhenTheyAreNotUnderWay) {
  Values gradient(kNumElements), value(kNumElements);
  Ends ends;
  const auto update = [&](std::uint32_t parameter) {
    updates_[0]->update(nameOf(parameter), gradient.data(), value.data(), value.data(), kNumBytes,
                        settingsOf(1), ends.expect());
  };
  update(0);
  EXPECT_FALSE(updates_[0]->remove("parameter0"));
  EXPECT_TRUE(updates_[0]->remove("parameter1"));
  EXPECT_TRUE(updates_[0]->remove("parameter1"));
  update(1);
  EXPECT_EQ(ends.wait(1), "no parameter was registered as parameter1");
  updates_[0]->add("parameter1", placeOf(0, 1));
  reducers_[0]->close();
  EXPECT_EQ(ends.wait(2), "the session is closed");
}

TEST_F(SharedParameters, AreNotWrittenBeforeAllHaveCopiedTheLastResult) {
  Values gradient(kNumElements), value(kNumElements, 8.F);
  std::vector<Values> updated(2, Values(kNumElements));
  std::vector<Ends> ends(2);
  const auto update = [&](std::size_t rank, std::uint32_t step) {
    updates_[rank]->update("parameter0", gradient.data(), value.data(), updated[rank].data(), kNumBytes,
                           settingsOf(step), ends[rank].expect());
  };
  together(2, [&](std::size_t rank) { update(rank, 1); });
  for (Ends& each : ends) ASSERT_EQ(each.wait(1), "");
  EXPECT_EQ(copied_[0], 1U);
  EXPECT_EQ(copied_[1], 1U);

  value.assign(kNumElements, 9.F);
  copied_[1] = 0;  // as if the second worker were at it
  together(2, [&](std::size_t rank) {
    if (rank == 1) copied_[1] = 1;
    update(rank, 2);
  });
  for (Ends& each : ends) ASSERT_EQ(each.wait(2), "");
  for (const Values& each : updated) EXPECT_EQ(each, value);

  const Values written = value;
  value.assign(kNumElements, 10.F);
  copied_[1] = 1;
  together(2, [&](std::size_t rank) { rank == 0 ? update(0, 3) : reducers_[0]->close(); });
  EXPECT_EQ(ends[0].wait(3), "the session is closed");
  const auto* const shared = reinterpret_cast<const float*>(placeOf(0, 0).parameter);
  EXPECT_EQ(Values(shared, shared + kNumElements), written);
}

TEST_F(SharedParameters, RefuseWhatTheyAreNot) {
  Values value(kNumElements);
  const auto update = [&](const std::string& name, std::size_t numBytes) {
    Ends ends;
    updates_[0]->update(name, value.data(), value.data(), value.data(), numBytes, settingsOf(1),
                        ends.expect());
    return ends.wait(1);
  };
  EXPECT_EQ(update("nothing", kNumBytes), "no parameter was registered as nothing");
  EXPECT_EQ(update("parameter0", kNumBytes - 4), "parameter0 has 1200 bytes, not 1196");
  EXPECT_THROW(updates_[0]->add("parameter0", placeOf(0, 0)), std::invalid_argument);
}

TEST_F(SharedParameters, AreNotUpdatedTwiceAtOnceAndEndWithTheirReducer) {
  Values gradient(kNumElements), value(kNumElements);
  Ends first, second;
  for (Ends* ends : {&first, &second})
    updates_[0]->update("parameter3", gradient.data(), value.data(), value.data(), kNumBytes, settingsOf(1),
                        ends->expect());
  EXPECT_EQ(second.wait(1), "parameter3 is updated twice at once");
  reducers_[0]->close();
  EXPECT_EQ(first.wait(1), "the session is closed");
}

}  // namespace
}  // namespace coarse::test::async_updates_test
