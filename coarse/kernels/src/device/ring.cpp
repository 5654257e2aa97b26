#include "coarse/device/ring.hpp"

#include <algorithm>
#include <utility>

namespace coarse {
namespace {

// Entries begin at whole cache lines of any dtype, as kernels that move vectors require.
constexpr std::size_t kEntryUnit = kCacheLineBytes;

}  // namespace

RingCore::RingCore(RingLinks links, DeviceLinks& deviceLinks, std::unique_ptr<RingCompute> compute,
                   std::vector<std::size_t> localClients, FindGroup findGroup, ShardDone shardDone)
    : links_(links),
      deviceLinks_(deviceLinks),
      compute_(std::move(compute)),
      localClients_(std::move(localClients)),
      findGroup_(std::move(findGroup)),
      shardDone_(std::move(shardDone)) {}

bool RingCore::advance() {
  if (compute_->isBusy()) return compute_->advance();
  if (group_ == nullptr && !start()) return false;
  if (receives() && !hasMessage()) return false;
  if (sends() && !canSend()) return false;
  beginIteration();
  return true;
}

bool RingCore::start() {
  if (!readRing(*links_.log, logPosition_, entry_)) return false;
  TensorGroup* group = findGroup_(entry_.group);
  if (group == nullptr) return false;  // announced by a peer before our own control thread has mapped it
  ++logPosition_;
  if (deviceLinks_.isPaced()) clock_ = std::max(clock_, timeOf(entry_.completedAt, monotonicNow()));
  group_ = group;
  shape_ = group->shape(entry_.shard);
  const Shard& shard = group->plan().shards[entry_.shard];
  localInputs_.clear();
  outputs_.clear();
  for (const std::size_t client : localClients_) {
    outputs_.push_back(group->slot(client, shard));
    if (group->isPresent(entry_.shard, client)) localInputs_.push_back(outputs_.back());
  }
  step_.dtype = shape_.dtype;
  step_.op = shape_.op;
  step_.divisor = group->divisor(entry_.shard);
  const std::size_t share = (shape_.numElements + links_.numDevices - 1) / links_.numDevices;
  elementsPerEntry_ = std::min(std::max(roundUp(share, kEntryUnit), kEntryUnit),
                               links_.messageBytes / accumulatorBytes(shape_.dtype));
  chunkStart_ = 0;
  iteration_ = 0;
  return true;
}

void RingCore::finish() {
  TensorGroup& group = *std::exchange(group_, nullptr);
  entry_.completedAt = stampOf(clock_);
  shardDone_(group, entry_, shape_);
}

/// In iteration i, entry (position - i) passes this device: in p - 1 iterations it grows by addition, then it
/// is complete.
void RingCore::beginIteration() {
  const std::size_t p = links_.numDevices;
  if (sends()) clock_ = std::max(clock_, links_.next->freeAt[numSent_ % kRingDepth]);
  if (describe((links_.position + 2 * p - iteration_) % p)) {
    compute_->begin(step_, [this] { endIteration(); });
  } else {
    endIteration();
  }
}

/// Determines the work on an entry. @returns whether there is any.
bool RingCore::describe(std::size_t entry) {
  const std::size_t received = numReceived_ % kRingDepth, sent = numSent_ % kRingDepth;
  const bool hasReceived = receives() && links_.own->isEmpty[received] == 0;
  step_.received = hasReceived ? links_.ownMessages + received * links_.messageBytes : nullptr;
  step_.sent = sends() ? links_.nextMessages + sent * links_.messageBytes : nullptr;
  step_.numElements = entryElements(entry);
  step_.inputs.clear();
  step_.outputs.clear();
  const std::size_t offset = entryStart(entry) * itemBytes(shape_.dtype);
  if (iteration_ < links_.numDevices) {
    for (const std::byte* input : localInputs_) step_.inputs.push_back(input + offset);
  }
  if (iteration_ + 1 >= links_.numDevices) {
    for (std::byte* output : outputs_) step_.outputs.push_back(output + offset);
  }
  const bool isEmpty = !hasReceived && step_.inputs.empty();
  if (sends()) links_.next->isEmpty[sent] = isEmpty ? 1 : 0;
  return !isEmpty && step_.numElements > 0;
}

void RingCore::endIteration() {
  if (sends()) send();
  if (receives()) handBack();
  if (++iteration_ <= 2 * links_.numDevices - 2) return;
  iteration_ = 0;
  chunkStart_ += elementsPerEntry_ * links_.numDevices;
  if (chunkStart_ >= shape_.numElements) finish();
}

/// Hands the message that this iteration has written to the next device.
void RingCore::send() {
  const std::size_t message = numSent_ % kRingDepth;
  const std::size_t numBytes =
      links_.next->isEmpty[message] != 0 ? 0 : step_.numElements * accumulatorBytes(step_.dtype);
  links_.next->arrivesAt[message] =
      deviceLinks_.reserve(deviceLinks_.endpointOfDevice(links_.device),
                           deviceLinks_.endpointOfDevice(links_.nextDevice), numBytes, clock_, entry_.shard);
  links_.next->sent.store(++numSent_, std::memory_order_release);
  links_.nextDoorbell->ring();
}

/// Gives the place of the message that this iteration has read back to the previous device.
void RingCore::handBack() {
  isAwaiting_ = false;
  links_.own->freeAt[numReceived_ % kRingDepth] = clock_;
  links_.own->consumed.store(++numReceived_, std::memory_order_release);
  links_.previousDoorbell->ring();
}

/// Whether the next message is there, written and carried by the links.
bool RingCore::hasMessage() {
  if (isAwaiting_) return hasArrived_;
  if (links_.own->sent.load(std::memory_order_acquire) <= numReceived_) return false;
  isAwaiting_ = true;
  hasArrived_ = false;
  deviceLinks_.at(links_.own->arrivesAt[numReceived_ % kRingDepth], [this](MonotonicNs arrivedAt) {
    clock_ = std::max(clock_, arrivedAt);
    hasArrived_ = true;
  });
  return hasArrived_;
}

bool RingCore::canSend() const noexcept {
  return numSent_ - links_.next->consumed.load(std::memory_order_acquire) < kRingDepth;
}

std::size_t RingCore::entryStart(std::size_t entry) const noexcept {
  return std::min<std::size_t>(chunkStart_ + entry * elementsPerEntry_, shape_.numElements);
}

std::size_t RingCore::entryElements(std::size_t entry) const noexcept {
  return std::min<std::size_t>(entryStart(entry) + elementsPerEntry_, shape_.numElements) - entryStart(entry);
}

}  // namespace coarse
