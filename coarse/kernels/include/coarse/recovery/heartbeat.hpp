#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/waiting.hpp"

namespace coarse {

/// Detects memory devices that are alive for the operating system but have stopped working, by the loop
/// iterations that their sync cores count.
///
/// Only time during which the caller polls is counted: a caller that was itself stopped or busy does not
/// blame a device. A device that has not started yet does not count as silent.
///
/// Thread safety: one caller at a time.
class HeartbeatWatch {
 public:
  /// @param limit longest time without progress of a device; 0: no limit.
  HeartbeatWatch(const Doorbell* doorbells, std::size_t numDevices, std::chrono::milliseconds limit);

  /// Checks all devices; call it a few times a second during a wait.
  /// @returns a device that was silent for the limit.
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
