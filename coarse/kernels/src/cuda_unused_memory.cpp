#include "coarse/cuda_unused_memory.hpp"

#include <mutex>
#include <utility>
#include <vector>

namespace coarse::cuda {
namespace {

/// Never destroyed: the last memory may go when the process ends.
struct UnusedMemory {
  std::mutex mutex;  // guards what follows
  std::vector<std::unique_ptr<DeviceMemory>> mapped;
};

UnusedMemory& unusedMemory() {
  static auto* const unused = new UnusedMemory;
  return *unused;
}

}  // namespace

void unmapUnused(std::unique_ptr<DeviceMemory> memory) noexcept {
  std::vector<std::unique_ptr<DeviceMemory>> all;
  {
    const std::lock_guard<std::mutex> lock(unusedMemory().mutex);
    all.swap(unusedMemory().mapped);
  }
  if (memory != nullptr) all.push_back(std::move(memory));
  for (std::unique_ptr<DeviceMemory>& each : all) {
    if (each->settle()) continue;  // goes with `all`
    const std::lock_guard<std::mutex> lock(unusedMemory().mutex);
    unusedMemory().mapped.push_back(std::move(each));
  }
}

std::size_t numUnused() noexcept {
  const std::lock_guard<std::mutex> lock(unusedMemory().mutex);
  return unusedMemory().mapped.size();
}

}  // namespace coarse::cuda
