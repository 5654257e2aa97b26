#pragma once

#include <cstddef>
#include <vector>

namespace coarse {

/// The upper bound of this machine's performance: float32 means over the buffers of `numWorkers` workers.
/// `numThreads` threads divide the buffers into pieces of a shard's default size, read all contributions and
/// write the result to all of them, with the kernels of the sync cores and without queues.
///
/// The result is verified.
/// @returns seconds of each of `numIterations` iterations, from one end to the next, including a barrier at
/// both ends.
/// @throws std::runtime_error if the reduction gave a wrong number, std::invalid_argument without a thread.
std::vector<double> measureReductionLimit(std::size_t numWorkers, std::size_t numBytes,
                                          std::size_t numIterations, std::size_t numThreads);

}  // namespace coarse
