#pragma once

#include <cstddef>
#include <cstdint>

#include "coarse/shared_memory/layout.hpp"

namespace coarse {

/// Which link a probe measures. The values are part of the wire format.
enum class ProbeKind : std::uint8_t {
  kPush = 0,            // from the client's slot to the device
  kPull = 1,            // from the device to the client's slot
  kBetweenDevices = 2,  // from the device to another one: into a slot in the other device's memory
  kBetweenWorkers = 3,  // from the client's slot to another client's
};

inline constexpr std::size_t kNumProbeKinds = 4;

/// The copy that a client requests from a memory device. In a descriptor of a shard whose algorithm is
/// kProbe.
struct ProbeRequest {
  ProbeKind kind = ProbeKind::kPush;
  std::uint8_t target = 0;     // the other device, or the other client
  std::uint8_t slotOwner = 0;  // kBetweenDevices: a client whose slots lie in the target's memory
  std::uint32_t numBytes = 0;

  static ProbeRequest of(const Descriptor& descriptor) noexcept;
  void writeTo(Descriptor& descriptor) const noexcept;
};

}  // namespace coarse
