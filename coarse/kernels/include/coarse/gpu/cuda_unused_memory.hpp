#pragma once

#include <cstddef>
#include <memory>

#include "coarse/gpu/cuda_driver.hpp"

/// Memory to which nobody refers any more, while kernels may still use it: the driver unmaps without waiting
/// for them. Whoever drops the last reference cannot wait, for it may be anybody at any time: a garbage
/// collector while a stream is captured into a graph, which waiting would spoil. Thread safety: any.
namespace coarse::cuda {

/// Keeps memory mapped until unmapUnused() is called.
void leaveUnused(std::unique_ptr<DeviceMemory> memory);

/// Unmaps what was left, when its devices have done what they were given; or nothing, while one of their
/// streams is captured. @pre the caller's thread captures none.
void unmapUnused() noexcept;

/// What is still mapped.
std::size_t numUnused() noexcept;

}  // namespace coarse::cuda
