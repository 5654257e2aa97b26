/// Tables: of a huge tensor a few rows travel, and what comes of them is what would come of whole tensors.
#include "coarse/tensors/row_reducer.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

#include "fixture.hpp"

namespace coarse::test::row_reducer_test {
namespace {

constexpr std::uint32_t kGroup = 1;
constexpr std::uint32_t kTable = 1;  // behind a whole tensor
constexpr std::uint64_t kNumRows = 1000;
constexpr std::uint32_t kRowElements = 3;

using Rows = std::map<std::uint64_t, std::vector<float>>;

GroupPlan makeTablePlan(std::size_t numClients, bool hasOptimizer) {
  const TensorSpec whole{50, DType::kFloat32, ReduceOp::kMean, Algorithm::kGather};
  const TensorSpec table{kNumRows * kRowElements, DType::kFloat32, ReduceOp::kMean, Algorithm::kDirect};
  GroupPlan plan = makePlan(kGroup, numClients, {whole, table}, 256 * kRowElements);
  plan.slotBytes = 64 * sizeof(float);  // a table has no slot
  plan.rowElements = {0, kRowElements};
  plan.hasOptimizer = hasOptimizer;
  plan.numStates = hasOptimizer ? 1 : 0;
  return plan;
}

void give(const RowList& list, const Rows& rows) {
  std::size_t place = 0;
  for (const auto& [number, values] : rows) {
    list.numbers[place] = number;
    std::memcpy(list.values + place * kRowElements * sizeof(float), values.data(),
                kRowElements * sizeof(float));
    ++place;
  }
  list.count->store(place);
}

Rows read(const RowList& list) {
  Rows rows;
  for (std::size_t place = 0; place < list.size(kNumRows); ++place) {
    const auto* values = reinterpret_cast<const float*>(list.values) + place * kRowElements;
    EXPECT_TRUE(rows.empty() || rows.rbegin()->first < list.numbers[place]) << "ascending, none twice";
    rows[list.numbers[place]].assign(values, values + kRowElements);
  }
  return rows;
}

/// Some rows; whole numbers, so that any order of additions gives the same.
Rows randomRows(std::uint32_t seed, std::size_t count) {
  std::mt19937 random(seed);
  Rows rows;
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<float>& values = rows[random() % kNumRows];
    values.clear();
    for (std::uint32_t element = 0; element < kRowElements; ++element)
      values.push_back(static_cast<float>(random() % 1000));
  }
  return rows;
}

Rows meanOf(const std::vector<Rows>& all) {
  Rows mean;
  for (const Rows& rows : all) {
    for (const auto& [number, values] : rows) {
      std::vector<float>& sum = mean.try_emplace(number, kRowElements, 0.F).first->second;
      for (std::uint32_t element = 0; element < kRowElements; ++element) sum[element] += values[element];
    }
  }
  for (auto& [number, sum] : mean) {
    for (float& each : sum) each /= static_cast<float>(all.size());
  }
  return mean;
}

class Job {
 public:
  explicit Job(ClusterShape shape, bool hasOptimizer = false)
      : cluster(shape), plan(makeTablePlan(shape.numClients, hasOptimizer)) {
    cluster.start().addGroup(plan);
  }
  RowBuffer rows(std::size_t client) const { return cluster.rows(plan, client, kTable); }
  float* table() const {
    return reinterpret_cast<float*>(cluster.parameters(plan) + plan.keptArrays()[kTable].parameterOffset);
  }
  void set(std::size_t client, std::uint32_t updateNumber) {
    UpdateSettings settings;
    settings.rule = UpdateRule::kSgdMomentum;
    settings.stepSize = 1;
    settings.firstDecay = 0.5F;
    settings.updateNumber = updateNumber;
    cluster.settings(plan, client)[kTable] = settings;
  }
  void synchronise(std::size_t client, std::uint8_t flags) {
    ASSERT_EQ(cluster.client(client).push(kGroup, kTable, flags, nullptr), WaitStatus::kDone);
    ASSERT_EQ(cluster.client(client).pull(kGroup, kTable, nullptr, kPatienceSeconds), WaitStatus::kDone);
  }

  Cluster cluster;
  GroupPlan plan;
};

class Tables : public testing::TestWithParam<ClusterShape> {};

TEST_P(Tables, HaveTheMeanOfAllRowsInEveryClientsBuffer) {
  Job job(GetParam());
  const std::size_t numClients = GetParam().numClients;
  for (std::uint32_t step = 0; step < 20; ++step) {
    std::vector<Rows> given;
    for (std::uint32_t client = 0; client < numClients; ++client)
      given.push_back(randomRows(100 * step + client, step * 20));
    together(numClients, [&](std::size_t client) {
      give(job.rows(client).given(), given[client]);
      job.synchronise(client, kPresent);
    });
    for (std::size_t client = 0; client < numClients; ++client)
      ASSERT_EQ(read(job.rows(client).mean()), meanOf(given)) << "step " << step;
  }
}

TEST_P(Tables, MeanOverWorkersWithoutRowsToo) {
  Job job(GetParam());
  const std::size_t numClients = GetParam().numClients;
  const Rows rows = randomRows(7, 30);
  together(numClients, [&](std::size_t client) {
    give(job.rows(client).given(), rows);
    job.synchronise(client, client == 1 ? kPresent : 0);
  });
  std::vector<Rows> all(numClients);
  all[1] = rows;
  EXPECT_EQ(read(job.rows(0).mean()), meanOf(all));
  EXPECT_EQ(job.cluster.client(0).contributors(kGroup, kTable), 1U);
}

TEST_P(Tables, UpdateTheRowsThatCameAndNoOthers) {
  Job job(GetParam(), true);
  const std::size_t numClients = GetParam().numClients;
  std::vector<float> expected(kNumRows * kRowElements, 8.F), momentum(kNumRows * kRowElements, 0.F);
  std::copy(expected.begin(), expected.end(), job.table());
  for (std::uint32_t step = 1; step <= 4; ++step) {
    std::vector<Rows> given;
    for (std::uint32_t client = 0; client < numClients; ++client)
      given.push_back(randomRows(10 * step + client, 200));
    const bool isReduced = step % 2 == 0;
    together(numClients, [&](std::size_t client) {
      job.set(client, step);
      give(job.rows(client).given(), given[client]);
      if (isReduced) give(job.rows(client).mean(), meanOf(given));
      job.synchronise(client, static_cast<std::uint8_t>(kPresent | kUpdate | (isReduced ? kReduced : 0)));
    });
    for (const auto& [number, values] : meanOf(given)) {
      for (std::uint32_t element = 0; element < kRowElements; ++element) {
        const std::size_t i = number * kRowElements + element;
        momentum[i] = 0.5F * momentum[i] + values[element];
        expected[i] -= momentum[i];
      }
    }
    for (std::size_t i = 0; i < expected.size(); ++i)
      ASSERT_EQ(job.table()[i], expected[i]) << i << " step " << step;
  }
}

TEST_P(Tables, MeasureTheMeanOfTheirRows) {
  Job job(GetParam(), true);
  const std::size_t numClients = GetParam().numClients;
  together(numClients, [&](std::size_t client) {
    give(job.rows(client).given(), {{3, {1, 2, 2}}, {900, {4, 0, 0}}});
    job.synchronise(client, kPresent | kMeasure);
    EXPECT_EQ(job.cluster.client(client).measures(kGroup)[kTable].sumOfSquares, 25);
    EXPECT_EQ(job.cluster.client(client).measures(kGroup)[kTable].nonFiniteOf, kNobody);
    const float bad = client == 1 ? std::numeric_limits<float>::quiet_NaN() : 1.F;
    give(job.rows(client).given(), {{500, {1, bad, 2}}});
    job.synchronise(client, kPresent | kMeasure);
    EXPECT_EQ(job.cluster.client(client).measures(kGroup)[kTable].nonFiniteOf, 1);
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, Tables,
                         testing::Values(ClusterShape{2, 1, 1}, ClusterShape{2, 2, 1}, ClusterShape{3, 2, 2}),
                         nameOf);

// ---- what a worker with a mind of its own may write ----

TEST(TableMemory, IsNeverLeftWhateverTheNumbersSay) {
  Job job({2, 1, 1}, true);
  std::mt19937_64 random(1);
  for (std::uint32_t step = 1; step <= 50; ++step) {
    together(2, [&](std::size_t client) {
      job.set(client, step);
      give(job.rows(client).given(), {{10, {1, 1, 1}}, {11, {1, 1, 1}}});
    });
    const RowList wild = job.rows(1).given();
    for (std::size_t place = 0; place < kNumRows; ++place)
      wild.numbers[place] = step % 2 == 0 ? random() : random() % (2 * kNumRows);
    wild.count->store(random() | (std::uint64_t{1} << 60));
    const auto flags = static_cast<std::uint8_t>(kPresent | (step % 3 == 0 ? kUpdate : 0));
    together(2, [&](std::size_t client) { job.synchronise(client, flags); });
    EXPECT_LE(job.rows(0).mean().size(kNumRows), kNumRows);
    EXPECT_LE(job.rows(0).mean().count->load(), kNumRows);
  }
}

TEST(TableMemory, SeesAStepThatOthersHaveSeenByTheRowsThatWorkersHold) {
  Job job({2, 2, 1}, true);
  std::fill_n(job.table(), kNumRows * kRowElements, 8.F);
  for (const std::size_t client : {0, 1}) {
    job.set(client, 1);
    UpdateSettings* const settings = job.cluster.settings(job.plan, client);
    settings[kTable].hasGradient = 1;
    settings[0] = settings[kTable];
    give(job.rows(client).mean(), {{5, {1, 2, 3}}});
    ASSERT_EQ(job.cluster.client(client).push(kGroup, 0, kPresent | kUpdate | kReduced, nullptr),
              WaitStatus::kDone);
    job.cluster.client(client).flush();
  }
  for (const std::size_t client : {0, 1})
    ASSERT_EQ(job.cluster.client(client).pull(kGroup, 0, nullptr, kPatienceSeconds), WaitStatus::kDone);
  for (const std::size_t device : {0, 1}) job.cluster.proxy(device).stop();  // all workers have died
  const GroupUpdates updates = job.cluster.proxy(0).finishGroupUpdates().at(0);
  EXPECT_EQ(updates.problem, "");
  EXPECT_EQ(updates.updateNumbers, (std::vector<std::uint32_t>{1, 1}));
  for (std::size_t i = 0; i < kNumRows * kRowElements; ++i) {
    const std::size_t element = i - std::size_t{5} * kRowElements;
    ASSERT_EQ(job.table()[i], element < kRowElements ? 7.F - static_cast<float>(element) : 8.F) << i;
  }
}

TEST(TablePlans, RefuseWhatCannotTravelAsRows) {
  const auto validate = [](auto change) {
    GroupPlan plan = makeTablePlan(2, true);
    change(plan);
    plan.validate();
  };
  EXPECT_NO_THROW(validate([](GroupPlan&) {}));
  EXPECT_THROW(validate([](GroupPlan& plan) { plan.rowElements = {0}; }), std::invalid_argument);
  EXPECT_THROW(validate([](GroupPlan& plan) { plan.rowElements = {0, 7}; }), std::invalid_argument);
  EXPECT_THROW(validate([](GroupPlan& plan) { plan.shards.back().algorithm = Algorithm::kRing; }),
               std::invalid_argument);
  EXPECT_THROW(validate([](GroupPlan& plan) { plan.shards.back().op = ReduceOp::kSum; }),
               std::invalid_argument);
}

TEST(TablePlans, HaveSparseMemoryForEveryRow) {
  const GroupPlan plan = makeTablePlan(2, false);
  const std::vector<RowTable> tables = plan.rowTables();
  ASSERT_EQ(tables.size(), 2U);
  EXPECT_EQ(tables[0].rowElements, 0U);
  EXPECT_EQ(tables[kTable].numRows, kNumRows);
  EXPECT_GE(plan.rowsBytes(), 2 * kNumRows * (sizeof(std::uint64_t) + kRowElements * sizeof(float)));
  EXPECT_EQ(plan.clientBytes(), plan.slotBytes);
}

}  // namespace
}  // namespace coarse::test::row_reducer_test
