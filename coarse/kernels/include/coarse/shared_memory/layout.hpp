#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

/// Everything that processes share, as it lies in memory: a wire format (docs/design/queue-protocol.md).
///
/// Values in memory that a client can write are untrusted: a memory device copies them out before it checks
/// them.
namespace coarse {

inline constexpr std::size_t kCacheLineBytes = 64;

static_assert(std::atomic<std::uint32_t>::is_always_lock_free && sizeof(std::atomic<std::uint32_t>) == 4);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && sizeof(std::atomic<std::uint64_t>) == 8);

constexpr std::size_t roundUp(std::size_t value, std::size_t multiple) noexcept {
  return (value + multiple - 1) / multiple * multiple;
}

/// Hands out consecutive, cache-line aligned arrays; without a base it only adds up their sizes.
class ArrayCursor {
 public:
  explicit ArrayCursor(std::byte* base) noexcept : base_(base) {}
  template <typename T>
  T* take(std::size_t count) noexcept {
    T* array = reinterpret_cast<T*>(base_ + offset_);
    offset_ = roundUp(offset_ + count * sizeof(T), kCacheLineBytes);
    return array;
  }
  std::size_t offset() const noexcept { return offset_; }

 private:
  std::byte* base_;
  std::size_t offset_ = 0;
};

/// Where the sync cores of one memory device sleep, and its sign of life. Rung by whoever has work for them.
struct alignas(kCacheLineBytes) Doorbell {
  std::atomic<std::uint32_t> rings;     // futex word: counts rings
  std::atomic<std::uint32_t> sleepers;  // sync cores asleep, or about to be
  // Turns of sync core 0, which takes some each second whatever it does (heartbeat.hpp); 0 before it starts.
  // On a line of its own, which others only look at.
  alignas(kCacheLineBytes) std::atomic<std::uint32_t> beats;

  /// Wakes the sleeping sync cores; costs one atomic addition when none sleeps.
  void ring() noexcept;
};
static_assert(sizeof(Doorbell) == 2 * kCacheLineBytes);

/// Where one client waits for completed shards. The client writes `wakeAt` and `sleeping`, devices the rest.
struct alignas(kCacheLineBytes) Inbox {
  std::atomic<std::uint32_t> completed;  // futex word: shards completed for this client, wraps around
  std::atomic<std::uint32_t> wakeAt;     // a sleeping client wants to be woken at this count
  std::atomic<std::uint32_t> sleeping;
  std::atomic<std::uint32_t> aborted;  // set once, when a process was lost: nothing will complete any more

  /// Counts one completed shard, and wakes the client if that is what it sleeps for.
  void completeOne() noexcept;
  /// Marks the session as lost and wakes the client.
  void abort() noexcept;
};
static_assert(sizeof(Inbox) == kCacheLineBytes);

/// Flags of a contribution.
enum : std::uint8_t {
  kPresent = 1,    // the slot holds a contribution; without it the client contributes nothing
  kJoined = 2,     // the client has run out of inputs and doesn't count in a mean
  kOwnPath = 4,    // the workers reduce this shard themselves: the contribution stays with its worker
  kAllGather = 8,  // on their own path they do it by all-gather,
  kAllToAll = 16,  // or by all-to-all; without either in a ring,
  kByNccl = 24,    // with both by NCCL, which takes zeros of a client that contributes nothing
  kUpdate = 32,    // the mean updates the parameter (update.hpp); slots stay as they are
  kReduced = 64,   // with kUpdate: slots hold the mean of an earlier step, and the first stands for all
  kMeasure = 128,  // the mean is measured (GradientMeasure); of a group that has an optimizer
};

/// Whether a parameter is updated by a mean that every slot holds.
constexpr bool isUpdateByMean(std::uint8_t flags) noexcept {
  return (flags & kUpdate) != 0 && (flags & kReduced) != 0;
}

/// What all contributions to a shard must agree on.
inline constexpr std::uint8_t kPathFlags = kOwnPath | kAllGather | kAllToAll;

/// One client's notice that its contribution to a shard lies in its slot.
struct Descriptor {
  std::uint32_t group = 0;
  std::uint32_t shard = 0;
  std::uint32_t step = 0;         // 1 for the first synchronisation of this shard
  std::uint32_t numElements = 0;  // of a dynamic shard only, as are dtype and op
  std::uint8_t flags = 0;
  std::uint8_t dtype = 0;
  std::uint8_t op = 0;
  std::uint8_t slotOwner = 0;  // of a probe only
  std::uint32_t sentAt = 0;    // low bits of the clock; in emulated sessions
};
static_assert(sizeof(Descriptor) == 24);

/// Number of descriptors that one client can have under way to one memory device.
inline constexpr std::uint64_t kDescriptorCapacity = 4096;

struct DescriptorCell {
  Descriptor descriptor;
  std::atomic<std::uint64_t> commit;  // position + 1, stored last: the descriptor is whole
};
static_assert(sizeof(DescriptorCell) == 32);

/// Single-producer single-consumer queue from one client to one memory device.
struct DescriptorQueue {
  alignas(kCacheLineBytes) std::atomic<std::uint64_t> consumed;  // written by the device, read by the client
  alignas(kCacheLineBytes) std::array<DescriptorCell, kDescriptorCapacity> cells;
};
static_assert(sizeof(DescriptorQueue) == kCacheLineBytes + kDescriptorCapacity * sizeof(DescriptorCell));

/// The memory through which one client talks to all memory devices: its inbox, then a queue per device.
class ClientSegment {
 public:
  ClientSegment() = default;
  explicit ClientSegment(std::byte* base) noexcept : base_(base) {}
  static constexpr std::size_t numBytes(std::size_t numDevices) noexcept {
    return sizeof(Inbox) + numDevices * sizeof(DescriptorQueue);
  }
  Inbox& inbox() const noexcept { return *reinterpret_cast<Inbox*>(base_); }
  DescriptorQueue& queue(std::size_t device) const noexcept {
    return reinterpret_cast<DescriptorQueue*>(base_ + sizeof(Inbox))[device];
  }

 private:
  std::byte* base_ = nullptr;
};

/// What one client said of one shard, kept by the memory devices.
struct Contribution {
  std::atomic<std::uint32_t> step;  // stored last: the rest belongs to this step
  std::uint32_t numElements;
  std::uint8_t flags;
  std::uint8_t dtype;
  std::uint8_t op;
  std::uint8_t device;                 // the memory device that took it, in whose memory it lies
  std::atomic<std::uint32_t> claimed;  // the step that a memory device takes, or has taken
};
static_assert(sizeof(Contribution) == 16);

/// Who brought NaN or Inf into a mean, where it is no client's number.
inline constexpr std::int32_t kNobody = -1;     // the mean is finite
inline constexpr std::int32_t kEverybody = -2;  // only the mean is not: finite gradients overflowed in it

/// What a memory device saw of the last mean of a shard that was measured.
struct GradientMeasure {
  double sumOfSquares;       // of its elements, in their order: the same bits whoever reduces the shard
  std::int32_t nonFiniteOf;  // the first client with NaN or Inf in its contribution
  std::uint32_t padding;
};
static_assert(sizeof(GradientMeasure) == 16);

/// A cell of a group's ready queue.
struct ReadyCell {
  std::atomic<std::uint64_t> sequence;
  std::uint32_t shard;
  std::uint32_t step;
};
static_assert(sizeof(ReadyCell) == 16);

struct alignas(kCacheLineBytes) Counter {
  std::atomic<std::uint64_t> value;
};

/// How far the optimizer has come with one shard of a group that has one. Written by memory devices.
struct UpdateRecord {
  std::atomic<std::uint32_t> step;          // optimizer steps that the shard has seen; stored last
  std::atomic<std::uint32_t> updateNumber;  // of its last update, as its workers count
};
static_assert(sizeof(UpdateRecord) == 8);

/// State that all memory devices share about the shards of one tensor group. Clients see it read-only.
class GroupControl {
 public:
  GroupControl() = default;
  GroupControl(std::byte* base, std::size_t numShards, std::size_t numClients) noexcept;
  static std::size_t numBytes(std::size_t numShards, std::size_t numClients) noexcept;

  std::atomic<std::uint32_t>& arrivals(std::size_t shard) const noexcept { return arrivals_[shard]; }
  /// How many clients had something to contribute to the last completed step.
  std::atomic<std::uint32_t>& contributors(std::size_t shard) const noexcept { return contributors_[shard]; }
  Contribution& contribution(std::size_t shard, std::size_t client) const noexcept {
    return contributions_[shard * numClients_ + client];
  }
  /// Gives a client's contribution to `step` to one memory device alone, whichever it was told to.
  /// @returns false if another one has it, or the step before was never taken.
  bool claim(std::size_t shard, std::size_t client, std::uint32_t step) const noexcept;
  /// Of a shard whose last mean was measured.
  GradientMeasure& measure(std::size_t shard) const noexcept { return measures_[shard]; }
  /// Of a shard that is exchanged: memory devices whose pieces are not done.
  std::atomic<std::uint32_t>& devicesLeft(std::size_t shard) const noexcept { return devicesLeft_[shard]; }
  /// Last step whose result is in the client's slot.
  std::atomic<std::uint32_t>& done(std::size_t client, std::size_t shard) const noexcept {
    return done_[client * doneStride_ + shard];
  }
  UpdateRecord& update(std::size_t shard) const noexcept { return updates_[shard]; }
  Counter& readyTail() const noexcept { return counters_[0]; }
  Counter& readyHead() const noexcept { return counters_[1]; }
  ReadyCell& readyCell(std::uint64_t position) const noexcept { return ready_[position & mask_]; }
  /// Cells of the ready queue: a power of two, at least the number of shards, each of which is in it once at
  /// most.
  std::uint64_t capacity() const noexcept { return mask_ + 1; }
  /// Puts memory that is all zero into its first state. Called once, by the memory device that made it.
  void initialise() const noexcept;

 private:
  Counter* counters_ = nullptr;
  std::atomic<std::uint32_t>* arrivals_ = nullptr;
  std::atomic<std::uint32_t>* contributors_ = nullptr;
  std::atomic<std::uint32_t>* devicesLeft_ = nullptr;
  Contribution* contributions_ = nullptr;
  GradientMeasure* measures_ = nullptr;
  ReadyCell* ready_ = nullptr;
  std::atomic<std::uint32_t>* done_ = nullptr;
  UpdateRecord* updates_ = nullptr;
  std::size_t numClients_ = 0;
  std::size_t doneStride_ = 0;
  std::uint64_t mask_ = 0;
};

/// Number of rings over the memory devices; adjacent ones run in opposite directions (paper, section IV-A).
/// Each works on a shard of its own, so that sync cores have something to do while an entry is on its way:
/// with two rings a reduction over two devices took four times as long.
inline constexpr std::size_t kNumRings = 8;

/// Shards that can be under way on one ring; registration refuses more.
inline constexpr std::uint64_t kRingLogCapacity = 16384;

struct RingLogCell {
  std::atomic<std::uint64_t> sequence;  // position + 1, stored last: the entry is whole
  std::uint32_t group;
  std::uint32_t shard;
  std::uint32_t step;
  std::uint32_t completedAt;  // low bits of the clock; in emulated sessions
};
static_assert(sizeof(RingLogCell) == 24);

/// The order in which all memory devices run the shards of one ring.
struct RingLog {
  Counter tail;
  alignas(kCacheLineBytes) std::array<RingLogCell, kRingLogCapacity> cells;
};

using RingLogs = std::array<RingLog, kNumRings>;

/// The shards of which one memory device reduces pieces, where memories are distinct (device_exchange.hpp).
using ExchangeLog = RingLog;

/// Messages that a neighbour may send ahead.
inline constexpr std::size_t kRingDepth = 4;

/// RecvBuf of one sync core: written by its neighbour, read by itself. What its messages carry lies in memory
/// of the device's own kind (device_rings.hpp).
struct RecvBuf {
  alignas(kCacheLineBytes) std::atomic<std::uint64_t> sent;      // messages written, by the neighbour
  alignas(kCacheLineBytes) std::atomic<std::uint64_t> consumed;  // messages read, by the owner
  // Of each message: the sender, and all before it, had nothing to contribute.
  alignas(kCacheLineBytes) std::array<std::uint8_t, kRingDepth> isEmpty;
};

/// What neighbours of one device write into: a RecvBuf per ring.
using RingSegment = std::array<RecvBuf, kNumRings>;

}  // namespace coarse
