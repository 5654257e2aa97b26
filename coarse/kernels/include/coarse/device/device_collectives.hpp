#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "coarse/device/batched_compute.hpp"
#include "coarse/device/ring.hpp"
#include "coarse/device/shard_queue.hpp"
#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/shared_memory.hpp"

namespace coarse {

class TensorMemory;

/// The shards that devices have proposed, and the batches that the home device has made of them. In the
/// latter, RingEntry::completedAt is how many more shards of the batch follow.
struct CollectiveLogs {
  RingLog proposals;
  RingLog batches;
};

/// What the collectives of a session go through. The descriptor stays the caller's.
struct CollectiveMemory {
  int logsFd = -1;                                    // CollectiveLogs, one for all devices; none without
  std::vector<std::vector<std::size_t>> clientsOf{};  // each device's
  std::shared_ptr<BatchRunner> runner{};              // reduces with the other devices
  std::shared_ptr<const TensorMemory> memory{};       // where groups must lie that are reduced so
};

/// Shards that all memory devices reduce together by a library's collectives, such as NCCL's, which wait for
/// each other: so all devices must begin the same ones in the same order. Whichever device has the last
/// contribution proposes a shard; the home device puts what was proposed meanwhile into batches, and every
/// device begins batch after batch.
///
/// It cannot deadlock: only shards to which all clients have contributed are proposed, so that a device which
/// begins a batch waits for nothing but the others' turns.
///
/// Nothing here blocks but drain(). Thread safety: one caller at a time.
class DeviceCollectives {
 public:
  /// @throws std::invalid_argument if the memory is unsealed or too small, or there is no runner.
  DeviceCollectives(const CollectiveMemory& memory, std::size_t device, std::size_t numDevices,
                    Doorbell* doorbells, FindGroup findGroup, ShardDone shardDone);

  /// Whether a shard can be reduced so: every device has a contribution to it, and they are added. (NCCL's
  /// maximum passes over NaN.) @pre all contributions have arrived and agree.
  bool canReduce(const TensorGroup& group, std::uint32_t shard) const noexcept;
  /// Has all devices reduce a shard. @pre canReduce(), and there is room in the logs.
  void propose(const RingEntry& entry) noexcept;
  /// Makes batches, begins and ends them, without waiting. @returns whether there was anything to do.
  bool advance();
  /// Whether a batch was begun that nobody will ring for.
  bool isBusy() const noexcept { return !started_.empty(); }
  /// Returns when what was begun is done, or cannot be.
  void drain() noexcept;
  /// Whether a shard of `group` is being worked on: the group must stay until it is done.
  bool isWorkingOn(const TensorGroup& group) const noexcept;
  /// Where groups must lie.
  const TensorMemory& memory() const noexcept { return *memory_; }

 private:
  struct Begun {
    ShardBatch batch;
    // In this step: clients may have pushed the next one when the batch is concluded.
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
  std::vector<RingEntry> next_;         // the batch that comes next, as far as it was read
  bool isNextWhole_ = false;
  std::deque<Begun> started_;
};

}  // namespace coarse
