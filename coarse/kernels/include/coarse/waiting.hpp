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
