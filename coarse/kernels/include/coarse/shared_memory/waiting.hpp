#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace coarse {

using Clock = std::chrono::steady_clock;

/// Sleeps while `word` holds `expected`, at most `timeout`. Returns early on a wake, a signal or a spurious
/// wake-up: the caller looks again at what it waits for.
void futexWait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
               std::chrono::nanoseconds timeout) noexcept;

/// Wakes up to `count` sleepers on `word`, in whatever process they are.
void futexWake(std::atomic<std::uint32_t>& word, int count) noexcept;

/// Between two looks at what is waited for, no more than this counts as waited. A process that looks later
/// was stopped, or had other things to do, and those that it waits for may have been stopped with it.
constexpr std::chrono::seconds kLongestGap{1};

/// A clock that goes on while somebody looks at it a few times a second, and stands still otherwise: for time
/// limits of waits. For one thread at a time.
class AttendedClock {
 public:
  Clock::time_point now(Clock::time_point look = Clock::now()) noexcept;
  /// When a wait that begins now is at its end; after centuries at most.
  Clock::time_point in(std::chrono::milliseconds limit) noexcept;

 private:
  Clock::time_point lastLook_ = Clock::now();
  Clock::duration missed_{};
};

/// How long a wait may still take, by a clock of its own.
class Patience {
 public:
  explicit Patience(double seconds) noexcept : limit_(seconds) {}

  /// To be asked a few times a second. @returns whether it is at its end.
  bool isOver(Clock::time_point look = Clock::now()) noexcept { return clock_.now(look) - began_ >= limit_; }

 private:
  std::chrono::duration<double> limit_;
  AttendedClock clock_;
  Clock::time_point began_ = clock_.now();
};

/// Lets timed sleeps of this thread end when they are due, instead of up to 50 us later (prctl(2), timer
/// slack).
void makeSleepsExact() noexcept;

/// A bounded wait that gives the processor away at every look. With more processes than cores, whoever is
/// waited for needs this very core, so a busy spin would delay what it waits for.
class YieldingSpin {
 public:
  explicit YieldingSpin(std::chrono::microseconds budget) noexcept : budget_(budget) {}

  /// Gives the processor away once. @returns false when the budget is spent and it is time to sleep.
  bool yield() noexcept;
  /// Starts the budget anew.
  void reset() noexcept { started_ = false; }

 private:
  std::chrono::microseconds budget_;
  Clock::time_point deadline_{};
  bool started_ = false;
};

}  // namespace coarse
