#pragma once

#include <string>
#include <vector>

/// Which GPUs reach each other's memory. The driver answers by what it knows of the machine; where a PCIe
/// switch or an IOMMU then loses what is copied between them, copies end without an error and nothing has
/// arrived. So what it promises is tried once in a process, for each pair. Thread safety: any.
namespace coarse::cuda {

/// Why kernels and copies of `device` cannot use the memory of `peer`; "" if they can.
std::string peerObstacle(int device, int peer);

/// Whether there is none.
bool reachesPeer(int device, int peer);

/// What was found of pairs where the driver says yes, in words: copies that get lost, or that could not be
/// tried. Each is told once.
std::vector<std::string> takePeerWarnings();

}  // namespace coarse::cuda
