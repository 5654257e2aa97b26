// Several nodes within a process, for the tests of the data path.
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "fixture.hpp"

namespace coarse::test {

inline std::pair<Fd, Fd> streamPair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) std::abort();
  return {Fd(ends[0]), Fd(ends[1])};
}

/// The devices and workers of several nodes in one process. Worker ranks count through all nodes.
class Nodes {
 public:
  /// @param linkTable emulated links of all nodes; null for real ones.
  explicit Nodes(const std::vector<ClusterShape>& shapes,
                 const std::shared_ptr<const Memory>& linkTable = nullptr)
      : fds_(shapes.size()) {
    int rank = 0;
    for (std::size_t node = 0; node < shapes.size(); ++node) {
      clusters_.push_back(std::make_unique<Cluster>(shapes[node], linkTable, NodeIndex{node, shapes.size()}));
      ranks_.emplace_back();
      for (std::size_t client = 0; client < shapes[node].numClients; ++client)
        ranks_.back().push_back(rank++);
      fds_[node].assign(shapes[node].numDevices, std::vector<std::vector<int>>(shapes.size()));
    }
    for (std::size_t a = 0; a < shapes.size(); ++a) {
      for (std::size_t b = 0; b < a; ++b) connect(a, b);
    }
    for (std::size_t node = 0; node < shapes.size(); ++node)
      clusters_[node]->joinNodes({node, shapes.size()}, ranks_, fds_[node]);
    sockets_.clear();  // proxies have duplicates
  }

  /// The last word of each node goes out before the next one stops.
  ~Nodes() {
    together(clusters_.size(), [&](std::size_t node) { clusters_[node].reset(); });
  }

  Nodes& start() {
    for (auto& cluster : clusters_) cluster->start();
    return *this;
  }
  /// The plan's number of clients is that of each node.
  void addGroup(GroupPlan plan) {
    for (auto& cluster : clusters_) {
      plan.numClients = cluster->shape().numClients;
      cluster->addGroup(plan);
    }
  }
  Cluster& node(std::size_t node) { return *clusters_[node]; }
  std::size_t numWorkers() const { return static_cast<std::size_t>(ranks_.back().back()) + 1; }
  Cluster& clusterOf(std::size_t rank) { return *clusters_[place(rank).first]; }
  /// Which of its node's clients it is.
  std::size_t clientOf(std::size_t rank) const { return place(rank).second; }
  Client& worker(std::size_t rank) { return clusterOf(rank).client(clientOf(rank)); }
  void stop(std::size_t node) { clusters_[node].reset(); }

  std::vector<NodeEvent> nodeEvents(std::size_t node, std::size_t device = 0) {
    std::vector<NodeEvent> events;
    eventually([&] { return !(events = clusters_[node]->proxy(device).takeNodeEvents()).empty(); });
    return events;
  }

 private:
  std::pair<std::size_t, std::size_t> place(std::size_t rank) const {
    std::size_t node = 0;
    while (static_cast<int>(rank) > ranks_[node].back()) ++node;
    return {node, rank - static_cast<std::size_t>(ranks_[node].front())};
  }
  void connect(std::size_t a, std::size_t b) {
    for (std::size_t i = 0; i < std::max(fds_[a].size(), fds_[b].size()); ++i) {
      auto [forA, forB] = streamPair();
      fds_[a][i % fds_[a].size()][b].push_back(forA);
      fds_[b][i % fds_[b].size()][a].push_back(forB);
      sockets_.push_back(std::move(forA));
      sockets_.push_back(std::move(forB));
    }
  }

  std::vector<std::vector<int>> ranks_;
  std::vector<std::vector<std::vector<std::vector<int>>>> fds_;  // by node, device, other node
  std::vector<Fd> sockets_;
  std::vector<std::unique_ptr<Cluster>> clusters_;
};

}  // namespace coarse::test
