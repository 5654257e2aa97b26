#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace coarse {

/// A word in shared memory that one thread sleeps on and any process rings.
struct alignas(64) Bell {
  std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> isAsleep;

  void ring() noexcept;
  /// What to give to sleep(): read before looking for what the bell is rung for.
  std::uint32_t listen() const noexcept { return rings.load(std::memory_order_seq_cst); }
  /// Sleeps unless the bell was rung since listen() gave `seen`; at most `limit`.
  void sleep(std::uint32_t seen, std::chrono::nanoseconds limit) noexcept;
};
static_assert(sizeof(Bell) == 64);

/// One way from a rank to another, a ring of bytes. Counts bytes since the group began; each counter has one
/// writer and a line of its own.
struct Channel {
  alignas(64) std::atomic<std::uint64_t> written;
  alignas(64) std::atomic<std::uint64_t> taken;
};
static_assert(sizeof(Channel) == 128);

/// Memory through which ranks send each other messages: a bell for each rank and one for the bridge to other
/// nodes, a channel and its ring for each ordered pair. A view; owns nothing.
class MessageArea {
 public:
  MessageArea(std::byte* memory, std::size_t numRanks) noexcept;
  static std::size_t numBytes(std::size_t numRanks);

  Bell& bell(std::size_t rank) const noexcept { return reinterpret_cast<Bell*>(memory_)[rank]; }
  Bell& bridgeBell() const noexcept { return bell(numRanks_); }
  Channel& channel(std::size_t from, std::size_t to) const noexcept;
  std::byte* ring(std::size_t from, std::size_t to) const noexcept;
  std::size_t ringBytes() const noexcept { return ringBytes_; }

 private:
  std::byte* memory_;
  std::size_t numRanks_;
  std::size_t ringBytes_;
};

}  // namespace coarse
