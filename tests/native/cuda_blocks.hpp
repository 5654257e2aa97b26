// Runs a kernel's source as it stands on the host: a thread for each thread of a block, blocks one after the
// other. The thread sanitizer then sees what threads of a block do to each other's data between two barriers.
#pragma once

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "platform.cuh"

#define __global__
#define __device__
#define __shared__ static
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

namespace coarse::cuda {

using std::isfinite;
using std::min;

struct Index {
  unsigned x = 0;
};
inline thread_local Index threadIdx, blockIdx, gridDim;

/// All threads of the one block that runs at a time.
class BlockBarrier {
 public:
  /// @returns whether any thread came with `isTrue`.
  bool wait(bool isTrue) {
    std::unique_lock<std::mutex> lock(mutex_);
    any_ = any_ || isTrue;
    const unsigned round = round_;
    if (++numWaiting_ == kThreads) {
      result_ = any_;
      any_ = false;
      numWaiting_ = 0;
      ++round_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return round_ != round; });
    return result_;
  }

 private:
  std::mutex mutex_;  // guards the rest
  std::condition_variable changed_;
  unsigned numWaiting_ = 0;
  unsigned round_ = 0;
  bool any_ = false;
  bool result_ = false;  // stays until all have come again, so all have read it
};
inline BlockBarrier blockBarrier;

inline void __syncthreads() { blockBarrier.wait(false); }
inline int __syncthreads_or(int isTrue) { return blockBarrier.wait(isTrue != 0) ? 1 : 0; }
inline void __threadfence() {}  // blocks run one after the other

template <class T>
T __ldcg(const T* address) {
  return *address;
}

inline unsigned atomicAdd(unsigned* address, unsigned value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

inline void atomicMin(unsigned* address, unsigned value) {
  unsigned seen = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (value < seen &&
         !__atomic_compare_exchange_n(address, &seen, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

template <class Batch>
void launch(void (*kernel)(Batch), unsigned numBlocks, const Batch& batch) {
  for (unsigned block = 0; block < numBlocks; ++block) {
    std::vector<std::thread> threads;
    for (unsigned thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        threadIdx.x = thread;
        blockIdx.x = block;
        gridDim.x = numBlocks;
        kernel(batch);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace coarse::cuda
