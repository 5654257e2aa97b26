#pragma once

#include <cstdint>

#include "coarse/gpu/cuda_driver.hpp"

namespace coarse::cuda {

/// Maximum useful number of blocks for the kernels of batches.cuh: several times those that run at once, so
/// that multiprocessors which finish early take more of them.
std::uint32_t mostBlocks(const Context& context);

/// Launches a kernel on a batch of `numTiles`. @pre the stream's context is current.
void launchBatch(FunctionHandle kernel, std::uint32_t numTiles, std::uint32_t mostBlocks, StreamHandle stream,
                 void* batch);

}  // namespace coarse::cuda
