#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>

#include "coarse/gpu/cuda_driver.hpp"

namespace coarse {

/// A piece of device memory for frameworks that take DLPack capsules: bytes on the GPU of its context,
/// whichever one they lie on. It stays mapped until the capsule, or the tensor that is made of it, is gone.
pybind11::capsule dlpackCapsule(std::shared_ptr<const cuda::DeviceMemory> memory, std::size_t start,
                                std::size_t numBytes);

}  // namespace coarse
