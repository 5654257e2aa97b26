#include "coarse/reduce/reduction_limit.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <thread>

#include "coarse/reduce/reduce.hpp"
#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/shared_memory.hpp"
#include "coarse/shared_memory/waiting.hpp"

namespace coarse {
namespace {

/// A barrier that spins if every thread has a processor, and yields if they share processors.
class Barrier {
 public:
  explicit Barrier(std::size_t numThreads)
      : numThreads_(numThreads), mustYield_(numThreads > std::thread::hardware_concurrency()) {}
  void wait() noexcept {
    const std::size_t generation = generation_.load(std::memory_order_acquire);
    if (numArrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == numThreads_) {
      numArrived_.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);
      return;
    }
    YieldingSpin spin(std::chrono::hours(1));
    while (generation_.load(std::memory_order_acquire) == generation) {
      if (mustYield_) spin.yield();
    }
  }

 private:
  std::size_t numThreads_;
  bool mustYield_;
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

constexpr std::size_t kMostPieceElements = (256 << 10) / sizeof(float);

void reducePiece(const Buffers& buffers, std::size_t begin, std::size_t end) {
  const std::size_t numWorkers = buffers.mappings.size();
  std::vector<void*> pieces;
  for (const Mapping& mapping : buffers.mappings) pieces.push_back(mapping.data() + begin * sizeof(float));
  const std::vector<const void*> inputs(pieces.begin(), pieces.end());
  reduce(DType::kFloat32, ReduceOp::kMean, inputs.data(), numWorkers, pieces.data(), numWorkers, end - begin,
         static_cast<std::uint32_t>(numWorkers));
}

/// Takes pieces until none is left, as sync cores take shards.
void reduceShare(const Buffers& buffers, std::atomic<std::size_t>& next, std::size_t numElements,
                 std::size_t numThreads) {
  const std::size_t piece = std::min(kMostPieceElements, numElements / numThreads + 1);
  while (true) {
    const std::size_t begin = next.fetch_add(piece, std::memory_order_relaxed);
    if (begin >= numElements) return;
    reducePiece(buffers, begin, std::min(begin + piece, numElements));
  }
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
                                          std::size_t numIterations, std::size_t numThreads) {
  if (numThreads == 0) throw std::invalid_argument("a reduction needs a thread");
  const std::size_t numElements = numBytes / sizeof(float);
  const Buffers buffers(numWorkers, numElements * sizeof(float));
  Barrier barrier(numThreads);
  std::atomic<std::size_t> next{0};
  std::vector<double> seconds(numIterations);
  const auto work = [&](std::size_t thread) {
    auto previous = Clock::now();
    // The first round warms up; means of means do not change.
    for (std::size_t iteration = 0; iteration <= numIterations; ++iteration) {
      if (thread == 0) next.store(0, std::memory_order_relaxed);
      barrier.wait();
      reduceShare(buffers, next, numElements, numThreads);
      barrier.wait();
      if (thread != 0) continue;
      const auto now = Clock::now();
      if (iteration > 0) seconds[iteration - 1] = std::chrono::duration<double>(now - previous).count();
      previous = now;
    }
  };
  std::vector<std::thread> threads;
  for (std::size_t thread = 1; thread < numThreads; ++thread) threads.emplace_back(work, thread);
  work(0);
  for (std::thread& thread : threads) thread.join();
  verify(buffers);
  return seconds;
}

}  // namespace coarse
