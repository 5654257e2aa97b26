#pragma once

#include <cstddef>
#include <memory>

#include "coarse/gpu/cuda_driver.hpp"

/// Memory without references that kernels may still use: the driver unmaps without waiting for them. The code
/// that drops the last reference cannot wait, because it may run anywhere at any time: in a garbage collector
/// while a stream is captured into a graph, for example, where waiting would invalidate the capture. Thread
/// safety: any.
namespace coarse::cuda {

/// Keeps memory mapped until unmapUnused() is called.
void leaveUnused(std::unique_ptr<DeviceMemory> memory);

/// Unmaps this memory when the work of its devices is done; or nothing, while one of their streams is
/// captured. @pre the caller's thread captures none.
void unmapUnused() noexcept;

/// Number of memories still mapped.
std::size_t numUnused() noexcept;

}  // namespace coarse::cuda
