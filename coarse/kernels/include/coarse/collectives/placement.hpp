#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace coarse {

/// The node of each rank of a group. Ranks of one node share memory; the lowest of them, its *leader*, has
/// the connections to other nodes.
class Placement {
 public:
  /// All on one node.
  Placement() = default;
  /// @param nodes by rank, numbered from 0 on in the order of their leaders.
  /// @throws std::invalid_argument if they are not numbered in this way.
  explicit Placement(std::vector<std::uint32_t> nodes);

  std::size_t numNodes() const noexcept { return leaders_.empty() ? 1 : leaders_.size(); }
  std::size_t nodeOf(std::size_t rank) const noexcept { return nodes_.empty() ? 0 : nodes_[rank]; }
  bool areTogether(std::size_t one, std::size_t other) const noexcept { return nodeOf(one) == nodeOf(other); }
  /// The leader of the node of `rank`.
  std::size_t leaderOf(std::size_t rank) const noexcept {
    return leaders_.empty() ? 0 : leaders_[nodeOf(rank)];
  }

 private:
  std::vector<std::uint32_t> nodes_;
  std::vector<std::size_t> leaders_;  // by node
};

}  // namespace coarse
