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

/// Copy-on-write snapshots of memory that is updated in place (docs/design/storage.md; paper, section III-D).
namespace coarse {

/// Snapshots that can be held at a time.
inline constexpr std::size_t kMostSnapshots = 4;
/// Behind those of the snapshots: a place in the pool for whichever comes first, of memory that was taken
/// ahead.
inline constexpr std::size_t kCommonPlace = kMostSnapshots;

/// What workers write to begin a snapshot. Untrusted: a number that cannot be begins nothing (SnapshotStore).
struct alignas(kCacheLineBytes) SnapshotRequest {
  std::atomic<std::uint32_t> begun;  // snapshots begun so far, and the number of the newest one
  std::atomic<std::uint32_t> beganBy[kMostSnapshots];  // by place: the client and 1, by its own word
};
static_assert(sizeof(SnapshotRequest) == kCacheLineBytes);

/// What becomes of a block in a snapshot. A block is pending until one of these is recorded.
enum class BlockState : std::uint8_t {
  kPending = 0,  // the snapshot's version is the one in place
  kKept = 1,     // it was copied to the pool before an update
  kDone = 2,     // the snapshot has let go of the block
  kCommon = 3,   // it was copied to the place of the pool that all snapshots share
};

/// How much a pool holds, and what it has cost.
struct SnapshotStatistics {
  std::uint64_t limitBytes = 0;
  std::uint64_t takenBytes = 0;  // now
  std::uint64_t peakBytes = 0;
  std::uint64_t keptBytes = 0;  // of all copies ever made
  std::uint64_t numWaits = 0;   // updates that waited because the pool was full
  double waitedSeconds = 0;
  std::uint32_t numLost = 0;  // snapshots that were given up for it
  std::uint32_t lostOf = 0;   // the client of the last one and 1, by its own word; 0 if none says so
  std::uint32_t impossible =
      0;  // what SnapshotRequest::begun said that cannot be, at least 1; 0 if it never did
};

/// The same in shared memory.
struct alignas(kCacheLineBytes) SnapshotMeters {
  std::atomic<std::uint64_t> limitBytes;
  std::atomic<std::uint64_t> takenBytes;
  std::atomic<std::uint64_t> peakBytes;
  std::atomic<std::uint64_t> keptBytes;
  std::atomic<std::uint64_t> numWaits;
  std::atomic<std::uint64_t> waitedNs;
  std::atomic<std::uint32_t> numLost;
  std::atomic<std::uint32_t> frees;  // futex word: counts what is given back to the pool
  std::atomic<std::uint32_t> lostOf;
  std::atomic<std::uint32_t> impossible;
};
static_assert(sizeof(SnapshotMeters) == kCacheLineBytes);

/// State that memory devices share about the snapshots of one set of blocks. Workers see it read-only. Memory
/// that is all zero is its first state, but for the limit of the pool.
class SnapshotControl {
 public:
  SnapshotControl() = default;
  SnapshotControl(std::byte* base, std::size_t numBlocks) noexcept;
  static std::size_t numBytes(std::size_t numBlocks) noexcept;

  SnapshotMeters& meters() const noexcept { return *meters_; }
  /// The last snapshot of this place that was released.
  std::atomic<std::uint32_t>& released(std::size_t place) const noexcept { return ended_[place]; }
  /// The last snapshot of this place that was given up.
  std::atomic<std::uint32_t>& lost(std::size_t place) const noexcept {
    return ended_[kMostSnapshots + place];
  }
  /// Snapshots begun so far, as devices last found that it can be.
  std::atomic<std::uint32_t>& believed() const noexcept { return ended_[2 * kMostSnapshots]; }
  /// Reads how many snapshots workers say were begun. @returns whether that can be: places have one snapshot
  /// at a time, and are taken in turn.
  bool readBegun(const SnapshotRequest& request, std::uint32_t& begun) const noexcept;
  /// What was last recorded of a block in a snapshot of this place: its number and a BlockState.
  std::atomic<std::uint64_t>& record(std::size_t block, std::size_t place) const noexcept {
    return records_[block * kMostSnapshots + place];
  }
  /// Whether memory was taken ahead for a block at kCommonPlace.
  std::atomic<std::uint32_t>& isWarm(std::size_t block) const noexcept { return warm_[block]; }

 private:
  SnapshotMeters* meters_ = nullptr;
  std::atomic<std::uint32_t>* ended_ = nullptr;
  std::atomic<std::uint64_t>* records_ = nullptr;
  std::atomic<std::uint32_t>* warm_ = nullptr;
};

/// A worker's end: begins snapshots by adding one to a counter.
class SnapshotTrigger {
 public:
  /// Maps `requestFd`, and `controlFd` read-only; both stay the caller's. @param client whose snapshots it
  /// begins.
  /// @throws std::invalid_argument if a descriptor is not sealed or too small.
  SnapshotTrigger(int requestFd, int controlFd, std::uint32_t client);

  /// Begins a snapshot of everything as it is now. @pre no update is under way, as between two steps of the
  /// caller, whose next push is needed for the next update.
  /// @returns its number, from 1 on; 0 if as many as there can be are held.
  std::uint32_t begin() noexcept;
  /// What the counter of snapshots says, at least 1, if a worker has overwritten it with what cannot be; else
  /// 0. No snapshot begins then.
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
  std::shared_ptr<SnapshotPool> versions{};  // where they lie instead, if they do

  /// Whether this process can keep and read versions.
  bool hasPool() const noexcept { return pool >= 0 || versions != nullptr; }
};

/// A block that is updated in place.
struct BlockInPlace {
  std::size_t block = 0;
  const std::byte* current = nullptr;  // where it lies
};

/// The memory devices' end: keeps the versions that snapshots refer to, of blocks which stay at their place.
///
/// Whoever is about to overwrite a block calls keep() first, which copies the block to the pool if a snapshot
/// still refers to it. One atomic word per block and snapshot decides between this and a reader that takes
/// the block where it lies: a reader never holds up an update.
///
/// Thread safety: keep() by one thread at a time for each block, in any process; everything else by one
/// thread at a time for each snapshot, beside any keep().
class SnapshotStore {
 public:
  /// How long keep() waits while nothing is freed, before it gives up the oldest snapshot.
  static constexpr std::chrono::milliseconds kPatience{5000};

  /// Maps memory that stays the caller's. @param blockBytes length of each block.
  /// @throws std::invalid_argument if a descriptor is not sealed or too small.
  SnapshotStore(const std::vector<std::size_t>& blockBytes, const SnapshotFds& fds,
                std::chrono::milliseconds patience = kPatience);
  SnapshotStore(const SnapshotStore&) = delete;
  SnapshotStore& operator=(const SnapshotStore&) = delete;

  /// Sets how much of the pool may be taken at a time, at least what the largest block needs. Called once, by
  /// who made the memory, before anything else.
  void setLimit(std::size_t numBytes) noexcept;

  /// Takes memory for a version of a block ahead and for good, if a whole snapshot may be held. By one thread
  /// at a time, beside anything else. @returns whether it is there.
  bool warm(std::size_t block) noexcept;
  /// Copies the block at `current` to the pool for every snapshot that refers to it. Waits for room while
  /// blocks are freed; if none is for as long as patience lasts, gives up the oldest snapshot.
  void keep(std::size_t block, const std::byte* current);
  /// The same for several blocks, whose copies run together.
  void keep(const BlockInPlace* blocks, std::size_t count);
  /// Has keep() add to `beats` while it waits: the device is at work. Before the first keep().
  void beatWhileWaiting(std::atomic<std::uint32_t>& beats) noexcept { beats_ = &beats; }
  /// Ends and forbids waits for room: snapshots are given up instead. Idempotent.
  void stopWaiting() noexcept;

  /// Copies a block as it was when `snapshot` began to `destination`. @param current where the block lies.
  /// @returns false if the snapshot was given up or released, or has let go of the block.
  bool read(std::uint32_t snapshot, std::size_t block, const std::byte* current, std::byte* destination);
  /// The snapshot needs this block no more: its version is freed. Idempotent.
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
  /// Of a block to the pool, that is not recorded yet.
  struct Copy {
    std::uint32_t snapshot;
    std::size_t block;
    std::uint64_t seen;  // the record before
    BlockState kept;     // kKept or kCommon: where it lies
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
