#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/waiting.hpp"

namespace coarse {

/// Notices memory devices that are alive for the operating system but have stopped working, by the turns that
/// their sync cores count.
///
/// Only time in which somebody looks is counted: whoever was stopped itself, or had other things to do, does
/// not blame a device for that. A device that has not started yet is not missed.
///
/// Thread safety: one caller at a time.
class HeartbeatWatch {
 public:
  /// @param limit how long a device may give no sign of life; 0 lets it do so for ever.
  HeartbeatWatch(const Doorbell* doorbells, std::size_t numDevices, std::chrono::milliseconds limit);

  /// Looks at all devices; to be called a few times a second while something is waited for.
  /// @returns one that has been silent for the limit.
  std::optional<std::size_t> look(Clock::time_point now = Clock::now());

 private:
  struct Device {
    std::uint32_t lastBeats = 0;
    Clock::duration silence{};
  };

  const Doorbell* doorbells_;
  std::chrono::milliseconds limit_;
  std::vector<Device> devices_;
  std::optional<Clock::time_point> lastLook_;
};

}  // namespace coarse
