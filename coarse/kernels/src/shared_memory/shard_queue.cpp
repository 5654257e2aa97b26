#include "coarse/shared_memory/shard_queue.hpp"

namespace coarse {

// The ready queue is a bounded queue of cells with sequence numbers. A cell whose sequence equals the
// position is free for the producer of that position; position + 1 means filled; position + capacity means
// free for the next lap.

bool pushReady(const GroupControl& control, ReadyShard ready) noexcept {
  std::atomic<std::uint64_t>& tail = control.readyTail().value;
  std::uint64_t position = tail.load(std::memory_order_relaxed);
  while (true) {
    ReadyCell& cell = control.readyCell(position);
    const std::uint64_t sequence = cell.sequence.load(std::memory_order_acquire);
    if (sequence == position) {
      if (!tail.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) continue;
      cell.shard = ready.shard;
      cell.step = ready.step;
      cell.sequence.store(position + 1, std::memory_order_release);
      return true;
    }
    if (static_cast<std::int64_t>(sequence - position) < 0) return false;
    position = tail.load(std::memory_order_relaxed);
  }
}

bool popReady(const GroupControl& control, ReadyShard& ready) noexcept {
  std::atomic<std::uint64_t>& head = control.readyHead().value;
  std::uint64_t position = head.load(std::memory_order_relaxed);
  while (true) {
    ReadyCell& cell = control.readyCell(position);
    const std::uint64_t sequence = cell.sequence.load(std::memory_order_acquire);
    if (sequence == position + 1) {
      if (!head.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) continue;
      ready = {cell.shard, cell.step};
      cell.sequence.store(position + control.capacity(), std::memory_order_release);
      return true;
    }
    if (static_cast<std::int64_t>(sequence - (position + 1)) < 0) return false;
    position = head.load(std::memory_order_relaxed);
  }
}

void appendToRing(RingLog& log, const RingEntry& entry) noexcept {
  const std::uint64_t position = log.tail.value.fetch_add(1, std::memory_order_relaxed);
  RingLogCell& cell = log.cells[position % kRingLogCapacity];
  cell.group = entry.group;
  cell.shard = entry.shard;
  cell.step = entry.step;
  cell.completedAt = entry.completedAt;
  cell.sequence.store(position + 1, std::memory_order_release);
}

bool readRing(const RingLog& log, std::uint64_t position, RingEntry& entry) noexcept {
  const RingLogCell& cell = log.cells[position % kRingLogCapacity];
  if (cell.sequence.load(std::memory_order_acquire) != position + 1) return false;
  entry = {cell.group, cell.shard, cell.step, cell.completedAt};
  return true;
}

}  // namespace coarse
