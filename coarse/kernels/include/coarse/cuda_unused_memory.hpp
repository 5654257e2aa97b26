#pragma once

#include <cstddef>
#include <memory>

#include "coarse/cuda_driver.hpp"

namespace coarse::cuda {

/// Unmaps memory to which nobody refers any more, when its devices have done what they were given: kernels
/// may still use it, and the driver does not wait for them.
///
/// Nobody can wait for a device while one of its streams is captured into a graph; then the memory stays
/// mapped until this is called again, for other memory or for none. Thread safety: any.
void unmapUnused(std::unique_ptr<DeviceMemory> memory) noexcept;

/// What is still mapped.
std::size_t numUnused() noexcept;

}  // namespace coarse::cuda
