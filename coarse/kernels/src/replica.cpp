#include "coarse/replica.hpp"

#include <cstring>
#include <stdexcept>

#include "coarse/copy.hpp"
#include "coarse/recovery.hpp"
#include "coarse/tensor_group.hpp"

namespace coarse {
namespace {

constexpr std::uint32_t kBits = 64;

}  // namespace

void ShardSet::add(std::uint32_t shard) const noexcept {
  words_[shard / kBits].fetch_or(std::uint64_t{1} << shard % kBits, std::memory_order_release);
}

bool ShardSet::take(std::uint32_t& shard) const noexcept {
  for (std::size_t word = 0; word < numWords_; ++word) {
    std::uint64_t found = words_[word].load(std::memory_order_relaxed);
    while (found != 0) {
      const std::uint64_t bit = found & (~found + 1);
      // acquire: what was written before add().
      found = words_[word].fetch_and(~bit, std::memory_order_acquire);
      if ((found & bit) != 0) {
        shard = static_cast<std::uint32_t>(word * kBits) + static_cast<std::uint32_t>(__builtin_ctzll(bit));
        return true;
      }
    }
  }
  return false;
}

ReplicaControl::ReplicaControl(std::byte* base, std::size_t numShards) noexcept {
  ArrayCursor cursor(base);
  const std::size_t numWords = ShardSet::numWords(numShards);
  updates_ = {cursor.take<std::atomic<std::uint64_t>>(numWords), numShards};
  copies_ = {cursor.take<std::atomic<std::uint64_t>>(numWords), numShards};
  records_ = cursor.take<UpdateRecord>(numShards);
}

std::size_t ReplicaControl::numBytes(std::size_t numShards) noexcept {
  ArrayCursor cursor(nullptr);
  cursor.take<std::atomic<std::uint64_t>>(ShardSet::numWords(numShards));
  cursor.take<std::atomic<std::uint64_t>>(ShardSet::numWords(numShards));
  cursor.take<UpdateRecord>(numShards);
  return cursor.offset();
}

Replica::Replica(const GroupPlan& plan, const TensorMemory& memory, const ReplicaFds& fds)
    : owner_(fds.owner),
      keeper_(fds.keeper),
      isFilled_(fds.isFilled),
      controlMapping_(mapSealed(fds.control, ReplicaControl::numBytes(plan.shards.size()),
                                Mapping::Access::kReadWrite, "replica control")),
      control_(controlMapping_.data(), plan.shards.size()),
      parameters_(memory.map(fds.parameters, plan.parameterBytes(), "replica of parameters")) {
  if (owner_ == keeper_) throw std::invalid_argument("a replica lies in the memory of another device");
  if (const std::size_t keptBytes = plan.keptBytes(); keptBytes > 0)
    states_ = memory.map(fds.states, keptBytes, "replica of states");
}

void Replica::copyArrays(const TensorGroup& group, std::uint32_t shard, std::vector<std::byte>& staging) {
  const Shard& plan = group.plan().shards[shard];
  const std::size_t numArrays = group.plan().numStates + (group.plan().hasMaster(plan) ? 1 : 0);
  const std::size_t parameterBytes = plan.numElements * itemBytes(plan.dtype);
  const std::size_t arrayBytes = plan.numElements * sizeof(float);
  if (staging.size() < parameterBytes + numArrays * arrayBytes)
    staging.resize(parameterBytes + numArrays * arrayBytes);
  std::memcpy(staging.data(), group.parameter(plan), parameterBytes);
  for (std::size_t i = 0; i < numArrays; ++i)
    std::memcpy(staging.data() + parameterBytes + i * arrayBytes, group.state(plan, i), arrayBytes);
  // Nobody reads it soon.
  copyBytesStreaming(group.parameterIn(parameters(), plan), staging.data(), parameterBytes);
  for (std::size_t i = 0; i < numArrays; ++i) {
    copyBytesStreaming(group.stateIn(states(), plan, i), staging.data() + parameterBytes + i * arrayBytes,
                       arrayBytes);
  }
}

void Replica::copy(const TensorGroup& group, std::uint32_t shard, std::vector<std::byte>& staging,
                   bool hasChanged) {
  const UpdateRecord& from = group.control().update(shard);
  UpdateRecord& to = control_.record(shard);
  if (hasChanged || to.step.load(std::memory_order_relaxed) == 0) copyArrays(group, shard, staging);
  to.updateNumber.store(from.updateNumber.load(std::memory_order_relaxed), std::memory_order_relaxed);
  // release: the copy before the note of it.
  to.step.store(from.step.load(std::memory_order_acquire), std::memory_order_release);
}

void Replica::begin(const TensorGroup& group, const GroupUpdates& updates) {
  std::vector<std::byte> staging;
  const std::vector<Shard>& shards = group.plan().shards;
  for (std::uint32_t shard = 0; shard < shards.size(); ++shard) {
    if (!isFilled_) copyArrays(group, shard, staging);
    UpdateRecord& record = control_.record(shard);
    record.updateNumber.store(updates.updateNumbers[shards[shard].tensor], std::memory_order_relaxed);
    record.step.store(updates.step, std::memory_order_release);
  }
}

}  // namespace coarse
