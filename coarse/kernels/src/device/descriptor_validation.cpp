#include "coarse/device/descriptor_validation.hpp"

#include <algorithm>
#include <cstddef>

namespace coarse {
namespace {

// Limit of a kernel, for contributions, where each other node counts as one, and for slots.
constexpr std::size_t kMostContributionsToGpu = 128;

/// Whether the workers can reduce such a shard themselves: over emulated links, in memory that they share, or
/// by NCCL. Its algorithm in memory devices does not matter there.
bool canUseDirectAllReduce(const TensorGroup& group, const Shard& shard, std::uint8_t flags) noexcept {
  if (shard.algorithm == Algorithm::kExchange) return true;
  const bool isCoherent = shard.algorithm == Algorithm::kDirect || shard.algorithm == Algorithm::kGather;
  return (isCoherent || (flags & kByNccl) == kByNccl) && !shard.isDynamic && !group.plan().hasOptimizer &&
         !group.plan().isTable(shard);
}

/// Whether emulated links delay all that this algorithm moves.
bool isPaceable(Algorithm algorithm) noexcept {
  return algorithm == Algorithm::kExchange || algorithm == Algorithm::kRing ||
         algorithm == Algorithm::kDirect;
}

}  // namespace

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
    const bool isExchangeOfNode = algorithm == Algorithm::kExchange && !paths.isPaced;
    if (hasNodes && (algorithm == Algorithm::kRing || isExchangeOfNode))
      return "rings and exchanges do not lead to other nodes; choose another algorithm when the session "
             "starts";
    if (algorithm == Algorithm::kRing && !paths.hasRings && paths.numDevices > 1)
      return "this session has no rings in such memory; choose the ring algorithm when it starts";
    if (algorithm == Algorithm::kNccl && !paths.hasCollectives && paths.numDevices > 1)
      return "this session has no NCCL between memory devices; choose the algorithm nccl when it starts";
    if ((algorithm == Algorithm::kExchange || paths.isPaced) && !paths.hasExchange)
      return "this session has no exchange; choose the exchange algorithm when it starts";
    if (paths.isPaced && !isPaceable(algorithm))
      return "an emulated session synchronises by exchange, ring or direct: other algorithms pass over its "
             "links";
    if (paths.isPaced && (plan.hasOptimizer || plan.isTable(shard)))
      return "emulated links carry gradients that are reduced: no updates, and no rows of tables";
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
    return "shard " + std::to_string(descriptor.shard) + " cannot be reduced by direct all-reduce";
  if ((descriptor.flags & kDirectAllReduce) != 0 && descriptor.op >= kNumRelays) return "unknown relay";
  if ((descriptor.flags & (kUpdate | kMeasure)) != 0 && !group->plan().hasOptimizer)
    return "an update, or a mean to be measured, in a group without an optimizer";
  if (shard.algorithm == Algorithm::kProbe) return prober.rejection(*group, descriptor);
  if (!shard.isDynamic && descriptor.numElements != 0)
    return "a number of elements, which only records of lost workers have";
  if (!shard.isDynamic) return {};
  if (descriptor.dtype >= kNumDTypes || descriptor.op >= kNumReduceOps) return "unknown dtype or op";
  const std::size_t numBytes = descriptor.numElements * itemBytes(static_cast<DType>(descriptor.dtype));
  if (numBytes > shard.numElements) return std::to_string(numBytes) + " bytes in a slot of fewer";
  return {};
}

}  // namespace coarse
