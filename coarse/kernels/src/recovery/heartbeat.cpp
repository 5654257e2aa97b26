#include "coarse/recovery/heartbeat.hpp"

#include <algorithm>

namespace coarse {
HeartbeatWatch::HeartbeatWatch(const Doorbell* doorbells, std::size_t numDevices,
                               std::chrono::milliseconds limit)
    : doorbells_(doorbells), limit_(limit), devices_(numDevices) {}

std::optional<std::size_t> HeartbeatWatch::look(Clock::time_point now) {
  if (limit_.count() == 0) return std::nullopt;
  const Clock::duration seen = std::min<Clock::duration>(now - lastLook_.value_or(now), kLongestGap);
  lastLook_ = now;
  std::optional<std::size_t> silent;
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    Device& device = devices_[i];
    // relaxed: the count publishes no other memory.
    const std::uint32_t beats = doorbells_[i].beats.load(std::memory_order_relaxed);
    const bool isAlive = beats == 0 || beats != device.lastBeats;
    device.silence = isAlive ? Clock::duration::zero() : device.silence + seen;
    device.lastBeats = beats;
    if (device.silence >= limit_ && !silent) silent = i;
  }
  return silent;
}

}  // namespace coarse
