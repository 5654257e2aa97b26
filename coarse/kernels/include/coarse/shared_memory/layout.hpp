#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

/// Everything that processes share, as it lies in memory: a wire format (docs/design/queue-protocol.md).
///
/// Values in memory that a client can write are untrusted: a memory device copies them before it checks them.
namespace coarse {

inline constexpr std::size_t kCacheLineBytes = 64;

static_assert(std::atomic<std::uint32_t>::is_always_lock_free && sizeof(std::atomic<std::uint32_t>) == 4);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && sizeof(std::atomic<std::uint64_t>) == 8);

constexpr std::size_t roundUp(std::size_t value, std::size_t multiple) noexcept {
  return (value + multiple - 1) / multiple * multiple;
}

/// Hands out consecutive, cache-line aligned arrays; without a base it only sums their sizes.
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

/// The word on which the sync cores of one memory device sleep, and the device's heartbeat. Any thread or
/// process with work for them rings it.
struct alignas(kCacheLineBytes) Doorbell {
  std::atomic<std::uint32_t> rings;     // futex word: counts rings
  std::atomic<std::uint32_t> sleepers;  // sync cores that sleep or are about to
  // Loop iterations of sync core 0, which makes several each second, busy or idle (heartbeat.hpp); 0 before
  // it starts. On its own cache line, which others only read.
  alignas(kCacheLineBytes) std::atomic<std::uint32_t> beats;

  /// Wakes the sleeping sync cores; costs one atomic addition when none sleeps.
  void ring() noexcept;
};
static_assert(sizeof(Doorbell) == 2 * kCacheLineBytes);

/// The word on which one client waits for completed shards. The client writes `wakeAt` and `sleeping`,
/// devices the rest.
struct alignas(kCacheLineBytes) Inbox {
  std::atomic<std::uint32_t> completed;  // futex word: shards completed for this client, wraps around
  std::atomic<std::uint32_t> wakeAt;     // a sleeping client asks to be woken at this count
  std::atomic<std::uint32_t> sleeping;
  std::atomic<std::uint32_t> aborted;  // set once, when a process was lost: nothing more will complete

  /// Counts one completed shard, and wakes the client if it waits for this count.
  void completeOne() noexcept;
  /// Marks the session as lost and wakes the client.
  void abort() noexcept;
};
static_assert(sizeof(Inbox) == kCacheLineBytes);

/// Flags of a contribution.
enum : std::uint8_t {
  kPresent = 1,          // the slot holds a contribution; without this flag the client contributes nothing
  kJoined = 2,           // the client has run out of inputs and does not count in a mean
  kDirectAllReduce = 4,  // the workers reduce this shard themselves; the contribution stays with its worker
  kAllGather = 8,        // direct all-reduce by all-gather
  kAllToAll = 16,        // direct all-reduce by all-to-all; with neither flag, by a Relay
  kByNccl = 24,          // both flags: by NCCL, with zeros for a client without a contribution
  kUpdate = 32,          // the mean updates the parameter (update.hpp); slots stay unchanged
  kReduced = 64,         // with kUpdate: slots hold the mean of an earlier step; the first slot is used
  kMeasure = 128,        // the mean is measured (GradientMeasure); for groups with an optimizer
};

/// Whether the update uses a mean that every slot already holds.
constexpr bool isUpdateByMean(std::uint8_t flags) noexcept {
  return (flags & kUpdate) != 0 && (flags & kReduced) != 0;
}

/// The flags of direct all-reduce, on which all contributions to a shard must agree.
inline constexpr std::uint8_t kDirectAllReduceFlags = kDirectAllReduce | kAllGather | kAllToAll;

/// How a shard of direct all-reduce passes from worker to worker, with neither kAllGather nor kAllToAll.
enum class Relay : std::uint8_t { kRing = 0, kTwoWayRing = 1, kTree = 2, kTwoLevel = 3 };
inline constexpr std::uint8_t kNumRelays = 4;

/// One client's notice that its contribution to a shard lies in its slot.
struct Descriptor {
  std::uint32_t group = 0;
  std::uint32_t shard = 0;
  std::uint32_t step = 0;         // 1 for the first synchronisation of this shard
  std::uint32_t numElements = 0;  // only for a dynamic shard, as are dtype and op
  std::uint8_t flags = 0;
  std::uint8_t dtype = 0;
  std::uint8_t op = 0;         // on the workers' own path: a Relay
  std::uint8_t slotOwner = 0;  // only for a probe; otherwise the epoch of the client (EpochTable)
  std::uint32_t sentAt = 0;    // low bits of the clock; in emulated sessions
};
static_assert(sizeof(Descriptor) == 24);

/// Number of descriptors that one client can have in flight to one memory device.
inline constexpr std::uint64_t kDescriptorCapacity = 4096;

struct DescriptorCell {
  Descriptor descriptor;
  std::atomic<std::uint64_t> commit;  // position + 1, stored last: the descriptor is complete
};
static_assert(sizeof(DescriptorCell) == 32);

/// Single-producer single-consumer queue from one client to one memory device.
struct DescriptorQueue {
  alignas(kCacheLineBytes) std::atomic<std::uint64_t> consumed;  // written by the device, read by the client
  alignas(kCacheLineBytes) std::array<DescriptorCell, kDescriptorCapacity> cells;
};
static_assert(sizeof(DescriptorQueue) == kCacheLineBytes + kDescriptorCapacity * sizeof(DescriptorCell));

/// The memory by which one client communicates with all memory devices: its inbox, then a queue per device.
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

/// One client's contribution to one shard, recorded by the memory devices.
struct Contribution {
  std::atomic<std::uint32_t> step;  // stored last: the other fields belong to this step
  // Of a dynamic shard. In others 0; or, once a memory device stands in for a lost client, the first step for
  // which one did.
  std::uint32_t numElements;
  std::uint8_t flags;
  std::uint8_t dtype;
  std::uint8_t op;
  std::uint8_t device;                 // the memory device that took it, whose memory holds it
  std::atomic<std::uint32_t> claimed;  // the step that a memory device is taking or has taken
};
static_assert(sizeof(Contribution) == 16);

/// GradientMeasure::nonFiniteOf if it is no client's number.
inline constexpr std::int32_t kNobody = -1;     // the mean is finite
inline constexpr std::int32_t kEverybody = -2;  // only the mean is not finite: finite gradients overflowed

/// A memory device's measurement of the last measured mean of a shard.
struct GradientMeasure {
  double sumOfSquares;       // of its elements, in order: the same bits for any device that reduces the shard
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

/// The optimizer's progress for one shard of a group with an optimizer. Written by memory devices.
struct UpdateRecord {
  std::atomic<std::uint32_t> step;          // optimizer steps applied to the shard; stored last
  std::atomic<std::uint32_t> updateNumber;  // of its last update, by the workers' count
};
static_assert(sizeof(UpdateRecord) == 8);

/// Records for a copy of parameters and states the steps of `from`. @pre the copy is complete.
void copyRecord(UpdateRecord& to, const UpdateRecord& from) noexcept;

/// Places of workers in an EpochTable.
inline constexpr std::size_t kMostPlaces = 256;

/// In EpochTable: a worker that is no member yet. Epochs have lower numbers.
inline constexpr std::uint8_t kNoEpoch = 255;

/// The epochs of a session (docs/design/membership.md): an epoch begins when workers take the places of lost
/// ones. Written by memory devices, read-only for clients.
struct alignas(kCacheLineBytes) EpochTable {
  std::atomic<std::uint32_t> newest;  // 0 at first; stored after the other fields of its new members
  // The first epoch in which the worker of a place contributes; before it, memory devices stand in.
  std::array<std::atomic<std::uint8_t>, kMostPlaces> memberSince;
  // Bits of the places whose workers are new in each epoch; they stay when such a worker is replaced.
  alignas(kCacheLineBytes)
      std::array<std::array<std::atomic<std::uint64_t>, kMostPlaces / 64>, kNoEpoch> newcomers;
};
static_assert(sizeof(EpochTable) ==
              5 * kCacheLineBytes + roundUp(kNoEpoch * kMostPlaces / 8, kCacheLineBytes));

/// State that all memory devices share about the shards of one tensor group. Read-only for clients.
class GroupControl {
 public:
  GroupControl() = default;
  /// @param numRanks GroupPlan::numRanks.
  GroupControl(std::byte* base, std::size_t numShards, std::size_t numClients,
               std::size_t numRanks = 0) noexcept;
  static std::size_t numBytes(std::size_t numShards, std::size_t numClients,
                              std::size_t numRanks = 0) noexcept;

  std::atomic<std::uint32_t>& arrivals(std::size_t shard) const noexcept { return arrivals_[shard]; }
  /// In a job of several nodes that goes on without lost workers: the step of shard 0 from which on a memory
  /// device stands in for the worker of this rank; 0 if none does. Equal on all nodes for the steps that are
  /// complete.
  std::atomic<std::uint32_t>& absentSince(std::size_t rank) const noexcept { return absentSince_[rank]; }
  /// Number of clients that contributed to the last completed step.
  std::atomic<std::uint32_t>& contributors(std::size_t shard) const noexcept { return contributors_[shard]; }
  Contribution& contribution(std::size_t shard, std::size_t client) const noexcept {
    return contributions_[shard * numClients_ + client];
  }
  /// Assigns a client's contribution to `step` to one memory device, whichever devices received its
  /// descriptor.
  /// @returns false if another device has it, or the previous step was never taken.
  bool claim(std::size_t shard, std::size_t client, std::uint32_t step) const noexcept;
  /// The measure of a shard whose last mean was measured.
  GradientMeasure& measure(std::size_t shard) const noexcept { return measures_[shard]; }
  /// For an exchanged shard: memory devices whose pieces are not complete.
  std::atomic<std::uint32_t>& devicesLeft(std::size_t shard) const noexcept { return devicesLeft_[shard]; }
  /// Last step whose result is in the client's slot.
  std::atomic<std::uint32_t>& done(std::size_t client, std::size_t shard) const noexcept {
    return done_[client * doneStride_ + shard];
  }
  UpdateRecord& update(std::size_t shard) const noexcept { return updates_[shard]; }
  Counter& readyTail() const noexcept { return counters_[0]; }
  Counter& readyHead() const noexcept { return counters_[1]; }
  ReadyCell& readyCell(std::uint64_t position) const noexcept { return ready_[position & mask_]; }
  /// Cells of the ready queue: a power of two, at least the number of shards. Each shard is in the queue at
  /// most once.
  std::uint64_t capacity() const noexcept { return mask_ + 1; }
  /// Initialises memory that is all zero. The memory device that created it calls this once.
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
  std::atomic<std::uint32_t>* absentSince_ = nullptr;
  std::size_t numClients_ = 0;
  std::size_t doneStride_ = 0;
  std::uint64_t mask_ = 0;
};

/// Number of rings over the memory devices; adjacent ones run in opposite directions (paper, section IV-A).
/// Each works on its own shard, so that sync cores have work while an entry is in transit: with two rings a
/// reduction over two devices took four times as long.
inline constexpr std::size_t kNumRings = 8;

/// Shards that can be in progress on one ring; registration refuses more.
inline constexpr std::uint64_t kRingLogCapacity = 16384;

struct RingLogCell {
  std::atomic<std::uint64_t> sequence;  // position + 1, stored last: the entry is complete
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

/// The shards of which one memory device reduces pieces, if memories are distinct (device_exchange.hpp).
using ExchangeLog = RingLog;

/// Messages that a neighbour may send ahead of the receiver.
inline constexpr std::size_t kRingDepth = 4;

/// RecvBuf of one sync core: its neighbour writes it, the core reads it. The messages' payload lies in memory
/// of the device's kind (device_rings.hpp). Times are MonotonicNs of an emulated session, else 0.
struct RecvBuf {
  alignas(kCacheLineBytes) std::atomic<std::uint64_t> sent;      // messages written, by the neighbour
  alignas(kCacheLineBytes) std::atomic<std::uint64_t> consumed;  // messages read, by the owner
  std::array<std::int64_t, kRingDepth> freeAt;  // for each message: when the owner has read it, by the owner
  // By the neighbour, for each message: it, and all devices before it, had nothing to contribute; and when
  // the message arrives.
  alignas(kCacheLineBytes) std::array<std::uint8_t, kRingDepth> isEmpty;
  std::array<std::int64_t, kRingDepth> arrivesAt;
};

/// The memory of one device into which its neighbours write: a RecvBuf per ring.
using RingSegment = std::array<RecvBuf, kNumRings>;

}  // namespace coarse
