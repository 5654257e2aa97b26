#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "coarse/device/prober.hpp"
#include "coarse/shared_memory/layout.hpp"
#include "coarse/tensors/tensor_group.hpp"

/// Checks by a memory device of requested tensor groups and of clients' descriptors. Every function returns
/// the problem in words; empty if there is none.
namespace coarse {

/// The ways in which the proxies of a session can synchronise.
struct SessionPaths {
  std::size_t numDevices = 1;
  std::size_t numNodes = 1;     // the nodes whose workers take part
  bool hasRings = false;        // memory for rings over the devices
  bool hasCollectives = false;  // of a library, between the devices
  bool hasExchange = false;     // logs for an exchange between distinct memories
  bool isPaced = false;         // emulated links
  bool isHostMemory = true;     // the host itself reads and writes the group's tensors
};

/// Returns why a session cannot synchronise such a group.
std::string unsupported(const GroupPlan& plan, const SessionPaths& paths);

/// Returns why a descriptor of `client` is invalid. `group` is the group that it names, nullptr if there is
/// none.
/// @param descriptor copied out of the client's memory.
std::string rejection(const TensorGroup* group, std::size_t client, const Descriptor& descriptor,
                      const Prober& prober);

}  // namespace coarse
