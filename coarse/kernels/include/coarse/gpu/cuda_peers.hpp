#pragma once

#include <string>
#include <vector>

#include "coarse/gpu/cuda_driver.hpp"

/// Which GPUs reach each other's memory. The driver answers from its knowledge of the machine. If a PCIe
/// switch or an IOMMU then loses data between GPUs, copies end without an error and nothing has arrived.
/// Therefore each pair is tested once in a process. Thread safety: any.
namespace coarse::cuda {

/// Why kernels and copies of `device` cannot use the memory of `peer`; "" if they can.
std::string peerObstacle(int device, int peer);
/// The same for a peer given by UUID. A peer that this process does not see (CUDA_VISIBLE_DEVICES) is not
/// tested here: the result is that of requireKeptCopies().
std::string peerObstacle(int device, const std::string& peer);

/// Whether there is no obstacle.
bool reachesPeer(int device, int peer);

/// Tests the peers that this process does not see, where it cannot allocate memory: on memory that it has
/// mapped.
/// @param memory as imported from `region`; no one else uses it meanwhile, and its contents are preserved.
/// @throws Error if copies to it are lost.
void requireKeptCopies(const DeviceMemory& memory, const Region& region);

/// Warnings about pairs that the driver accepts, in words: copies that get lost, or that could not be tested.
/// Each warning is returned once.
std::vector<std::string> takePeerWarnings();

}  // namespace coarse::cuda
