#include "coarse/device/descriptor_validation.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <sstream>

namespace coarse {
namespace {

// Limit of a kernel, for contributions, where each other node counts as one, and for slots.
constexpr std::size_t kMostContributionsToGpu = 128;

std::string describe(const ShardShape& shape) {
  return std::to_string(shape.numElements) + " elements of dtype " +
         std::to_string(static_cast<int>(shape.dtype)) + " with op " +
         std::to_string(static_cast<int>(shape.op));
}

std::string nameOf(std::size_t client, const std::vector<int>& ranks) {
  return std::to_string(ranks.empty() ? static_cast<int>(client) : ranks[client]);
}

std::string directAllReduceDisagreement(const TensorGroup& group, std::uint32_t shard) {
  const std::uint8_t path = group.directAllReduceFlags(shard);
  for (std::size_t client = 1; client < group.plan().numClients; ++client) {
    if ((group.control().contribution(shard, client).flags & kDirectAllReduceFlags) == path) continue;
    return "workers disagree on whether or how they reduce shard " + std::to_string(shard) +
           " themselves: workers 0 and " + std::to_string(client) + " do not agree";
  }
  return {};
}

std::string bufferDisagreement(const TensorGroup& group, std::uint32_t shard, const std::vector<int>& ranks) {
  const ShardShape expected = group.shape(shard);
  for (std::size_t client = 0; client < group.plan().numClients; ++client) {
    const Contribution& other = group.control().contribution(shard, client);
    const ShardShape shape{other.numElements, static_cast<DType>(other.dtype),
                           static_cast<ReduceOp>(other.op)};
    if (shape.numElements == expected.numElements && shape.dtype == expected.dtype && shape.op == expected.op)
      continue;
    return "workers disagree on a buffer: worker " + nameOf(client, ranks) + " gave " + describe(shape) +
           ", another one " + describe(expected);
  }
  return {};
}

std::string updateDisagreement(const TensorGroup& group, std::uint32_t shard, const std::vector<int>& ranks) {
  constexpr std::uint8_t kKindOfUpdate = kUpdate | kReduced | kMeasure;
  constexpr std::size_t kComparedBytes = offsetof(UpdateSettings, hasGradient);
  const std::size_t first = group.firstClient();
  const std::uint8_t expectedKind = group.control().contribution(shard, first).flags & kKindOfUpdate;
  const UpdateSettings expected = group.settings(shard, first);
  const auto tensor = [&] { return "tensor " + std::to_string(group.plan().shards[shard].tensor) + ": "; };
  for (std::size_t client = first + 1; client < group.plan().numClients; ++client) {
    if (group.isLost(client)) continue;
    const auto whom = [&] {
      return tensor() + "workers " + nameOf(first, ranks) + " and " + nameOf(client, ranks) + " ";
    };
    if ((group.control().contribution(shard, client).flags & kKindOfUpdate) != expectedKind) {
      return whom() +
             "are at different points of a step: one averages a gradient, the other one updates the "
             "parameter. Call backward() and optimizer.step() equally often on every worker";
    }
    const UpdateSettings other = group.settings(shard, client);
    if ((expectedKind & kUpdate) != 0 && expected.written != other.written) {
      return whom() +
             "have written unlike values to this parameter since the last update, or one of them has and the "
             "other "
             "one has not. What is written to parameters between two steps (load_state_dict(), copy_(), an "
             "average of "
             "weights) every worker has to write alike, or put back what was there before the next step";
    }
    if ((expectedKind & kUpdate) == 0 || std::memcmp(&expected, &other, kComparedBytes) == 0) continue;
    return whom() + "disagree on the optimizer's settings: " + firstDifference(expected, other) +
           ". Every worker must run the same scheduler and load the same state";
  }
  if ((expectedKind & kUpdate) != 0 && !isRunnable(expected, group.plan().numStates))
    return tensor() + "no update rule, or one that keeps more state than was registered";
  return {};
}

/// Whether the workers can reduce such a shard themselves: over emulated links, in memory that they share, or
/// by NCCL. The path through memory devices does not matter.
bool canUseDirectAllReduce(const TensorGroup& group, const Shard& shard, std::uint8_t flags) noexcept {
  if (shard.algorithm == Algorithm::kExchange) return true;
  const bool isCoherent = shard.algorithm == Algorithm::kDirect || shard.algorithm == Algorithm::kGather;
  return (isCoherent || (flags & kByNccl) == kByNccl) && !shard.isDynamic && !group.plan().hasOptimizer &&
         !group.plan().isTable(shard);
}

}  // namespace

std::string firstDifference(const UpdateSettings& one, const UpdateSettings& other) {
  const auto differ = [](const char* name, auto first, auto second) {
    // Compares bits, so that NaN equals NaN.
    if (std::memcmp(&first, &second, sizeof(first)) == 0) return std::string();
    std::ostringstream text;
    text << name << " " << first << " and " << second;
    return text.str();
  };
  const std::string differences[] = {
      differ("rule", static_cast<std::uint32_t>(one.rule), static_cast<std::uint32_t>(other.rule)),
      differ("number of the update", one.updateNumber, other.updateNumber),
      differ("step size", one.stepSize, other.stepSize),
      differ("weight decay", one.gradientDecay, other.gradientDecay),
      differ("parameter scale", one.parameterScale, other.parameterScale),
      differ("scale of the gradient", one.gradientScale, other.gradientScale),
      differ("decay of the first state", one.firstDecay, other.firstDecay),
      differ("weight of the gradient in the first state", one.firstWeight, other.firstWeight),
      differ("momentum", one.momentum, other.momentum),
      differ("decay of the second state", one.secondDecay, other.secondDecay),
      differ("weight of the gradient in the second state", one.secondWeight, other.secondWeight),
      differ("bias correction", one.secondScale, other.secondScale),
      differ("epsilon", one.epsilon, other.epsilon),
  };
  for (const std::string& difference : differences) {
    if (!difference.empty()) return difference;
  }
  return {};
}

std::string unsupported(const GroupPlan& plan, const SessionPaths& paths) {
  if (!paths.isHostMemory && plan.numClients + paths.numNodes - 1 > kMostContributionsToGpu)
    return "memory devices on GPUs serve at most " + std::to_string(kMostContributionsToGpu) +
           " workers, of whom those of each other node count as one";
  const bool hasNodes = paths.numNodes > 1;
  for (const Shard& shard : plan.shards) {
    const Algorithm algorithm = shard.algorithm;
    if (!paths.isHostMemory && algorithm == Algorithm::kProbe)
      return "links to the memory of GPUs cannot be probed yet; set COARSE_PROFILE=off";
    if (!paths.isHostMemory && plan.isTable(shard))
      return "memory devices on GPUs take whole gradients, not rows of tables";
    if (algorithm == Algorithm::kProbe) continue;
    if (plan.hasOptimizer && algorithm != Algorithm::kDirect && algorithm != Algorithm::kGather)
      return "optimizers run in coherent memory only; choose the algorithm auto, direct or gather";
    if (plan.isTable(shard) && hasNodes)
      return "rows of tables do not lead to other nodes; this session has several";
    if (hasNodes && (algorithm == Algorithm::kRing || algorithm == Algorithm::kExchange))
      return "rings and exchanges do not lead to other nodes; choose another algorithm when the session "
             "starts";
    if (algorithm == Algorithm::kRing && !paths.hasRings && paths.numDevices > 1)
      return "this session has no rings in such memory; choose the ring algorithm when it starts";
    if (algorithm == Algorithm::kNccl && !paths.hasCollectives && paths.numDevices > 1)
      return "this session has no NCCL between memory devices; choose the algorithm nccl when it starts";
    if (algorithm == Algorithm::kExchange && !paths.hasExchange)
      return "this session has no exchange; choose the exchange algorithm when it starts";
    if (algorithm != Algorithm::kExchange && paths.isPaced)
      return "an emulated session synchronises by exchange only: other algorithms pass over its links";
  }
  return {};
}

std::string rejection(const TensorGroup* group, std::size_t client, const Descriptor& descriptor,
                      const Prober& prober) {
  if (group == nullptr) return "tensor group " + std::to_string(descriptor.group) + " is not registered";
  if (descriptor.shard >= group->plan().shards.size()) {
    return "shard " + std::to_string(descriptor.shard) + " of " + std::to_string(group->plan().shards.size());
  }
  const std::uint32_t done = group->control().done(client, descriptor.shard).load(std::memory_order_relaxed);
  const std::uint32_t pushed =
      group->control().contribution(descriptor.shard, client).step.load(std::memory_order_relaxed);
  if (descriptor.step != done + 1 || pushed == descriptor.step) {
    return "step " + std::to_string(descriptor.step) + " of shard " + std::to_string(descriptor.shard) +
           " although step " + std::to_string(std::max(done, pushed)) + " was its last";
  }
  const Shard& shard = group->plan().shards[descriptor.shard];
  if ((descriptor.flags & kDirectAllReduce) != 0 && !canUseDirectAllReduce(*group, shard, descriptor.flags))
    return "shard " + std::to_string(descriptor.shard) + " has no path among the workers";
  if ((descriptor.flags & (kUpdate | kMeasure)) != 0 && !group->plan().hasOptimizer)
    return "an update, or a mean to be measured, in a group without an optimizer";
  if (shard.algorithm == Algorithm::kProbe) return prober.rejection(*group, descriptor);
  if (!shard.isDynamic) return {};
  if (descriptor.dtype >= kNumDTypes || descriptor.op >= kNumReduceOps) return "unknown dtype or op";
  const std::size_t numBytes = descriptor.numElements * itemBytes(static_cast<DType>(descriptor.dtype));
  if (numBytes > shard.numElements) return std::to_string(numBytes) + " bytes in a slot of fewer";
  return {};
}

std::string disagreement(const TensorGroup& group, std::uint32_t shard, const std::vector<int>& ranks) {
  if (std::string difference = directAllReduceDisagreement(group, shard); !difference.empty())
    return difference;
  if (group.plan().hasOptimizer) return updateDisagreement(group, shard, ranks);
  if (group.plan().shards[shard].isDynamic) return bufferDisagreement(group, shard, ranks);
  return {};
}

}  // namespace coarse
