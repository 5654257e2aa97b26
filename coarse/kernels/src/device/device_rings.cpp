#include "coarse/device/device_rings.hpp"

#include <algorithm>
#include <stdexcept>

#include "coarse/shared_memory/shard_queue.hpp"

namespace coarse {

DeviceRings::DeviceRings(const RingMemory& memory, DeviceLinks& deviceLinks, std::size_t device,
                         std::size_t numDevices, Doorbell* doorbells,
                         const std::vector<std::size_t>& localClients, const FindGroup& findGroup,
                         const ShardDone& shardDone)
    : memory_(memory.memory), links_(deviceLinks) {
  if (memory.bufferFds.size() != numDevices || memory.messages.size() != numDevices)
    throw std::invalid_argument("a proxy needs the ring memory of every device");
  constexpr auto kWritable = Mapping::Access::kReadWrite;
  logsMapping_ = mapSealed(memory.logsFd, sizeof(RingLogs), kWritable, "ring logs");
  logs_ = reinterpret_cast<RingLogs*>(logsMapping_.data());
  for (std::size_t i = 0; i < numDevices; ++i) {
    bufferMappings_.push_back(mapSealed(memory.bufferFds[i], sizeof(RingSegment), kWritable, "ring buffers"));
    messages_.push_back(
        memory_->map(memory.messages[i], ringMessagesBytes(memory.messageBytes), "ring messages"));
  }
  const auto bufferOf = [&](std::size_t owner, std::size_t ring) {
    return &(*reinterpret_cast<RingSegment*>(bufferMappings_[owner].data()))[ring];
  };
  const auto messagesOf = [&](std::size_t owner, std::size_t ring) {
    return messages_[owner].get() + ring * kRingDepth * memory.messageBytes;
  };
  const std::size_t after = (device + 1) % numDevices, before = (device + numDevices - 1) % numDevices;
  for (std::size_t ring = 0; ring < kNumRings; ++ring) {
    const bool isForward = ring % 2 == 0;
    const std::size_t next = isForward ? after : before, previous = isForward ? before : after;
    RingLinks links;
    links.log = &(*logs_)[ring];
    links.own = bufferOf(device, ring);
    links.next = bufferOf(next, ring);
    links.ownMessages = messagesOf(device, ring);
    links.nextMessages = messagesOf(next, ring);
    links.messageBytes = memory.messageBytes;
    links.nextDoorbell = &doorbells[next];
    links.previousDoorbell = &doorbells[previous];
    links.device = device;
    links.nextDevice = next;
    links.position = isForward ? device : (numDevices - device) % numDevices;
    links.numDevices = numDevices;
    cores_.push_back(std::make_unique<RingCore>(links, deviceLinks, memory_->makeRingCompute(), localClients,
                                                findGroup, shardDone));
  }
}

void DeviceRings::append(const RingEntry& entry) noexcept {
  appendToRing((*logs_)[entry.shard % kNumRings], entry);
}

bool DeviceRings::advance(std::size_t core, std::size_t numCores) {
  // Other sync cores could only divide a GPU's work, and core 0 does all pacing.
  if (!memory_->isHost() || links_.isPaced()) {
    if (core > 0) return false;
    numCores = 1;
  }
  bool progressed = false;
  for (std::size_t ring = core; ring < cores_.size(); ring += numCores) progressed |= cores_[ring]->advance();
  return progressed;
}

bool DeviceRings::isBusy() const noexcept {
  return std::any_of(cores_.begin(), cores_.end(), [](const auto& core) { return core->isBusy(); });
}

void DeviceRings::drain() {
  for (const auto& core : cores_) core->drain();
}

bool DeviceRings::isWorkingOn(const TensorGroup& group) const noexcept {
  return std::any_of(cores_.begin(), cores_.end(),
                     [&](const auto& core) { return core->isWorkingOn(group); });
}

}  // namespace coarse
