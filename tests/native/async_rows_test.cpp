/// AsyncRows: each request for rows of a table by its name gets those of all workers, each number once.
#include "coarse/client/async_rows.hpp"

#include <gtest/gtest.h>

#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "fixture.hpp"

namespace coarse::test::async_rows_test {
namespace {

constexpr std::uint64_t kNumRows = 500;
constexpr std::uint32_t kRowElements = 3;
constexpr std::size_t kRowBytes = kRowElements * sizeof(float);

using Sums = std::map<std::uint64_t, std::vector<float>>;

/// What a worker contributes: numbers in any order, some of them several times.
struct Given {
  std::vector<std::int64_t> numbers;
  std::vector<float> values;

  void addTo(Sums& sums) const {
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      std::vector<float>& sum = sums[static_cast<std::uint64_t>(numbers[i])];
      sum.resize(kRowElements);
      for (std::uint32_t j = 0; j < kRowElements; ++j) sum[j] += values[i * kRowElements + j];
    }
  }
};

/// Whole numbers, so that any order of additions gives the same.
Given randomRows(std::uint32_t seed, std::size_t count) {
  std::mt19937_64 random(seed);
  Given given;
  for (std::size_t i = 0; i < count; ++i) {
    given.numbers.push_back(static_cast<std::int64_t>(random() % kNumRows));
    for (std::uint32_t j = 0; j < kRowElements; ++j)
      given.values.push_back(static_cast<float>(random() % 100));
  }
  return given;
}

/// The end of one request, and what came of it.
class End {
 public:
  AsyncRows::Done expect() {
    return [this](const char* failure, const AsyncRows::Result& result) {
      const std::lock_guard lock(mutex_);
      if (failure != nullptr) failure_ = failure;
      for (std::uint64_t i = 0; i < result.count; ++i) {
        isAscending_ = isAscending_ && (i == 0 || result.numbers[i - 1] < result.numbers[i]);
        std::vector<float>& values = sums_[result.numbers[i]];
        values.resize(kRowElements);
        std::memcpy(values.data(), result.values + i * kRowBytes, kRowBytes);
      }
      isOver_ = true;
      changed_.notify_all();
    };
  }
  /// @returns the failure, empty if there was none.
  std::string wait() {
    std::unique_lock lock(mutex_);
    const auto patience = std::chrono::duration<double>(kPatienceSeconds);
    return changed_.wait_for(lock, patience, [this] { return isOver_; }) ? failure_ : "it did not end";
  }
  Sums sums() {
    const std::lock_guard lock(mutex_);
    EXPECT_TRUE(isAscending_);
    return sums_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool isOver_ = false, isAscending_ = true;
  std::string failure_;
  Sums sums_;
};

/// Two workers with a counter and a table, twice.
class TwoTables : public testing::Test {
 protected:
  TwoTables() : cluster_(ClusterShape{}) {
    cluster_.start();
    for (const std::uint32_t group : {1U, 2U}) cluster_.addGroup(makeTablePlan(group));
    for (std::size_t rank = 0; rank < 2; ++rank) {
      Client& client = cluster_.client(rank);
      reducers_.push_back(std::make_unique<AsyncReducer>(
          client, kPatienceSeconds,
          [](WaitStatus, std::uint32_t, std::uint32_t) { return std::string("a wait failed"); }));
      rows_.push_back(std::make_unique<AsyncRows>(client, *reducers_[rank]));
      for (const std::uint32_t group : {1U, 2U})
        rows_[rank]->add(nameOf(group), group, 0, 1, cluster_.rowsFd(client.plan(group), rank));
    }
  }

  static std::string nameOf(std::uint32_t group) { return "table" + std::to_string(group); }
  static GroupPlan makeTablePlan(std::uint32_t group) {
    const TensorSpec counter{1, DType::kInt64, ReduceOp::kSum, Algorithm::kGather};
    const TensorSpec table{kNumRows * kRowElements, DType::kFloat32, ReduceOp::kSum, Algorithm::kDirect};
    GroupPlan plan = makePlan(group, 2, {counter, table}, 128 * kRowElements);
    plan.slotBytes = 64;  // a table has no slot
    plan.rowElements = {0, kRowElements};
    return plan;
  }
  void reduce(std::size_t rank, std::uint32_t group, const Given& given, End& end) {
    rows_[rank]->reduce(nameOf(group), given.numbers.data(), given.values.data(), given.numbers.size(),
                        given.values.size() * sizeof(float), end.expect());
  }

  Cluster cluster_;
  std::vector<std::unique_ptr<AsyncReducer>> reducers_;
  std::vector<std::unique_ptr<AsyncRows>> rows_;
};

TEST_F(TwoTables, HaveTheRowsOfAllWorkersInOrdersOfTheirOwn) {
  constexpr std::uint32_t kTurns = 6;
  // By worker, table and turn; the first turn has no rows at all, and later ones have more each time.
  std::vector<std::vector<std::vector<Given>>> given(2, std::vector<std::vector<Given>>(3));
  std::vector<std::vector<std::vector<End>>> ends(2);
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    for (std::uint32_t group = 0; group < 3; ++group) {
      for (std::uint32_t turn = 0; turn < kTurns; ++turn)
        given[rank][group].push_back(randomRows(100 * turn + 10 * group + rank, turn * (40 + 100 * rank)));
      ends[rank].emplace_back(kTurns);
    }
  }
  together(4, [&](std::size_t thread) {  // a table that is under way is asked for again
    const std::size_t rank = thread / 2;
    const std::uint32_t group = 1 + (thread + rank) % 2;
    for (std::uint32_t turn = 0; turn < kTurns; ++turn)
      reduce(rank, group, given[rank][group][turn], ends[rank][group][turn]);
  });
  for (const std::uint32_t group : {1U, 2U}) {
    for (std::uint32_t turn = 0; turn < kTurns; ++turn) {
      Sums expected;
      for (std::size_t rank = 0; rank < 2; ++rank) given[rank][group][turn].addTo(expected);
      for (std::size_t rank = 0; rank < 2; ++rank) {
        ASSERT_EQ(ends[rank][group][turn].wait(), "");
        ASSERT_EQ(ends[rank][group][turn].sums(), expected) << "table " << group << ", turn " << turn;
      }
    }
  }
}

TEST_F(TwoTables, TheWeightOfALostWorkerGoesToTheRowsOfTheOthers) {
  const Given given = randomRows(1, 40);
  const std::vector<double> weights = {1, 3};
  std::vector<double> factors;
  End end;
  const AsyncRows::Done done = end.expect();
  rows_[0]->reduce(nameOf(1), given.numbers.data(), given.values.data(), given.numbers.size(),
                   given.values.size() * sizeof(float),
                   [&](const char* failure, const AsyncRows::Result& result) {
                     if (result.factors != nullptr)
                       factors.assign(result.factors, result.factors + result.count);
                     done(failure, result);
                   },
                   {weights.data(), weights.size()});
  cluster_.proxy(0).clientEnded(1);
  ASSERT_TRUE(eventually([&] { return !cluster_.proxy(0).takeDrained().empty(); }));
  cluster_.proxy(0).standInFor(1);
  ASSERT_EQ(end.wait(), "");
  Sums expected;
  given.addTo(expected);
  EXPECT_EQ(end.sums(), expected);
  EXPECT_EQ(factors, std::vector<double>(expected.size(), 4));
}

TEST_F(TwoTables, WhatIsNoRowOfTheTableIsRefused) {
  End beyond, negative, tooShort, unknown;
  reduce(0, 1, {{3, kNumRows}, std::vector<float>(2 * kRowElements)}, beyond);
  EXPECT_EQ(beyond.wait(), "table1/rows: row 500 is none of the table's 500");
  reduce(0, 1, {{-1}, std::vector<float>(kRowElements)}, negative);
  EXPECT_EQ(negative.wait(), "table1/rows: row -1 is none of the table's 500");
  reduce(0, 1, {{1, 2}, std::vector<float>(kRowElements)}, tooShort);
  EXPECT_EQ(tooShort.wait(), "2 rows of table1 have 24 bytes, not 12");
  reduce(0, 3, {}, unknown);
  EXPECT_EQ(unknown.wait(), "no table was registered as table3");
}

TEST_F(TwoTables, AreUsableAfterRowsWereRefused) {
  End refused;
  reduce(0, 1, {{-1}, std::vector<float>(kRowElements)}, refused);
  EXPECT_NE(refused.wait(), "");
  std::vector<End> ends(2);
  for (std::size_t rank = 0; rank < 2; ++rank) reduce(rank, 1, {{7}, {1, 2, 3}}, ends[rank]);
  for (End& end : ends) {
    ASSERT_EQ(end.wait(), "");
    EXPECT_EQ(end.sums(), (Sums{{7, {2, 4, 6}}}));
  }
}

TEST_F(TwoTables, AreForgottenWhenTheyAreNotUnderWay) {
  End alone, unknown;
  reduce(0, 1, {{7}, {1, 2, 3}}, alone);
  EXPECT_FALSE(rows_[0]->remove("table1"));
  EXPECT_TRUE(rows_[0]->remove("table2"));
  EXPECT_TRUE(rows_[0]->remove("table2"));
  reduce(0, 2, {}, unknown);
  EXPECT_EQ(unknown.wait(), "no table was registered as table2");
  rows_[0]->add("table2", 2, 0, 1, cluster_.rowsFd(makeTablePlan(2), 0));
  reducers_[0]->close();
  EXPECT_EQ(alone.wait(), "the session is closed");
}

TEST_F(TwoTables, EndWithTheirReducer) {
  const Given rows = randomRows(1, 10);
  End underWay, waiting, late;
  reduce(0, 1, rows, underWay);
  reduce(0, 1, rows, waiting);
  reducers_[0]->close();
  reduce(0, 2, rows, late);
  for (End* end : {&underWay, &waiting, &late}) EXPECT_EQ(end->wait(), "the session is closed");
}

TEST_F(TwoTables, AreOfAFloatingTypeAndCountedByAWholeNumber) {
  EXPECT_THROW(rows_[0]->add("table1", 1, 0, 1, cluster_.rowsFd(makeTablePlan(1), 0)), std::invalid_argument);
  EXPECT_THROW(rows_[0]->add("other", 1, 1, 1, cluster_.rowsFd(makeTablePlan(1), 0)), std::invalid_argument);
  EXPECT_THROW(rows_[0]->add("other", 1, 0, 0, cluster_.rowsFd(makeTablePlan(1), 0)), std::invalid_argument);
}

}  // namespace
}  // namespace coarse::test::async_rows_test
