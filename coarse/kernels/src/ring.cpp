#include "coarse/ring.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "coarse/reduce.hpp"

namespace coarse {
namespace {

bool isHalf(DType dtype) noexcept { return dtype == DType::kBFloat16 || dtype == DType::kFloat16; }

/// Bytes of one element on its way around the ring.
std::size_t accumulatorBytes(DType dtype) noexcept {
  return isHalf(dtype) ? sizeof(float) : itemBytes(dtype);
}

/// Partial results are sums; only the last device of a chunk turns them into means.
ReduceOp partialOp(ReduceOp op) noexcept { return op == ReduceOp::kMean ? ReduceOp::kSum : op; }

}  // namespace

RingCore::RingCore(RingLinks links, std::vector<std::size_t> localClients, FindGroup findGroup,
                   ShardDone shardDone)
    : links_(links),
      localClients_(std::move(localClients)),
      findGroup_(std::move(findGroup)),
      shardDone_(std::move(shardDone)),
      scratch_(kRingEntryBytes / sizeof(float)) {}

bool RingCore::advance() {
  if (group_ == nullptr && !start()) return false;
  const std::size_t last = 2 * links_.numDevices - 2;
  if (iteration_ > 0 && !canReceive()) return false;
  if (iteration_ < last && !canSend()) return false;
  iterate();
  if (iteration_++ < last) return true;
  iteration_ = 0;
  chunkStart_ += elementsPerEntry_ * static_cast<std::uint32_t>(links_.numDevices);
  if (chunkStart_ >= shape_.numElements) finish();
  return true;
}

bool RingCore::start() {
  if (!readRing(*links_.log, logPosition_, entry_)) return false;
  TensorGroup* group = findGroup_(entry_.group);
  if (group == nullptr) return false;  // announced by a peer before our own control thread has mapped it
  ++logPosition_;
  group_ = group;
  shape_ = group->shape(entry_.shard);
  divisor_ = group->divisor(entry_.shard);
  const Shard& shard = group->plan().shards[entry_.shard];
  localInputs_.clear();
  outputs_.clear();
  for (const std::size_t client : localClients_) {
    outputs_.push_back(group->slot(client, shard));
    if (group->isPresent(entry_.shard, client)) localInputs_.push_back(outputs_.back());
  }
  const auto numDevices = static_cast<std::uint32_t>(links_.numDevices);
  const auto most = static_cast<std::uint32_t>(kRingEntryBytes / accumulatorBytes(shape_.dtype));
  elementsPerEntry_ = std::clamp((shape_.numElements + numDevices - 1) / numDevices, 1U, most);
  chunkStart_ = 0;
  iteration_ = 0;
  return true;
}

void RingCore::finish() {
  TensorGroup& group = *std::exchange(group_, nullptr);
  shardDone_(group, entry_, shape_);
}

void RingCore::iterate() {
  const std::size_t p = links_.numDevices;
  const std::size_t entry = (links_.position + 2 * p - iteration_) % p;
  if (iteration_ == 0) {
    sendLocal(entry, outgoing());
    published();
  } else if (iteration_ < p) {
    RingMessage& out = outgoing();
    receiveAndReduce(entry, out);
    if (iteration_ == p - 1) writeResult(entry, out);
    published();
    consumed();
  } else {
    writeResult(entry, received());
    if (iteration_ < 2 * p - 2) {
      std::memcpy(outgoing().payload.data(), received().payload.data(),
                  entryElements(entry) * accumulatorBytes(shape_.dtype));
      outgoing().isEmpty = received().isEmpty;
      published();
    }
    consumed();
  }
}

void RingCore::sendLocal(std::size_t entry, RingMessage& out) {
  const std::size_t offset = entryStart(entry) * itemBytes(shape_.dtype);
  const std::size_t numElements = entryElements(entry);
  out.isEmpty = localInputs_.empty() ? 1 : 0;
  if (localInputs_.empty()) return;
  if (isHalf(shape_.dtype)) {
    auto* sum = reinterpret_cast<float*>(out.payload.data());
    widen(shape_.dtype, localInputs_[0] + offset, sum, numElements);
    for (std::size_t i = 1; i < localInputs_.size(); ++i) {
      widen(shape_.dtype, localInputs_[i] + offset, scratch_.data(), numElements);
      reduceInto(DType::kFloat32, partialOp(shape_.op), sum, scratch_.data(), numElements);
    }
    return;
  }
  std::memcpy(out.payload.data(), localInputs_[0] + offset, numElements * itemBytes(shape_.dtype));
  for (std::size_t i = 1; i < localInputs_.size(); ++i) {
    reduceInto(shape_.dtype, partialOp(shape_.op), out.payload.data(), localInputs_[i] + offset, numElements);
  }
}

void RingCore::receiveAndReduce(std::size_t entry, RingMessage& out) {
  const RingMessage& in = received();
  if (in.isEmpty != 0) {
    sendLocal(entry, out);
    return;
  }
  const std::size_t offset = entryStart(entry) * itemBytes(shape_.dtype);
  const std::size_t numElements = entryElements(entry);
  out.isEmpty = 0;
  if (localInputs_.size() == 1 && !isHalf(shape_.dtype)) {
    const void* inputs[] = {in.payload.data(), localInputs_[0] + offset};
    void* outputs[] = {out.payload.data()};
    reduce(shape_.dtype, partialOp(shape_.op), inputs, 2, outputs, 1, numElements, 1);
    return;
  }
  std::memcpy(out.payload.data(), in.payload.data(), numElements * accumulatorBytes(shape_.dtype));
  for (std::byte* local : localInputs_) {
    if (isHalf(shape_.dtype)) {
      widen(shape_.dtype, local + offset, scratch_.data(), numElements);
      reduceInto(DType::kFloat32, partialOp(shape_.op), out.payload.data(), scratch_.data(), numElements);
    } else {
      reduceInto(shape_.dtype, partialOp(shape_.op), out.payload.data(), local + offset, numElements);
    }
  }
}

void RingCore::writeResult(std::size_t entry, const RingMessage& result) {
  if (result.isEmpty != 0 || outputs_.empty()) return;
  const std::size_t offset = entryStart(entry) * itemBytes(shape_.dtype);
  const std::size_t numElements = entryElements(entry);
  if (isHalf(shape_.dtype)) {
    const auto* sum = reinterpret_cast<const float*>(result.payload.data());
    for (std::byte* output : outputs_)
      narrow(shape_.dtype, sum, output + offset, numElements, divisor_, shape_.op);
    return;
  }
  const void* inputs[] = {result.payload.data()};
  for (std::byte* output : outputs_) {
    void* outputs[] = {output + offset};
    reduce(shape_.dtype, shape_.op, inputs, 1, outputs, 1, numElements, divisor_);
  }
}

bool RingCore::canReceive() const noexcept {
  return links_.own->sent.load(std::memory_order_acquire) > numReceived_;
}

bool RingCore::canSend() const noexcept {
  return numSent_ - links_.next->consumed.load(std::memory_order_acquire) < kRingDepth;
}

RingMessage& RingCore::received() const noexcept { return links_.own->messages[numReceived_ % kRingDepth]; }
RingMessage& RingCore::outgoing() const noexcept { return links_.next->messages[numSent_ % kRingDepth]; }

void RingCore::published() noexcept {
  links_.next->sent.store(++numSent_, std::memory_order_release);
  links_.nextDoorbell->ring();
}

void RingCore::consumed() noexcept {
  links_.own->consumed.store(++numReceived_, std::memory_order_release);
  links_.previousDoorbell->ring();
}

std::uint32_t RingCore::entryStart(std::size_t entry) const noexcept {
  return std::min(chunkStart_ + static_cast<std::uint32_t>(entry) * elementsPerEntry_, shape_.numElements);
}

std::uint32_t RingCore::entryElements(std::size_t entry) const noexcept {
  return std::min(entryStart(entry) + elementsPerEntry_, shape_.numElements) - entryStart(entry);
}

}  // namespace coarse
