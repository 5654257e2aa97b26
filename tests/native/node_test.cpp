/// Several nodes: what was pushed on any of them comes back reduced, exactly, on all; and what a node cannot
/// say.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "coarse/node/tcp_transport.hpp"
#include "contributions.hpp"
#include "fixture.hpp"
#include "nodes.hpp"

namespace coarse::test::node_test {
namespace {

std::vector<TensorSpec> variousTensors() {
  std::vector<TensorSpec> tensors;
  std::uint32_t numElements = 1;
  for (const Algorithm algorithm : {Algorithm::kGather, Algorithm::kDirect}) {
    for (const DType dtype : kEveryDType) {
      for (const ReduceOp op : kEveryOp) {
        tensors.push_back({numElements, dtype, op, algorithm});
        numElements = numElements * 3 % 1009;
      }
    }
  }
  return tensors;
}

constexpr std::uint32_t kShardElements = 200;

struct NodesShape {
  const char* name;
  std::vector<ClusterShape> shapes;
};

void PrintTo(const NodesShape& shape, std::ostream* out) { *out << shape.name; }

class SeveralNodes : public testing::TestWithParam<NodesShape> {
 protected:
  std::vector<std::size_t> everyone() {
    std::vector<std::size_t> ranks(nodes_.numWorkers());
    std::iota(ranks.begin(), ranks.end(), std::size_t{0});
    return ranks;
  }
  /// All workers push and pull all tensors; those of `flags` that are not kPresent contribute nothing.
  void synchronise(const std::vector<TensorSpec>& tensors, std::uint32_t step,
                   const std::vector<std::uint8_t>& flags) {
    std::vector<std::size_t> present;
    std::uint32_t divisor = 0;
    for (std::size_t rank = 0; rank < flags.size(); ++rank) {
      for (std::size_t tensor = 0; tensor < tensors.size(); ++tensor) last_.try_emplace({rank, tensor});
    }
    for (std::size_t rank = 0; rank < flags.size(); ++rank) {
      if (flags[rank] == kPresent) present.push_back(rank);
      if (flags[rank] != kJoined) ++divisor;
    }
    together(nodes_.numWorkers(), [&](std::size_t rank) {
      Client& worker = nodes_.worker(rank);
      for (std::uint32_t tensor = 0; tensor < tensors.size(); ++tensor) {
        const TensorSpec& spec = tensors[tensor];
        const Bytes data = contribution(spec.dtype, spec.numElements, rank, step);
        ASSERT_EQ(worker.push(1, tensor, flags[rank], data.data()), WaitStatus::kDone);
      }
      for (std::uint32_t tensor = 0; tensor < tensors.size(); ++tensor) {
        const TensorSpec& spec = tensors[tensor];
        Bytes data(spec.numElements * itemBytes(spec.dtype));
        ASSERT_EQ(worker.pull(1, tensor, data.data(), kPatienceSeconds), WaitStatus::kDone)
            << "tensor " << tensor << " at step " << step << " on worker " << rank;
        ASSERT_EQ(worker.contributors(1, tensor), present.size());
        // What nobody contributes to is not brought to slots that lie elsewhere: there the last result stays.
        const bool isElsewhere = nodes_.clusterOf(rank).shape().isDeferred;
        const Bytes before =
            isElsewhere ? last_.at({rank, tensor}) : contribution(spec.dtype, spec.numElements, rank, step);
        const Bytes expected =
            present.empty() ? before : result(spec.dtype, spec.op, spec.numElements, present, step, divisor);
        ASSERT_TRUE(data == expected) << "tensor " << tensor << " at step " << step << " on worker " << rank;
        last_.at({rank, tensor}) = std::move(data);
      }
    });
  }
  Nodes nodes_{GetParam().shapes};
  std::map<std::pair<std::size_t, std::size_t>, Bytes> last_;  // results of the last step, by rank and tensor
};

TEST_P(SeveralNodes, ReduceEveryTypeAndOperation) {
  const std::vector<TensorSpec> tensors = variousTensors();
  nodes_.start().addGroup(makePlan(1, 1, tensors, kShardElements));
  for (std::uint32_t step = 1; step <= 6; ++step)
    synchronise(tensors, step, std::vector<std::uint8_t>(nodes_.numWorkers(), kPresent));
}

TEST_P(SeveralNodes, ReduceWhatSomeWorkersLeaveOut) {
  const std::vector<TensorSpec> tensors = variousTensors();
  nodes_.start().addGroup(makePlan(1, 1, tensors, kShardElements));
  const std::size_t numWorkers = nodes_.numWorkers();
  for (std::uint32_t step = 1; step <= 12; ++step) {
    std::vector<std::uint8_t> flags(numWorkers, kPresent);
    for (std::size_t rank = 0; rank < numWorkers; ++rank) {
      if ((step * 7 + rank) % 3 == 1) flags[rank] = 0;
      if ((step * 7 + rank) % 3 == 2) flags[rank] = kJoined;
    }
    if (step % 4 == 0) std::fill(flags.begin(), flags.end(), std::uint8_t{0});
    synchronise(tensors, step, flags);
  }
}

TEST_P(SeveralNodes, ReduceBuffersThatAreNotRegistered) {
  nodes_.start().addGroup(makeDynamicPlan(1, 1, 4, 4096, Algorithm::kDirect));
  const std::vector<std::size_t> all = everyone();
  together(nodes_.numWorkers(), [&](std::size_t rank) {
    for (const DType dtype : kEveryDType) {
      const std::size_t numElements = 3000 + static_cast<std::size_t>(dtype);
      Bytes buffer = contribution(dtype, numElements, rank, 1);
      ASSERT_EQ(nodes_.worker(rank).allReduce(1, buffer.data(), numElements, dtype, ReduceOp::kSum, true,
                                              kPatienceSeconds),
                WaitStatus::kDone);
      ASSERT_TRUE(buffer == result(dtype, ReduceOp::kSum, numElements, all, 1, 1));
      // A broadcast of the last worker.
      const bool isRoot = rank == all.back();
      buffer = contribution(dtype, numElements, rank, 2);
      ASSERT_EQ(nodes_.worker(rank).allReduce(1, buffer.data(), numElements, dtype, ReduceOp::kSum, isRoot,
                                              kPatienceSeconds),
                WaitStatus::kDone);
      ASSERT_TRUE(buffer == contribution(dtype, numElements, all.back(), 2));
    }
  });
}

TEST_P(SeveralNodes, GiveTheSameBitsInEveryRun) {
  const std::vector<TensorSpec> tensors = {{5000, DType::kFloat32, ReduceOp::kMean, Algorithm::kDirect}};
  std::vector<Bytes> seen;
  for (int run = 0; run < 3; ++run) {
    Nodes nodes(GetParam().shapes);
    nodes.start().addGroup(makePlan(1, 1, tensors, kShardElements));
    std::vector<Bytes> results(nodes.numWorkers());
    together(nodes.numWorkers(), [&](std::size_t rank) {
      std::vector<float> values(5000);
      for (std::size_t i = 0; i < values.size(); ++i)
        values[i] = 1.0f / static_cast<float>(1 + (i * 31 + rank * 17) % 101);
      results[rank].resize(values.size() * sizeof(float));
      ASSERT_EQ(nodes.worker(rank).push(1, 0, kPresent, values.data()), WaitStatus::kDone);
      ASSERT_EQ(nodes.worker(rank).pull(1, 0, results[rank].data(), kPatienceSeconds), WaitStatus::kDone);
    });
    seen.insert(seen.end(), results.begin(), results.end());
  }
  EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [&](const Bytes& each) { return each == seen[0]; }));
}

// ---- optimizers: parameters and states once on each node ----

constexpr std::uint32_t kParameterElements[] = {10'007, 33, 5};

GroupPlan optimizerPlan() {
  std::vector<TensorSpec> tensors;
  for (const std::uint32_t numElements : kParameterElements)
    tensors.push_back({numElements, DType::kFloat32, ReduceOp::kMean, Algorithm::kDirect});
  GroupPlan plan = makePlan(1, 1, tensors, kShardElements);
  plan.hasOptimizer = true;
  plan.numStates = 1;
  return plan;
}

class SeveralNodesWithOptimizer : public SeveralNodes {
 protected:
  SeveralNodesWithOptimizer() {
    nodes_.start().addGroup(plan_);
    for (std::size_t rank = 0; rank < nodes_.numWorkers(); ++rank) {
      fill(nodes_.clusterOf(rank).parameters(planOf(rank)), 8);
      set(rank, 1);
    }
  }
  GroupPlan planOf(std::size_t rank) {
    GroupPlan plan = plan_;
    plan.numClients = nodes_.clusterOf(rank).shape().numClients;
    return plan;
  }
  std::byte* slots(std::size_t rank) {
    return nodes_.clusterOf(rank).slots(planOf(rank), nodes_.clientOf(rank));
  }
  float* values(std::byte* base, const Shard& shard) { return reinterpret_cast<float*>(base + shard.offset); }
  void fill(std::byte* base, float value) {
    for (const Shard& shard : plan_.shards) std::fill_n(values(base, shard), shard.numElements, value);
  }
  /// Momentum: the buffer is half of what it was, and the gradient; the parameter loses half of that.
  void set(std::size_t rank, std::uint32_t updateNumber) {
    UpdateSettings settings;
    settings.rule = UpdateRule::kSgdMomentum;
    settings.stepSize = 0.5F;
    settings.firstDecay = 0.5F;
    settings.updateNumber = updateNumber;
    std::fill_n(nodes_.clusterOf(rank).settings(planOf(rank), nodes_.clientOf(rank)),
                std::size(kParameterElements), settings);
  }
  void synchronise(std::size_t rank, std::uint8_t flags) {
    Client& worker = nodes_.worker(rank);
    for (std::uint32_t tensor = 0; tensor < std::size(kParameterElements); ++tensor)
      ASSERT_EQ(worker.push(1, tensor, flags, nullptr), WaitStatus::kDone);
    ASSERT_EQ(worker.pullAll(1, kPatienceSeconds), WaitStatus::kDone);
  }
  void expectParameters(std::size_t rank, float value) {
    std::byte* parameters = nodes_.clusterOf(rank).parameters(planOf(rank));
    for (const Shard& shard : plan_.shards) {
      const float* first = values(parameters, shard);
      ASSERT_TRUE(std::all_of(first, first + shard.numElements, [&](float each) { return each == value; }))
          << first[0] << " in tensor " << shard.tensor << " on worker " << rank;
    }
  }
  /// A gradient whose mean over all workers is 4.
  float gradient(std::size_t rank) {
    return 8.F * static_cast<float>(rank + 1) / static_cast<float>(nodes_.numWorkers() + 1);
  }
  const GroupPlan plan_ = optimizerPlan();
};

TEST_P(SeveralNodesWithOptimizer, UpdateOnEachOfThemWhatAllHaveAveraged) {
  together(nodes_.numWorkers(), [&](std::size_t rank) {
    for (std::uint32_t step = 1; step <= 2; ++step) {
      set(rank, step);
      fill(slots(rank), gradient(rank));
      ASSERT_NO_FATAL_FAILURE(synchronise(rank, kPresent | kUpdate));
      ASSERT_NO_FATAL_FAILURE(expectParameters(rank, step == 1 ? 6.F : 3.F));
    }
  });
}

TEST_P(SeveralNodesWithOptimizer, UpdateByAMeanThatWasPulledAndChanged) {
  together(nodes_.numWorkers(), [&](std::size_t rank) {
    for (std::uint32_t step = 1; step <= 4; ++step) {
      set(rank, step);
      fill(slots(rank), gradient(rank));
      ASSERT_NO_FATAL_FAILURE(synchronise(rank, kPresent | kMeasure));
      fill(slots(rank), step == 1 ? 8.F : 0.F);  // as clipping would
      ASSERT_NO_FATAL_FAILURE(synchronise(rank, kPresent | kUpdate | kReduced));
      // The buffer is 8, 4, 2, 1.
      ASSERT_NO_FATAL_FAILURE(expectParameters(rank, 8.F / static_cast<float>(1U << step)));
    }
  });
}

TEST_P(SeveralNodesWithOptimizer, UpdateByGradientsOfAnotherNode) {
  const std::size_t only = nodes_.numWorkers() - 1;
  together(nodes_.numWorkers(), [&](std::size_t rank) {
    fill(slots(rank), static_cast<float>(4 * nodes_.numWorkers()));
    ASSERT_NO_FATAL_FAILURE(
        synchronise(rank, static_cast<std::uint8_t>(kUpdate | (rank == only ? kPresent : 0))));
    EXPECT_EQ(nodes_.worker(rank).contributors(1, 0), 1);
    ASSERT_NO_FATAL_FAILURE(expectParameters(rank, 6));
    ASSERT_NO_FATAL_FAILURE(synchronise(rank, kUpdate));
    ASSERT_NO_FATAL_FAILURE(expectParameters(rank, 6));
  });
}

TEST_P(SeveralNodesWithOptimizer, MeasureTheMeanAlikeOnAllOfThem) {
  std::vector<std::vector<GradientMeasure>> measures(nodes_.numWorkers());
  together(nodes_.numWorkers(), [&](std::size_t rank) {
    fill(slots(rank), 0.1F * static_cast<float>(rank + 1));
    if (rank == 1) values(slots(rank), plan_.shards.back())[2] = std::numeric_limits<float>::infinity();
    ASSERT_NO_FATAL_FAILURE(synchronise(rank, kPresent | kMeasure));
    measures[rank] = nodes_.worker(rank).measures(1);
    ASSERT_EQ(measures[rank].size(), std::size(kParameterElements));
    const double mean = values(slots(rank), plan_.shards.front())[0];
    EXPECT_NEAR(measures[rank][0].sumOfSquares, mean * mean * kParameterElements[0], 1e-6);
    EXPECT_EQ(measures[rank][0].nonFiniteOf, kNobody);
    EXPECT_EQ(measures[rank][2].nonFiniteOf, kEverybody) << "only one node could tell who";
    ASSERT_NO_FATAL_FAILURE(synchronise(rank, kMeasure));
    EXPECT_EQ(nodes_.worker(rank).measures(1)[0].sumOfSquares, 0) << "of nobody's gradient";
  });
  for (const std::vector<GradientMeasure>& each : measures)
    EXPECT_EQ(each[0].sumOfSquares, measures[0][0].sumOfSquares);
}

const auto kShapes = testing::Values(
    NodesShape{"TwoOfTwo", {{2, 2, 1}, {2, 2, 1}}},
    NodesShape{"ThreeOfOne", {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}}}, NodesShape{"Uneven", {{1, 1, 2}, {3, 3, 1}}},
    NodesShape{"ThreeUneven", {{2, 1, 1}, {1, 2, 2}, {1, 3, 1}}},
    NodesShape{"TwoDeferred", {kDeferred<2, 2, 1>, kDeferred<2, 1, 2>}},
    NodesShape{"MixedDeferred", {kDeferred<1, 1, 1>, {1, 2, 1}, kDeferred<2, 2, 1>}});

INSTANTIATE_TEST_SUITE_P(Shapes, SeveralNodesWithOptimizer, kShapes,
                         [](const auto& info) { return std::string(info.param.name); });

INSTANTIATE_TEST_SUITE_P(Shapes, SeveralNodes, kShapes,
                         [](const auto& info) { return std::string(info.param.name); });

// ---- gradients that are compressed between nodes ----

std::string nameOf(Compression compression) {
  const char* const names[] = {"None", "BFloat16", "Float16", "Int8"};
  return names[static_cast<int>(compression)];
}

constexpr std::uint32_t kGradientElements = 5000;
constexpr double kLargestGradient = 0.05;

/// Every worker pushes gradients of one tensor of float32 means, beside tensors of other kinds.
class CompressedNodes : public testing::TestWithParam<std::tuple<NodesShape, Compression>> {
 protected:
  static std::vector<ClusterShape> shapes() {
    std::vector<ClusterShape> shapes = std::get<0>(GetParam()).shapes;
    for (ClusterShape& shape : shapes) shape.compression = std::get<1>(GetParam());
    return shapes;
  }
  static GroupPlan gradients(std::vector<TensorSpec> tensors) {
    GroupPlan plan = makePlan(1, 1, tensors, kShardElements);
    plan.areGradients = true;
    return plan;
  }
  /// One step of tensor 0. @returns the bits that each worker has pulled.
  static std::vector<std::vector<float>> step(Nodes& nodes, const std::vector<std::vector<float>>& given) {
    std::vector<std::vector<float>> taken(nodes.numWorkers(), std::vector<float>(kGradientElements));
    together(nodes.numWorkers(), [&](std::size_t rank) {
      Client& worker = nodes.worker(rank);
      ASSERT_EQ(worker.push(1, 0, kPresent, given[rank].data()), WaitStatus::kDone);
      ASSERT_EQ(worker.pull(1, 0, taken[rank].data(), kPatienceSeconds), WaitStatus::kDone);
    });
    return taken;
  }
  static std::vector<std::vector<float>> gradientsOf(std::size_t numWorkers, std::size_t number) {
    std::vector<std::vector<float>> given(numWorkers, std::vector<float>(kGradientElements));
    for (std::size_t rank = 0; rank < numWorkers; ++rank) {
      for (std::size_t i = 0; i < kGradientElements; ++i) {
        const std::size_t mixed = (i * 7919 + rank * 104729 + number * 1299709) % 100003;
        given[rank][i] = static_cast<float>(kLargestGradient * (static_cast<double>(mixed) / 50001.5 - 1));
      }
    }
    return given;
  }
  static double meanOf(const std::vector<std::vector<float>>& given, std::size_t i) {
    double sum = 0;
    for (const std::vector<float>& each : given) sum += each[i];
    return sum / static_cast<double>(given.size());
  }
  /// Bytes that memory devices have received from other nodes.
  static std::uint64_t receivedBytes(Nodes& nodes, std::size_t numNodes) {
    std::uint64_t sum = 0;
    for (std::size_t node = 0; node < numNodes; ++node) {
      for (std::size_t device = 0; device < nodes.node(node).shape().numDevices; ++device)
        sum += nodes.node(node).metrics().device(device).read(Metric::kNodeReceivedBytes);
    }
    return sum;
  }
  const std::vector<TensorSpec> tensor_{{kGradientElements, DType::kFloat32, ReduceOp::kMean}};
};

TEST_P(CompressedNodes, GiveEveryWorkerTheSameBitsInEveryRunNearTheMean) {
  std::vector<Bytes> runs;
  for (int run = 0; run < 2; ++run) {
    Nodes nodes(shapes());
    nodes.start().addGroup(gradients(tensor_));
    Bytes seen;
    for (std::size_t number = 1; number <= 4; ++number) {
      const auto given = gradientsOf(nodes.numWorkers(), number);
      const auto taken = step(nodes, given);
      for (const std::vector<float>& each : taken)
        ASSERT_EQ(std::memcmp(each.data(), taken[0].data(), kGradientElements * sizeof(float)), 0);
      for (std::size_t i = 0; i < kGradientElements; ++i)
        ASSERT_NEAR(taken[0][i], meanOf(given, i), 3 * kLargestGradient / 127) << i << " of step " << number;
      const auto* const bytes = reinterpret_cast<const std::byte*>(taken[0].data());
      seen.insert(seen.end(), bytes, bytes + kGradientElements * sizeof(float));
    }
    runs.push_back(std::move(seen));
  }
  EXPECT_TRUE(runs[0] == runs[1]);
}

TEST_P(CompressedNodes, PassOnWhatIsNotFinite) {
  Nodes nodes(shapes());
  nodes.start().addGroup(gradients(tensor_));
  for (std::size_t number = 1; number <= 3; ++number) {
    auto given = gradientsOf(nodes.numWorkers(), number);
    if (number == 2) {
      given.front()[7] = std::numeric_limits<float>::infinity();
      given.back()[450] = -std::numeric_limits<float>::infinity();
      given.back()[999] = std::numeric_limits<float>::quiet_NaN();
    }
    const auto taken = step(nodes, given);
    for (const std::vector<float>& each : taken) {
      for (std::size_t i = 0; i < kGradientElements; ++i) {
        const double mean = meanOf(given, i);
        if (std::isfinite(mean)) {
          ASSERT_NEAR(each[i], mean, 3 * kLargestGradient / 126) << i << " of step " << number;
        } else {
          ASSERT_TRUE(std::isnan(mean) ? std::isnan(each[i]) : each[i] == mean) << i;
        }
      }
    }
  }
}

TEST_P(CompressedNodes, LeaveWhatTheyNeedNotRoundAsItIs) {
  std::vector<TensorSpec> tensors;
  for (const TensorSpec& each : variousTensors()) {
    if (each.dtype != DType::kFloat32 || each.op != ReduceOp::kMean) tensors.push_back(each);
  }
  Nodes nodes(shapes());
  nodes.start().addGroup(gradients(tensors));
  nodes.addGroup(makePlan(2, 1, tensor_, kShardElements));  // means that are no gradients
  std::vector<std::size_t> everyone(nodes.numWorkers());
  std::iota(everyone.begin(), everyone.end(), std::size_t{0});
  together(nodes.numWorkers(), [&](std::size_t rank) {
    Client& worker = nodes.worker(rank);
    const auto check = [&](std::uint32_t group, std::uint32_t tensor, const TensorSpec& spec) {
      Bytes data = contribution(spec.dtype, spec.numElements, rank, 1);
      ASSERT_EQ(worker.push(group, tensor, kPresent, data.data()), WaitStatus::kDone);
      ASSERT_EQ(worker.pull(group, tensor, data.data(), kPatienceSeconds), WaitStatus::kDone);
      ASSERT_TRUE(data == result(spec.dtype, spec.op, spec.numElements, everyone, 1,
                                 static_cast<std::uint32_t>(everyone.size())))
          << "tensor " << tensor << " of group " << group;
    };
    for (std::uint32_t tensor = 0; tensor < tensors.size(); ++tensor) check(1, tensor, tensors[tensor]);
    check(2, 0, tensor_[0]);
  });
}

TEST_P(CompressedNodes, SendFewerBytes) {
  const auto receivedOf = [&](const GroupPlan& plan) {
    Nodes nodes(shapes());
    nodes.start().addGroup(plan);
    step(nodes, gradientsOf(nodes.numWorkers(), 1));
    return static_cast<double>(receivedBytes(nodes, shapes().size()));
  };
  GroupPlan plan = makePlan(1, 1, tensor_);
  const double plain = receivedOf(plan);
  plan.areGradients = true;
  const double compressed = receivedOf(plan);
  EXPECT_NEAR(compressed / plain, std::get<1>(GetParam()) == Compression::kInt8 ? 0.26 : 0.5, 0.02);
}

TEST_P(CompressedNodes, GoOnAfterStepsToWhichSomeOrAllContributeNothing) {
  Nodes nodes(shapes());
  nodes.start().addGroup(gradients(tensor_));
  const std::size_t last = nodes.numWorkers() - 1;
  for (std::uint32_t number = 1; number <= 6; ++number) {
    const bool isAnybodyPresent = number % 3 != 0;
    const auto given = gradientsOf(nodes.numWorkers(), number);
    std::vector<std::vector<float>> taken(nodes.numWorkers(), std::vector<float>(kGradientElements));
    together(nodes.numWorkers(), [&](std::size_t rank) {
      const bool isPresent = isAnybodyPresent && (number % 3 == 1 || rank == last);
      Client& worker = nodes.worker(rank);
      const std::uint8_t flags = isPresent ? kPresent : 0;
      ASSERT_EQ(worker.push(1, 0, flags, given[rank].data()), WaitStatus::kDone);
      ASSERT_EQ(worker.pull(1, 0, taken[rank].data(), kPatienceSeconds), WaitStatus::kDone);
    });
    if (!isAnybodyPresent) continue;
    for (const std::vector<float>& each : taken) {
      ASSERT_EQ(std::memcmp(each.data(), taken[0].data(), kGradientElements * sizeof(float)), 0);
      for (std::size_t i = 0; i < kGradientElements; ++i) {
        const double mean =
            number % 3 == 1 ? meanOf(given, i) : given[last][i] / static_cast<double>(nodes.numWorkers());
        ASSERT_NEAR(each[i], mean, 4 * kLargestGradient / 127) << i << " of step " << number;
      }
    }
  }
}

class NodesWithErrorFeedback : public CompressedNodes {};

TEST_P(NodesWithErrorFeedback, ApproachAConstantGradientInTheLongRun) {
  Nodes nodes(shapes());
  nodes.start().addGroup(gradients(tensor_));
  const auto given = gradientsOf(nodes.numWorkers(), 1);
  std::vector<double> sums(kGradientElements);
  constexpr int kSteps = 100;
  double largestError = 0;
  for (int number = 0; number < kSteps; ++number) {
    const auto taken = step(nodes, given);
    for (std::size_t i = 0; i < kGradientElements; ++i) {
      sums[i] += taken[0][i];
      largestError = std::max(largestError, std::fabs(taken[0][i] - meanOf(given, i)));
    }
  }
  EXPECT_GT(largestError, 1e-4) << "single steps are off";
  for (std::size_t i = 0; i < kGradientElements; ++i)
    ASSERT_NEAR(sums[i] / kSteps, meanOf(given, i), kLargestGradient / 1000);
}

TEST_P(CompressedNodes, UpdateParametersAlikeOnAllOfThem) {
  GroupPlan plan = optimizerPlan();
  plan.areGradients = true;
  Nodes nodes(shapes());
  nodes.start().addGroup(plan);
  const auto planOf = [&](std::size_t rank) {
    GroupPlan own = plan;
    own.numClients = nodes.clusterOf(rank).shape().numClients;
    return own;
  };
  const std::size_t numBytes = plan.parameterBytes();
  std::vector<Bytes> parameters(nodes.numWorkers());
  together(nodes.numWorkers(), [&](std::size_t rank) {
    UpdateSettings settings;
    settings.rule = UpdateRule::kSgd;
    settings.stepSize = 1;
    const GroupPlan own = planOf(rank);
    std::fill_n(nodes.clusterOf(rank).settings(own, nodes.clientOf(rank)), std::size(kParameterElements),
                settings);
    auto* const slots = reinterpret_cast<float*>(nodes.clusterOf(rank).slots(own, nodes.clientOf(rank)));
    for (std::size_t number = 1; number <= 3; ++number) {
      const auto given = gradientsOf(nodes.numWorkers(), number);
      for (std::size_t i = 0; i < own.slotBytes / sizeof(float); ++i)
        slots[i] = given[rank][i % kGradientElements];
      for (std::uint32_t tensor = 0; tensor < std::size(kParameterElements); ++tensor)
        ASSERT_EQ(nodes.worker(rank).push(1, tensor, kPresent | kUpdate, nullptr), WaitStatus::kDone);
      ASSERT_EQ(nodes.worker(rank).pullAll(1, kPatienceSeconds), WaitStatus::kDone);
    }
    const std::byte* const first = nodes.clusterOf(rank).parameters(own);
    parameters[rank].assign(first, first + numBytes);
  });
  for (const Bytes& each : parameters) EXPECT_TRUE(each == parameters[0]);
  const auto* const values = reinterpret_cast<const float*>(parameters[0].data());
  double expected = 0;
  for (std::size_t number = 1; number <= 3; ++number)
    expected -= meanOf(gradientsOf(nodes.numWorkers(), number), 5);
  EXPECT_NEAR(values[5], expected, 9 * kLargestGradient / 127);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, CompressedNodes,
    testing::Combine(kShapes,
                     testing::Values(Compression::kBFloat16, Compression::kFloat16, Compression::kInt8)),
    [](const auto& info) { return std::get<0>(info.param).name + nameOf(std::get<1>(info.param)); });

INSTANTIATE_TEST_SUITE_P(Shapes, NodesWithErrorFeedback,
                         testing::Combine(kShapes, testing::Values(Compression::kInt8)),
                         [](const auto& info) { return std::string(std::get<0>(info.param).name); });

// ---- what nodes do not agree on ----

TEST(NodeDisagreement, OnABufferIsAnEventAtItsOwner) {
  Nodes nodes({{1, 1, 1}, {1, 1, 1}});
  nodes.start().addGroup(makeDynamicPlan(2, 1, 2, 4096, Algorithm::kDirect));
  for (std::size_t node = 0; node < 2; ++node) {
    Descriptor descriptor;
    descriptor.group = 2;
    descriptor.step = 1;
    descriptor.flags = kPresent;
    descriptor.numElements = static_cast<std::uint32_t>(10 + node);
    nodes.node(node).tell(0, 0, descriptor);
  }
  const std::vector<ProxyEvent> events = nodes.node(0).events(0);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].client, -1);
  EXPECT_EQ(
      events[0].message,
      "workers disagree on a buffer: worker(s) 1 gave 11 elements of dtype 0 with op 0, worker(s) 0 gave 10 "
      "elements of dtype 0 with op 0");
}

TEST(NodeDisagreement, OnWhetherAStepWasMadeIsAnEventAtTheOwner) {
  Nodes nodes({{1, 1, 1}, {1, 1, 1}});
  nodes.start().addGroup(optimizerPlan());
  const auto push = [&](std::size_t rank, std::uint8_t flags) {
    ASSERT_EQ(nodes.worker(rank).push(1, 2, flags, nullptr), WaitStatus::kDone);
    nodes.worker(rank).flush();
  };
  const auto pull = [&](std::size_t rank) {
    ASSERT_EQ(nodes.worker(rank).pullAll(1, kPatienceSeconds), WaitStatus::kDone);
  };
  UpdateSettings settings;
  settings.rule = UpdateRule::kSgd;
  for (const std::size_t node : {0, 1})
    std::fill_n(nodes.node(node).settings(optimizerPlan(), 0), std::size(kParameterElements), settings);
  for (const std::size_t rank : {0, 1}) push(rank, kPresent);
  for (const std::size_t rank : {0, 1}) pull(rank);
  push(1, kPresent | kUpdate | kReduced);
  pull(1);
  for (const std::size_t rank : {0, 1}) push(rank, kPresent);
  const std::uint32_t shard = static_cast<std::uint32_t>(optimizerPlan().shards.size() - 1);
  const std::vector<ProxyEvent> events = nodes.node(shard % 2).events(0);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_NE(events[0].message.find("are at different points of a step"), std::string::npos)
      << events[0].message;
}

/// Two nodes of a worker each, which take one tensor through a step by turns.
class NodeSettings : public testing::Test {
 protected:
  void SetUp() override {
    nodes_.start().addGroup(optimizerPlan());
    settings_.rule = UpdateRule::kSgd;
    settings_.stepSize = 0.5F;
    for (const std::size_t rank : {0, 1}) set(rank, settings_);
  }
  void set(std::size_t rank, const UpdateSettings& settings) {
    std::fill_n(nodes_.node(rank).settings(optimizerPlan(), 0), std::size(kParameterElements), settings);
  }
  void push(std::size_t rank, std::uint8_t flags) {
    ASSERT_EQ(nodes_.worker(rank).push(1, 2, static_cast<std::uint8_t>(kPresent | flags), nullptr),
              WaitStatus::kDone);
    nodes_.worker(rank).flush();
  }
  void synchronise(std::uint8_t flags) {
    for (const std::size_t rank : {0, 1}) push(rank, flags);
    for (const std::size_t rank : {0, 1})
      ASSERT_EQ(nodes_.worker(rank).pullAll(1, kPatienceSeconds), WaitStatus::kDone);
  }
  void expectDisagreement() {
    const std::uint32_t shard = static_cast<std::uint32_t>(optimizerPlan().shards.size() - 1);
    const std::vector<ProxyEvent> events = nodes_.node(shard % 2).events(0);
    ASSERT_EQ(events.size(), 1u);
    EXPECT_NE(events[0].message.find("disagree on the optimizer's settings"), std::string::npos)
        << events[0].message;
  }
  UpdateSettings settings_;
  Nodes nodes_{{{1, 1, 1}, {1, 1, 1}}};
};

TEST_F(NodeSettings, ThatDifferEndAnUpdateBeforeItIsMade) {
  synchronise(kUpdate);
  settings_.stepSize = 0.25F;
  set(1, settings_);
  for (const std::size_t rank : {0, 1}) push(rank, kUpdate);
  expectDisagreement();
}

TEST_F(NodeSettings, ThatDifferAreFoundAtTheAverageAfterAnUpdateByMeans) {
  settings_.gradientScale = -1;
  set(1, settings_);
  synchronise(0);  // settings of an update to come, which a worker may be writing: nobody looks at them
  synchronise(kUpdate | kReduced);
  for (const std::size_t rank : {0, 1}) push(rank, 0);
  expectDisagreement();
}

TEST_F(NodeSettings, MayChangeOnAllNodes) {
  for (const float stepSize : {0.5F, 0.25F, 0.125F}) {
    settings_.stepSize = stepSize;
    set(1, settings_);
    synchronise(0);
    set(0, settings_);
    synchronise(kUpdate | kReduced);
  }
  EXPECT_TRUE(nodes_.node(0).events(0, kMomentSeconds).empty());
}

TEST_F(NodeSettings, ThatMeasureOnOneNodeAloneDiffer) {
  push(0, kMeasure);
  push(1, 0);
  expectDisagreement();
}

// ---- leaving ----

class LeavingNodes : public testing::Test {
 protected:
  void SetUp() override { nodes_.start().addGroup(makePlan(1, 1, tensors_)); }
  void synchronise() {
    together(nodes_.numWorkers(), [&](std::size_t rank) {
      for (std::uint32_t tensor = 0; tensor < tensors_.size(); ++tensor)
        ASSERT_EQ(nodes_.worker(rank).push(1, tensor, kPresent, nullptr), WaitStatus::kDone);
      ASSERT_EQ(nodes_.worker(rank).pullAll(1, kPatienceSeconds), WaitStatus::kDone);
    });
  }
  /// Worker 1, alone on node 1, says goodbye; node 0's control thread hears of it.
  void workerLeaves() {
    nodes_.node(1).proxy(0).clientLeft(0);
    const std::vector<NodeEvent> events = nodes_.nodeEvents(0);
    ASSERT_EQ(events.size(), 1u);
    EXPECT_EQ(events[0].kind, NodeEvent::Kind::kLeft);
    EXPECT_EQ(events[0].number, 1u);
    nodes_.node(0).proxy(0).workerLeftNode(1);
  }
  void push(std::size_t rank, std::uint32_t tensor) {
    ASSERT_EQ(nodes_.worker(rank).push(1, tensor, kPresent, nullptr), WaitStatus::kDone);
    nodes_.worker(rank).flush();
  }
  void expectDeparture(std::size_t node) {
    std::vector<ProxyEvent> events;
    ASSERT_TRUE(eventually([&] { return !(events = nodes_.node(node).proxy(0).takeEvents()).empty(); }));
    EXPECT_EQ(events[0].message, "");
  }
  const std::vector<TensorSpec> tensors_{{100}, {100}};  // one owned by each node
  Nodes nodes_{{{1, 1, 1}, {1, 1, 1}}};
};

TEST_F(LeavingNodes, AfterTheLastStepIsNoEvent) {
  synchronise();
  workerLeaves();
  EXPECT_TRUE(nodes_.node(0).events(0, kMomentSeconds).empty());
  nodes_.stop(1);
  const std::vector<NodeEvent> ended = nodes_.nodeEvents(0);
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].kind, NodeEvent::Kind::kEnded);
  nodes_.node(0).proxy(0).nodeEnded(1);
  EXPECT_TRUE(nodes_.node(0).events(0, kMomentSeconds).empty());
}

TEST_F(LeavingNodes, BeforeAPushIsAnEventOfThePusher) {
  synchronise();
  workerLeaves();
  push(0, 0);
  expectDeparture(0);
}

TEST_F(LeavingNodes, AfterAPushIsAnEventAtTheOwner) {
  synchronise();
  push(0, 0);
  ASSERT_TRUE(eventually([&] { return nodes_.node(0).proxy(0).lastStep(0) == 2; }));
  workerLeaves();
  expectDeparture(0);
}

TEST_F(LeavingNodes, OfTheOwnerIsAnEventThereWhenAContributionComes) {
  synchronise();
  nodes_.node(1).proxy(0).clientLeft(0);
  push(0, 1);
  expectDeparture(1);
}

TEST_F(LeavingNodes, OfAllOfTheOwnerIsAnEventWhereItsResultIsAwaited) {
  synchronise();
  push(0, 1);
  ASSERT_TRUE(eventually([&] { return nodes_.node(0).proxy(0).lastStep(0) == 2; }));
  nodes_.stop(1);
  EXPECT_EQ(nodes_.nodeEvents(0)[0].kind, NodeEvent::Kind::kEnded);
  // The push was recorded; that it was sent is what a sync core does next.
  ASSERT_TRUE(eventually([&] {
    nodes_.node(0).proxy(0).nodeEnded(1);
    return !nodes_.node(0).proxy(0).takeEvents().empty();
  }));
}

TEST_F(LeavingNodes, AnAbortTellsWhy) {
  nodes_.node(1).proxy(0).abortNodes("because");
  const std::vector<NodeEvent> events = nodes_.nodeEvents(0);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, NodeEvent::Kind::kAborted);
  EXPECT_EQ(events[0].node, 1u);
  EXPECT_EQ(events[0].text, "because");
}

// ---- frames that cannot be ----

/// One node, and the test in the place of the other.
class Frames : public testing::Test {
 protected:
  Frames() {
    cluster_.joinNodes({0, 2}, {{0}, {1}}, {{{}, {ours_.second}}});
    ours_.second.close();
    // Shards 0 and 2 belong to the node, shard 1 to us.
    plan_ = makePlan(1, 1, {{100}, {100}, {100}});
    plan_.numRanks = 2;
    cluster_.start().addGroup(plan_);
  }
  ~Frames() override { ours_.first.close(); }
  FrameHeader partial(std::uint32_t shard = 0, std::uint32_t step = 1) const {
    FrameHeader header;
    header.kind = FrameKind::kPartial;
    header.group = 1;
    header.shard = shard;
    header.step = step;
    header.numElements = 100;
    header.numPresent = header.numCounted = 1;
    header.payloadBytes = 400;
    return header;
  }
  /// A frame with the next number, as another node would send it, of which the payload is zero.
  std::vector<std::byte> frame(const FrameHeader& header, std::size_t payloadBytes) {
    TcpPrefix prefix = nextPrefix();
    std::vector<std::byte> bytes(sizeof prefix + sizeof header + payloadBytes);
    std::memcpy(bytes.data(), &prefix, sizeof prefix);
    std::memcpy(bytes.data() + sizeof prefix, &header, sizeof header);
    return bytes;
  }
  TcpPrefix nextPrefix(TcpFrameType type = TcpFrameType::kData) {
    return {kTcpMagic, type, sizeof(FrameHeader), 0, numSent_++, 0};
  }
  void send(const FrameHeader& header, std::size_t payloadBytes) { sendBytes(frame(header, payloadBytes)); }
  void send(const TcpPrefix& prefix) {
    std::vector<std::byte> bytes(sizeof prefix + sizeof(FrameHeader));
    std::memcpy(bytes.data(), &prefix, sizeof prefix);
    sendBytes(bytes);
  }
  /// Receives the header of a frame; its payload comes next.
  FrameHeader receiveHeader() {
    struct {
      TcpPrefix prefix;
      FrameHeader header;
    } head;
    do {
      EXPECT_EQ(::recv(ours_.first, &head, sizeof head, MSG_WAITALL), static_cast<ssize_t>(sizeof head));
    } while (head.prefix.type == TcpFrameType::kReceived);
    return head.header;
  }
  void sendBytes(const std::vector<std::byte>& bytes) {
    // The node may close the connection while we are at it.
    [[maybe_unused]] const auto sent = ::send(ours_.first, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  void expectLost(const std::string& reason) {
    std::vector<NodeEvent> events;
    ASSERT_TRUE(eventually([&] { return !(events = cluster_.proxy(0).takeNodeEvents()).empty(); }));
    ASSERT_EQ(events.size(), 1u);
    EXPECT_EQ(events[0].kind, NodeEvent::Kind::kLost);
    EXPECT_NE(events[0].text.find(reason), std::string::npos) << events[0].text;
  }
  std::pair<Fd, Fd> ours_ = streamPair();
  std::uint32_t numSent_ = 0;
  GroupPlan plan_;
  Cluster cluster_{{1, 1, 1}};
};

TEST_F(Frames, OfAStepAreTaken) {
  send(partial(), 400);
  const std::vector<float> values(100, 3);
  ASSERT_EQ(cluster_.client(0).push(1, 0, kPresent, values.data()), WaitStatus::kDone);
  ASSERT_EQ(cluster_.client(0).pull(1, 0, nullptr, kPatienceSeconds), WaitStatus::kDone);
  const FrameHeader answer = receiveHeader();
  EXPECT_EQ(answer.kind, FrameKind::kResult);
  EXPECT_EQ(answer.numPresent, 2u);
  std::vector<float> payload(100);
  ASSERT_EQ(::recv(ours_.first, payload.data(), 400, MSG_WAITALL), 400);
  EXPECT_EQ(payload, values);
}

TEST_F(Frames, SayOfAWorkerFromWhichStepOnItIsAbsent) {
  FrameHeader absence = partial(), nothing = partial();
  absence.kind = FrameKind::kAbsent;
  absence.numElements = 1;
  absence.payloadBytes = 0;
  nothing.numPresent = nothing.numCounted = 0;
  nothing.payloadBytes = 0;
  send(absence, 0);
  send(nothing, 0);
  EXPECT_TRUE(cluster_.client(0).absentRanks(1).empty()) << "before the step";
  ASSERT_EQ(cluster_.client(0).push(1, 0, kPresent, nullptr), WaitStatus::kDone);
  ASSERT_EQ(cluster_.client(0).pull(1, 0, nullptr, kPatienceSeconds), WaitStatus::kDone);
  EXPECT_EQ(cluster_.client(0).absentRanks(1), std::vector<std::size_t>{1});
  const FrameHeader answer = receiveHeader();
  EXPECT_EQ(answer.kind, FrameKind::kAbsent) << "the owner tells all nodes";
  EXPECT_EQ(answer.numElements, 1U);
  EXPECT_EQ(answer.step, 1U);
  EXPECT_EQ(receiveHeader().kind, FrameKind::kResult);
  absence.step = 2;
  send(absence, 0);
  expectLost("worker 1 is absent from step 2");
}

TEST_F(Frames, MayComeByteByByte) {
  for (const std::byte byte : frame(partial(), 400)) sendBytes({byte});
  ASSERT_EQ(cluster_.client(0).push(1, 0, kPresent, nullptr), WaitStatus::kDone);
  EXPECT_EQ(cluster_.client(0).pull(1, 0, nullptr, kPatienceSeconds), WaitStatus::kDone);
}

TEST_F(Frames, ThatCannotBeEndTheConnection) {
  const auto refused = [](auto change, const std::string& reason) {
    struct Once : Frames {
      void TestBody() override {}
      using Frames::expectLost;
      using Frames::partial;
      using Frames::send;
    } once;
    FrameHeader header = once.partial();
    change(header);
    once.send(header, 400);
    once.expectLost(reason);
  };
  refused([](FrameHeader& header) { header.kind = static_cast<FrameKind>(99); }, "kind 99");
  for (const FrameKind kind : {FrameKind::kReport, FrameKind::kFetch, FrameKind::kHanded})
    refused([kind](FrameHeader& header) { header.kind = kind; }, "without which nobody goes on");
  refused([](FrameHeader& header) { header.kind = FrameKind::kAgreement, header.payloadBytes = 1 << 20; },
          "1048576 bytes");
  refused([](FrameHeader& header) { header.group = 2; }, "has not registered");
  refused([](FrameHeader& header) { header.shard = 3; }, "which has 3 shards");
  refused([](FrameHeader& header) { header.shard = 1; }, "belongs to another node");
  refused([](FrameHeader& header) { header.step = 0; }, "after that of step 0");
  refused([](FrameHeader& header) { header.step = 2; }, "after that of step 0");
  refused([](FrameHeader& header) { header.numElements = 101; }, "101 elements");
  refused([](FrameHeader& header) { header.dtype = 1; }, "dtype 1");
  refused([](FrameHeader& header) { header.dtype = 200; }, "dtype 200");
  refused([](FrameHeader& header) { header.op = 2; }, "op 2");
  refused([](FrameHeader& header) { header.compression = 3; }, "with compression 3 instead of 0");
  refused([](FrameHeader& header) { header.payloadBytes = 404; }, "404 bytes instead of 400");
  refused([](FrameHeader& header) { header.payloadBytes = ~std::uint64_t{0}; }, "instead of 400");
  refused([](FrameHeader& header) { header.numPresent = 0; }, "400 bytes instead of 0");
  refused([](FrameHeader& header) { header.kind = FrameKind::kResult; }, "nobody waits");
  refused([](FrameHeader& header) { header.kind = FrameKind::kResult, header.shard = 1; }, "nobody waits");
  refused([](FrameHeader& header) { header.kind = FrameKind::kLeft; }, "400 bytes");
  refused([](FrameHeader& header) { header.kind = FrameKind::kAbort, header.payloadBytes = 1 << 20; },
          "1048576 bytes");
  const auto absent = [](std::uint32_t rank, std::uint32_t shard = 0, std::uint32_t step = 1) {
    return [=](FrameHeader& header) {
      header.kind = FrameKind::kAbsent;
      header.numElements = rank;
      header.shard = shard;
      header.step = step;
      header.payloadBytes = 0;
    };
  };
  refused(absent(0), "worker 0 is absent");  // it is not theirs
  refused(absent(2), "worker 2 is absent");
  refused(absent(1, 2), "worker 1 is absent from step 1 of shard 2");
  refused(absent(1, 0, 2), "worker 1 is absent from step 2 of shard 0");
  refused([](FrameHeader& header) { header.kind = FrameKind::kLost, header.payloadBytes = 1 << 20; },
          "1048576 bytes");
}

TEST_F(Frames, WithPrefixesThatCannotBeEndTheConnection) {
  const auto refused = [](auto change, const std::string& reason) {
    struct Once : Frames {
      void TestBody() override {}
      using Frames::expectLost;
      using Frames::nextPrefix;
      using Frames::send;
    } once;
    TcpPrefix prefix = once.nextPrefix();
    change(prefix);
    once.send(prefix);
    once.expectLost(reason);
  };
  refused([](TcpPrefix& prefix) { prefix.magic = 0; }, "no frame");
  refused([](TcpPrefix& prefix) { prefix.type = static_cast<TcpFrameType>(4); }, "no frame");
  refused([](TcpPrefix& prefix) { prefix.type = static_cast<TcpFrameType>(0); }, "no frame");
  refused([](TcpPrefix& prefix) { prefix.headerBytes -= 8; }, "no frame");
  refused([](TcpPrefix& prefix) { prefix.headerBytes = 200; }, "no frame");
  refused([](TcpPrefix& prefix) { prefix.zero = 1; }, "no frame");
  refused([](TcpPrefix& prefix) { prefix.number = 1; }, "frame 1 when frame 0 was due");
  refused([](TcpPrefix& prefix) { prefix.type = TcpFrameType::kReceived, prefix.numReceived = 1; },
          "acknowledged a frame that was not sent");
}

TEST_F(Frames, ThatComeAgainEndTheConnection) {
  const std::vector<std::byte> bytes = frame(partial(), 400);
  sendBytes(bytes);
  sendBytes(bytes);
  expectLost("frame 0 when frame 1 was due");
}

TEST_F(Frames, OfOneStepComeOnce) {
  send(partial(), 400);
  send(partial(), 400);
  expectLost("after that of step 1");
}

TEST_F(Frames, AreNotResultsOfWhatTheNodeOwns) {
  ASSERT_EQ(cluster_.client(0).push(1, 0, kPresent, nullptr), WaitStatus::kDone);
  cluster_.client(0).flush();
  FrameHeader header = partial();
  header.kind = FrameKind::kResult;
  send(header, 400);
  expectLost("nobody waits");
}

TEST_F(Frames, AfterAGoodbyeEndTheConnection) {
  send(nextPrefix(TcpFrameType::kLast));
  send(partial(), 400);
  expectLost("after its goodbye");
}

TEST_F(Frames, ThatEndWithoutAGoodbyeMeanALoss) {
  send(partial(), 13);
  ours_.first.close();
  expectLost("closed from the other end");
}

TEST_F(Frames, OfARemovedGroupAreSentToTheirEnd) {
  const GroupPlan large = makePlan(2, 1, {{4 << 20}});
  cluster_.addGroup(large);
  FrameHeader header = partial();
  header.group = 2;
  header.numElements = 4 << 20;
  header.payloadBytes = 16 << 20;
  const std::vector<std::byte> bytes = frame(header, 16 << 20);
  std::vector<float> values(4 << 20, 3);
  together(2, [&](std::size_t who) {
    if (who == 0) {
      ASSERT_EQ(::send(ours_.first, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
      return;
    }
    ASSERT_EQ(cluster_.client(0).push(2, 0, kPresent, values.data()), WaitStatus::kDone);
    ASSERT_EQ(cluster_.client(0).pull(2, 0, nullptr, kPatienceSeconds), WaitStatus::kDone);
  });
  cluster_.client(0).removeGroup(2);
  cluster_.removeFromProxies(2);
  receiveHeader();
  std::vector<std::byte> answer(16 << 20);
  ASSERT_EQ(::recv(ours_.first, answer.data(), answer.size(), MSG_WAITALL),
            static_cast<ssize_t>(answer.size()));
  EXPECT_EQ(std::memcmp(answer.data(), values.data(), 16 << 20), 0);
}
TEST(LeavingNodesWithOptimizer, IsNoEventOfWhoHasStillToUpdateHisOwnNode) {
  Nodes nodes({{1, 1, 1}, {1, 1, 1}});
  nodes.start().addGroup(optimizerPlan());
  const auto synchronise = [&](std::size_t rank, std::uint8_t flags) {
    UpdateSettings settings;
    settings.rule = UpdateRule::kSgd;
    std::fill_n(nodes.node(rank).settings(optimizerPlan(), 0), std::size(kParameterElements), settings);
    ASSERT_EQ(nodes.worker(rank).push(1, 0, flags, nullptr), WaitStatus::kDone);
    ASSERT_EQ(nodes.worker(rank).pullAll(1, kPatienceSeconds), WaitStatus::kDone);
  };
  together(2, [&](std::size_t rank) { synchronise(rank, kPresent); });
  synchronise(1, kPresent | kUpdate | kReduced);
  nodes.node(1).proxy(0).clientLeft(0);
  ASSERT_EQ(nodes.nodeEvents(0)[0].kind, NodeEvent::Kind::kLeft);
  nodes.node(0).proxy(0).workerLeftNode(1);
  synchronise(0, kPresent | kUpdate | kReduced);
  nodes.stop(1);
  ASSERT_EQ(nodes.nodeEvents(0)[0].kind, NodeEvent::Kind::kEnded);
  nodes.node(0).proxy(0).nodeEnded(1);
  EXPECT_TRUE(nodes.node(0).events(0, kMomentSeconds).empty());
  ASSERT_EQ(nodes.worker(0).push(1, 0, kPresent, nullptr), WaitStatus::kDone);
  nodes.worker(0).flush();
  const std::vector<ProxyEvent> events = nodes.node(0).events(0);
  ASSERT_FALSE(events.empty());
  EXPECT_EQ(events[0].message, "");
}

// ---- what cannot be set up ----

TEST(NodeSetUp, RefusesWhatDoesNotFit) {
  Cluster cluster({1, 1, 1});
  const auto [ours, theirs] = streamPair();
  Proxy& proxy = cluster.proxy(0);
  const int fd = theirs;
  EXPECT_THROW(proxy.joinNodes(0, {{0, 1}, {2}}, {{}, {fd}}), std::invalid_argument) << "there is one client";
  EXPECT_THROW(proxy.joinNodes(0, {{0}, {1}}, {{}, {}}), std::invalid_argument) << "no way to node 1";
  EXPECT_THROW(proxy.joinNodes(0, {{0}, {1}}, {{fd}, {fd}}), std::invalid_argument) << "a way to itself";
  EXPECT_THROW(proxy.joinNodes(0, {{0}, {1}}, {{}}), std::invalid_argument) << "too few nodes";
}

TEST(NodeSetUp, RefusesRingsAndMemoryThatIsTooSmall) {
  Cluster cluster({1, 1, 1});
  const auto [ours, theirs] = streamPair();
  const int fd = theirs;
  cluster.joinNodes({0, 2}, {{0}, {1}}, {{{}, {fd}}});
  GroupPlan plan = makePlan(1, 1, {{100}});
  const Memory control(GroupControl::numBytes(1, 1)), slots(plan.slotBytes), small(64);
  EXPECT_THROW(cluster.proxy(0).addGroup(plan, control.fd, {slots.fd}, true, small.fd),
               std::invalid_argument);
  plan.shards[0].algorithm = Algorithm::kRing;
  EXPECT_THROW(cluster.proxy(0).addGroup(plan, control.fd, {slots.fd}, true, small.fd),
               std::invalid_argument);
}

/// Nodes whose links, also those between them, are emulated: a bucket for every pair of endpoints. Endpoints
/// are the workers of all nodes, then their devices.
class EmulatedNodes {
 public:
  static constexpr double kGbytesPerSecond = 0.1;
  static constexpr double kLatencyUs = 1000;

  EmulatedNodes(std::size_t numNodes, ClusterShape shape)
      : table_(makeLinkTable(
            separateLinks(numNodes * (shape.numClients + shape.numDevices), kGbytesPerSecond, kLatencyUs))),
        nodes_(std::vector<ClusterShape>(numNodes, shape), table_) {
    nodes_.start();
  }

  /// One step of a tensor of float32, in shards of 1 << 18 bytes; checks the sums. @returns its seconds.
  double step(std::uint32_t numShards, std::optional<Relay> relay = std::nullopt, std::uint32_t number = 1) {
    constexpr std::uint32_t kShardElements = 1 << 16;
    const std::uint32_t numElements = numShards * kShardElements;
    if (number == 1)
      nodes_.addGroup(makePlan(1, 1, {{numElements, DType::kFloat32, ReduceOp::kSum, Algorithm::kDirect}},
                               kShardElements));
    std::vector<std::size_t> everybody(nodes_.numWorkers());
    std::iota(everybody.begin(), everybody.end(), std::size_t{0});
    const Bytes expected = result(DType::kFloat32, ReduceOp::kSum, numElements, everybody, number, 1);
    const MonotonicNs begin = monotonicNow();
    together(nodes_.numWorkers(), [&](std::size_t rank) {
      Client& worker = nodes_.worker(rank);
      if (relay)
        worker.setDirectAllReduceFlags(
            1, std::vector<std::uint8_t>(numShards, kDirectAllReduce),
            std::vector<std::uint8_t>(numShards, static_cast<std::uint8_t>(*relay)));
      Bytes data = contribution(DType::kFloat32, numElements, rank, number);
      ASSERT_EQ(worker.push(1, 0, kPresent, data.data()), WaitStatus::kDone);
      ASSERT_EQ(worker.pull(1, 0, data.data(), kPatienceSeconds), WaitStatus::kDone);
      EXPECT_EQ(data, expected);
    });
    return static_cast<double>(monotonicNow() - begin) / 1e9;
  }
  std::uint64_t bytes(std::size_t source, std::size_t target) const {
    return Pacer(table_->fd).statistics(source, target).numBytes;
  }

 private:
  std::shared_ptr<const Memory> table_;
  Nodes nodes_;
};

constexpr std::uint64_t kShardBytes = 1 << 18;

TEST(EmulatedNetwork, CarriesEachPartialAndResultOnce) {
  EmulatedNodes nodes(2, {2, 2, 1});
  const double seconds = nodes.step(4);
  // Shard s goes between the devices s mod 2, as a partial to node s mod 2 and back as a result.
  for (std::size_t device = 0; device < 2; ++device) {
    EXPECT_EQ(nodes.bytes(4 + device, 6 + device), 2 * kShardBytes);
    EXPECT_EQ(nodes.bytes(6 + device, 4 + device), 2 * kShardBytes);
  }
  EXPECT_EQ(nodes.bytes(4, 7) + nodes.bytes(5, 6) + nodes.bytes(6, 5) + nodes.bytes(7, 4), 0U);
  // The second shard of a device: both pushes, its contribution, partial, results between nodes and devices,
  // pull.
  EXPECT_GE(seconds, (2 + 5) * kShardBytes / 0.1e9 + 6e-3 - 1e-6);
}

TEST(EmulatedNetwork, AddsALatencyToEachHopOnce) {
  EmulatedNodes nodes(2, {1, 1, 1});
  const double seconds = nodes.step(1);
  // Push, partial, result, pull.
  EXPECT_GE(seconds, 4 * (kShardBytes / 0.1e9 + 1e-3) - 1e-6);
}

TEST(EmulatedNetwork, CarriesTheSecondLevelOfADirectAllReduce) {
  EmulatedNodes nodes(2, {2, 2, 1});
  const double seconds = nodes.step(1, Relay::kTwoLevel);
  for (std::size_t source = 0; source < 8; ++source) {
    for (std::size_t target = 0; target < 8; ++target) {
      const bool isWorkers = source < 4 && target < 4 && source != target;
      const bool isSameNode = source / 2 == target / 2, isSameNumber = source % 2 == target % 2;
      const std::uint64_t expected = !isWorkers     ? 0
                                     : isSameNode   ? kShardBytes
                                     : isSameNumber ? kShardBytes / 2
                                                    : 0;
      if (source == target) continue;
      EXPECT_EQ(nodes.bytes(source, target), expected) << source << " to " << target;
    }
  }
  EXPECT_GE(seconds, 3 * (kShardBytes / 2 / 0.1e9 + 1e-3) - 1e-6);
}

TEST(EmulatedNetwork, OfThreeNodesReducesAndGathersTheSums) {
  EmulatedNodes nodes(3, {1, 1, 1});
  nodes.step(1, Relay::kTwoLevel);
  const std::uint64_t third = (kShardBytes + 2) / 3;
  EXPECT_EQ(nodes.bytes(0, 1), 2 * third);
  EXPECT_EQ(nodes.bytes(2, 0), 2 * third);
}

TEST(EmulatedNetwork, CarriesARingOfAllWorkers) {
  EmulatedNodes nodes(2, {2, 1, 1});
  for (std::uint32_t number = 1; number <= 3; ++number) nodes.step(3, Relay::kRing, number);
  for (std::size_t worker = 0; worker < 4; ++worker)
    EXPECT_EQ(nodes.bytes(worker, (worker + 1) % 4), std::uint64_t{3} * 3 * 6 * kShardBytes / 4);
}

TEST(EmulatedNetwork, NeedsTheTableOfItsNodes) {
  const auto table = makeLinkTable(separateLinks(4, 1, 1));
  Cluster cluster({1, 1, 1}, table, NodeIndex{0, 2});
  const auto [ours, theirs] = streamPair();
  const int fd = theirs;
  EXPECT_THROW(cluster.proxy(0).joinNodes(1, {{0}, {1}}, {{fd}, {}}), std::invalid_argument);
}

}  // namespace
}  // namespace coarse::test::node_test
