#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "coarse/client/probe.hpp"
#include "coarse/device/tensor_group.hpp"
#include "coarse/shared_memory/layout.hpp"

/// What a memory device checks before it acts: tensor groups that are asked for, descriptors that clients
/// send, and whether the contributions to a shard fit each other. Every function returns what is wrong, in
/// words; empty if nothing is.
namespace coarse {

/// By which ways the proxies of a session can synchronise.
struct SessionPaths {
  std::size_t numDevices = 1;
  std::size_t numNodes = 1;     // whose workers take part
  bool hasRings = false;        // memory for rings over the devices
  bool hasCollectives = false;  // a library's, between the devices
  bool hasExchange = false;     // logs of an exchange between distinct memories
  bool isPaced = false;         // emulated links
  bool isHostMemory = true;     // the group's tensors lie where the host itself reads and writes
};

/// Why a session cannot synchronise such a group.
std::string unsupported(const GroupPlan& plan, const SessionPaths& paths);

/// Why a descriptor of `client` cannot be. `group` is the one that it names, nullptr if there is none.
/// @param descriptor copied out of the client's memory.
std::string rejection(const TensorGroup* group, std::size_t client, const Descriptor& descriptor,
                      const Prober& prober);

/// In what the clients that have all contributed to `shard` do not agree.
/// @param ranks of the clients, for the message; their numbers if it is empty.
std::string disagreement(const TensorGroup& group, std::uint32_t shard, const std::vector<int>& ranks);

/// What two workers' settings of one tensor differ in, with both values.
std::string firstDifference(const UpdateSettings& one, const UpdateSettings& other);

}  // namespace coarse
