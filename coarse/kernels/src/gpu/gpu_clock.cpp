#include "coarse/gpu/gpu_clock.hpp"

#include <algorithm>

namespace coarse {

void GpuClock::note(MonotonicNs launchedAt, std::uint64_t shown) noexcept {
  const MonotonicNs seen = static_cast<MonotonicNs>(shown) - launchedAt;
  offset_ = hasNotes_ ? std::min(seen, offsetAt(launchedAt)) : seen;
  notedAt_ = launchedAt;
  hasNotes_ = true;
}

std::uint64_t GpuClock::shownAt(MonotonicNs time) const noexcept {
  return static_cast<std::uint64_t>(time + offsetAt(time));
}

MonotonicNs GpuClock::offsetAt(MonotonicNs time) const noexcept {
  return offset_ + std::max<MonotonicNs>(0, time - notedAt_) / kDriftDivisor;
}

}  // namespace coarse
