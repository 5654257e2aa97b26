// What a descriptor costs, next to a trigger that needs none: an atomic addition to a counter with a
// threshold.
//
// Build: g++ -std=c++17 -O3 -pthread -Icoarse/kernels/include benchmarks/descriptor_queue.cpp
//            coarse/kernels/src/shared_memory/descriptor_queue.cpp -o descriptor_queue
//
// The first two cases keep everything in one core's cache; the others hand over between two threads, of which
// one needs a core of its own. Each case is verified. All figures are measured: the least and the median of
// 20 repetitions.

#include "coarse/shared_memory/descriptor_queue.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRepetitions = 20;
constexpr std::uint32_t kMessages = 20000;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "descriptor_queue: %s\n", what);
  std::exit(1);
}

double nanosecondsEach(const std::function<void()>& run) {
  const auto began = Clock::now();
  run();
  return std::chrono::duration<double, std::nano>(Clock::now() - began).count() / kMessages;
}

void report(const char* what, const std::function<void()>& run) {
  std::vector<double> times;
  for (int repetition = 0; repetition < kRepetitions; ++repetition) times.push_back(nanosecondsEach(run));
  std::sort(times.begin(), times.end());
  std::printf("%-44s %8.1f ns at least, %8.1f ns p50\n", what, times.front(), times[times.size() / 2]);
}

/// A queue with both of its ends.
struct Queue {
  std::unique_ptr<coarse::DescriptorQueue> memory = std::make_unique<coarse::DescriptorQueue>();
  coarse::DescriptorProducer producer{*memory};
  coarse::DescriptorConsumer consumer{*memory};
};

std::uint32_t popWaiting(coarse::DescriptorConsumer& consumer) {
  coarse::Descriptor descriptor;
  while (!consumer.pop(descriptor)) {
  }
  return descriptor.shard;
}

void pushAndPop() {
  Queue queue;
  for (std::uint32_t shard = 0; shard < kMessages; ++shard) {
    require(queue.producer.push({0, shard}), "the queue is full");
    require(popWaiting(queue.consumer) == shard, "another descriptor came out");
  }
}

void triggerAlone() {
  constexpr std::uint32_t kThreshold = 4;
  std::atomic<std::uint32_t> counter{0};
  std::uint32_t numFired = 0;
  for (std::uint32_t trigger = 0; trigger < kMessages; ++trigger) {
    if (counter.fetch_add(1, std::memory_order_acq_rel) + 1 < kThreshold) continue;
    counter.store(0, std::memory_order_relaxed);
    ++numFired;
  }
  require(numFired == kMessages / kThreshold, "an operation fired too often, or not at all");
}

/// Descriptors there and back: half of a round is one hand-over.
void descriptorRounds() {
  Queue there, back;
  std::thread device([&] {
    for (std::uint32_t round = 0; round < kMessages / 2; ++round)
      back.producer.push({0, popWaiting(there.consumer)});
  });
  for (std::uint32_t round = 0; round < kMessages / 2; ++round) {
    there.producer.push({0, round});
    require(popWaiting(back.consumer) == round, "another descriptor came back");
  }
  device.join();
}

/// Triggers there and back: each side fires when its counter reaches the round's threshold.
void triggerRounds() {
  struct alignas(64) Counter {
    std::atomic<std::uint32_t> value{0};
  };
  std::array<Counter, 2> counters;
  const auto await = [](const Counter& counter, std::uint32_t threshold) {
    while (counter.value.load(std::memory_order_acquire) < threshold) {
    }
  };
  std::thread device([&] {
    for (std::uint32_t round = 1; round <= kMessages / 2; ++round) {
      await(counters[0], round);
      counters[1].value.fetch_add(1, std::memory_order_acq_rel);
    }
  });
  for (std::uint32_t round = 1; round <= kMessages / 2; ++round) {
    counters[0].value.fetch_add(1, std::memory_order_acq_rel);
    await(counters[1], round);
  }
  device.join();
  require(counters[1].value == kMessages / 2, "a trigger was lost");
}

}  // namespace

int main() {
  report("descriptor, push and pop on one core", pushAndPop);
  report("trigger, on one core", triggerAlone);
  report("descriptor, from one core to another", descriptorRounds);
  report("trigger, from one core to another", triggerRounds);
}
