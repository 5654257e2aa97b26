#pragma once

#include <cstddef>
#include <functional>

#include "coarse/device_links.hpp"
#include "coarse/layout.hpp"
#include "coarse/shard_queue.hpp"
#include "coarse/tensor_group.hpp"

namespace coarse {

/// The workers' own all-reduce in an emulated session, past the memory devices (dual synchronisation, paper,
/// section III-F): a ring over the links between workers, all in one direction, as NCCL builds it.
///
/// A contribution stays with its worker. In 2(p-1) iterations each worker sends a p-th of the shard to the
/// next one; when the last of them has arrived, the shard is reduced. The ring is run by the memory device
/// where the last contribution was announced: what takes time are the links.
///
/// Nothing here blocks. Thread safety: one caller at a time.
class WorkerRing {
 public:
  /// Looks a registered tensor group up by its id; nullptr if there is none.
  using FindGroup = std::function<TensorGroup*(std::uint32_t group)>;
  /// Reduces a shard whose contributions have been all around, and completes it for all clients.
  using Reduce = std::function<void(TensorGroup& group, const RingEntry& entry)>;

  WorkerRing(DeviceLinks& links, FindGroup findGroup, Reduce reduce);

  /// @pre all contributions to the shard have been announced, and lie at the workers.
  void start(const TensorGroup& group, const RingEntry& entry);

 private:
  struct Task {
    RingEntry entry;
    std::size_t numWorkers = 0;
    std::size_t numIterations = 0;
    std::size_t numBytes = 0;  // that each worker sends in an iteration
  };

  void iterate(const Task& task, std::size_t iteration, MonotonicNs sentAt);

  DeviceLinks& links_;
  FindGroup findGroup_;
  Reduce reduce_;
};

}  // namespace coarse
