#pragma once

#include <cstdint>

#include "coarse/gpu/cuda_driver.hpp"

namespace coarse::cuda {

/// Blocks of the kernels of batches.cuh that are worth their launch: several times those that run at once, so
/// that multiprocessors which are done early take more of them.
std::uint32_t mostBlocks(const Context& context);

/// Has a kernel take a batch of `numTiles`. @pre the stream's context is current.
void launchBatch(FunctionHandle kernel, std::uint32_t numTiles, std::uint32_t mostBlocks, StreamHandle stream,
                 void* batch);

}  // namespace coarse::cuda
