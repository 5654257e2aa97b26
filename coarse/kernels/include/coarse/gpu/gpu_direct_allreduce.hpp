#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "coarse/client/client.hpp"
#include "coarse/gpu/cuda_driver.hpp"
#include "coarse/gpu/nccl.hpp"
#include "coarse/tensors/tensor_group.hpp"

namespace coarse {

/// Direct all-reduce between the workers' GPUs: NCCL sums some shards of each step, on its own stream, while
/// others go to the memory devices (paper, section III-F: T_sync(GPU)).
///
/// Shards are summed in place. NCCL gets them in an order on which all workers have agreed, in buckets, each
/// as soon as this worker has all of it. So all ranks give NCCL the same operations in the same order, for
/// any order of gradients. A worker without a contribution gives zeros.
///
/// Thread safety: one caller at a time, except check() and abort(), which any thread may call at any time;
/// abort() may run concurrently with any call.
class GpuDirectAllReduce {
 public:
  /// @param communicator of the group's workers; no one else uses it meanwhile.
  /// @param plan of the group; must outlive this.
  /// @param shards summed by this, in the order of all workers: sums or means of float32 or float64.
  /// @param bucketBytes minimum size that NCCL gets at once.
  /// @throws std::invalid_argument for a shard that does not exist, occurs twice or is of another kind.
  GpuDirectAllReduce(std::shared_ptr<nccl::Communicator> communicator, const GroupPlan& plan,
                     const std::vector<std::uint32_t>& shards, std::size_t bucketBytes);

  bool has(std::uint32_t shard) const noexcept { return isTaken_[shard]; }
  /// Takes the next step's contribution to those of these shards that this sums. The first shard lies
  /// at `address`; the memory there receives the result even without a contribution. The memory must stay
  /// valid until join() has ended the step. @throws std::logic_error if a shard was already taken in this
  /// step.
  void take(const ShardRange& shards, cuda::DeviceAddress address, bool isPresent);
  /// The shards taken since the last call are ready when a stream has done the work that `computed` has
  /// marked: gives NCCL the complete buckets. @throws nccl::Error, cuda::Error as they do.
  void advance(const cuda::Event& computed);
  /// Ends the step: makes `stream` wait for all results, and writes `number` to `word` when they are ready.
  /// @throws std::logic_error if a shard was not taken: other workers would wait for it.
  void join(cuda::StreamHandle stream, cuda::DeviceAddress word, std::uint32_t number);

  /// @throws nccl::Error if an operation has failed, or this was aborted.
  void check() const { communicator_->check(); }
  /// Ends operations in progress, whose results are then arbitrary. Waits one second for an NCCL call in
  /// which the caller is, because it may need the communicator until its end. A longer call waits for other
  /// workers, and abort() ends it.
  void abort() noexcept;
  /// Whether shards were taken since the last join().
  bool isInStep() const noexcept { return isInStep_; }
  /// Waits for this object's GPU work. @pre all workers reach it, or this was aborted.
  void synchronize() const { stream_.synchronize(); }

 private:
  /// Adjacent shards of one tensor.
  struct Run {
    std::uint32_t first;
    std::uint32_t last;
    std::size_t numElements;
  };
  using Bucket = std::vector<Run>;
  struct Place {
    cuda::DeviceAddress address = 0;
    bool isPresent = false;
  };

  void checkShard(std::uint32_t shard) const;
  std::size_t bytesOf(const Run& run) const noexcept;
  bool isComplete(const Bucket& bucket) const noexcept;
  void sumUp(const Bucket& bucket);

  std::shared_ptr<nccl::Communicator> communicator_;
  const GroupPlan& plan_;
  cuda::Stream stream_;
  cuda::Event summed_;
  std::vector<bool> isTaken_;    // by shard
  std::vector<Bucket> buckets_;  // in the order of all workers
  std::vector<Place> taken_;     // by shard, of this step
  bool hasTaken_ = false;        // whether shards were taken since the stream last waited
  bool isInStep_ = false;
  std::mutex callMutex_;       // held during calls of NCCL
  std::size_t numSummed_ = 0;  // buckets of this step that NCCL has
};

}  // namespace coarse
