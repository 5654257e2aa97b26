#pragma once

#include <cstddef>
#include <vector>

namespace coarse {

/// What this machine can do at best: float32 means over the buffers of `numWorkers` workers. `numThreads`
/// threads share out the buffers in pieces of a shard's default size, read all contributions and write the
/// result to all of them, with the kernels of the sync cores and no queues.
///
/// The result is verified.
/// @returns seconds of each of `numIterations` iterations, from one end to the next: a barrier at both ends
/// is part of it.
/// @throws std::runtime_error if the reduction gave a wrong number, std::invalid_argument without a
/// thread.
std::vector<double> measureReductionLimit(std::size_t numWorkers, std::size_t numBytes,
                                          std::size_t numIterations, std::size_t numThreads);

}  // namespace coarse
