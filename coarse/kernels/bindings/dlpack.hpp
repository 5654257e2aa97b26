#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>

#include "coarse/gpu/cuda_driver.hpp"

namespace coarse {

/// A piece of device memory for frameworks that accept DLPack capsules: bytes on the GPU of its context,
/// whichever GPU holds them. It stays mapped until the capsule, or the tensor made of it, is gone.
pybind11::capsule dlpackCapsule(std::shared_ptr<const cuda::DeviceMemory> memory, std::size_t start,
                                std::size_t numBytes);

}  // namespace coarse
