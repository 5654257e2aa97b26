#include "coarse/device/descriptor_intake.hpp"

#include <algorithm>
#include <utility>

namespace coarse {
namespace {

// Descriptors taken from one client before the next client's turn.
constexpr int kDescriptorsPerTurn = 64;

}  // namespace

DescriptorIntake::DescriptorIntake(IntakeConfig config, DeviceLinks& links, FindGroup findGroup,
                                   Accept accept)
    : config_(config),
      links_(links),
      findGroup_(std::move(findGroup)),
      accept_(std::move(accept)),
      clients_(config.numClients) {}

void DescriptorIntake::addClient(std::size_t client, int segmentFd) {
  auto added = std::make_unique<Client>();
  added->mapping = mapSealed(segmentFd, ClientSegment::numBytes(config_.numDevices),
                             Mapping::Access::kReadWrite, "client segment");
  added->segment = ClientSegment(added->mapping.data());
  added->queue = DescriptorConsumer(added->segment.queue(config_.device));
  clients_.at(client) = std::move(added);
}

bool DescriptorIntake::hasAllClients() const noexcept {
  return std::all_of(clients_.begin(), clients_.end(), [](const auto& client) { return client != nullptr; });
}

bool DescriptorIntake::drain() {
  if (config_.scheduling == Scheduling::kFcfs) return drainFirstComeFirstServe();
  bool progressed = false;
  Descriptor descriptor;
  for (std::size_t client = 0; client < clients_.size(); ++client) {
    for (int i = 0; i < kDescriptorsPerTurn && take(client, descriptor); ++i) {
      handOver(client, descriptor);
      progressed = true;
    }
  }
  return progressed;
}

void DescriptorIntake::drain(std::size_t client) {
  Descriptor descriptor;
  while (take(client, descriptor)) handOver(client, descriptor);
}

bool DescriptorIntake::drainFirstComeFirstServe() {
  bool progressed = false;
  if (blocker_ && isBlockerDone()) {
    blocker_.reset();
    progressed = true;
  }
  for (std::size_t client = 0; client < clients_.size(); ++client) {
    std::optional<Descriptor>& head = clients_[client]->head;
    Descriptor descriptor;
    if (!head && take(client, descriptor)) head = descriptor;
    if (!head) continue;
    if (blocker_ && (head->group != blocker_->group || head->shard != blocker_->shard)) continue;
    descriptor = *std::exchange(head, std::nullopt);
    if (handOver(client, descriptor))
      blocker_ = RingEntry{descriptor.group, descriptor.shard, descriptor.step, 0};
    progressed = true;
  }
  return progressed;
}

bool DescriptorIntake::isBlockerDone() const noexcept {
  const TensorGroup* group = findGroup_(blocker_->group);
  if (group == nullptr) return true;  // removed meanwhile
  const auto& done = group->control().done(config_.observer, blocker_->shard);
  return done.load(std::memory_order_acquire) == blocker_->step;
}

/// Takes the next descriptor of a client whose contribution has arrived. @returns false if there is none.
bool DescriptorIntake::take(std::size_t client, Descriptor& descriptor) {
  Client& from = *clients_[client];
  if (!links_.isPaced()) return from.queue.pop(descriptor);
  for (int i = 0; i < kDescriptorsPerTurn && from.queue.pop(descriptor); ++i)
    holdUntilArrival(client, descriptor);
  if (from.arrived.empty()) return false;
  descriptor = from.arrived.front();
  from.arrived.pop_front();
  return true;
}

bool DescriptorIntake::handOver(std::size_t client, const Descriptor& descriptor) {
  config_.metrics.add(Metric::kTakenShards, 1);
  if (clients_[client]->isEvicted) return false;
  if (isClosed_.load(std::memory_order_relaxed) && !isUpdateByMean(descriptor.flags)) return false;
  return accept_(client, descriptor);
}

void DescriptorIntake::holdUntilArrival(std::size_t client, const Descriptor& descriptor) {
  if (isProbe(descriptor)) {
    clients_[client]->arrived.push_back(descriptor);  // the probe itself models its transfer time
    return;
  }
  const MonotonicNs sentAt = timeOf(descriptor.sentAt, monotonicNow());
  const bool staysWithWorker = (descriptor.flags & kDirectAllReduce) != 0;
  const MonotonicNs due =
      staysWithWorker
          ? sentAt
          : links_.reserve(links_.endpointOfClient(client), links_.endpointOfDevice(config_.device),
                           contributedBytes(descriptor), sentAt, descriptor.shard);
  links_.at(due, [this, client, arrived = descriptor](MonotonicNs arrivedAt) mutable {
    arrived.sentAt = stampOf(arrivedAt);  // from here on this device is the sender
    clients_[client]->arrived.push_back(arrived);
  });
}

bool DescriptorIntake::isProbe(const Descriptor& descriptor) const noexcept {
  const TensorGroup* group = findGroup_(descriptor.group);
  return group != nullptr && descriptor.shard < group->plan().shards.size() &&
         group->plan().shards[descriptor.shard].algorithm == Algorithm::kProbe;
}

/// Bytes that travel over the link with a descriptor, which is not validated yet.
std::size_t DescriptorIntake::contributedBytes(const Descriptor& descriptor) const noexcept {
  const TensorGroup* group = findGroup_(descriptor.group);
  if ((descriptor.flags & kPresent) == 0 || group == nullptr ||
      descriptor.shard >= group->plan().shards.size())
    return 0;
  const Shard& shard = group->plan().shards[descriptor.shard];
  if (!shard.isDynamic) return shard.numElements * itemBytes(shard.dtype);
  if (descriptor.dtype >= kNumDTypes) return 0;
  return std::min<std::size_t>(shard.numElements,
                               descriptor.numElements * itemBytes(static_cast<DType>(descriptor.dtype)));
}

}  // namespace coarse
