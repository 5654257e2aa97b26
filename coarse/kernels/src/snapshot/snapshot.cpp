#include "coarse/snapshot/snapshot.hpp"

#include <algorithm>
#include <climits>
#include <utility>

#include "coarse/shared_memory/waiting.hpp"
#include "coarse/timeline/recorder.hpp"

namespace coarse {
namespace {

constexpr std::chrono::milliseconds kLongestSleep{20};

constexpr std::uint64_t pack(std::uint32_t snapshot, BlockState state) noexcept {
  return std::uint64_t{snapshot} << 8 | static_cast<std::uint64_t>(state);
}

/// A block's state in `snapshot` by a record: pending, if the record is of an earlier one.
constexpr BlockState stateIn(std::uint64_t record, std::uint32_t snapshot) noexcept {
  return record >> 8 == snapshot ? static_cast<BlockState>(record & 0xFF) : BlockState::kPending;
}

constexpr std::size_t placeOf(std::uint32_t snapshot) noexcept { return snapshot % kMostSnapshots; }

/// The snapshot that takes a place after `released`; without one, the first snapshot of the place.
constexpr std::uint32_t following(std::uint32_t released, std::size_t place) noexcept {
  if (released != 0) return released + static_cast<std::uint32_t>(kMostSnapshots);
  return static_cast<std::uint32_t>(place == 0 ? kMostSnapshots : place);
}

/// The newest of `begun` snapshots that has a place; 0 if none has.
constexpr std::uint32_t newestAt(std::size_t place, std::uint32_t begun) noexcept {
  const auto behind = static_cast<std::uint32_t>((begun - place) % kMostSnapshots);
  return begun <= behind ? 0 : begun - behind;
}

/// The place in the pool of a version with the recorded state `kept`.
constexpr std::size_t roomOf(std::uint32_t snapshot, BlockState kept) noexcept {
  return kept == BlockState::kCommon ? kCommonPlace : placeOf(snapshot);
}

constexpr bool isInPool(BlockState state) noexcept {
  return state == BlockState::kKept || state == BlockState::kCommon;
}

constexpr std::size_t kNumEnds = 2 * kMostSnapshots + 1;  // released and lost of each place, and believed
constexpr int kMostReads = 16;                            // of a counter that others change meanwhile

}  // namespace

SnapshotControl::SnapshotControl(std::byte* base, std::size_t numBlocks) noexcept {
  ArrayCursor cursor(base);
  meters_ = cursor.take<SnapshotMeters>(1);
  ended_ = cursor.take<std::atomic<std::uint32_t>>(kNumEnds);
  records_ = cursor.take<std::atomic<std::uint64_t>>(numBlocks * kMostSnapshots);
  warm_ = cursor.take<std::atomic<std::uint32_t>>(numBlocks);
}

std::size_t SnapshotControl::numBytes(std::size_t numBlocks) noexcept {
  ArrayCursor cursor(nullptr);
  cursor.take<SnapshotMeters>(1);
  cursor.take<std::atomic<std::uint32_t>>(kNumEnds);
  cursor.take<std::atomic<std::uint64_t>>(numBlocks * kMostSnapshots);
  cursor.take<std::atomic<std::uint32_t>>(numBlocks);
  return cursor.offset();
}

bool SnapshotControl::readBegun(const SnapshotRequest& request, std::uint32_t& begun) const noexcept {
  for (int i = 0; i < kMostReads; ++i) {
    // acquire: pairs with SnapshotTrigger::begin().
    begun = request.begun.load(std::memory_order_acquire);
    bool canBe = begun >= believed().load(std::memory_order_acquire);
    for (std::size_t place = 0; place < kMostSnapshots; ++place) {
      const std::uint32_t newest = newestAt(place, begun);
      const std::uint32_t last = released(place).load(std::memory_order_acquire);
      canBe = canBe && (newest == last || newest == following(last, place));
    }
    if (canBe) return true;
    // Snapshots begun since then may also have been released, which looks the same.
    if (request.begun.load(std::memory_order_acquire) == begun) return false;
  }
  return false;
}

// ---- the worker's end ----

SnapshotTrigger::SnapshotTrigger(int requestFd, int controlFd, std::uint32_t client)
    : requestMapping_(
          mapSealed(requestFd, sizeof(SnapshotRequest), Mapping::Access::kReadWrite, "snapshot request")),
      controlMapping_(
          mapSealed(controlFd, SnapshotControl::numBytes(0), Mapping::Access::kReadOnly, "snapshot control")),
      client_(client) {}

std::uint32_t SnapshotTrigger::begin() noexcept {
  auto& request = *reinterpret_cast<SnapshotRequest*>(requestMapping_.data());
  auto& begun = request.begun;
  const SnapshotControl control(controlMapping_.data(), 0);
  std::uint32_t last = begun.load(std::memory_order_acquire);
  while (true) {
    // Devices believe no more than was begun: either the counter was overwritten, or others have begun since.
    if (last < control.believed().load(std::memory_order_acquire)) {
      const std::uint32_t seen = last;
      last = begun.load(std::memory_order_acquire);
      if (last == seen) return 0;
      continue;
    }
    const std::uint32_t next = last + 1;
    if (next == 0) return 0;
    const std::uint32_t before = next > kMostSnapshots ? next - kMostSnapshots : 0;
    // acquire: the reader of the previous snapshot is done with its place in the pool.
    if (control.released(placeOf(next)).load(std::memory_order_acquire) != before) return 0;
    // release: everything the caller has seen of the last step; its next push comes after it.
    if (begun.compare_exchange_weak(last, next, std::memory_order_acq_rel)) {
      request.beganBy[placeOf(next)].store(client_ + 1, std::memory_order_relaxed);
      return next;
    }
  }
}

std::uint32_t SnapshotTrigger::impossible() const noexcept {
  const auto& request = *reinterpret_cast<const SnapshotRequest*>(requestMapping_.data());
  const SnapshotControl control(controlMapping_.data(), 0);
  std::uint32_t begun = 0;
  return control.readBegun(request, begun) ? 0 : std::max(begun, 1U);
}

// ---- the memory devices' end ----

SnapshotStore::SnapshotStore(const std::vector<std::size_t>& blockBytes, const SnapshotFds& fds,
                             std::chrono::milliseconds patience)
    : blockBytes_(blockBytes), patience_(patience), pool_(fds.versions) {
  constexpr auto kWritable = Mapping::Access::kReadWrite;
  requestMapping_ = mapSealed(fds.request, sizeof(SnapshotRequest), kWritable, "snapshot request");
  request_ = reinterpret_cast<SnapshotRequest*>(requestMapping_.data());
  controlMapping_ =
      mapSealed(fds.control, SnapshotControl::numBytes(numBlocks()), kWritable, "snapshot control");
  control_ = SnapshotControl(controlMapping_.data(), numBlocks());
  if (pool_ == nullptr) pool_ = std::make_shared<SparsePool>(blockBytes, fds.pool);
}

void SnapshotStore::setLimit(std::size_t numBytes) noexcept {
  const auto largest = std::max_element(blockBytes_.begin(), blockBytes_.end());
  const std::size_t least = largest == blockBytes_.end() ? 0 : versionBytes(*largest);
  control_.meters().limitBytes.store(std::max(numBytes, least), std::memory_order_release);
}

bool SnapshotStore::warm(std::size_t block) noexcept {
  std::size_t wholeBytes = 0;
  for (const std::size_t each : blockBytes_) wholeBytes += versionBytes(each);
  if (control_.meters().limitBytes.load(std::memory_order_relaxed) < wholeBytes) return false;
  if (blockBytes_[block] == 0) return true;
  if (!pool_->warm(block)) return false;
  // release: the pages exist before another thread stores to them through a mapping.
  control_.isWarm(block).store(1, std::memory_order_release);
  return true;
}

/// The number of snapshots begun: the workers' claim, while it is possible.
std::uint32_t SnapshotStore::begun() const noexcept {
  std::uint32_t believed = control_.believed().load(std::memory_order_acquire);
  std::uint32_t said = request_->begun.load(std::memory_order_acquire);
  if (said == believed) return said;
  if (!control_.readBegun(*request_, said)) {
    control_.meters().impossible.store(std::max(said, 1U), std::memory_order_relaxed);
    return believed;
  }
  while (believed < said &&
         !control_.believed().compare_exchange_weak(believed, said, std::memory_order_acq_rel)) {
  }
  return std::max(believed, said);
}

/// The live snapshot of a place; 0 if none.
std::uint32_t SnapshotStore::liveAt(std::size_t place) const noexcept {
  const std::uint32_t next = following(control_.released(place).load(std::memory_order_acquire), place);
  return isLive(next) ? next : 0;
}

bool SnapshotStore::isLive(std::uint32_t snapshot) const noexcept {
  const std::size_t place = placeOf(snapshot);
  return snapshot != 0 && snapshot <= begun() &&
         snapshot == following(control_.released(place).load(std::memory_order_acquire), place) &&
         !isLost(snapshot);
}

bool SnapshotStore::isLost(std::uint32_t snapshot) const noexcept {
  return control_.lost(placeOf(snapshot)).load(std::memory_order_acquire) == snapshot;
}

bool SnapshotStore::isPending(std::uint32_t snapshot, std::size_t block) const noexcept {
  // acquire: a reader that has let go has finished reading the block in place.
  const auto record = control_.record(block, placeOf(snapshot)).load(std::memory_order_acquire);
  return stateIn(record, snapshot) == BlockState::kPending;
}

void SnapshotStore::keep(std::size_t block, const std::byte* current) {
  const BlockInPlace only{block, current};
  keep(&only, 1);
}

void SnapshotStore::keep(const BlockInPlace* blocks, std::size_t count) {
  std::vector<Copy> begun;
  for (std::size_t i = 0; i < count; ++i) {
    if (blockBytes_[blocks[i].block] == 0) continue;
    for (std::size_t place = 0; place < kMostSnapshots; ++place) {
      const std::uint32_t snapshot = liveAt(place);
      if (snapshot == 0 || !isPending(snapshot, blocks[i].block)) continue;
      bool hasWaited = false;
      while (!beginToKeep(snapshot, blocks[i], begun, hasWaited)) {
      }
    }
  }
  conclude(begun);
}

/// @returns whether the snapshot no longer needs the block in place, once `begun` is concluded.
bool SnapshotStore::beginToKeep(std::uint32_t snapshot, const BlockInPlace& block, std::vector<Copy>& begun,
                                bool& hasWaited) {
  SnapshotMeters& meters = control_.meters();
  const std::uint64_t seen = control_.record(block.block, placeOf(snapshot)).load(std::memory_order_acquire);
  if (!isLive(snapshot) || stateIn(seen, snapshot) != BlockState::kPending) return true;
  // Read before looking for room: memory freed from now on ends the wait.
  const std::uint32_t seenFrees = meters.frees.load(std::memory_order_acquire);
  if (copyToPool(snapshot, block, begun)) {
    begun.back().seen = seen;
    return true;
  }
  conclude(begun);  // recorded copies can be read, and then freed
  if (!std::exchange(hasWaited, true)) meters.numWaits.fetch_add(1, std::memory_order_relaxed);
  waitForRoom(snapshot, block.block, seenFrees);
  return false;
}

/// Records begun copies once they are complete.
void SnapshotStore::conclude(std::vector<Copy>& begun) {
  if (begun.empty()) return;
  pool_->synchronize();
  for (Copy& copy : begun) {
    auto& record = control_.record(copy.block, placeOf(copy.snapshot));
    // release: the copy before the word that leads to it. acquire: if a reader has let go, it has finished
    // reading.
    if (record.compare_exchange_strong(copy.seen, pack(copy.snapshot, copy.kept),
                                       std::memory_order_acq_rel)) {
      control_.meters().keptBytes.fetch_add(blockBytes_[copy.block], std::memory_order_relaxed);
    } else {
      pool_->free(copy.block, roomOf(copy.snapshot, copy.kept));
      returnRoom(versionBytes(blockBytes_[copy.block]));
    }
  }
  begun.clear();
}

/// Whether the shared place has no version of a block. Only keep() takes it, by one thread at a time for each
/// block; threads that let go of a version concurrently only return it.
bool SnapshotStore::isCommonFree(std::size_t block, const std::vector<Copy>& begun) const noexcept {
  for (std::size_t place = 0; place < kMostSnapshots; ++place) {
    // acquire: earlier reads there happen before the overwrite.
    const std::uint64_t record = control_.record(block, place).load(std::memory_order_acquire);
    if (static_cast<BlockState>(record & 0xFF) == BlockState::kCommon) return false;
  }
  return std::none_of(begun.begin(), begun.end(), [&](const Copy& copy) {
    return copy.block == block && copy.kept == BlockState::kCommon;
  });
}

/// Adds its copies to `begun`. @returns false if the pool or the machine has no room; then nothing was
/// allocated.
bool SnapshotStore::copyToPool(std::uint32_t snapshot, const BlockInPlace& block, std::vector<Copy>& begun) {
  SnapshotMeters& meters = control_.meters();
  const std::size_t needed = versionBytes(blockBytes_[block.block]);
  const std::uint64_t limit = meters.limitBytes.load(std::memory_order_relaxed);
  std::uint64_t taken = meters.takenBytes.load(std::memory_order_relaxed);
  do {
    if (taken + needed > limit) return false;
  } while (!meters.takenBytes.compare_exchange_weak(taken, taken + needed, std::memory_order_relaxed));
  const bool isWarm = control_.isWarm(block.block).load(std::memory_order_acquire) != 0;
  const BlockState kept =
      isWarm && isCommonFree(block.block, begun) ? BlockState::kCommon : BlockState::kKept;
  const TimelineSpan span([&](TimelineEvent& event) {
    event.kind = EventKind::kSnapshotCopy;
    event.index = static_cast<std::uint32_t>(block.block);
    event.numBytes = blockBytes_[block.block];
  });
  if (!pool_->store(block.block, roomOf(snapshot, kept), block.current)) {
    meters.takenBytes.fetch_sub(needed, std::memory_order_relaxed);
    return false;
  }
  std::uint64_t peak = meters.peakBytes.load(std::memory_order_relaxed);
  while (peak < taken + needed &&
         !meters.peakBytes.compare_exchange_weak(peak, taken + needed, std::memory_order_relaxed)) {
  }
  begun.push_back({snapshot, block.block, 0, kept});
  return true;
}

/// Waits until memory is freed, or the snapshot no longer needs the block; gives a snapshot up when patience
/// is spent.
void SnapshotStore::waitForRoom(std::uint32_t snapshot, std::size_t block, std::uint32_t seenFrees) noexcept {
  SnapshotMeters& meters = control_.meters();
  const TimelineSpan span([&](TimelineEvent& event) {
    event.kind = EventKind::kSnapshotWait;
    event.index = static_cast<std::uint32_t>(block);
    event.numBytes = blockBytes_[block];
  });
  const auto begin = Clock::now();
  while (isLive(snapshot) && isPending(snapshot, block) &&
         meters.frees.load(std::memory_order_acquire) == seenFrees) {
    if (isWaitingForbidden_.load(std::memory_order_acquire) || Clock::now() - begin >= patience_) {
      giveUpOldest();
      break;
    }
    if (beats_ != nullptr) beats_->fetch_add(1, std::memory_order_relaxed);
    futexWait(meters.frees, seenFrees, std::min<std::chrono::nanoseconds>(kLongestSleep, patience_));
  }
  const auto waited = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin);
  meters.waitedNs.fetch_add(static_cast<std::uint64_t>(waited.count()), std::memory_order_relaxed);
}

void SnapshotStore::stopWaiting() noexcept { isWaitingForbidden_.store(true, std::memory_order_release); }

void SnapshotStore::giveUpOldest() noexcept {
  std::uint32_t oldest = 0;
  for (std::size_t place = 0; place < kMostSnapshots; ++place) {
    const std::uint32_t snapshot = liveAt(place);
    if (snapshot != 0 && (oldest == 0 || snapshot < oldest)) oldest = snapshot;
  }
  if (oldest == 0) return;
  auto& lost = control_.lost(placeOf(oldest));
  std::uint32_t before = lost.load(std::memory_order_relaxed);
  if (before == oldest || !lost.compare_exchange_strong(before, oldest, std::memory_order_acq_rel)) return;
  control_.meters().lostOf.store(request_->beganBy[placeOf(oldest)].load(std::memory_order_relaxed),
                                 std::memory_order_relaxed);
  // release: a reader of the number also sees the client.
  control_.meters().numLost.fetch_add(1, std::memory_order_release);
  for (std::size_t block = 0; block < numBlocks(); ++block) letGo(oldest, block);
}

bool SnapshotStore::read(std::uint32_t snapshot, std::size_t block, const std::byte* current,
                         std::byte* destination) {
  const std::size_t place = placeOf(snapshot);
  auto& record = control_.record(block, place);
  std::uint64_t seen = record.load(std::memory_order_acquire);
  while (isLive(snapshot)) {
    const BlockState state = stateIn(seen, snapshot);
    if (state == BlockState::kDone) return false;
    if (state == BlockState::kPending) {
      pool_->loadCurrent(block, current, destination);
    } else if (!pool_->load(block, roomOf(snapshot, state), destination)) {
      return false;
    }
    // Changes nothing, but orders this read before or after keep()'s change: if before, the copy was complete
    // before the update began (release), and otherwise it is discarded.
    if (record.compare_exchange_strong(seen, seen, std::memory_order_acq_rel)) return true;
  }
  return false;
}

void SnapshotStore::letGo(std::uint32_t snapshot, std::size_t block) noexcept {
  auto& record = control_.record(block, placeOf(snapshot));
  std::uint64_t seen = record.load(std::memory_order_acquire);
  do {
    const bool isOfLaterOne = seen >> 8 > snapshot;
    if (isOfLaterOne || stateIn(seen, snapshot) == BlockState::kDone) return;
    // release: the block was read before it is overwritten, in place or in the pool.
  } while (!record.compare_exchange_weak(seen, pack(snapshot, BlockState::kDone), std::memory_order_acq_rel));
  const BlockState before = stateIn(seen, snapshot);
  const bool wasKept = isInPool(before);
  if (wasKept) pool_->free(block, roomOf(snapshot, before));
  returnRoom(wasKept ? versionBytes(blockBytes_[block]) : 0);  // an update may wait for this very block
}

void SnapshotStore::release(std::uint32_t snapshot) noexcept {
  auto& released = control_.released(placeOf(snapshot));
  if (snapshot == 0 || snapshot > begun() ||
      snapshot != following(released.load(std::memory_order_acquire), placeOf(snapshot)))
    return;
  for (std::size_t block = 0; block < numBlocks(); ++block) letGo(snapshot, block);
  pool_->trim();
  // release: pairs with SnapshotTrigger::begin().
  released.store(snapshot, std::memory_order_release);
}

/// Wakes the threads that wait for room.
void SnapshotStore::returnRoom(std::size_t numBytes) noexcept {
  SnapshotMeters& meters = control_.meters();
  meters.takenBytes.fetch_sub(numBytes, std::memory_order_relaxed);
  meters.frees.fetch_add(1, std::memory_order_release);
  futexWake(meters.frees, INT_MAX);
}

SnapshotStatistics SnapshotStore::statistics() const noexcept {
  const SnapshotMeters& meters = control_.meters();
  constexpr auto kRelaxed = std::memory_order_relaxed;
  SnapshotStatistics statistics;
  statistics.limitBytes = meters.limitBytes.load(kRelaxed);
  statistics.takenBytes = meters.takenBytes.load(kRelaxed);
  statistics.peakBytes = meters.peakBytes.load(kRelaxed);
  statistics.keptBytes = meters.keptBytes.load(kRelaxed);
  statistics.numWaits = meters.numWaits.load(kRelaxed);
  statistics.waitedSeconds = static_cast<double>(meters.waitedNs.load(kRelaxed)) / 1e9;
  statistics.numLost = meters.numLost.load(std::memory_order_acquire);
  statistics.lostOf = meters.lostOf.load(kRelaxed);
  statistics.impossible = meters.impossible.load(kRelaxed);
  return statistics;
}

}  // namespace coarse
