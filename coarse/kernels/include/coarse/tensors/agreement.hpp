#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "coarse/tensors/tensor_group.hpp"

namespace coarse {

/// Returns how the clients' contributions to `shard` disagree, in words; empty if they agree. @pre all have
/// contributed.
/// @param ranks of the clients, for the message; their numbers if it is empty.
std::string disagreement(const TensorGroup& group, std::uint32_t shard, const std::vector<int>& ranks);

}  // namespace coarse
