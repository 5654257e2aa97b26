/// Client::allReduce(): unregistered buffers, through the dynamic shards of a group.
#include <algorithm>
#include <cstddef>
#include <stdexcept>

#include "coarse/client/client.hpp"
#include "coarse/reduce/copy.hpp"

namespace coarse {

WaitStatus Client::allReduce(std::uint32_t groupId, void* buffer, std::size_t numElements, DType dtype,
                             ReduceOp op, bool isPresent, double timeoutSeconds) {
  if (isForked()) return WaitStatus::kForked;
  Group& group = find(groupId);
  BufferPieces pieces(group.plan, static_cast<std::byte*>(buffer), numElements, dtype, op);
  pieces.flags = isPresent ? kPresent : 0;
  const TimelineSpan span([&](TimelineEvent& event) {
    describe(event, EventKind::kBuffer, group, {});
    event.numBytes = numElements * pieces.itemSize;
  });
  // One half of the shards is reduced while the other half is copied out and in again.
  for (std::size_t begin = 0; begin < numElements + 2 * pieces.perHalf; begin += pieces.perHalf) {
    WaitStatus status = WaitStatus::kDone;
    if (begin >= 2 * pieces.perHalf)
      status = collect(group, pieces, begin - 2 * pieces.perHalf, timeoutSeconds);
    if (status == WaitStatus::kDone) status = contribute(group, pieces, begin);
    if (status != WaitStatus::kDone) return status;
  }
  return pieces.isIncomplete ? WaitStatus::kNoContribution : WaitStatus::kDone;
}

Client::BufferPieces::BufferPieces(const GroupPlan& plan, std::byte* buffer, std::size_t count, DType dtype,
                                   ReduceOp op)
    : bytes(buffer), numElements(count), itemSize(itemBytes(dtype)), dtype(dtype), op(op) {
  numShards = plan.shards.size() / 2 * 2;
  perShard = plan.shards.at(0).numElements / itemSize;
  perHalf = numShards / 2 * perShard;
  if (perHalf == 0 || !plan.shards[0].isDynamic) {
    throw std::invalid_argument("a buffer needs a group of at least two dynamic shards");
  }
}

WaitStatus Client::contribute(Group& group, const BufferPieces& pieces, std::size_t begin) {
  const std::size_t end = pieces.endOfHalf(begin);
  for (std::size_t at = begin; at < end; at += pieces.perShard) {
    const std::uint32_t shard = pieces.shardOf(at);
    const std::size_t count = std::min(pieces.perShard, end - at);
    const std::size_t numBytes = count * pieces.itemSize;
    std::byte* slot = group.slots->data() + group.plan.shards[shard].offset;
    if (pieces.flags == kPresent) copyBytes(slot, pieces.bytes + at * pieces.itemSize, numBytes);
    Descriptor descriptor;
    descriptor.group = group.plan.id;
    descriptor.shard = shard;
    descriptor.step = ++group.tensors[shard].step;
    descriptor.numElements = static_cast<std::uint32_t>(count);
    descriptor.flags = pieces.flags;
    descriptor.dtype = static_cast<std::uint8_t>(pieces.dtype);
    descriptor.op = static_cast<std::uint8_t>(pieces.op);
    descriptor.slotOwner = ownEpoch();
    const std::lock_guard lock(postMutex_);
    countPush(group, shard, descriptor.flags, numBytes);
    const WaitStatus status = postDescriptor(group.routes[shard], descriptor, numBytes);
    if (status != WaitStatus::kDone) return status;
  }
  flush();
  return WaitStatus::kDone;
}

WaitStatus Client::collect(const Group& group, BufferPieces& pieces, std::size_t begin,
                           double timeoutSeconds) {
  const std::size_t end = pieces.endOfHalf(begin);
  if (begin >= end) return WaitStatus::kDone;
  const std::uint32_t last = pieces.shardOf(end - 1) + 1;
  const WaitStatus status =
      waitForShards(group, pieces.shardOf(begin), last, WaitCause::kAllReduce, timeoutSeconds);
  if (status != WaitStatus::kDone) return status;
  for (std::size_t at = begin; at < end; at += pieces.perShard) {
    const std::uint32_t shard = pieces.shardOf(at);
    if (group.control.contributors(shard).load(std::memory_order_relaxed) == 0) {
      pieces.isIncomplete = true;  // the others go on, so that all workers stay at the same step
      continue;
    }
    const std::byte* slot = group.slots->data() + group.plan.shards[shard].offset;
    copyBytes(pieces.bytes + at * pieces.itemSize, slot,
              std::min(pieces.perShard, end - at) * pieces.itemSize);
  }
  return WaitStatus::kDone;
}

}  // namespace coarse
