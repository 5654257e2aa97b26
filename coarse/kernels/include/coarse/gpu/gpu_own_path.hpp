#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "coarse/client/client.hpp"
#include "coarse/device/tensor_group.hpp"
#include "coarse/gpu/cuda_driver.hpp"
#include "coarse/gpu/nccl.hpp"

namespace coarse {

/// The workers' own path between their GPUs: NCCL sums up some shards of each step, on a stream of its own,
/// while others go to the memory devices (paper, section III-F: T_sync(GPU)).
///
/// Shards are summed up where they lie. NCCL gets them in the order on which all workers have agreed, in
/// buckets, each as soon as this worker has all of it; so whatever order gradients come in, all ranks give it
/// the same operations in the same order. A worker without a contribution gives zeros.
///
/// Thread safety: one caller at a time, except check() and abort(), which any thread may call at any time,
/// and abort() beside whatever the caller is in.
class GpuOwnPath {
 public:
  /// @param communicator of the workers of the group, and no one else's meanwhile.
  /// @param plan of the group; must outlive this.
  /// @param shards that are summed up here, in the order of all workers: sums or means of float32 or float64.
  /// @param bucketBytes that NCCL gets at once, at least.
  /// @throws std::invalid_argument for a shard that does not exist, comes twice or is something else.
  GpuOwnPath(std::shared_ptr<nccl::Communicator> communicator, const GroupPlan& plan,
             const std::vector<std::uint32_t>& shards, std::size_t bucketBytes);

  bool has(std::uint32_t shard) const noexcept { return isOwn_[shard]; }
  /// Takes the next step's contribution to those of these shards that it has, the first of which lies at
  /// `address`; without a contribution what is there gets the result all the same. What is taken stays until
  /// join() has ended the step. @throws std::logic_error if one was taken before in this step.
  void take(const ShardRange& shards, cuda::DeviceAddress address, bool isPresent);
  /// What was taken since the last call is there when a stream has done what `computed` has marked: gives
  /// NCCL what is complete. @throws nccl::Error, cuda::Error as they do.
  void advance(const cuda::Event& computed);
  /// Ends the step: has `stream` wait for all results, and `number` be written to `word` when they are there.
  /// @throws std::logic_error if a shard was not taken: other workers would wait for it.
  void join(cuda::StreamHandle stream, cuda::DeviceAddress word, std::uint32_t number);

  /// @throws nccl::Error if something has failed, or this was aborted.
  void check() const { communicator_->check(); }
  /// Ends what is under way; results are then arbitrary. Waits a second for a call of NCCL's that the caller
  /// is in, which may need the communicator to its end; one that takes longer waits for other workers, and
  /// this ends it.
  void abort() noexcept;
  /// Whether something was taken since the last join().
  bool isInStep() const noexcept { return isInStep_; }
  /// Waits for what the GPU was given. @pre all workers come to it, or this was aborted.
  void synchronize() const { stream_.synchronize(); }

 private:
  /// Shards of one tensor that lie one behind the other.
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
  std::vector<bool> isOwn_;      // by shard
  std::vector<Bucket> buckets_;  // in the order of all workers
  std::vector<Place> taken_;     // by shard, of this step
  bool hasTaken_ = false;        // something, since the stream was told what it waits for
  bool isInStep_ = false;
  std::mutex callMutex_;       // held during calls of NCCL
  std::size_t numSummed_ = 0;  // buckets of this step that NCCL has
};

}  // namespace coarse
