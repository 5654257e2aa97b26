// Makes later work of its stream wait until an emulated link has delivered its input. One thread.
#include "delay.cuh"

namespace coarse::cuda {

__device__ __forceinline__ std::uint64_t globalTimer() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// A sleep takes at most twice the requested time.
constexpr std::uint64_t kShortestSleepNs = 500;

/// Does nothing before Volta, whose threads cannot sleep.
__device__ __forceinline__ void sleepFor([[maybe_unused]] unsigned ns) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 700
  __nanosleep(ns);
#endif
}

}  // namespace coarse::cuda

extern "C" __global__ void hold_until(const COARSE_GRID_CONSTANT coarse::cuda::Hold hold) {
  std::uint64_t now = coarse::cuda::globalTimer();
  *hold.startedAt = now;
  const std::uint64_t end = coarse::cuda::endOf(hold, now);
  for (; now < end; now = coarse::cuda::globalTimer()) {
    const std::uint64_t half = (end - now) / 2;
    if (half > coarse::cuda::kShortestSleepNs) coarse::cuda::sleepFor(static_cast<unsigned>(half));
  }
}
