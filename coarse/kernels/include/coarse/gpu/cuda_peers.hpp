#pragma once

#include <string>
#include <vector>

#include "coarse/gpu/cuda_driver.hpp"

/// Which GPUs reach each other's memory. The driver answers by what it knows of the machine; where a PCIe
/// switch or an IOMMU then loses what is copied between them, copies end without an error and nothing has
/// arrived. So what it promises is tried once in a process, for each pair. Thread safety: any.
namespace coarse::cuda {

/// Why kernels and copies of `device` cannot use the memory of `peer`; "" if they can.
std::string peerObstacle(int device, int peer);
/// The same of a peer by its UUID. One that this process does not see (CUDA_VISIBLE_DEVICES) is not tried
/// here: of such a one it is what requireKeptCopies() has found.
std::string peerObstacle(int device, const std::string& peer);

/// Whether there is none.
bool reachesPeer(int device, int peer);

/// Tries the peers that this process does not see, for it can allocate no memory there: on memory that it has
/// mapped.
/// @param memory as imported from `region`; nobody else uses it meanwhile, and it keeps what it holds.
/// @throws Error if what is copied there gets lost.
void requireKeptCopies(const DeviceMemory& memory, const Region& region);

/// What was found of pairs where the driver says yes, in words: copies that get lost, or that could not be
/// tried. Each is told once.
std::vector<std::string> takePeerWarnings();

}  // namespace coarse::cuda
