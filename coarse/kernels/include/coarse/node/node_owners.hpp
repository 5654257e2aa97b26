#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace coarse {

/// Which nodes of a job live, and which of them owns a shard. A value: every node that has lost the same
/// nodes in the same order has the same one.
class NodeOwners {
 public:
  explicit NodeOwners(std::size_t numNodes) : numNodes_(numNodes) {
    for (std::size_t node = 0; node < numNodes; ++node) live_.push_back(node);
  }

  /// The owners after the loss of a node that lives. Its shards go to the others in turn; no other shard
  /// moves.
  NodeOwners without(std::size_t node) const {
    NodeOwners owners = *this;
    owners.live_.erase(std::remove(owners.live_.begin(), owners.live_.end(), node), owners.live_.end());
    owners.losses_.push_back({node, owners.live_});
    return owners;
  }

  std::size_t ownerOf(std::size_t shard) const noexcept {
    std::size_t owner = shard % numNodes_;
    for (const Loss& loss : losses_) {
      if (owner == loss.node) owner = loss.heirs[shard / numNodes_ % loss.heirs.size()];
    }
    return owner;
  }
  /// In ascending order.
  const std::vector<std::size_t>& live() const noexcept { return live_; }
  bool isLive(std::size_t node) const noexcept {
    return std::find(live_.begin(), live_.end(), node) != live_.end();
  }

 private:
  struct Loss {
    std::size_t node;
    std::vector<std::size_t> heirs;
  };

  std::size_t numNodes_;
  std::vector<std::size_t> live_;
  std::vector<Loss> losses_;  // in their order
};

}  // namespace coarse
