#pragma once

#include <cstddef>
#include <functional>

#include "coarse/device/group_table.hpp"
#include "coarse/emulation/device_links.hpp"
#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/shard_queue.hpp"
#include "coarse/tensors/tensor_group.hpp"

namespace coarse {

/// Direct all-reduce in an emulated session, past the memory devices (dual synchronisation, paper,
/// section III-F). The flags of the contributions select how the p workers, of all nodes, reduce a shard of n
/// bytes:
///
/// - ring: in 2(p-1) iterations each worker sends n/p bytes to the next one, as NCCL's ring does;
/// - two-way ring: half of these bytes to the next one, the others to the previous one;
/// - tree: each half of the bytes goes up a binary tree and down again, level by level. The inner workers of
///   one tree are leaves of the other, as in NCCL's double binary tree;
/// - two-level: as all-to-all among the workers of each node, but between its iterations each worker
/// exchanges its
///   n/p' bytes, where p' is the number of workers of a node, with the workers of the same number on the
///   others;
/// - all-gather: each sends all n bytes to every other one, at once;
/// - all-to-all: each sends n/p bytes to every other one, which sums them and sends its sum to all.
///
/// A contribution stays with its worker. When the whole last iteration has arrived, the shard is reduced in
/// the order of the clients, for every way. The memory device that received the last announcement does the
/// reduction; only the links take emulated time.
///
/// Nothing here blocks. Thread safety: one caller at a time.
class EmulatedDirectAllReduce {
 public:
  /// Reduces a shard whose contributions have been exchanged at `entry.completedAt`, and completes it for all
  /// clients.
  using Reduce = std::function<void(TensorGroup& group, const RingEntry& entry)>;

  EmulatedDirectAllReduce(DeviceLinks& links, FindGroup findGroup, Reduce reduce);

  /// @pre all contributions to the shard have been announced, lie with the workers, and have the same path
  /// flags.
  /// @param numPresent workers that contribute something.
  void start(const TensorGroup& group, const RingEntry& entry, std::uint32_t numPresent);

 private:
  struct Task {
    RingEntry entry;
    std::size_t numWorkers = 0;
    std::size_t numIterations = 0;
    std::size_t numTargets = 0;  // workers that each one sends to in an iteration: the next ones; 0 in a tree
    std::size_t numBytes = 0;    // of a transfer
    bool isTwoWay = false;       // whether workers send to the previous one, too
    bool isTwoLevel = false;
    std::size_t numBytesBetweenNodes = 0;  // of a transfer between nodes, if there are two levels
  };
  /// Called with the source and the target of a transfer.
  using Send = std::function<void(std::size_t source, std::size_t target)>;

  Task makeTwoLevels(const RingEntry& entry, std::size_t numWorkers, std::size_t numBytes) const;
  Task makeTask(const TensorGroup& group, const RingEntry& entry, std::uint32_t numPresent) const;
  void forEachTransfer(const Task& task, std::size_t iteration, const Send& send) const;
  void forEachTransferInLevels(const Task& task, std::size_t iteration, const Send& send) const;
  static bool isBetweenNodes(const Task& task, std::size_t iteration) noexcept;
  static void forEachTransferInTrees(const Task& task, std::size_t iteration, const Send& send);
  void iterate(const Task& task, std::size_t iteration, MonotonicNs sentAt);

  DeviceLinks& links_;
  FindGroup findGroup_;
  Reduce reduce_;
};

}  // namespace coarse
