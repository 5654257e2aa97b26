#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "coarse/device/ring.hpp"
#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/shard_queue.hpp"
#include "coarse/shared_memory/shared_memory.hpp"
#include "coarse/tensors/batched_compute.hpp"

namespace coarse {

class TensorMemory;

/// The shards that devices have proposed, and the batches that the home device has made of them. In a batch,
/// RingEntry::completedAt is the number of shards that still follow.
struct CollectiveLogs {
  RingLog proposals;
  RingLog batches;
};

/// The memory and objects that a session's collectives use. The caller closes the descriptor.
struct CollectiveMemory {
  int logsFd = -1;                                    // CollectiveLogs, one for all devices; none without
  std::vector<std::vector<std::size_t>> clientsOf{};  // each device's
  std::shared_ptr<BatchRunner> runner{};              // reduces with the other devices
  std::shared_ptr<const TensorMemory> memory{};       // the memory required for groups reduced in this way
};

/// Shards that all memory devices reduce together by a library's collectives, such as NCCL's. Collectives
/// wait for each other, so all devices must begin the same ones in the same order. The device that gets the
/// last contribution proposes a shard. The home device collects proposals into batches, and every device
/// begins batch after batch.
///
/// This cannot deadlock: only shards with contributions from all clients are proposed, so a device that
/// begins a batch waits only for the other devices' turns.
///
/// Only drain() blocks. Thread safety: one caller at a time.
class DeviceCollectives {
 public:
  /// @throws std::invalid_argument if the memory is unsealed or too small, or there is no runner.
  DeviceCollectives(const CollectiveMemory& memory, std::size_t device, std::size_t numDevices,
                    Doorbell* doorbells, FindGroup findGroup, ShardDone shardDone);

  /// Whether a shard can be reduced in this way: every device has a contribution to it, and the operation is
  /// addition. (NCCL's maximum ignores NaN.) @pre all contributions have arrived and agree.
  bool canReduce(const TensorGroup& group, std::uint32_t shard) const noexcept;
  /// Makes all devices reduce a shard. @pre canReduce(), and the logs have room.
  void propose(const RingEntry& entry) noexcept;
  /// Makes, begins and ends batches without waiting. @returns whether there was work.
  bool advance();
  /// Whether a batch is in progress whose end rings no doorbell.
  bool isBusy() const noexcept { return !started_.empty(); }
  /// Returns when everything begun is done, or cannot be done.
  void drain() noexcept;
  /// Whether a shard of `group` is in progress: the group must stay until it is done.
  bool isWorkingOn(const TensorGroup& group) const noexcept;
  /// The memory in which groups must lie.
  const TensorMemory& memory() const noexcept { return *memory_; }

 private:
  struct Begun {
    ShardBatch batch;
    // Recorded for this step: clients may have pushed the next one when the batch is concluded.
    std::vector<ShardShape> shapes;
  };

  bool conclude();
  bool makeBatch();
  bool readBatch();
  bool startBatch();

  Mapping mapping_;
  CollectiveLogs* logs_;
  std::size_t device_;
  std::size_t numDevices_;
  Doorbell* doorbells_;
  std::vector<std::vector<std::size_t>> clientsOf_;
  FindGroup findGroup_;
  ShardDone shardDone_;
  std::shared_ptr<const TensorMemory> memory_;
  std::shared_ptr<BatchRunner> runner_;

  std::uint64_t numProposalsRead_ = 0;  // by the home device
  std::uint64_t numEntriesRead_ = 0;    // of batches
  std::vector<RingEntry> next_;         // the next batch, as far as it was read
  bool isNextWhole_ = false;
  std::deque<Begun> started_;
};

}  // namespace coarse
