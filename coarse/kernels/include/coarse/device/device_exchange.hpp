#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

#include "coarse/device/group_table.hpp"
#include "coarse/emulation/device_links.hpp"
#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/shard_queue.hpp"
#include "coarse/tensors/shard_compute.hpp"
#include "coarse/tensors/tensor_group.hpp"

namespace coarse {

/// Shards of at most this size are reduced by one device: cutting them would only add messages.
inline constexpr std::size_t kSmallestExchangeBytes = 64 * 1024;

/// The memory that one device's exchange shares with the others.
struct ExchangePeers {
  std::size_t device = 0;
  std::size_t numDevices = 1;
  ExchangeLog* logs = nullptr;    // of each device
  Doorbell* doorbells = nullptr;  // of each device
};

/// All-reduce over distinct memories, for contributions in any of them.
///
/// A shard is cut into one piece per client. The device that took client i's contribution reduces piece i: it
/// fetches that piece of the contributions that other devices hold, adds all in the order of the clients, and
/// sends the result to every device that holds a contribution. Results therefore have the bits of the direct
/// algorithm for any routes, and with one contribution per device each link carries as much as in a ring:
/// 2(p-1)/p of the shard.
///
/// Shards of other algorithms are not cut: one device in turn reduces each. So an emulated session reduces by
/// the direct algorithm, whose sync cores are all free when a shard is ready, for they take no emulated time.
///
/// With several nodes shards are not cut either. Device `shard % numDevices` of each node takes the
/// contributions of its node, which then go from there to that device of the owner's node, and the result
/// back.
///
/// The ShardCompute of the tensors' memory fetches, adds and sends, and may take any time; `links` determine
/// when transfers would have arrived.
///
/// Nothing here blocks. Thread safety: one caller at a time.
class DeviceExchange {
 public:
  /// The ShardCompute that reduces a group's shards; it reports reduced pieces to reduced().
  using ComputeOf = std::function<ShardCompute&(const TensorGroup& group)>;
  /// Called once per client, in one of the devices, when the client has the result of a shard.
  using ClientDone = std::function<void(TensorGroup& group, const RingEntry& entry, std::size_t client)>;
  /// With several nodes: all contributions of this node have arrived at this device, at `entry.completedAt`.
  using PassToNodes = std::function<void(TensorGroup& group, const RingEntry& entry)>;

  DeviceExchange(ExchangePeers peers, DeviceLinks& links, FindGroup findGroup, ComputeOf computeOf,
                 ClientDone clientDone, PassToNodes passToNodes = {});

  /// Notifies the devices that reduce pieces of a shard. Called where its last contribution arrived.
  void distribute(TensorGroup& group, const RingEntry& entry);
  /// Starts on the next shard that any device has distributed. @returns whether there was one.
  bool advance();
  /// Sends a shard's result, which other nodes have completed here at `entry.completedAt`, to this node's
  /// clients.
  void deliver(TensorGroup& group, const RingEntry& entry);
  /// Reports that the pieces of a shard in its compute are reduced, at every client.
  void reduced(const RingEntry& entry);

 private:
  /// One device's work for one shard.
  struct Task {
    RingEntry entry;
    ShardShape shape;
    std::vector<ShardPiece> pieces;
    std::size_t numBytes = 0;  // of all pieces
    // Once contributions have arrived:
    MonotonicNs resultsAt = 0;  // when links have carried the results to all devices
    bool isReduced = false;
    bool isSent = false;
  };

  std::size_t numPieces(const TensorGroup& group, std::uint32_t shard) const noexcept;
  std::size_t reducerOf(const TensorGroup& group, std::uint32_t shard, std::size_t piece) const noexcept;
  Task makeTask(const TensorGroup& group, const RingEntry& entry) const;
  void fetch(const TensorGroup& group, Task task);
  void beginReduction(Task task, MonotonicNs arrivesAt, MonotonicNs lead);
  void sendPieces(const RingEntry& entry, MonotonicNs sentAt);
  MonotonicNs sendResults(const TensorGroup& group, const Task& task, MonotonicNs sentAt);
  void conclude(std::uint64_t key);
  void finishAt(Task task);
  void finishDevice(TensorGroup& group, const Task& task, MonotonicNs sentAt);

  ExchangePeers peers_;
  DeviceLinks& links_;
  FindGroup findGroup_;
  ComputeOf computeOf_;
  ClientDone clientDone_;
  PassToNodes passToNodes_;
  std::uint64_t logPosition_ = 0;
  std::unordered_map<std::uint64_t, Task> reducing_;  // by keyOf()
};

}  // namespace coarse
