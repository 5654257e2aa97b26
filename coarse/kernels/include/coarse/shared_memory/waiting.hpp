#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace coarse {

using Clock = std::chrono::steady_clock;

/// Sleeps while `word` holds `expected`, at most `timeout`. Returns early on a wake, a signal or a spurious
/// wake-up: the caller must check its condition again.
void futexWait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
               std::chrono::nanoseconds timeout) noexcept;

/// Wakes up to `count` sleepers on `word`, in any process.
void futexWake(std::atomic<std::uint32_t>& word, int count) noexcept;

/// The most time between two polls that counts as waited. A process that polls later was stopped or busy, and
/// the processes that it waits for may have been stopped with it.
constexpr std::chrono::seconds kLongestGap{1};

/// A clock for time limits of waits: it runs while a thread polls it a few times a second, and stands still
/// otherwise. For one thread at a time.
class AttendedClock {
 public:
  Clock::time_point now(Clock::time_point look = Clock::now()) noexcept;
  /// The end of a wait that begins now; after centuries at most.
  Clock::time_point in(std::chrono::milliseconds limit) noexcept;

 private:
  Clock::time_point lastLook_ = Clock::now();
  Clock::duration missed_{};
};

/// The time limit of a wait, with its own clock.
class Patience {
 public:
  explicit Patience(double seconds) noexcept : limit_(seconds) {}

  /// Call it a few times a second. @returns whether the time limit is reached.
  bool isOver(Clock::time_point look = Clock::now()) noexcept { return clock_.now(look) - began_ >= limit_; }

 private:
  std::chrono::duration<double> limit_;
  AttendedClock clock_;
  Clock::time_point began_ = clock_.now();
};

/// Lets timed sleeps of this thread end when they are due, instead of up to 50 us later (prctl(2), timer
/// slack).
void makeSleepsExact() noexcept;

/// A bounded wait that yields the processor at every poll. With more processes than cores, the awaited
/// process needs this very core, so a busy spin would delay it.
class YieldingSpin {
 public:
  explicit YieldingSpin(std::chrono::microseconds budget) noexcept : budget_(budget) {}

  /// Yields the processor once. @returns false when the budget is spent and the caller should sleep.
  bool yield() noexcept;
  /// Restarts the budget.
  void reset() noexcept { started_ = false; }

 private:
  std::chrono::microseconds budget_;
  Clock::time_point deadline_{};
  bool started_ = false;
};

}  // namespace coarse
