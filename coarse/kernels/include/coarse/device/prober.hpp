#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "coarse/emulation/device_links.hpp"
#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/shard_queue.hpp"
#include "coarse/tensors/tensor_group.hpp"

namespace coarse {

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
