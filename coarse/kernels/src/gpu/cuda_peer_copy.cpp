#include "coarse/gpu/cuda_peer_copy.hpp"

#include <string>
#include <utility>

#include "coarse/gpu/cuda_pinned_pages.hpp"

namespace coarse {

NearCopies::NearCopies(cuda::Stream& stream, std::shared_ptr<const DistantMemory> distant)
    : stream_(stream), distant_(std::move(distant)) {}

const void* NearCopies::toRead(const void* address, std::size_t numBytes) {
  Copy* const copy = find(address, numBytes);
  if (copy == nullptr) return address;
  if (!std::exchange(copy->isBrought, true))
    stream_.copyFrom(*copy->owner, copy->address, cuda::addressOf(address), numBytes);
  return cuda::pointerTo(copy->address);
}

void* NearCopies::toWrite(void* address, std::size_t numBytes) {
  Copy* const copy = find(address, numBytes);
  if (copy == nullptr) return address;
  copy->isWritten = true;
  return cuda::pointerTo(copy->address);
}

void NearCopies::sendBack() {
  for (const auto& [address, copy] : copies_) {
    if (copy.isWritten) stream_.copyTo(*copy.owner, cuda::addressOf(address), copy.address, copy.numBytes);
    stream_.free(copy.address);
  }
  copies_.clear();
  numBytes_ = 0;
}

NearCopies::Copy* NearCopies::find(const void* address, std::size_t numBytes) {
  if (distant_->isEmpty()) return nullptr;
  if (const auto found = copies_.find(address); found != copies_.end()) return &found->second;
  std::optional<cuda::SharedContext> owner = distant_->find(address);
  if (!owner) return nullptr;
  Copy copy;
  copy.owner = std::move(*owner);
  copy.numBytes = numBytes;
  copy.address = stream_.allocate(numBytes);
  if (copy.address == 0) {
    const cuda::MemoryInfo memory = stream_.context()->memoryInfo();
    throw cuda::OutOfMemoryError(
        "cuda:" + std::to_string(stream_.context()->device()) + " needs " + std::to_string(numBytes >> 10) +
        " KiB for copies of memory of cuda:" + std::to_string(copy.owner->device()) +
        ", which it cannot reach; " + std::to_string(memory.freeBytes >> 10) + " of its " +
        std::to_string(memory.totalBytes >> 10) +
        " KiB are free. Use fewer workers, or memory devices on GPUs that reach each other "
        "(coarse profile --gpus)");
  }
  numBytes_ += numBytes;
  return &copies_.emplace(address, std::move(copy)).first->second;
}

}  // namespace coarse
