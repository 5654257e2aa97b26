#include "coarse/collectives/placement.hpp"

#include <stdexcept>
#include <utility>

namespace coarse {

Placement::Placement(std::vector<std::uint32_t> nodes) : nodes_(std::move(nodes)) {
  for (std::size_t rank = 0; rank < nodes_.size(); ++rank) {
    if (nodes_[rank] > leaders_.size()) {
      throw std::invalid_argument("nodes are numbered in the order of their lowest ranks");
    }
    if (nodes_[rank] == leaders_.size()) leaders_.push_back(rank);
  }
}

}  // namespace coarse
