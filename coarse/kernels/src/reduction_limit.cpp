#include "coarse/reduction_limit.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <thread>

#include "coarse/layout.hpp"
#include "coarse/reduce.hpp"
#include "coarse/shared_memory.hpp"
#include "coarse/waiting.hpp"

namespace coarse {
namespace {

/// A barrier that yields: threads may outnumber cores.
class Barrier {
 public:
  explicit Barrier(std::size_t numThreads) : numThreads_(numThreads) {}
  void wait() noexcept {
    const std::size_t generation = generation_.load(std::memory_order_acquire);
    if (numArrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == numThreads_) {
      numArrived_.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);
      return;
    }
    YieldingSpin spin(std::chrono::hours(1));
    while (generation_.load(std::memory_order_acquire) == generation) spin.yield();
  }

 private:
  std::size_t numThreads_;
  std::atomic<std::size_t> numArrived_{0};
  std::atomic<std::size_t> generation_{0};
};

struct Buffers {
  Buffers(std::size_t numWorkers, std::size_t numBytes) {
    for (std::size_t worker = 0; worker < numWorkers; ++worker) {
      const int fd = createSealedMemory("reduction limit", numBytes);
      mappings.emplace_back(fd, numBytes, Mapping::Access::kReadWrite);
      ::close(fd);
      auto* values = reinterpret_cast<float*>(mappings.back().data());
      std::fill(values, values + numBytes / sizeof(float), static_cast<float>(worker + 1));
    }
  }
  std::vector<Mapping> mappings;
};

void reduceSlice(const Buffers& buffers, std::size_t worker, std::size_t numElements) {
  const std::size_t numWorkers = buffers.mappings.size();
  const std::size_t begin = numElements * worker / numWorkers;
  const std::size_t end = numElements * (worker + 1) / numWorkers;
  std::vector<void*> slices;
  for (const Mapping& mapping : buffers.mappings) slices.push_back(mapping.data() + begin * sizeof(float));
  const std::vector<const void*> inputs(slices.begin(), slices.end());
  reduce(DType::kFloat32, ReduceOp::kMean, inputs.data(), numWorkers, slices.data(), numWorkers, end - begin,
         static_cast<std::uint32_t>(numWorkers));
}

void verify(const Buffers& buffers) {
  const float expected = static_cast<float>(buffers.mappings.size() + 1) / 2;
  for (const Mapping& mapping : buffers.mappings) {
    const auto* values = reinterpret_cast<const float*>(mapping.data());
    const bool isRight = std::all_of(values, values + mapping.numBytes() / sizeof(float),
                                     [expected](float value) { return value == expected; });
    if (!isRight) throw std::runtime_error("the reduction behind the limit gave a wrong number");
  }
}

}  // namespace

std::vector<double> measureReductionLimit(std::size_t numWorkers, std::size_t numBytes,
                                          std::size_t numIterations) {
  const std::size_t numElements = numBytes / sizeof(float);
  const Buffers buffers(numWorkers, numElements * sizeof(float));
  Barrier barrier(numWorkers);
  std::vector<double> seconds(numIterations);
  const auto work = [&](std::size_t worker) {
    // The first round is for verification: means of means stay what they are.
    for (std::size_t iteration = 0; iteration <= numIterations; ++iteration) {
      barrier.wait();
      const auto start = Clock::now();
      reduceSlice(buffers, worker, numElements);
      barrier.wait();
      if (worker == 0 && iteration > 0) {
        seconds[iteration - 1] = std::chrono::duration<double>(Clock::now() - start).count();
      }
    }
  };
  std::vector<std::thread> threads;
  for (std::size_t worker = 1; worker < numWorkers; ++worker) threads.emplace_back(work, worker);
  work(0);
  for (std::thread& thread : threads) thread.join();
  verify(buffers);
  return seconds;
}

}  // namespace coarse
