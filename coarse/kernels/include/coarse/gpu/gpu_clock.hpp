#pragma once

#include <cstdint>

#include "coarse/emulation/pacer.hpp"

namespace coarse {

/// What the global timer of a GPU shows at times of the host, of which it knows nothing.
///
/// A kernel notes what the timer shows when it begins. That is later than when the host launched it, by an
/// unknown time; the smallest one of all seen is the best, with an allowance for how far the clocks may have
/// gone apart since. So answers are never too early, and late by what launching a kernel takes at best.
///
/// Thread safety: one caller at a time.
class GpuClock {
 public:
  /// The timer showed `shown` at some time after `launchedAt`. @pre notes come in the order of their times.
  void note(MonotonicNs launchedAt, std::uint64_t shown) noexcept;
  /// Whether something was noted so shortly before `now` that allowances are small.
  bool isFresh(MonotonicNs now) const noexcept { return hasNotes_ && now - notedAt_ <= kFreshNs; }
  /// What the timer shows at `time`, or more. @pre something was noted.
  std::uint64_t shownAt(MonotonicNs time) const noexcept;

 private:
  static constexpr MonotonicNs kFreshNs = 100'000'000;
  static constexpr MonotonicNs kDriftDivisor = 10'000;  // clocks go apart by less than 100 us in a second

  MonotonicNs offsetAt(MonotonicNs time) const noexcept;

  bool hasNotes_ = false;
  MonotonicNs notedAt_ = 0;
  MonotonicNs offset_ = 0;  // at that time: of the timer before the host's clock, or more
};

}  // namespace coarse
