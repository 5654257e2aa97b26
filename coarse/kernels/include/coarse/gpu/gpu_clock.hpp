#pragma once

#include <cstdint>

#include "coarse/emulation/pacer.hpp"

namespace coarse {

/// Converts host times to the global timer of a GPU, which is independent of the host's clock.
///
/// A kernel records the timer when it begins. That is later than the host's launch, by an unknown time. The
/// smallest difference seen is the best, with an allowance for the drift between the clocks since then. So
/// answers are never too early, and late by the shortest launch time.
///
/// Thread safety: one caller at a time.
class GpuClock {
 public:
  /// The timer showed `shown` at some time after `launchedAt`. @pre notes come in the order of their times.
  void note(MonotonicNs launchedAt, std::uint64_t shown) noexcept;
  /// Whether a note is so recent before `now` that allowances are small.
  bool isFresh(MonotonicNs now) const noexcept { return hasNotes_ && now - notedAt_ <= kFreshNs; }
  /// The timer's value at `time`, or more. @pre there was a note.
  std::uint64_t shownAt(MonotonicNs time) const noexcept;

 private:
  static constexpr MonotonicNs kFreshNs = 100'000'000;
  static constexpr MonotonicNs kDriftDivisor = 10'000;  // clocks drift by less than 100 us in a second

  MonotonicNs offsetAt(MonotonicNs time) const noexcept;

  bool hasNotes_ = false;
  MonotonicNs notedAt_ = 0;
  MonotonicNs offset_ = 0;  // at that time: the timer minus the host's clock, or more
};

}  // namespace coarse
