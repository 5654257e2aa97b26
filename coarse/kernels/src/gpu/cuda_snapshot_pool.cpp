#include "coarse/gpu/cuda_snapshot_pool.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "coarse/snapshot/snapshot.hpp"

namespace coarse {
namespace {

constexpr std::size_t kStagingBytes = std::size_t{4} << 20;

/// A lower priority than that of kernels: copies of a snapshot yield to work for which workers wait.
int readingPriority(const cuda::Context& context) { return context.priorities().first; }

void requirePools(const cuda::Context& context) {
  if (cuda::deviceAttribute(context.device(), cuda::DeviceAttribute::kMemoryPoolsSupported) == 0)
    throw cuda::Error(cuda::deviceName(context.device()) + " has no memory pools, which snapshots take");
}

}  // namespace

CudaSnapshotPool::Staging::Staging(const cuda::SharedContext& context)
    : pages(context, kStagingBytes), isThere(context) {}

CudaSnapshotPool::CudaSnapshotPool(cuda::SharedContext context, std::vector<std::size_t> blockBytes)
    : context_(std::move(context)),
      blockBytes_(std::move(blockBytes)),
      versions_(blockBytes_.size() * kMostSnapshots),
      keeping_(context_, context_->priorities().second),
      reading_(context_, readingPriority(*context_)) {
  requirePools(*context_);
}

CudaSnapshotPool::~CudaSnapshotPool() {
  try {
    const cuda::ContextScope scope(*context_);
    for (const cuda::DeviceAddress each : versions_) {
      if (each != 0) reading_.free(each);
    }
    keeping_.synchronize();
    reading_.synchronize();
  } catch (const cuda::Error&) {
    // The GPU is lost, and its memory with it.
  }
}

cuda::DeviceAddress& CudaSnapshotPool::version(std::size_t block, std::size_t place) noexcept {
  return versions_[block * kMostSnapshots + place];
}

bool CudaSnapshotPool::store(std::size_t block, std::size_t place, const std::byte* current) {
  const cuda::ContextScope scope(*context_);
  const std::lock_guard<std::mutex> lock(versionsMutex_);
  const cuda::DeviceAddress room = keeping_.allocate(blockBytes_[block]);
  if (room == 0) return false;
  keeping_.copyOnDevice(room, cuda::addressOf(current), blockBytes_[block]);
  version(block, place) = room;
  return true;
}

void CudaSnapshotPool::synchronize() {
  const cuda::ContextScope scope(*context_);
  keeping_.synchronize();
}

void CudaSnapshotPool::free(std::size_t block, std::size_t place) noexcept {
  const std::lock_guard<std::mutex> lock(versionsMutex_);
  if (version(block, place) == 0) return;
  try {
    const cuda::ContextScope scope(*context_);
    reading_.free(std::exchange(version(block, place), 0));
  } catch (const cuda::Error&) {
    // The GPU is lost, and its memory with it; the next update reports it.
  }
}

/// Synchronises a stream, because a pool returns memory to its GPU only then.
void CudaSnapshotPool::trim() noexcept {
  try {
    const cuda::ContextScope scope(*context_);
    reading_.synchronize();
  } catch (const cuda::Error&) {
    // As in free().
  }
}

bool CudaSnapshotPool::load(std::size_t block, std::size_t place, std::byte* destination) {
  return copyToHost(blockBytes_[block], destination, [&] { return version(block, place); });
}

void CudaSnapshotPool::loadCurrent(std::size_t block, const std::byte* current, std::byte* destination) {
  copyToHost(blockBytes_[block], destination, [&] { return cuda::addressOf(current); });
}

/// @param locate returns the block's current address, 0 if there is none; called for each piece, because a
/// version may be freed between two.
template <class Locate>
bool CudaSnapshotPool::copyToHost(std::size_t numBytes, std::byte* destination, Locate locate) {
  const cuda::ContextScope scope(*context_);
  const std::lock_guard<std::mutex> oneReader(readersMutex_);
  for (auto& staging : stagings_) {
    if (staging == nullptr) staging = std::make_unique<Staging>(context_);
  }
  const auto lengthAt = [&](std::size_t offset) { return std::min(kStagingBytes, numBytes - offset); };
  const auto begin = [&](std::size_t offset) {
    const std::lock_guard<std::mutex> lock(versionsMutex_);
    const cuda::DeviceAddress source = locate();
    if (source == 0) return false;
    Staging& staging = *stagings_[offset / kStagingBytes % 2];
    reading_.copyToHost(staging.pages.data(), source + offset, lengthAt(offset));
    staging.isThere.record(reading_.handle());
    return true;
  };
  bool isThere = numBytes == 0 || begin(0);
  for (std::size_t offset = 0; isThere && offset < numBytes; offset += kStagingBytes) {
    // The next piece is transferred while this one is copied out.
    const std::size_t next = offset + kStagingBytes;
    if (next < numBytes) isThere = begin(next);
    const Staging& staging = *stagings_[offset / kStagingBytes % 2];
    staging.isThere.synchronize();
    std::memcpy(destination + offset, staging.pages.data(), lengthAt(offset));
  }
  return isThere;
}

}  // namespace coarse
