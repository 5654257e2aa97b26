#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <queue>
#include <vector>

#include "coarse/emulation/pacer.hpp"

namespace coarse {

/// The endpoints of a link table: the workers of all nodes, node by node, then their memory devices. All
/// nodes have equally many of both.
struct LinkEndpoints {
  std::size_t numClients = 0;  // of each node
  std::size_t numDevices = 0;  // likewise
  std::size_t node = 0;
  std::size_t numNodes = 1;

  std::size_t count() const noexcept { return numNodes * (numClients + numDevices); }
};

/// The links of one memory device: the arrival times of its transfers, and the actions at arrival.
///
/// Without a pacer, links are host memory: transfers arrive immediately, and at() runs its action
/// immediately.
/// Thread safety: one caller at a time.
class DeviceLinks {
 public:
  /// The action at a transfer's arrival. Later transfers that it causes count from `due`, not from the time
  /// when it runs, so that delays of this process do not accumulate.
  using Action = std::function<void(MonotonicNs due)>;

  DeviceLinks() = default;
  /// @throws std::invalid_argument unless the table has these endpoints.
  DeviceLinks(std::unique_ptr<Pacer> pacer, const LinkEndpoints& endpoints);

  bool isPaced() const noexcept { return pacer_ != nullptr; }
  std::size_t endpointOfClient(std::size_t client) const noexcept {
    return endpoints_.node * endpoints_.numClients + client;
  }
  std::size_t endpointOfDevice(std::size_t device) const noexcept {
    return endpointOfDevice(device, endpoints_.node);
  }
  std::size_t endpointOfDevice(std::size_t device, std::size_t node) const noexcept {
    return endpoints_.numNodes * endpoints_.numClients + node * endpoints_.numDevices + device;
  }
  std::size_t numNodes() const noexcept { return endpoints_.numNodes; }
  /// @param tag the transfer's content, for the log of transfers: a shard.
  /// @returns the arrival time of `numBytes` that were sent at `sentAt`.
  MonotonicNs reserve(std::size_t source, std::size_t target, std::size_t numBytes, MonotonicNs sentAt,
                      std::uint32_t tag = 0) noexcept;
  /// Runs `action` in runDue(), not before `due`.
  void at(MonotonicNs due, Action action);
  /// Runs the next action if it is due. @returns whether it was.
  bool runDue();
  /// Time until the next action is due, at least 0.
  std::optional<MonotonicNs> untilNext() const noexcept;

 private:
  struct Arrival {
    MonotonicNs due;
    std::uint64_t number;  // equal times in the order of at()
    Action action;
    bool operator<(const Arrival& other) const noexcept {
      return due != other.due ? due > other.due : number > other.number;
    }
  };

  std::unique_ptr<Pacer> pacer_;
  LinkEndpoints endpoints_;
  std::uint64_t numScheduled_ = 0;
  std::priority_queue<Arrival> arrivals_;  // the next one on top
};

}  // namespace coarse
