// Holds a stream for as long as an emulated link would: reserve_transfer before a copy, hold_until behind it,
// one thread each. The copy itself runs meanwhile, and its time counts only if it is longer than the link's.
#include "delay.cuh"

namespace coarse::cuda {

__device__ __forceinline__ std::uint64_t globalTimer() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// A sleep is at most twice as long as asked for.
constexpr std::uint64_t kShortestSleepNs = 500;
constexpr std::uint64_t kLongestSleepNs = 500000;

__device__ __forceinline__ std::uint64_t take(std::uint64_t* takenUntil, std::uint64_t now,
                                              std::uint64_t numBytes, double nsPerByte) {
  auto* const word = reinterpret_cast<unsigned long long*>(takenUntil);
  unsigned long long seen = *static_cast<volatile unsigned long long*>(word);
  while (true) {
    const std::uint64_t end = takenUntilAfter(seen, now, numBytes, nsPerByte);
    const unsigned long long before = atomicCAS_system(word, seen, static_cast<unsigned long long>(end));
    if (before == seen) return end;
    seen = before;
  }
}

}  // namespace coarse::cuda

/// Takes a transfer's time in all buckets of its path; `due` gets when it arrives.
extern "C" __global__ void reserve_transfer(const __grid_constant__ coarse::cuda::DelayPath path,
                                            std::uint64_t numBytes, std::uint64_t* due) {
  const std::uint64_t now = coarse::cuda::globalTimer();
  std::uint64_t end = now;
  for (std::uint32_t i = 0; i < path.numBuckets; ++i)
    end = max(end, coarse::cuda::take(path.takenUntil[i], now, numBytes, path.nsPerByte[i]));
  *due = end + static_cast<std::uint64_t>(path.latencyNs + 0.5);
}

/// Returns when `due` has come.
extern "C" __global__ void hold_until(const std::uint64_t* due) {
  const std::uint64_t end = *due;
  for (std::uint64_t now = coarse::cuda::globalTimer(); now < end; now = coarse::cuda::globalTimer()) {
    const std::uint64_t half = (end - now) / 2;
    if (half > coarse::cuda::kShortestSleepNs)
      __nanosleep(static_cast<unsigned>(min(half, coarse::cuda::kLongestSleepNs)));
  }
}
