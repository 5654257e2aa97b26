#include "coarse/shared_memory/layout.hpp"

#include <climits>

#include "coarse/shared_memory/waiting.hpp"

namespace coarse {
namespace {

std::uint64_t queueCapacity(std::size_t numShards) noexcept {
  std::uint64_t capacity = 1;
  while (capacity < numShards) capacity *= 2;
  return capacity;
}

constexpr std::size_t kNumCounters = 2;  // tail and head of the ready queue

}  // namespace

void Doorbell::ring() noexcept {
  // seq_cst on both sides: either the sleeper sees the new count before it sleeps, or we see the sleeper.
  rings.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) futexWake(rings, INT_MAX);
}

void Inbox::completeOne() noexcept {
  // seq_cst pairs with the client's store to `sleeping`, as in Doorbell::ring().
  const std::uint32_t now = completed.fetch_add(1, std::memory_order_seq_cst) + 1;
  if (sleeping.load(std::memory_order_seq_cst) == 0) return;
  const auto beyond = static_cast<std::int32_t>(now - wakeAt.load(std::memory_order_relaxed));
  if (beyond >= 0) futexWake(completed, 1);
}

void Inbox::abort() noexcept {
  aborted.store(1, std::memory_order_seq_cst);
  futexWake(completed, 1);
}

GroupControl::GroupControl(std::byte* base, std::size_t numShards, std::size_t numClients,
                           std::size_t numRanks) noexcept
    : numClients_(numClients), mask_(queueCapacity(numShards) - 1) {
  doneStride_ = roundUp(numShards, kCacheLineBytes / sizeof(std::uint32_t));
  ArrayCursor cursor(base);
  counters_ = cursor.take<Counter>(kNumCounters);
  arrivals_ = cursor.take<std::atomic<std::uint32_t>>(numShards);
  contributors_ = cursor.take<std::atomic<std::uint32_t>>(numShards);
  devicesLeft_ = cursor.take<std::atomic<std::uint32_t>>(numShards);
  contributions_ = cursor.take<Contribution>(numShards * numClients);
  measures_ = cursor.take<GradientMeasure>(numShards);
  ready_ = cursor.take<ReadyCell>(capacity());
  done_ = cursor.take<std::atomic<std::uint32_t>>(doneStride_ * numClients);
  updates_ = cursor.take<UpdateRecord>(numShards);
  absentSince_ = cursor.take<std::atomic<std::uint32_t>>(numRanks);
}

std::size_t GroupControl::numBytes(std::size_t numShards, std::size_t numClients,
                                   std::size_t numRanks) noexcept {
  ArrayCursor cursor(nullptr);
  cursor.take<Counter>(kNumCounters);
  cursor.take<std::atomic<std::uint32_t>>(numShards);
  cursor.take<std::atomic<std::uint32_t>>(numShards);
  cursor.take<std::atomic<std::uint32_t>>(numShards);
  cursor.take<Contribution>(numShards * numClients);
  cursor.take<GradientMeasure>(numShards);
  cursor.take<ReadyCell>(queueCapacity(numShards));
  cursor.take<std::atomic<std::uint32_t>>(roundUp(numShards, kCacheLineBytes / sizeof(std::uint32_t)) *
                                          numClients);
  cursor.take<UpdateRecord>(numShards);
  cursor.take<std::atomic<std::uint32_t>>(numRanks);
  return cursor.offset();
}

bool GroupControl::claim(std::size_t shard, std::size_t client, std::uint32_t step) const noexcept {
  std::uint32_t last = step - 1;
  // relaxed: contribution.step and the arrival publish the winner's writes.
  return contribution(shard, client).claimed.compare_exchange_strong(last, step, std::memory_order_relaxed);
}

void GroupControl::initialise() const noexcept {
  for (std::uint64_t i = 0; i < capacity(); ++i) ready_[i].sequence.store(i, std::memory_order_release);
}

void copyRecord(UpdateRecord& to, const UpdateRecord& from) noexcept {
  to.updateNumber.store(from.updateNumber.load(std::memory_order_relaxed), std::memory_order_relaxed);
  // release: the copy happens before its record.
  to.step.store(from.step.load(std::memory_order_acquire), std::memory_order_release);
}

}  // namespace coarse
