#pragma once

#include <cstddef>
#include <vector>

namespace coarse {

/// What this machine can do at best: float32 means over the buffers of `numWorkers` threads, each reducing
/// its slice of all buffers and writing the result to all of them, with the kernels of the sync cores and no
/// queues.
///
/// The result is verified before it is timed.
/// @returns seconds of each of `numIterations` iterations.
/// @throws std::runtime_error if the reduction gave a wrong number.
std::vector<double> measureReductionLimit(std::size_t numWorkers, std::size_t numBytes,
                                          std::size_t numIterations);

}  // namespace coarse
