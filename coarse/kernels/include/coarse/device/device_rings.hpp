#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "coarse/device/ring.hpp"
#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/shared_memory.hpp"
#include "coarse/tensors/tensor_memory.hpp"

namespace coarse {

/// The memory that a session's rings use. The caller closes all descriptors.
struct RingMemory {
  int logsFd = -1;                 // RingLogs, one for all devices
  std::vector<int> bufferFds{};    // a RingSegment of each device; empty without rings
  std::vector<Region> messages{};  // ringMessagesBytes() of each device
  std::size_t messageBytes = 0;    // of each message
  std::shared_ptr<const TensorMemory> memory = hostMemory();  // memory of messages and reduced tensors
};

/// Bytes of all rings' messages to one device.
constexpr std::size_t ringMessagesBytes(std::size_t messageBytes) noexcept {
  return kNumRings * kRingDepth * messageBytes;
}
/// Bytes of a message in host memory, where it must fit in a cache, and in a GPU's memory, where it must take
/// longer than a launch.
inline constexpr std::size_t kHostMessageBytes = 64 * 1024;
inline constexpr std::size_t kCudaMessageBytes = 1024 * 1024;

/// One memory device's part in the rings over all of them.
///
/// Thread safety: append() from any thread; advance() by one caller at a time for each core, and only core 0
/// works on GPUs or over emulated links; everything else while no thread advances.
class DeviceRings {
 public:
  /// @param deviceLinks those of this device, which it shares with core 0.
  /// @param localClients whose contributions this device brings into the rings.
  /// @throws std::invalid_argument if memory of a device is missing or too small; as TensorMemory::map().
  DeviceRings(const RingMemory& memory, DeviceLinks& deviceLinks, std::size_t device, std::size_t numDevices,
              Doorbell* doorbells, const std::vector<std::size_t>& localClients, const FindGroup& findGroup,
              const ShardDone& shardDone);

  /// Makes all devices reduce a shard to which all clients have contributed. @pre the log has room.
  void append(const RingEntry& entry) noexcept;
  /// Advances the rings of sync core `core`, of `numCores`. @returns whether there was work.
  bool advance(std::size_t core, std::size_t numCores);
  /// Whether a step is in progress whose end rings no doorbell.
  bool isBusy() const noexcept;
  /// Returns when no step is in progress.
  void drain();
  /// Whether a shard of `group` is in progress: the group must stay until it is done.
  bool isWorkingOn(const TensorGroup& group) const noexcept;
  /// The memory in which groups reduced by rings must lie.
  const TensorMemory& memory() const noexcept { return *memory_; }

 private:
  std::shared_ptr<const TensorMemory> memory_;
  const DeviceLinks& links_;
  Mapping logsMapping_;
  std::vector<Mapping> bufferMappings_;
  std::vector<TensorBytes> messages_;
  RingLogs* logs_ = nullptr;
  std::vector<std::unique_ptr<RingCore>> cores_;
};

}  // namespace coarse
