#include "coarse/device/prober.hpp"

#include <utility>

#include "coarse/reduce/copy.hpp"
#include "coarse/shared_memory/probe_request.hpp"

namespace coarse {

Prober::Prober(std::size_t device, std::size_t numDevices, DeviceLinks& links, Done done)
    : device_(device), numDevices_(numDevices), links_(links), done_(std::move(done)) {}

std::string Prober::rejection(const TensorGroup& group, const Descriptor& descriptor) const {
  const ProbeRequest request = ProbeRequest::of(descriptor);
  if (descriptor.dtype >= kNumProbeKinds) return "unknown kind of probe";
  const Shard& shard = group.plan().shards[descriptor.shard];
  const std::size_t slotBytes = shard.numElements * (shard.isDynamic ? 1 : itemBytes(shard.dtype));
  if (request.numBytes > slotBytes) return "a probe of " + std::to_string(request.numBytes) + " bytes";
  const std::size_t numTargets =
      request.kind == ProbeKind::kBetweenDevices ? numDevices_ : group.plan().numClients;
  if (request.target >= numTargets || request.slotOwner >= group.plan().numClients)
    return "a probe to somebody who does not exist";
  return {};
}

void Prober::copy(const TensorGroup& group, std::size_t client, const Descriptor& descriptor) {
  const ProbeRequest request = ProbeRequest::of(descriptor);
  const Shard& shard = group.plan().shards[descriptor.shard];
  if (memory_.size() < request.numBytes) memory_.resize(request.numBytes);
  std::byte* slot = group.slot(client, shard);
  switch (request.kind) {
    case ProbeKind::kPush:
      return copyBytes(memory_.data(), slot, request.numBytes);
    case ProbeKind::kPull:
      return copyBytes(slot, memory_.data(), request.numBytes);
    case ProbeKind::kBetweenDevices:
      return copyBytes(group.slot(request.slotOwner, shard), memory_.data(), request.numBytes);
    case ProbeKind::kBetweenWorkers:
      if (request.target != client) copyBytes(group.slot(request.target, shard), slot, request.numBytes);
  }
}

void Prober::serve(const TensorGroup& group, std::size_t client, const Descriptor& descriptor) {
  const ProbeRequest request = ProbeRequest::of(descriptor);
  std::size_t source = links_.endpointOfClient(client);
  std::size_t target = links_.endpointOfDevice(device_);
  if (request.kind == ProbeKind::kPull) std::swap(source, target);
  if (request.kind == ProbeKind::kBetweenWorkers) target = links_.endpointOfClient(request.target);
  if (request.kind == ProbeKind::kBetweenDevices) {
    source = links_.endpointOfDevice(device_);
    target = links_.endpointOfDevice(request.target);
  }
  const MonotonicNs sentAt = links_.isPaced() ? timeOf(descriptor.sentAt, monotonicNow()) : MonotonicNs{0};
  const MonotonicNs due = links_.reserve(source, target, request.numBytes, sentAt);
  // The host copies while the emulated link would.
  copy(group, client, descriptor);
  if (request.numBytes == 0) std::vector<std::byte>().swap(memory_);
  const RingEntry entry{descriptor.group, descriptor.shard, descriptor.step, 0};
  links_.at(due, [this, entry, client](MonotonicNs) { done_(entry, client); });
}

}  // namespace coarse
