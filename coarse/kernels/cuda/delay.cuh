// When an emulated link has delivered a transfer: the buckets of docs/design/emulation.md, in a GPU's time.
#pragma once

#include "platform.cuh"

namespace coarse::cuda {

inline constexpr unsigned kMostBucketsPerPath = 8;

/// The way of one transfer. Times are nanoseconds of the GPU's global timer, dilated.
struct DelayPath {
  std::uint64_t* takenUntil[kMostBucketsPerPath];  // one word per bucket, in memory of the GPU, 0 at first
  double nsPerByte[kMostBucketsPerPath];
  double latencyNs;
  std::uint32_t numBuckets;
  std::uint32_t padding;
};
static_assert(sizeof(DelayPath) == 144, "a wire format");

/// Until when a bucket is taken if a transfer that was asked for at `now` takes it too.
COARSE_DEVICE std::uint64_t takenUntilAfter(std::uint64_t takenUntil, std::uint64_t now,
                                            std::uint64_t numBytes, double nsPerByte) {
  const std::uint64_t start = takenUntil > now ? takenUntil : now;
  return start + static_cast<std::uint64_t>(static_cast<double>(numBytes) * nsPerByte + 0.5);
}

}  // namespace coarse::cuda
