#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "coarse/client/probe.hpp"
#include "coarse/device/tensor_group.hpp"
#include "coarse/shared_memory/layout.hpp"

/// Checks by a memory device: of requested tensor groups, of clients' descriptors, and of whether the
/// contributions to a shard agree. Every function returns the problem in words; empty if there is none.
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

/// Returns how the clients' contributions to `shard` disagree. @pre all have contributed.
/// @param ranks of the clients, for the message; their numbers if it is empty.
std::string disagreement(const TensorGroup& group, std::uint32_t shard, const std::vector<int>& ranks);

/// The first difference between two workers' settings of one tensor, with both values.
std::string firstDifference(const UpdateSettings& one, const UpdateSettings& other);

}  // namespace coarse
