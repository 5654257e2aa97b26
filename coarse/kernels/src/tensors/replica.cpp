#include "coarse/tensors/replica.hpp"

#include <stdexcept>

#include "coarse/tensors/tensor_group.hpp"

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
      // acquire: pairs with earlier writes before add().
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

std::byte* ReplicaStaging::reserve(std::size_t numBytes) {
  if (numBytes > numBytes_) {
    bytes_.reset();  // free the old memory before allocating
    numBytes_ = 0;
    bytes_ = memory_->allocate(numBytes);
    numBytes_ = numBytes;
  }
  return bytes_.get();
}

TensorCopies& ReplicaStaging::copies() {
  if (copies_ == nullptr) copies_ = memory_->makeCopies();
  return *copies_;
}

Replica::Replica(const GroupPlan& plan, const TensorMemory& memory, const ReplicaFds& fds)
    : owner_(fds.owner),
      keeper_(fds.keeper),
      isFilled_(fds.isFilled),
      controlMapping_(mapSealed(fds.control, ReplicaControl::numBytes(plan.shards.size()),
                                Mapping::Access::kReadWrite, "replica control")),
      control_(controlMapping_.data(), plan.shards.size()) {
  if (owner_ == keeper_) throw std::invalid_argument("a replica lies in the memory of another device");
  if (fds.parameters.fd < 0) return;
  parameters_ = memory.map(fds.parameters, plan.parameterBytes(), "replica of parameters");
  if (const std::size_t keptBytes = plan.keptBytes(); keptBytes > 0)
    states_ = memory.map(fds.states, keptBytes, "replica of states");
}

KeptMemory Replica::kept() const noexcept { return {parameters_.get(), states_.get()}; }

void Replica::copy(const TensorGroup& group, const std::vector<std::uint32_t>& shards,
                   ReplicaStaging& staging) {
  std::vector<KeptPart> parts;
  std::size_t numBytes = 0;
  for (const std::uint32_t shard : shards) {
    const bool isEmpty = control_.record(shard).step.load(std::memory_order_relaxed) == 0;
    if (!isEmpty && group.numPresent(shard) == 0) continue;
    for (const KeptPart& part : group.partsOf(shard)) {
      parts.push_back(part);
      numBytes += part.numBytes;
    }
  }
  TensorCopies& copies = staging.copies();
  std::byte* const staged = staging.reserve(numBytes);
  std::size_t offset = 0;
  for (const KeptPart& part : parts) {
    copies.copy(staged + offset, part.in(group.kept()), part.numBytes, NextUse::kSoon);
    offset += part.numBytes;
  }
  copies.synchronize();
  offset = 0;
  for (const KeptPart& part : parts) {
    copies.copy(part.in(kept()), staged + offset, part.numBytes);
    offset += part.numBytes;
  }
  copies.synchronize();
  for (const std::uint32_t shard : shards) copyRecord(control_.record(shard), group.control().update(shard));
}

void Replica::begin(const TensorGroup& group, std::uint32_t step,
                    const std::vector<std::uint32_t>& updateNumbers) {
  const std::unique_ptr<TensorCopies> copies = group.memory().makeCopies();
  const std::vector<Shard>& shards = group.plan().shards;
  for (std::uint32_t shard = 0; shard < shards.size() && !isFilled_; ++shard) {
    for (const KeptPart& part : group.partsOf(shard))
      copies->copy(part.in(kept()), part.in(group.kept()), part.numBytes);
  }
  copies->synchronize();
  for (std::uint32_t shard = 0; shard < shards.size(); ++shard) {
    UpdateRecord& record = control_.record(shard);
    record.updateNumber.store(updateNumbers[shards[shard].tensor], std::memory_order_relaxed);
    record.step.store(step, std::memory_order_release);
  }
}

}  // namespace coarse
