#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

#include "coarse/device/shard_compute.hpp"
#include "coarse/device/shard_queue.hpp"
#include "coarse/device/tensor_group.hpp"
#include "coarse/emulation/device_links.hpp"
#include "coarse/shared_memory/layout.hpp"

namespace coarse {

/// Shards of up to so many bytes are reduced by one device: cutting them would only add messages.
inline constexpr std::size_t kSmallestExchangeBytes = 64 * 1024;

/// What the exchange of one memory device shares with the others.
struct ExchangePeers {
  std::size_t device = 0;
  std::size_t numDevices = 1;
  ExchangeLog* logs = nullptr;    // of each device
  Doorbell* doorbells = nullptr;  // of each device
};

/// All-reduce over distinct memories, for contributions that may lie at any of them.
///
/// A shard is cut into one piece per client. The device that took client i's contribution reduces piece i: it
/// fetches that piece of the contributions which other devices hold, adds all in the order of the clients,
/// and sends the result to every device that holds a contribution. So results have the bits of the direct
/// algorithm whatever the routes, and with one contribution per device each link carries what a ring's does:
/// 2(p-1)/p of the shard.
///
/// What fetches, adds and sends is the ShardCompute of the memory where the tensors lie, which may take its
/// time; when that would have come over the links is up to these.
///
/// Nothing here blocks. Thread safety: one caller at a time.
class DeviceExchange {
 public:
  /// Looks a registered tensor group up by its id; nullptr if there is none.
  using FindGroup = std::function<TensorGroup*(std::uint32_t group)>;
  /// What reduces the shards of a group; tells pieces that are reduced to reduced().
  using ComputeOf = std::function<ShardCompute&(const TensorGroup& group)>;
  /// Called once per client, in one of the devices, when the result of a shard is with the client.
  using ClientDone = std::function<void(TensorGroup& group, const RingEntry& entry, std::size_t client)>;

  DeviceExchange(ExchangePeers peers, DeviceLinks& links, FindGroup findGroup, ComputeOf computeOf,
                 ClientDone clientDone);

  /// Tells the devices that own pieces of a shard to start. Called where its last contribution arrived.
  void distribute(TensorGroup& group, const RingEntry& entry);
  /// Starts on the next shard that another device or this one has distributed. @returns whether there was
  /// one.
  bool advance();
  /// The pieces of a shard that were given to its compute are reduced, at every client.
  void reduced(const RingEntry& entry);

 private:
  /// What one device does for one shard.
  struct Task {
    RingEntry entry;
    ShardShape shape;
    std::vector<ShardPiece> pieces;
    std::size_t numBytes = 0;  // of all pieces
    // Once contributions are there:
    MonotonicNs resultsAt = 0;  // when links have brought the results to all devices
    bool isReduced = false;
    bool isSent = false;
  };

  Task makeTask(const TensorGroup& group, const RingEntry& entry) const;
  void fetch(const TensorGroup& group, Task task);
  void reducePieces(Task task, MonotonicNs arrivesAt, MonotonicNs lead);
  void sendPieces(const RingEntry& entry, MonotonicNs sentAt);
  MonotonicNs sendResults(const TensorGroup& group, const Task& task, MonotonicNs sentAt);
  void conclude(std::uint64_t key);
  void finishDevice(TensorGroup& group, const Task& task, MonotonicNs sentAt);

  ExchangePeers peers_;
  DeviceLinks& links_;
  FindGroup findGroup_;
  ComputeOf computeOf_;
  ClientDone clientDone_;
  std::uint64_t logPosition_ = 0;
  std::unordered_map<std::uint64_t, Task> reducing_;  // by keyOf()
};

}  // namespace coarse
