#pragma once

#include <cstdint>

#include "coarse/cuda_driver.hpp"

namespace coarse::cuda {

/// Blocks of the kernels of batches.cuh that are worth their launch: several for each multiprocessor, because
/// one reads several tiles at once where there are enough of them, and more than run at once gain nothing.
std::uint32_t mostBlocks(const Context& context);

/// Has a kernel take a batch of `numTiles`. @pre the stream's context is current.
void launchBatch(FunctionHandle kernel, std::uint32_t numTiles, std::uint32_t mostBlocks, StreamHandle stream,
                 void* batch);

}  // namespace coarse::cuda
