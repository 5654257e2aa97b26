#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "coarse/shared_memory/layout.hpp"

/// Records the work of this process for the job's timeline: docs/design/timeline.md.
namespace coarse {

/// Numbers are part of the file's format; coarse/timeline/parts.py has their names.
enum class EventKind : std::uint16_t {
  kSpan = 0,           // work with a name; `index` is the name's number
  kReady = 1,          // a gradient is ready; `index` is its tensor
  kPush = 2,           // `index` is the tensor
  kPull = 3,           // likewise, or kEveryTensor
  kWait = 4,           // for the result of a shard; `detail` has a bit for each client without a contribution
  kReduce = 5,         // `index` is the shard
  kUpdate = 6,         // the optimizer updates the parameters of a shard
  kReduced = 7,        // a ring, a collective or a GPU has finished a shard
  kDirectReduce = 8,   // a worker reduces its pieces of tensors; `index` is the first shard
  kDirectCopy = 9,     // a worker copies the other workers' pieces
  kBuffer = 10,        // all-reduce of a buffer that is not registered
  kSnapshotCopy = 11,  // a sync core keeps the old version of a block; `index` is the block
  kSnapshotWait = 12,  // an update waits for memory for old versions
  kTransfer = 13,      // over an emulated link; `detail` is source << 16 | target, `index` the shard
  kNodeSend = 14,      // to another node, whose number is `detail`; `index` is the shard
  kNodeReceive = 15,   // from another node
};

/// TimelineEvent::durationNs of an event without a duration.
inline constexpr std::int64_t kInstant = -1;
/// TimelineEvent::index of a pull of all tensors of a group, or of a wait for any result.
inline constexpr std::uint32_t kEveryTensor = 0xFFFFFFFF;

/// One event. Times are those of CLOCK_MONOTONIC, which all processes of a node share.
struct TimelineEvent {
  std::int64_t startNs = 0;
  std::int64_t durationNs = kInstant;
  std::uint64_t numBytes = 0;
  std::uint64_t detail = 0;
  std::uint32_t group = 0;
  std::uint32_t index = 0;
  std::uint32_t step = 0;
  EventKind kind = EventKind::kSpan;
  std::uint16_t session = 0;  // number of this process's client, if it has several; 0 in a memory device
  std::uint16_t lane = 0;     // the thread; set by record()
  std::uint16_t padding[3] = {};
};
static_assert(sizeof(TimelineEvent) == 56);

/// An event in the file.
struct TimelineCell {
  std::atomic<std::uint64_t> commit;  // position + 1, stored last: the event is complete
  TimelineEvent event;
};
static_assert(sizeof(TimelineCell) == kCacheLineBytes);

/// A thread that has recorded events.
struct TimelineLane {
  std::uint32_t threadId;
  char name[20];  // by pthread_getname_np(), as the thread recorded its first event
};
static_assert(sizeof(TimelineLane) == 24);

inline constexpr std::size_t kMostLanes = 256;  // later threads share the last one

/// The beginning of the file; the cells follow.
struct TimelineHeader {
  std::uint64_t magic;
  std::uint64_t capacity;           // number of cells, a power of two
  std::atomic<std::uint64_t> next;  // number of events so far; the oldest are overwritten
  std::atomic<std::uint64_t> numLanes;
  TimelineLane lanes[kMostLanes];
};
inline constexpr std::size_t kTimelineHeaderBytes = 8192;
static_assert(sizeof(TimelineHeader) <= kTimelineHeaderBytes);
inline constexpr std::uint64_t kTimelineMagic = 0x314C544553524F43;  // "CORSETL1", little-endian

/// Writes events into a file that is mapped, so that they survive any end of this process.
///
/// Thread safety: record() from any thread, lock-free.
class Recorder {
 public:
  static std::size_t numBytes(std::size_t capacity) noexcept {
    return kTimelineHeaderBytes + capacity * sizeof(TimelineCell);
  }
  /// @param base zeroed memory of numBytes(capacity) that stays mapped.
  /// @throws std::invalid_argument unless `capacity` is a power of two.
  Recorder(std::byte* base, std::size_t capacity);
  void record(TimelineEvent event) noexcept;

 private:
  std::uint16_t laneOfThread() noexcept;

  TimelineHeader* header_;
  TimelineCell* cells_;
  std::uint64_t mask_;
};

namespace timeline {
inline std::atomic<Recorder*> active{nullptr};
}  // namespace timeline

/// This process's recorder; null, most of the time, if it records no timeline. A process has one for all
/// sessions, because it has one timeline.
inline Recorder* recorder() noexcept { return timeline::active.load(std::memory_order_acquire); }

/// Nanoseconds of CLOCK_MONOTONIC.
std::int64_t timelineNow() noexcept;

/// Maps a file of Recorder::numBytes(capacity) zeros and records from now on, in place of an earlier file.
/// Forks of this process do not record. The mapping stays until the process ends, because threads may record
/// at any time.
/// @param fd allocated, so that a full disk is an error here and not a signal later; the caller closes it.
/// @throws std::system_error if it cannot be mapped, std::invalid_argument as Recorder.
void openTimeline(int fd, std::size_t capacity);
/// Stops recording. Idempotent.
void closeTimeline() noexcept;

/// A number for TimelineEvent::session, different for each call in this process.
std::uint16_t nextTimelineSession() noexcept;

/// Records the time from its construction to its destruction, if this process records at all.
class TimelineSpan {
 public:
  /// @param describe receives the event, to fill in all but its times; called only while recording.
  template <typename Describe>
  explicit TimelineSpan(const Describe& describe) noexcept : recorder_(recorder()) {
    if (recorder_ == nullptr) return;
    describe(event_);
    event_.startNs = timelineNow();
  }
  TimelineSpan(const TimelineSpan&) = delete;
  TimelineSpan& operator=(const TimelineSpan&) = delete;
  ~TimelineSpan() {
    if (recorder_ == nullptr) return;
    event_.durationNs = timelineNow() - event_.startNs;
    recorder_->record(event_);
  }

 private:
  Recorder* recorder_;
  TimelineEvent event_;
};

/// Names the calling thread, in the timeline and in debuggers. @param name at most 15 characters.
void nameThread(const char* name) noexcept;

}  // namespace coarse
