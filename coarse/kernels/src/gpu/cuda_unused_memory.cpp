#include "coarse/gpu/cuda_unused_memory.hpp"

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

namespace coarse::cuda {
namespace {

/// Never destroyed: the last memory may be released when the process ends.
struct UnusedMemory {
  std::atomic<std::size_t> count{0};
  std::mutex mutex;  // guards the next member
  std::vector<std::unique_ptr<DeviceMemory>> mapped;
};

UnusedMemory& unusedMemory() {
  static auto* const unused = new UnusedMemory;
  return *unused;
}

}  // namespace

void leaveUnused(std::unique_ptr<DeviceMemory> memory) {
  UnusedMemory& unused = unusedMemory();
  const std::lock_guard<std::mutex> lock(unused.mutex);
  unused.mapped.push_back(std::move(memory));
  unused.count = unused.mapped.size();
}

void unmapUnused() noexcept {
  UnusedMemory& unused = unusedMemory();
  if (unused.count == 0) return;
  std::vector<std::unique_ptr<DeviceMemory>> all;
  {
    const std::lock_guard<std::mutex> lock(unused.mutex);
    all.swap(unused.mapped);
    unused.count = 0;
  }
  for (std::unique_ptr<DeviceMemory>& each : all) {
    if (!each->trySynchronize()) leaveUnused(std::move(each));  // else it goes with `all`
  }
}

std::size_t numUnused() noexcept { return unusedMemory().count; }

}  // namespace coarse::cuda
