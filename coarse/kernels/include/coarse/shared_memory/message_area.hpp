#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace coarse {

/// A word in shared memory on which one thread sleeps and which any process rings.
struct alignas(64) Bell {
  std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> isAsleep;

  void ring() noexcept;
  /// The value to pass to sleep(): read it before checking for work.
  std::uint32_t listen() const noexcept { return rings.load(std::memory_order_seq_cst); }
  /// Sleeps at most `limit`, unless the bell was rung since listen() returned `seen`.
  void sleep(std::uint32_t seen, std::chrono::nanoseconds limit) noexcept;
};
static_assert(sizeof(Bell) == 64);

/// One direction between two ranks: a ring of bytes. Counts bytes since the group began; each counter has one
/// writer and its own cache line.
struct Channel {
  alignas(64) std::atomic<std::uint64_t> written;
  alignas(64) std::atomic<std::uint64_t> taken;
};
static_assert(sizeof(Channel) == 128);

/// Memory for messages between ranks: a bell for each rank and one for the bridge to other nodes, a channel
/// and its ring for each ordered pair. A view; owns nothing.
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
