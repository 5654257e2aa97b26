/// The part of Proxy that synchronises complete shards: its methods, what each begins, and the finish.
#include <utility>

#include "coarse/device/proxy.hpp"
#include "coarse/shared_memory/shard_queue.hpp"
#include "coarse/tensors/agreement.hpp"

namespace coarse {

/// A shard to which all clients have contributed, and the conditions of methods. The plan gives only its
/// algorithm; workers choose the rest anew in each step.
class Proxy::CompleteShard {
 public:
  CompleteShard(const Proxy& proxy, const TensorGroup& group, std::uint32_t shard,
                std::uint32_t numPresent) noexcept
      : proxy_(proxy),
        group_(group),
        shard_(shard),
        numPresent_(numPresent),
        algorithm_(group.plan().shards[shard].algorithm) {}

  /// Only the owner of a replicated group writes to its parameters.
  bool isReplicatedUpdate() const noexcept { return group_.replica() != nullptr && isUpdate(); }
  bool isEmulatedDirectAllReduce() const noexcept {
    return usesDirectAllReduce() && proxy_.emulatedDirectAllReduce_ != nullptr;
  }
  /// NCCL takes zeros for absent contributions; otherwise another method takes a shard that lacks some.
  bool isDirectAllReduce() const noexcept {
    return usesDirectAllReduce() && (numPresent_ == group_.plan().numClients || group_.isByNccl(shard_));
  }
  bool isExchanged() const noexcept { return algorithm_ == Algorithm::kExchange; }
  /// The home device has the parameters on its GPU, and their old versions.
  bool isUpdateAtHomeDevice() const noexcept {
    return isUpdate() && !isInHostMemory() && proxy_.config_.device != kHomeDevice;
  }
  bool isForRing() const noexcept {
    return algorithm_ == Algorithm::kRing && hasOtherDevices() && numPresent_ > 0;
  }
  bool isForCollective() const noexcept {
    return algorithm_ == Algorithm::kNccl && hasOtherDevices() &&
           proxy_.collectives_->canReduce(group_, shard_);
  }
  /// Where links are emulated, a sync core of another device could not read a shard without its links.
  bool isOverEmulatedLinks() const noexcept { return proxy_.links_.isPaced(); }
  /// Other processors, such as GPUs, take many shards at once: more sync cores could only divide them.
  bool isForThisCore() const noexcept {
    return algorithm_ == Algorithm::kGather || numPresent_ == 0 || !isInHostMemory();
  }
  bool isForAnyCore() const noexcept { return true; }

 private:
  bool isUpdate() const noexcept { return group_.isUpdate(shard_); }
  bool isInHostMemory() const noexcept { return group_.memory().isHost(); }
  bool hasOtherDevices() const noexcept { return proxy_.config_.numDevices > 1; }
  bool usesDirectAllReduce() const noexcept {
    return group_.usesDirectAllReduce(shard_) && proxy_.nodeExchange_ == nullptr;
  }

  const Proxy& proxy_;
  const TensorGroup& group_;
  std::uint32_t shard_;
  std::uint32_t numPresent_;  // clients with a contribution
  Algorithm algorithm_;
};

/// A way to synchronise a complete shard. It waits for nothing.
struct Proxy::SyncMethod {
  bool (CompleteShard::*applies)() const noexcept;
  void (Proxy::*begin)(TensorGroup& group, const RingEntry& entry);
};

/// The first method that applies is taken (docs/design/queue-protocol.md).
constexpr Proxy::SyncMethod Proxy::kSyncMethods[] = {
    {&CompleteShard::isReplicatedUpdate, &Proxy::passToOwner},
    {&CompleteShard::isEmulatedDirectAllReduce, &Proxy::emulateDirectAllReduce},
    {&CompleteShard::isDirectAllReduce, &Proxy::leaveToWorkers},
    {&CompleteShard::isExchanged, &Proxy::exchange},
    {&CompleteShard::isUpdateAtHomeDevice, &Proxy::passToHomeDevice},
    {&CompleteShard::isForRing, &Proxy::passAroundRing},
    {&CompleteShard::isForCollective, &Proxy::proposeCollective},
    {&CompleteShard::isOverEmulatedLinks, &Proxy::exchange},
    {&CompleteShard::isForThisCore, &Proxy::beginShard},
    {&CompleteShard::isForAnyCore, &Proxy::passToAnySyncCore},
};

void Proxy::complete(TensorGroup& group, const RingEntry& entry) {
  const GroupControl& control = group.control();
  control.arrivals(entry.shard).store(0, std::memory_order_relaxed);
  const std::uint32_t numPresent = group.numPresent(entry.shard);
  control.contributors(entry.shard).store(numPresent, std::memory_order_relaxed);
  if (std::string difference = disagreement(group, entry.shard, config_.ranks); !difference.empty()) {
    report(-1, std::move(difference));
    return;
  }
  if (epochs_ != nullptr && group.plan().id == boundary_.load(std::memory_order_relaxed)) beginEpoch();
  const CompleteShard shard(*this, group, entry.shard, numPresent);
  for (const SyncMethod& method : kSyncMethods) {
    if ((shard.*method.applies)()) return (this->*method.begin)(group, entry);
  }
}

// ---- what methods begin ----

void Proxy::passToOwner(TensorGroup& group, const RingEntry& entry) {
  group.replica()->control().updates().add(entry.shard);
  doorbells_[group.replica()->owner()].ring();
}

void Proxy::emulateDirectAllReduce(TensorGroup& group, const RingEntry& entry) {
  emulatedDirectAllReduce_->start(group, entry, group.numPresent(entry.shard));
}

/// From here on the workers do it (Client::reducePieces, GpuDirectAllReduce).
void Proxy::leaveToWorkers(TensorGroup& group, const RingEntry& entry) { finishForAll(group, entry); }

void Proxy::exchange(TensorGroup& group, const RingEntry& entry) {
  deviceExchange_->distribute(group, entry);
}

void Proxy::passToHomeDevice(TensorGroup& group, const RingEntry& entry) {
  // If the queue is full, a device has died inside it, and the session ends.
  [[maybe_unused]] const bool isQueued = pushReady(group.control(), {entry.shard, entry.step});
  doorbells_[kHomeDevice].ring();
}

void Proxy::passAroundRing(TensorGroup&, const RingEntry& entry) {
  rings_->append(entry);
  hasPushedRing_ = true;
}

void Proxy::proposeCollective(TensorGroup&, const RingEntry& entry) { collectives_->propose(entry); }

/// Starts to reduce or update a shard that lies in one memory, or passes it to the other nodes.
void Proxy::beginShard(TensorGroup& group, const RingEntry& entry) {
  // Each node updates its own parameters by a mean that nodes have already computed.
  const bool isOwnBusiness = isUpdateByMean(group.control().contribution(entry.shard, 0).flags);
  if (nodeExchange_ && !isOwnBusiness) return nodeExchange_->contribute(group, entry);
  if (nodeExchange_) nodeExchange_->recordSettings(group, entry.shard);
  computeOf(group).begin({&group, entry});
}

void Proxy::passToAnySyncCore(TensorGroup& group, const RingEntry& entry) {
  if (!pushReady(group.control(), {entry.shard, entry.step}))
    return beginShard(group, entry);  // do not wait for a sync core that may be dead
  ++numPushedReady_;
}

// ---- the finish ----

/// Finishes a shard whose result is in place; an update only when its replica is, too.
void Proxy::concludeShard(TensorGroup& group, const RingEntry& entry) noexcept {
  if (group.isUpdate(entry.shard)) {
    noteUpdate(group, entry.shard);
    if (const Replica* replica = group.replica(); replica != nullptr) {
      replica->control().copies().add(entry.shard);
      doorbells_[replica->keeper()].ring();
      return;
    }
  }
  count(group, entry.shard);
  finishForAll(group, entry);
}

void Proxy::finishForAll(TensorGroup& group, const RingEntry& entry) noexcept {
  for (std::size_t client = 0; client < config_.numClients; ++client) finishShard(group, entry, client);
}

/// Finishes a shard for one of this device's own clients, when its links have carried the result there.
void Proxy::letPull(TensorGroup& group, const RingEntry& entry, const ShardShape& shape, std::size_t client) {
  if (!links_.isPaced()) return finishShard(group, entry, client);
  const MonotonicNs due = links_.reserve(
      links_.endpointOfDevice(config_.device), links_.endpointOfClient(client),
      shape.numElements * itemBytes(shape.dtype), timeOf(entry.completedAt, monotonicNow()), entry.shard);
  links_.at(due, [this, entry, client](MonotonicNs) {
    TensorGroup* pulled = groups_.find(entry.group);
    if (pulled != nullptr) finishShard(*pulled, entry, client);
  });
}

void Proxy::finishShard(TensorGroup& group, const RingEntry& entry, std::size_t client) noexcept {
  // release: the result is visible before the flag.
  std::atomic<std::uint32_t>& done = group.control().done(client, entry.shard);
  if (epochs_ == nullptr) {
    done.store(entry.step, std::memory_order_release);
  } else {
    // Nobody waits in a vacant place, so that another device may have completed a later step there.
    std::uint32_t seen = done.load(std::memory_order_relaxed);
    while (seen < entry.step && !done.compare_exchange_weak(seen, entry.step, std::memory_order_release)) {
    }
  }
  intake_.inbox(client).completeOne();
  if (config_.scheduling != Scheduling::kFcfs) return;
  // A device that takes shards one by one may wait for this shard.
  for (std::size_t device = 0; device < config_.numDevices; ++device) doorbells_[device].ring();
}

}  // namespace coarse
