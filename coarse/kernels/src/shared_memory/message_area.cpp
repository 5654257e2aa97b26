#include "coarse/shared_memory/message_area.hpp"

#include <algorithm>

#include "coarse/shared_memory/waiting.hpp"

namespace coarse {
namespace {

constexpr std::size_t kLargestRing = 128 << 10;
constexpr std::size_t kSmallestRing = 4 << 10;
constexpr std::size_t kAllRings = 1 << 20;

std::size_t ringBytesOf(std::size_t numRanks) {
  return std::clamp(kAllRings / (numRanks * numRanks) / 64 * 64, kSmallestRing, kLargestRing);
}

}  // namespace

void Bell::ring() noexcept {
  // seq_cst, paired with the sleeper's: either it sees the ring, or this sees that it sleeps.
  rings.fetch_add(1, std::memory_order_seq_cst);
  if (isAsleep.load(std::memory_order_seq_cst) != 0) futexWake(rings, 1);
}

void Bell::sleep(std::uint32_t seen, std::chrono::nanoseconds limit) noexcept {
  isAsleep.store(1, std::memory_order_seq_cst);
  if (rings.load(std::memory_order_seq_cst) == seen) futexWait(rings, seen, limit);
  isAsleep.store(0, std::memory_order_relaxed);
}

MessageArea::MessageArea(std::byte* memory, std::size_t numRanks) noexcept
    : memory_(memory), numRanks_(numRanks), ringBytes_(ringBytesOf(numRanks)) {}

std::size_t MessageArea::numBytes(std::size_t numRanks) {
  return (numRanks + 1) * sizeof(Bell) + numRanks * numRanks * (sizeof(Channel) + ringBytesOf(numRanks));
}

Channel& MessageArea::channel(std::size_t from, std::size_t to) const noexcept {
  auto* channels = reinterpret_cast<Channel*>(memory_ + (numRanks_ + 1) * sizeof(Bell));
  return channels[from * numRanks_ + to];
}

std::byte* MessageArea::ring(std::size_t from, std::size_t to) const noexcept {
  std::byte* rings = memory_ + (numRanks_ + 1) * sizeof(Bell) + numRanks_ * numRanks_ * sizeof(Channel);
  return rings + (from * numRanks_ + to) * ringBytes_;
}

}  // namespace coarse
