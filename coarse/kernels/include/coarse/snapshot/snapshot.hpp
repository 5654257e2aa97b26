#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/shared_memory.hpp"
#include "coarse/snapshot/snapshot_pool.hpp"

/// Copy-on-write snapshots of memory that is updated in place (docs/design/storage.md; paper, section IV-A).
namespace coarse {

/// Maximum number of snapshots held at a time.
inline constexpr std::size_t kMostSnapshots = 4;
/// The place after those of the snapshots: memory allocated in advance, for the first snapshot that needs it.
inline constexpr std::size_t kCommonPlace = kMostSnapshots;

/// Written by workers to begin a snapshot. Untrusted: an impossible number begins nothing (SnapshotStore).
struct alignas(kCacheLineBytes) SnapshotRequest {
  std::atomic<std::uint32_t> begun;  // snapshots begun so far, and the number of the newest one
  std::atomic<std::uint32_t> beganBy[kMostSnapshots];  // by place: the client + 1, by its own claim
};
static_assert(sizeof(SnapshotRequest) == kCacheLineBytes);

/// A block's state in a snapshot. A block is pending until another state is recorded.
enum class BlockState : std::uint8_t {
  kPending = 0,  // the snapshot's version is the one in place
  kKept = 1,     // it was copied to the pool before an update
  kDone = 2,     // the snapshot needs the block no more
  kCommon = 3,   // it was copied to the place in the pool that all snapshots share
};

/// A pool's limit, use and cost.
struct SnapshotStatistics {
  std::uint64_t limitBytes = 0;
  std::uint64_t takenBytes = 0;  // current use
  std::uint64_t peakBytes = 0;
  std::uint64_t keptBytes = 0;  // total of all copies made so far
  std::uint64_t numWaits = 0;   // updates that waited because the pool was full
  double waitedSeconds = 0;
  std::uint32_t numLost = 0;  // snapshots given up because the pool was full
  std::uint32_t lostOf = 0;   // the client of the last one + 1, by its own claim; 0 if unknown
  std::uint32_t impossible =
      0;  // an impossible value that SnapshotRequest::begun had, at least 1; 0 if it never had one
};

/// SnapshotStatistics in shared memory.
struct alignas(kCacheLineBytes) SnapshotMeters {
  std::atomic<std::uint64_t> limitBytes;
  std::atomic<std::uint64_t> takenBytes;
  std::atomic<std::uint64_t> peakBytes;
  std::atomic<std::uint64_t> keptBytes;
  std::atomic<std::uint64_t> numWaits;
  std::atomic<std::uint64_t> waitedNs;
  std::atomic<std::uint32_t> numLost;
  std::atomic<std::uint32_t> frees;  // futex word: counts returns of memory to the pool
  std::atomic<std::uint32_t> lostOf;
  std::atomic<std::uint32_t> impossible;
};
static_assert(sizeof(SnapshotMeters) == kCacheLineBytes);

/// State that memory devices share about the snapshots of one set of blocks. Read-only for workers. Its first
/// state is all zero, except for the pool's limit.
class SnapshotControl {
 public:
  SnapshotControl() = default;
  SnapshotControl(std::byte* base, std::size_t numBlocks) noexcept;
  static std::size_t numBytes(std::size_t numBlocks) noexcept;

  SnapshotMeters& meters() const noexcept { return *meters_; }
  /// The last released snapshot of this place.
  std::atomic<std::uint32_t>& released(std::size_t place) const noexcept { return ended_[place]; }
  /// The last snapshot of this place that was given up.
  std::atomic<std::uint32_t>& lost(std::size_t place) const noexcept {
    return ended_[kMostSnapshots + place];
  }
  /// Snapshots begun so far, by the devices' last valid reading.
  std::atomic<std::uint32_t>& believed() const noexcept { return ended_[2 * kMostSnapshots]; }
  /// Reads the number of begun snapshots that workers claim. @returns whether it is possible: each place has
  /// one snapshot at a time, and places are taken in turn.
  bool readBegun(const SnapshotRequest& request, std::uint32_t& begun) const noexcept;
  /// The last record of a block in a snapshot of this place: its number and a BlockState.
  std::atomic<std::uint64_t>& record(std::size_t block, std::size_t place) const noexcept {
    return records_[block * kMostSnapshots + place];
  }
  /// Whether memory was allocated in advance for a block at kCommonPlace.
  std::atomic<std::uint32_t>& isWarm(std::size_t block) const noexcept { return warm_[block]; }

 private:
  SnapshotMeters* meters_ = nullptr;
  std::atomic<std::uint32_t>* ended_ = nullptr;
  std::atomic<std::uint64_t>* records_ = nullptr;
  std::atomic<std::uint32_t>* warm_ = nullptr;
};

/// A worker's end: begins snapshots by incrementing a counter.
class SnapshotTrigger {
 public:
  /// Maps `requestFd`, and `controlFd` read-only; the caller closes both. @param client whose snapshots it
  /// begins.
  /// @throws std::invalid_argument if a descriptor is not sealed or too small.
  SnapshotTrigger(int requestFd, int controlFd, std::uint32_t client);

  /// Begins a snapshot of the current contents. @pre no update is in progress, as between two steps of the
  /// caller, whose next push is needed for the next update.
  /// @returns its number, from 1 on; 0 if the maximum number of snapshots is held.
  std::uint32_t begin() noexcept;
  /// The value of the snapshot counter, at least 1, if a worker has overwritten it with an impossible value;
  /// else 0. No snapshot begins while it is impossible.
  std::uint32_t impossible() const noexcept;

 private:
  Mapping requestMapping_;
  Mapping controlMapping_;
  std::uint32_t client_;
};

struct SnapshotFds {
  int request = -1;                          // SnapshotRequest
  int control = -1;                          // SnapshotControl::numBytes()
  int pool = -1;                             // SparsePool::numBytes(), sparse
  std::shared_ptr<SnapshotPool> versions{};  // the place of versions instead of `pool`, if any

  /// Whether this process can keep and read versions.
  bool hasPool() const noexcept { return pool >= 0 || versions != nullptr; }
};

/// A block that is updated in place.
struct BlockInPlace {
  std::size_t block = 0;
  const std::byte* current = nullptr;  // the block's address
};

/// The memory devices' end: keeps the versions to which snapshots refer, of blocks that stay in place.
///
/// A writer calls keep() before it overwrites a block. keep() copies the block to the pool if a snapshot
/// still refers to it. One atomic word per block and snapshot decides between keep() and a reader that copies
/// the block in place: a reader never delays an update.
///
/// Thread safety: keep() by one thread at a time for each block, in any process; everything else by one
/// thread at a time for each snapshot, concurrently with any keep().
class SnapshotStore {
 public:
  /// Time that keep() waits without any freed memory before it gives up the oldest snapshot.
  static constexpr std::chrono::milliseconds kPatience{5000};

  /// Maps the memory; the caller closes the descriptors. @param blockBytes length of each block.
  /// @throws std::invalid_argument if a descriptor is not sealed or too small.
  SnapshotStore(const std::vector<std::size_t>& blockBytes, const SnapshotFds& fds,
                std::chrono::milliseconds patience = kPatience);
  SnapshotStore(const SnapshotStore&) = delete;
  SnapshotStore& operator=(const SnapshotStore&) = delete;

  /// Sets how much of the pool may be used at a time, at least enough for the largest block. The process that
  /// created the memory calls it once, before anything else.
  void setLimit(std::size_t numBytes) noexcept;

  /// Allocates memory for a version of a block in advance and permanently, if a whole snapshot may be held.
  /// One thread at a time, concurrently with anything else. @returns whether the memory is available.
  bool warm(std::size_t block) noexcept;
  /// Copies the block at `current` to the pool for every snapshot that refers to it. Waits for room while
  /// blocks are freed; if none is freed for the whole patience, gives up the oldest snapshot.
  void keep(std::size_t block, const std::byte* current);
  /// The same for several blocks, whose copies run together.
  void keep(const BlockInPlace* blocks, std::size_t count);
  /// Makes keep() increment `beats` while it waits, to show that the device works. Call before the first
  /// keep().
  void beatWhileWaiting(std::atomic<std::uint32_t>& beats) noexcept { beats_ = &beats; }
  /// Ends and forbids waits for room: keep() gives up snapshots instead. Idempotent.
  void stopWaiting() noexcept;

  /// Copies a block, as it was when `snapshot` began, to `destination`. @param current the block's address.
  /// @returns false if the snapshot was given up or released, or needs the block no more.
  bool read(std::uint32_t snapshot, std::size_t block, const std::byte* current, std::byte* destination);
  /// Frees the version of this block; the snapshot needs it no more. Idempotent.
  void letGo(std::uint32_t snapshot, std::size_t block) noexcept;
  /// The same for all blocks; makes room for another snapshot. Idempotent.
  void release(std::uint32_t snapshot) noexcept;

  /// Whether the snapshot was begun, not released and not given up.
  bool isLive(std::uint32_t snapshot) const noexcept;
  /// Whether it was given up because the pool was full.
  bool isLost(std::uint32_t snapshot) const noexcept;
  std::size_t numBlocks() const noexcept { return blockBytes_.size(); }
  std::size_t blockBytes(std::size_t block) const noexcept { return blockBytes_[block]; }
  SnapshotStatistics statistics() const noexcept;

 private:
  /// A copy of a block to the pool, not recorded yet.
  struct Copy {
    std::uint32_t snapshot;
    std::size_t block;
    std::uint64_t seen;  // the previous record
    BlockState kept;     // kKept or kCommon: its place
  };

  std::uint32_t begun() const noexcept;
  std::uint32_t liveAt(std::size_t place) const noexcept;
  bool beginToKeep(std::uint32_t snapshot, const BlockInPlace& block, std::vector<Copy>& begun,
                   bool& hasWaited);
  void conclude(std::vector<Copy>& begun);
  bool copyToPool(std::uint32_t snapshot, const BlockInPlace& block, std::vector<Copy>& begun);
  bool isCommonFree(std::size_t block, const std::vector<Copy>& begun) const noexcept;
  void waitForRoom(std::uint32_t snapshot, std::size_t block, std::uint32_t seenFrees) noexcept;
  bool isPending(std::uint32_t snapshot, std::size_t block) const noexcept;
  void returnRoom(std::size_t numBytes) noexcept;
  void giveUpOldest() noexcept;

  std::vector<std::size_t> blockBytes_;
  std::chrono::milliseconds patience_;
  Mapping requestMapping_, controlMapping_;
  SnapshotRequest* request_ = nullptr;
  SnapshotControl control_;
  std::shared_ptr<SnapshotPool> pool_;
  std::atomic<std::uint32_t>* beats_ = nullptr;
  std::atomic<bool> isWaitingForbidden_{false};
};

}  // namespace coarse
