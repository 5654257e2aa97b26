#include "coarse/timeline/recorder.hpp"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <system_error>

namespace coarse {
namespace {

/// The calling thread's lane of one recorder.
struct Lane {
  const Recorder* recorder = nullptr;
  std::uint16_t number = 0;
};
thread_local Lane laneOfThisThread;

void stopInForks() {
  [[maybe_unused]] static const int registered = ::pthread_atfork(nullptr, nullptr, closeTimeline);
}

}  // namespace

std::int64_t timelineNow() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Recorder::Recorder(std::byte* base, std::size_t capacity)
    : header_(reinterpret_cast<TimelineHeader*>(base)),
      cells_(reinterpret_cast<TimelineCell*>(base + kTimelineHeaderBytes)),
      mask_(capacity - 1) {
  if (capacity == 0 || (capacity & (capacity - 1)) != 0)
    throw std::invalid_argument("the number of events of a timeline must be a power of two");
  header_->capacity = capacity;
  header_->magic = kTimelineMagic;
}

void Recorder::record(TimelineEvent event) noexcept {
  event.lane = laneOfThread();
  const std::uint64_t position = header_->next.fetch_add(1, std::memory_order_relaxed);
  TimelineCell& cell = cells_[position & mask_];
  // Readers come after this process has ended, perhaps in the middle of this function: as for a signal
  // handler, only the compiler must keep the order.
  cell.commit.store(0, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_release);
  cell.event = event;
  cell.commit.store(position + 1, std::memory_order_release);
}

std::uint16_t Recorder::laneOfThread() noexcept {
  Lane& lane = laneOfThisThread;
  if (lane.recorder == this) return lane.number;
  const std::uint64_t taken = header_->numLanes.fetch_add(1, std::memory_order_relaxed);
  lane = {this, static_cast<std::uint16_t>(std::min<std::uint64_t>(taken, kMostLanes - 1))};
  TimelineLane& described = header_->lanes[lane.number];
  described.threadId = static_cast<std::uint32_t>(::syscall(SYS_gettid));
  ::pthread_getname_np(::pthread_self(), described.name, sizeof described.name);
  return lane.number;
}

void openTimeline(int fd, std::size_t capacity) {
  const std::size_t numBytes = Recorder::numBytes(capacity);
  void* const base = ::mmap(nullptr, numBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mapping a timeline");
  stopInForks();
  timeline::active.store(new Recorder(static_cast<std::byte*>(base), capacity), std::memory_order_release);
}

void closeTimeline() noexcept { timeline::active.store(nullptr, std::memory_order_release); }

std::uint16_t nextTimelineSession() noexcept {
  static std::atomic<std::uint16_t> last{0};
  return static_cast<std::uint16_t>(last.fetch_add(1, std::memory_order_relaxed) + 1);
}

void nameThread(const char* name) noexcept { ::pthread_setname_np(::pthread_self(), name); }

}  // namespace coarse
