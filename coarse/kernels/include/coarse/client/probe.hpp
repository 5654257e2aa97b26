#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "coarse/device/shard_queue.hpp"
#include "coarse/device/tensor_group.hpp"
#include "coarse/emulation/device_links.hpp"
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

/// Serves the probes of one memory device: copies, and completes a probe when the copy is done and, in an
/// emulated session, its link's time has passed. Keeps memory for the largest probe until a probe of 0 bytes,
/// which ends the measurement.
///
/// Thread safety: one caller at a time.
class Prober {
 public:
  using Done = std::function<void(const RingEntry& entry, std::size_t client)>;
  Prober(std::size_t device, std::size_t numDevices, DeviceLinks& links, Done done);

  /// @returns the reason to reject the request; empty if it is valid.
  std::string rejection(const TensorGroup& group, const Descriptor& descriptor) const;
  /// @pre rejection() is empty.
  void serve(const TensorGroup& group, std::size_t client, const Descriptor& descriptor);

 private:
  void copy(const TensorGroup& group, std::size_t client, const Descriptor& descriptor);

  std::size_t device_;
  std::size_t numDevices_;
  DeviceLinks& links_;
  Done done_;
  std::vector<std::byte> memory_;  // the device's end of a probe
};

}  // namespace coarse
