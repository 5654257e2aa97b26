/// Groups with an optimizer: the whole way from pushes of several clients to the updated parameter.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "coarse/reduce/update.hpp"
#include "fixture.hpp"

namespace coarse::test::optimizer_test {
namespace {

constexpr std::uint32_t kGroup = 1;
constexpr std::uint32_t kTensorElements[] = {100'003, 33};  // several shards, gathered at once

GroupPlan makeOptimizerPlan(std::size_t numClients, std::size_t numStates) {
  GroupPlan plan = makePlan(kGroup, numClients,
                            {{kTensorElements[0], DType::kFloat32, ReduceOp::kMean, Algorithm::kDirect},
                             {kTensorElements[1], DType::kFloat32, ReduceOp::kMean, Algorithm::kGather}},
                            16'384);
  plan.hasOptimizer = true;
  plan.numStates = numStates;
  return plan;
}

UpdateSettings momentumSettings(std::uint32_t updateNumber) {
  UpdateSettings settings;
  settings.rule = UpdateRule::kSgdMomentum;
  settings.stepSize = 0.5F;
  settings.firstDecay = 0.5F;
  settings.updateNumber = updateNumber;
  return settings;
}

/// A cluster with one group, parameters of which start at 8 and momentum buffers at 0.
class Job {
 public:
  explicit Job(ClusterShape shape, std::size_t numStates = 1)
      : cluster(shape), plan(makeOptimizerPlan(shape.numClients, numStates)) {
    cluster.start().addGroup(plan);
    for (std::size_t client = 0; client < shape.numClients; ++client)
      slots.push_back(cluster.slots(plan, client));
    for (std::uint32_t tensor = 0; tensor < 2; ++tensor) {
      for (std::size_t i = 0; i < kTensorElements[tensor]; ++i) parameter(tensor)[i] = 8;
      for (std::size_t client = 0; client < shape.numClients; ++client)
        set(client, tensor, momentumSettings(1));
    }
  }

  float* parameter(std::uint32_t tensor) { return floats(cluster.parameters(plan), tensor); }
  float* gradient(std::size_t client, std::uint32_t tensor) { return floats(slots[client], tensor); }
  void set(std::size_t client, std::uint32_t tensor, const UpdateSettings& settings) {
    cluster.settings(plan, client)[tensor] = settings;
  }
  void fill(std::size_t client, float value) {
    for (std::uint32_t tensor = 0; tensor < 2; ++tensor)
      std::fill_n(gradient(client, tensor), kTensorElements[tensor], value);
  }
  void push(std::size_t client, std::uint8_t flags) {
    for (std::uint32_t tensor = 0; tensor < 2; ++tensor)
      ASSERT_EQ(cluster.client(client).push(kGroup, tensor, flags, nullptr), WaitStatus::kDone);
    cluster.client(client).flush();
  }
  void pullAll(std::size_t client) {
    ASSERT_EQ(cluster.client(client).pullAll(kGroup, kPatienceSeconds), WaitStatus::kDone);
  }
  void expectParameters(float value) {
    for (std::uint32_t tensor = 0; tensor < 2; ++tensor) {
      for (std::size_t i = 0; i < kTensorElements[tensor]; ++i)
        ASSERT_EQ(parameter(tensor)[i], value) << tensor << " at " << i;
    }
  }

  Cluster cluster;
  GroupPlan plan;
  std::vector<std::byte*> slots;

 private:
  float* floats(std::byte* base, std::uint32_t tensor) const {
    for (const Shard& shard : plan.shards) {
      if (shard.tensor == tensor) return reinterpret_cast<float*>(base + shard.offset);
    }
    return nullptr;
  }
};

class Optimizers : public testing::TestWithParam<ClusterShape> {};

TEST_P(Optimizers, UpdateByTheMeanAndLeaveSlotsAsTheyAre) {
  Job job(GetParam());
  const std::size_t numClients = GetParam().numClients;
  // Mean 4 in both steps: the buffer is 4, then 6.
  for (std::uint32_t step = 1; step <= 2; ++step) {
    together(numClients, [&](std::size_t client) {
      for (std::uint32_t tensor = 0; tensor < 2; ++tensor) job.set(client, tensor, momentumSettings(step));
      job.fill(client, 8.F * static_cast<float>(client + 1) / static_cast<float>(numClients + 1));
      job.push(client, kPresent | kUpdate);
      job.pullAll(client);
    });
    job.expectParameters(step == 1 ? 6.F : 3.F);
  }
  for (std::size_t client = 0; client < numClients; ++client) {
    EXPECT_EQ(job.gradient(client, 0)[7],
              8.F * static_cast<float>(client + 1) / static_cast<float>(numClients + 1));
  }
}

TEST_P(Optimizers, UpdateByAMeanThatWasPulledAndChanged) {
  Job job(GetParam());
  together(GetParam().numClients, [&](std::size_t client) {
    job.fill(client, 4);
    job.push(client, kPresent);
    job.pullAll(client);
    job.fill(client, 2 * job.gradient(client, 0)[0]);  // as clipping would
    job.push(client, kPresent | kUpdate | kReduced);
    job.pullAll(client);
  });
  job.expectParameters(4);
}

TEST_P(Optimizers, MeasureTheMeanWhoeverReducesIt) {
  Job job(GetParam());
  together(GetParam().numClients, [&](std::size_t client) {
    job.fill(client, client == 0 ? 0.1F * static_cast<float>(GetParam().numClients) : 0.F);
    job.push(client, kPresent | kMeasure);
    job.pullAll(client);
    const std::vector<GradientMeasure> measures = job.cluster.client(client).measures(kGroup);
    ASSERT_EQ(measures.size(), 2U);
    for (std::uint32_t tensor = 0; tensor < 2; ++tensor) {
      const double mean = job.gradient(client, tensor)[0];
      EXPECT_NEAR(mean, 0.1, 1e-7);
      const double expected = mean * mean * kTensorElements[tensor];
      EXPECT_NEAR(measures[tensor].sumOfSquares, expected, 1e-12 * expected);
      EXPECT_EQ(measures[tensor].nonFiniteOf, kNobody);
    }
  });
}

TEST_P(Optimizers, NameWhoBroughtNaNIntoAMean) {
  Job job(GetParam());
  together(GetParam().numClients, [&](std::size_t client) {
    job.fill(client, 1);
    if (client == 1) job.gradient(client, 0)[70'000] = std::numeric_limits<float>::quiet_NaN();
    if (client == 1) job.gradient(client, 1)[3] = -std::numeric_limits<float>::infinity();
    job.push(client, kPresent | kMeasure);
    job.pullAll(client);
    for (const GradientMeasure& measure : job.cluster.client(client).measures(kGroup))
      EXPECT_EQ(measure.nonFiniteOf, 1);
    // What nobody contributes to has no gradient.
    job.push(client, kMeasure);
    job.pullAll(client);
    for (const GradientMeasure& measure : job.cluster.client(client).measures(kGroup)) {
      EXPECT_EQ(measure.nonFiniteOf, kNobody);
      EXPECT_EQ(measure.sumOfSquares, 0);
    }
  });
}

TEST_P(Optimizers, NobodysGradientChangesNothing) {
  Job job(GetParam());
  together(GetParam().numClients, [&](std::size_t client) {
    job.push(client, kUpdate | kReduced);
    job.pullAll(client);
  });
  job.expectParameters(8);
}

TEST_P(Optimizers, TouchNoParameterBeforeTheLastWorkersPush) {
  Job job(GetParam());
  const std::size_t numClients = GetParam().numClients;
  for (std::size_t client = 0; client < numClients; ++client) job.fill(client, 4);
  for (std::size_t client = 0; client + 1 < numClients; ++client) job.push(client, kPresent | kUpdate);
  const GroupControl control = job.cluster.control(job.plan);
  const auto last = static_cast<std::uint32_t>(job.plan.shards.size() - 1);
  for (std::uint32_t shard = 0; shard <= last; ++shard) {
    ASSERT_TRUE(eventually([&] { return control.arrivals(shard).load() == numClients - 1; }));
  }
  job.expectParameters(8);
  job.push(numClients - 1, kPresent | kUpdate);
  for (std::size_t client = 0; client < numClients; ++client) job.pullAll(client);
  job.expectParameters(6);
}

INSTANTIATE_TEST_SUITE_P(Shapes, Optimizers,
                         testing::Values(ClusterShape{2, 1, 1}, ClusterShape{2, 2, 1}, ClusterShape{3, 2, 2},
                                         kDeferred<3, 2, 2>),
                         nameOf);

// ---- what is refused ----

void expectDisagreement(Job& job, const std::string& words) {
  const std::vector<ProxyEvent> events = job.cluster.events(0);
  ASSERT_FALSE(events.empty());
  EXPECT_NE(events[0].message.find(words), std::string::npos) << events[0].message;
  job.expectParameters(8);
}

TEST(OptimizerProxy, NamesTheSettingThatWorkersDisagreeOn) {
  Job job({2, 1, 1});
  UpdateSettings other = momentumSettings(1);
  other.stepSize = 0.25F;
  job.set(1, 0, other);
  job.set(1, 1, other);
  for (const std::size_t client : {0, 1}) job.push(client, kPresent | kUpdate);
  expectDisagreement(job, "workers 0 and 1 disagree on the optimizer's settings: step size 0.5 and 0.25");
}

TEST(OptimizerProxy, NoticesThatAWorkerSkippedAnUpdate) {
  Job job({2, 1, 1});
  job.set(1, 0, momentumSettings(2));
  job.set(1, 1, momentumSettings(2));
  for (const std::size_t client : {0, 1}) job.push(client, kPresent | kUpdate);
  expectDisagreement(job, "number of the update 1 and 2");
}

TEST(OptimizerProxy, NoticesThatWorkersAreAtDifferentPointsOfAStep) {
  Job job({2, 1, 1});
  job.push(0, kPresent);
  job.push(1, kPresent | kUpdate | kReduced);
  expectDisagreement(job, "are at different points of a step");
}

TEST(OptimizerProxy, RefusesARuleWithoutState) {
  Job job({2, 1, 1}, 0);
  for (const std::size_t client : {0, 1}) job.push(client, kPresent | kUpdate);
  expectDisagreement(job, "keeps more state than was registered");
}

TEST(OptimizerProxy, RefusesARuleThatDoesNotExist) {
  Job job({2, 1, 1});
  UpdateSettings unknown = momentumSettings(1);
  unknown.rule = static_cast<UpdateRule>(kNumUpdateRules);
  for (const std::size_t client : {0, 1}) {
    job.set(client, 0, unknown);
    job.set(client, 1, unknown);
    job.push(client, kPresent | kUpdate);
  }
  expectDisagreement(job, "no update rule");
}

TEST(OptimizerProxy, EvictsWhoUpdatesInAGroupWithoutOptimizer) {
  Cluster cluster({2, 1, 1});
  cluster.start().addGroup(makePlan(kGroup, 2, {{100}}));
  ASSERT_EQ(cluster.client(1).push(kGroup, 0, kPresent | kUpdate, nullptr), WaitStatus::kDone);
  cluster.client(1).flush();
  const std::vector<ProxyEvent> events = cluster.events(0);
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].client, 1);
  EXPECT_NE(events[0].message.find("in a group without an optimizer"), std::string::npos);
}

TEST(OptimizerPlans, RefuseWhatCannotBeUpdated) {
  const auto validate = [](auto change) {
    GroupPlan plan = makeOptimizerPlan(2, 2);
    change(plan);
    plan.validate();
  };
  EXPECT_NO_THROW(validate([](GroupPlan&) {}));
  EXPECT_THROW(validate([](GroupPlan& plan) { plan.numStates = kMostStates + 1; }), std::invalid_argument);
  EXPECT_THROW(validate([](GroupPlan& plan) { plan.hasOptimizer = false; }), std::invalid_argument);
  EXPECT_THROW(validate([](GroupPlan& plan) { plan.shards[0].dtype = DType::kInt32; }),
               std::invalid_argument);
  EXPECT_THROW(validate([](GroupPlan& plan) { plan.shards[0].op = ReduceOp::kSum; }), std::invalid_argument);
}

TEST(OptimizerPlans, KeepStatesAndMasterWeightsTensorByTensor) {
  constexpr std::uint32_t kShardElements = 64;
  GroupPlan plan = makePlan(kGroup, 2,
                            {{100, DType::kFloat32, ReduceOp::kMean, Algorithm::kDirect},
                             {100, DType::kBFloat16, ReduceOp::kMean, Algorithm::kDirect}},
                            kShardElements);
  plan.hasOptimizer = true;
  plan.numStates = 2;
  const std::vector<KeptArrays> kept = plan.keptArrays();
  constexpr std::size_t kArrayBytes = 448;  // 100 float32, in whole cache lines
  ASSERT_EQ(kept.size(), 2U);
  EXPECT_EQ(kept[0].numArrays, 2U);
  EXPECT_EQ(kept[0].arrayBytes, kArrayBytes);
  EXPECT_EQ(kept[1].numArrays, 3U);
  EXPECT_EQ(kept[1].offset, 2 * kArrayBytes);
  EXPECT_EQ(plan.keptBytes(), 5 * kArrayBytes);

  const Memory control(GroupControl::numBytes(plan.shards.size(), 2)), parameters(plan.parameterBytes()),
      states(plan.keptBytes()), slots(plan.slotBytes), settings(plan.settingsBytes());
  const TensorGroup group(plan, control.fd, {slots.fd, slots.fd},
                          {{settings.fd, settings.fd}, parameters.fd, states.fd});
  const Shard& second = plan.shards[3];  // elements 64 to 99 of the bfloat16 tensor
  const auto distance = [&](const float* array) {
    return reinterpret_cast<const std::byte*>(array) -
           reinterpret_cast<const std::byte*>(group.state(plan.shards[0], 0));
  };
  EXPECT_EQ(distance(group.state(second, 1)), 3 * kArrayBytes + kShardElements * sizeof(float));
  EXPECT_EQ(distance(group.master(second)), 4 * kArrayBytes + kShardElements * sizeof(float));
}

/// A mean of bfloat16 gradients moves the master weights, and the parameter is their rounding.
TEST(OptimizerProxy, UpdatesNarrowParametersByTheirMasterWeights) {
  GroupPlan plan = makePlan(
      kGroup, 2, {{kTensorElements[0], DType::kBFloat16, ReduceOp::kMean, Algorithm::kDirect}}, 16'384);
  plan.hasOptimizer = true;
  plan.numStates = 1;
  Cluster cluster({2, 2, 1});
  cluster.start().addGroup(plan);
  auto* const parameter = reinterpret_cast<std::uint16_t*>(cluster.parameters(plan));
  std::fill_n(parameter, kTensorElements[0], std::uint16_t{0x3f80});  // 1
  for (std::uint32_t step = 1; step <= 2; ++step) {
    together(2, [&](std::size_t client) {
      UpdateSettings settings = momentumSettings(step);
      settings.stepSize = 1.F / 512;  // a quarter of the last place below 1
      *cluster.settings(plan, client) = settings;
      auto* const gradient = reinterpret_cast<std::uint16_t*>(cluster.slots(plan, client));
      std::fill_n(gradient, kTensorElements[0],
                  static_cast<std::uint16_t>(client == 0 ? 0x4000 : 0));  // mean 1
      ASSERT_EQ(cluster.client(client).push(kGroup, 0, kPresent | kUpdate, nullptr), WaitStatus::kDone);
      ASSERT_EQ(cluster.client(client).pullAll(kGroup, kPatienceSeconds), WaitStatus::kDone);
    });
  }
  // 1 - 1/512 - 1.5/512 is 1 - 0.0048828125, which rounds to 1 - 1/256.
  for (std::size_t i = 0; i < kTensorElements[0]; ++i) ASSERT_EQ(parameter[i], 0x3f7f) << i;
}

TEST(OptimizerPlans, RefuseAlgorithmsThatNeedNoCoherentMemory) {
  Cluster cluster({2, 2, 1});
  cluster.start();
  for (const Algorithm algorithm : {Algorithm::kRing, Algorithm::kExchange}) {
    GroupPlan plan = makeOptimizerPlan(2, 1);
    for (Shard& shard : plan.shards) shard.algorithm = algorithm;
    EXPECT_THROW(cluster.addToProxies(plan), std::invalid_argument);
  }
}

}  // namespace
}  // namespace coarse::test::optimizer_test
