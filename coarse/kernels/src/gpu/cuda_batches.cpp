#include "coarse/gpu/cuda_batches.hpp"

#include <algorithm>

#include "batches.cuh"

namespace coarse::cuda {
namespace {

constexpr std::uint32_t kBlocksPerMultiprocessor =
    24;  // a multiple of 2, 3 and 4, the possible numbers that run at once
constexpr auto kMultiprocessorCount = static_cast<DeviceAttribute>(16);

}  // namespace

std::uint32_t mostBlocks(const Context& context) {
  return kBlocksPerMultiprocessor *
         static_cast<std::uint32_t>(deviceAttribute(context.device(), kMultiprocessorCount));
}

void launchBatch(FunctionHandle kernel, std::uint32_t numTiles, std::uint32_t mostBlocks, StreamHandle stream,
                 void* batch) {
  LaunchShape shape;
  shape.grid[0] = std::min(numTiles, mostBlocks);
  shape.block[0] = kThreads;
  launchKernel(kernel, shape, stream, {batch});
}

}  // namespace coarse::cuda
