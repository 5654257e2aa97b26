/// What ranks give NCCL comes back as sums and maxima of all of them, in order; where NCCL is missing,
/// refuses or waits in vain, it is said what to do, or ended. Driver and NCCL are those of cuda_stand_in.cpp
/// and nccl_stand_in.cpp, and ranks are threads.
#include "coarse/gpu/nccl.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fixture.hpp"

extern "C" int standInCommunicators();

namespace coarse::test::nccl_test {
namespace {

using nccl::Communicator;
using nccl::Error;
using nccl::GroupScope;
using nccl::Library;
using nccl::UniqueId;

template <typename Exception, typename Call>
std::string messageOf(Call call) {
  try {
    call();
  } catch (const Exception& error) {
    return error.what();
  }
  return "no exception";
}

void expectSays(const std::string& message, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << message << " says nothing of " << part;
}

/// What one rank of a test has.
struct Rank {
  Rank(const std::shared_ptr<Library>& loaded, const UniqueId& id, int rank, int numRanks, int device)
      : library(loaded),
        context(std::make_shared<cuda::Context>(device)),
        stream(context),
        communicator(library, id, rank, numRanks, context) {}

  template <typename T>
  void allReduce(const std::vector<T>& send, std::vector<T>& receive, DType dtype,
                 ReduceOp op = ReduceOp::kSum) {
    communicator.allReduce(send.data(), receive.data(), send.size(), dtype, op, stream.handle());
  }

  std::shared_ptr<Library> library;
  cuda::SharedContext context;
  cuda::Stream stream;
  Communicator communicator;
};

class Nccl : public testing::Test {
 protected:
  /// Runs function(rank) in a thread for each rank of one communicator, each with a device of its own.
  template <typename Function>
  void forRanks(int numRanks, Function function) {
    const UniqueId id = library_->makeUniqueId();
    together(static_cast<std::size_t>(numRanks), [&](std::size_t i) {
      Rank rank(library_, id, static_cast<int>(i), numRanks, static_cast<int>(i));
      function(rank);
    });
  }

  const Variable devices_{"STAND_IN_GPUS", "3"};
  const std::shared_ptr<Library> library_ = std::make_shared<Library>();
};

class NcclRanks : public Nccl, public testing::WithParamInterface<int> {};

/// Rank r gives 2^r * (i % 5) + r: more than one chunk of the stand-in's, and a chunk that is not full.
template <typename T>
void reducesNumbers(Rank& rank, DType dtype) {
  constexpr std::size_t kCount = (64 << 10) / sizeof(T) + 7;
  const int mine = rank.communicator.rank(), numRanks = rank.communicator.numRanks();
  const auto number = [](int r, std::size_t i) {
    return static_cast<T>((1 << r) * static_cast<int>(i % 5) + r);
  };
  std::vector<T> given(kCount), sums(kCount), maxima(kCount), sumsHere(kCount), maximaHere(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    given[i] = number(mine, i);
    for (int r = 0; r < numRanks; ++r) sums[i] = static_cast<T>(sums[i] + number(r, i));
    maxima[i] = number(numRanks - 1, i);
  }
  rank.allReduce(given, sumsHere, dtype);
  rank.allReduce(given, maximaHere, dtype, ReduceOp::kMax);
  rank.allReduce(given, given, dtype);  // in place
  rank.stream.synchronize();
  EXPECT_EQ(sumsHere, sums);
  EXPECT_EQ(maximaHere, maxima);
  EXPECT_EQ(given, sums);
  EXPECT_NO_THROW(rank.communicator.check());
}

/// The same for a type that `narrow` makes of float32.
void reducesNarrowNumbers(Rank& rank, DType dtype) {
  constexpr std::size_t kCount = 20011;
  const int mine = rank.communicator.rank(), numRanks = rank.communicator.numRanks();
  std::vector<float> given(kCount), sums(kCount), maxima(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    const auto part = static_cast<float>(i % 16);
    given[i] = part + static_cast<float>(mine);
    sums[i] = part * static_cast<float>(numRanks) + static_cast<float>(numRanks * (numRanks - 1) / 2);
    maxima[i] = part + static_cast<float>(numRanks - 1);
  }
  const auto narrowed = [&](const std::vector<float>& wide) {
    std::vector<std::uint16_t> stored(kCount);
    narrow(dtype, wide.data(), stored.data(), kCount, 1, ReduceOp::kSum);
    return stored;
  };
  std::vector<std::uint16_t> sumsHere(kCount), maximaHere(kCount);
  const std::vector<std::uint16_t> sent = narrowed(given);
  rank.allReduce(sent, sumsHere, dtype);
  rank.allReduce(sent, maximaHere, dtype, ReduceOp::kMax);
  rank.stream.synchronize();
  EXPECT_EQ(sumsHere, narrowed(sums));
  EXPECT_EQ(maximaHere, narrowed(maxima));
}

TEST_P(NcclRanks, HaveSumsAndMaximaOfAllOfEveryType) {
  forRanks(GetParam(), [](Rank& rank) {
    reducesNumbers<float>(rank, DType::kFloat32);
    reducesNumbers<double>(rank, DType::kFloat64);
    reducesNumbers<std::int32_t>(rank, DType::kInt32);
    reducesNumbers<std::int64_t>(rank, DType::kInt64);
    reducesNumbers<std::uint8_t>(rank, DType::kUInt8);
    reducesNarrowNumbers(rank, DType::kBFloat16);
    reducesNarrowNumbers(rank, DType::kFloat16);
  });
}

TEST_P(NcclRanks, RunOperationsInTheirOrderOnWhateverStreams) {
  forRanks(GetParam(), [](Rank& rank) {
    cuda::Stream other(rank.context);
    std::vector<std::int64_t> given{1 << rank.communicator.rank()}, first(1), second(1), third(1);
    rank.allReduce(given, first, DType::kInt64);
    // Sums of the sum before, on another stream that nobody has told to wait for the first.
    rank.communicator.allReduce(first.data(), second.data(), 1, DType::kInt64, ReduceOp::kSum,
                                other.handle());
    rank.allReduce(second, third, DType::kInt64);
    rank.stream.synchronize();
    const std::int64_t numRanks = rank.communicator.numRanks(), all = (1 << numRanks) - 1;
    EXPECT_EQ(first[0], all);
    EXPECT_EQ(second[0], all * numRanks);
    EXPECT_EQ(third[0], all * numRanks * numRanks);
  });
}

INSTANTIATE_TEST_SUITE_P(Nccl, NcclRanks, testing::Values(1, 2, 3),
                         [](const auto& shape) { return std::to_string(shape.param) + "ranks"; });

TEST_F(Nccl, VersionAndPathAreTold) {
  EXPECT_EQ(library_->version().major, 2);
  EXPECT_EQ(library_->version().minor, 99);
  EXPECT_EQ(library_->version().patch, 3);
  EXPECT_EQ(library_->path(), "libnccl.so.2");
}

TEST_F(Nccl, UniqueIdsTravelAsBytes) {
  const UniqueId id = library_->makeUniqueId();
  EXPECT_EQ(id.bytes().size(), 128u);
  EXPECT_EQ(UniqueId::fromBytes(id.bytes()).bytes(), id.bytes());
  EXPECT_NE(library_->makeUniqueId().bytes(), id.bytes());
  expectSays(messageOf<std::invalid_argument>([] { UniqueId::fromBytes("short"); }), {"128", "5"});
}

TEST_F(Nccl, RanksThatHaveJoinedLeaveNoFileBehind) {
  const UniqueId id = library_->makeUniqueId();
  const std::string path = id.bytes().c_str();
  std::thread first([&] { Rank(library_, id, 0, 2, 0); });
  EXPECT_TRUE(eventually([&] { return std::filesystem::exists(path); }));
  Rank(library_, id, 1, 2, 1);
  first.join();
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(Nccl, OperationsOfAGroupAreGivenAtItsEnd) {
  forRanks(2, [&](Rank& rank) {
    std::vector<float> given{1, 2}, sums(2), more{10}, moreSums(1);
    GroupScope group(rank.communicator);
    rank.allReduce(given, sums, DType::kFloat32);
    rank.allReduce(more, moreSums, DType::kFloat32);
    rank.stream.synchronize();
    EXPECT_EQ(sums, std::vector<float>(2)) << "before the group's end";
    group.end();
    rank.stream.synchronize();
    EXPECT_EQ(sums, (std::vector<float>{2, 4}));
    EXPECT_EQ(moreSums, std::vector<float>{20});
  });
}

/// As NCCL has it with NCCL_COMM_BLOCKING=0: calls return before they are done, and may fail later.
class NcclInTheBackground : public Nccl {
  const Variable isSo_{"NCCL_COMM_BLOCKING", "0"};
};

TEST_F(NcclInTheBackground, CallsAreWaitedFor) {
  forRanks(2, [&](Rank& rank) {
    reducesNumbers<float>(rank, DType::kFloat32);
    std::vector<float> given{1, 2}, sums(2);
    GroupScope group(rank.communicator);
    rank.allReduce(given, sums, DType::kFloat32);
    group.end();
    EXPECT_NO_THROW(rank.communicator.check());
    rank.stream.synchronize();
    EXPECT_EQ(sums, (std::vector<float>{2, 4}));
  });
}

TEST_F(NcclInTheBackground, ACommunicatorThatFailsToJoinIsGivenBack) {
  const Variable fails("STAND_IN_NCCL_FAILS", "rank0");
  const int before = standInCommunicators();
  expectSays(messageOf<Error>([&] { Rank(library_, library_->makeUniqueId(), 0, 1, 0); }),
             {"ncclCommInitRank", "No space left", "/dev/shm"});
  EXPECT_EQ(standInCommunicators(), before);
}

TEST_F(Nccl, AMaximumIsTheNumberWhereAnotherRankHasNaN) {
  forRanks(2, [](Rank& rank) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> given{rank.communicator.rank() == 0 ? nan : 1}, maximum(1), sum(1);
    rank.allReduce(given, maximum, DType::kFloat32, ReduceOp::kMax);
    rank.allReduce(given, sum, DType::kFloat32);
    rank.stream.synchronize();
    EXPECT_EQ(maximum[0], 1);
    EXPECT_TRUE(std::isnan(sum[0]));
  });
}

TEST_F(Nccl, AbortEndsTheWaitForARankThatNeverComes) {
  forRanks(2, [](Rank& rank) {
    if (rank.communicator.rank() == 1) {
      // Until the peer has been ended by its own abort: what it waits for must not be this rank's.
      rank.stream.synchronize();
      return;
    }
    std::vector<float> given{1}, sum{-1};
    rank.allReduce(given, sum, DType::kFloat32);
    std::this_thread::sleep_for(std::chrono::duration<double>(kMomentSeconds));
    EXPECT_FALSE(rank.stream.isIdle());
    std::thread([&] { rank.communicator.abort(); }).join();
    rank.stream.synchronize();
    EXPECT_EQ(sum[0], -1);
    rank.communicator.abort();  // again
    expectSays(messageOf<Error>([&] { rank.communicator.check(); }), {"rank 0 of 2", "cuda:0", "aborted"});
    expectSays(messageOf<Error>([&] { rank.allReduce(given, sum, DType::kFloat32); }), {"aborted"});
  });
}

TEST_F(Nccl, AbortIsToldToWhoeverChecksMeanwhile) {
  forRanks(2, [](Rank& rank) {
    std::string message;
    std::thread watcher([&] {
      const Deadline deadline;
      message = messageOf<Error>([&] {
        while (!deadline.isOver()) rank.communicator.check();
      });
    });
    rank.communicator.abort();
    watcher.join();
    expectSays(message, {"of 2", "aborted"});
  });
}

TEST_F(Nccl, ACommunicatorThatGoesEndsWhatWaitsForItsPeers) {
  const auto context = std::make_shared<cuda::Context>(0);
  cuda::Stream stream(context);
  std::vector<float> given{1}, sum{-1};
  const UniqueId id = library_->makeUniqueId();
  together(2, [&](std::size_t i) {
    Rank rank(library_, id, static_cast<int>(i), 2, static_cast<int>(i));
    if (i == 1) return;
    rank.communicator.allReduce(given.data(), sum.data(), 1, DType::kFloat32, ReduceOp::kSum,
                                stream.handle());
  });
  stream.synchronize();
  EXPECT_EQ(sum[0], -1);
}

TEST_F(Nccl, OperationsThatDifferAreToldByCheck) {
  forRanks(2, [](Rank& rank) {
    std::vector<float> given(rank.communicator.rank() == 0 ? 3 : 4), sum(4);
    EXPECT_NO_THROW(rank.communicator.check());
    rank.allReduce(given, sum, DType::kFloat32);
    rank.stream.synchronize();
    expectSays(messageOf<Error>([&] { rank.communicator.check(); }), {"of 2", "NCCL_DEBUG=INFO"});
  });
}

TEST_F(Nccl, RanksOnOneGpuAreRefusedWithAdvice) {
  const UniqueId id = library_->makeUniqueId();
  together(2, [&](std::size_t i) {
    expectSays(messageOf<Error>([&] { Rank(library_, id, static_cast<int>(i), 2, 1); }),
               {"ncclCommInitRank", "of 2, cuda:1", "(5)", "Duplicate GPU", "NCCL 2.30",
                "NCCL_MULTI_RANK_GPU_ENABLE=1", "NCCL_DEBUG=INFO"});
  });
}

TEST_F(Nccl, RanksOnOneGpuAreTakenWhereNcclIsTold) {
  const Variable allowed("NCCL_MULTI_RANK_GPU_ENABLE", "1");
  const UniqueId id = library_->makeUniqueId();
  together(2, [&](std::size_t i) {
    Rank rank(library_, id, static_cast<int>(i), 2, 1);
    reducesNumbers<float>(rank, DType::kFloat32);
  });
}

TEST_F(Nccl, MeansAreOfFractions) {
  forRanks(2, [](Rank& rank) {
    std::vector<double> numbers{3.0 * rank.communicator.rank(), 5.0};
    rank.allReduce(numbers, numbers, DType::kFloat64, ReduceOp::kMean);
    rank.stream.synchronize();
    EXPECT_EQ(numbers, (std::vector<double>{1.5, 5.0}));
  });
}

TEST_F(Nccl, MeansOfTypesThatNcclTruncatesOrRoundsTwiceAreTheCallers) {
  forRanks(1, [](Rank& rank) {
    std::vector<std::int32_t> numbers(1);
    for (const DType dtype : {DType::kInt32, DType::kBFloat16, DType::kFloat16}) {
      expectSays(
          messageOf<std::invalid_argument>([&] { rank.allReduce(numbers, numbers, dtype, ReduceOp::kMean); }),
          {"float32 or float64", "divide"});
    }
  });
}

TEST_F(Nccl, RanksThatThereAreNotAreRefused) {
  const UniqueId id = library_->makeUniqueId();
  for (const int rank : {-1, 2}) {
    expectSays(messageOf<std::invalid_argument>([&] { Rank(library_, id, rank, 2, 0); }),
               {std::to_string(rank).c_str(), "of 2"});
  }
}

TEST(NcclLibrary, ThatIsNotInstalledIsNamedWithTheRemedy) {
  expectSays(messageOf<Error>([] { Library("libcoarse_no_nccl.so.2"); }),
             {"no NCCL", "libcoarse_no_nccl.so.2", "pip install 'coarse-train[nccl]'"});
}

TEST(NcclLibrary, WithoutAFunctionIsTooOld) {
  expectSays(messageOf<Error>([] { Library("libm.so.6"); }),
             {"libm.so.6", "ncclGetVersion", "2.13", "pip install"});
}

}  // namespace
}  // namespace coarse::test::nccl_test
