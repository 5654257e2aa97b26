#include "coarse/tensors/undo_log.hpp"

#include "coarse/tensors/tensor_group.hpp"

namespace coarse {
namespace {

void copyShard(TensorCopies& copies, const TensorGroup& group, std::uint32_t shard, const KeptMemory& to,
               const KeptMemory& from) {
  for (const KeptPart& part : group.partsOf(shard)) copies.copy(part.in(to), part.in(from), part.numBytes);
}

}  // namespace

UndoLog::UndoLog(const GroupPlan& plan, const TensorMemory& memory, const UndoFds& fds)
    : controlMapping_(mapSealed(fds.control, controlBytes(plan.shards.size()), Mapping::Access::kReadWrite,
                                "undo control")),
      records_(ArrayCursor(controlMapping_.data()).take<UpdateRecord>(plan.shards.size())),
      copies_(memory.makeCopies()),
      parameters_(memory.map(fds.parameters, plan.parameterBytes(), "parameters before")) {
  if (const std::size_t keptBytes = plan.keptBytes(); keptBytes > 0)
    states_ = memory.map(fds.states, keptBytes, "states before");
}

std::size_t UndoLog::controlBytes(std::size_t numShards) noexcept {
  ArrayCursor cursor(nullptr);
  cursor.take<UpdateRecord>(numShards);
  return cursor.offset();
}

void UndoLog::keep(const TensorGroup& group, std::uint32_t shard) { keep(group, &shard, 1); }

void UndoLog::keep(const TensorGroup& group, const std::uint32_t* shards, std::size_t count) {
  const KeptMemory log{parameters_.get(), states_.get()};
  for (std::size_t i = 0; i < count; ++i) copyShard(*copies_, group, shards[i], log, group.kept());
  copies_->synchronize();
  for (std::size_t i = 0; i < count; ++i) copyRecord(records_[shards[i]], group.control().update(shards[i]));
}

bool UndoLog::restore(TensorGroup& group, std::uint32_t shard, std::uint32_t step) {
  UpdateRecord& seen = group.control().update(shard);
  if (seen.step.load(std::memory_order_acquire) == step) return true;
  if (records_[shard].step.load(std::memory_order_acquire) != step) {
    // Without a gradient, a step changes nothing that must be kept.
    if (group.numPresent(shard) > 0) return false;
    seen.step.store(step, std::memory_order_release);
    return true;
  }
  copyShard(*copies_, group, shard, group.kept(), {parameters_.get(), states_.get()});
  copies_->synchronize();
  copyRecord(seen, records_[shard]);
  return true;
}

}  // namespace coarse
