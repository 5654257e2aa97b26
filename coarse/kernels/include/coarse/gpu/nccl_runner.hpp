#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "coarse/device/batched_compute.hpp"
#include "coarse/device/ring_step.hpp"
#include "coarse/gpu/cuda_driver.hpp"
#include "coarse/gpu/cuda_tensor_memory.hpp"
#include "coarse/gpu/nccl.hpp"

namespace coarse {

struct NcclLimits {
  // Of sums that NCCL adds up in one operation, and in one launch.
  std::size_t pieceBytes = 16 << 20;
  std::size_t roundBytes = 64 << 20;
  // Who waits longer for the others at the end of a session waits for somebody who is gone.
  std::chrono::milliseconds patience{3000};

  /// @throws std::invalid_argument unless a round has room for a piece, and that for a number.
  void validate() const;
};

/// Adds up shards over memory devices on different GPUs by NCCL (paper, section IV-B): a kernel adds the
/// contributions of the device's own clients, NCCL these sums, and a kernel finishes the result in the slots
/// of the clients. Where a device has one client, and sums have the type of its elements, NCCL works in its
/// slot.
///
/// All devices must start the same batches in the same order.
class NcclRunner : public BatchRunner {
 public:
  /// @param localClients whose contributions this device brings.
  /// @param limits on all devices the same.
  /// @throws std::invalid_argument as NcclLimits; cuda::Error as streams and memory do.
  NcclRunner(std::shared_ptr<nccl::Communicator> communicator, std::shared_ptr<const CudaTensorMemory> memory,
             std::vector<std::size_t> localClients, const NcclLimits& limits = {});
  ~NcclRunner() override;

  /// Has NCCL connect the devices, which takes a second, before there is anything to reduce. Blocks until all
  /// devices do it. @throws nccl::Error, cuda::Error if that fails.
  void connect();

  void start(const ShardBatch& batch, MonotonicNs notBefore) override;
  bool conclude() override;
  /// @throws nccl::Error if it failed, or the others do not come to it within some seconds: then it was
  /// ended, its results are arbitrary, and nothing more can be started.
  void wait() override;

 private:
  std::deque<RingStep> piecesOf(const ShardBatch& batch) const;
  std::vector<RingStep> takeRound(std::deque<RingStep>& pieces) const;
  void addUp(const std::vector<RingStep>& round);
  void launch(const std::vector<RingStep>& steps);
  template <typename Work>
  void attempt(Work work);
  void end() noexcept;

  std::shared_ptr<nccl::Communicator> communicator_;
  std::shared_ptr<const CudaTensorMemory> memory_;
  cuda::SharedContext context_;
  std::vector<std::size_t> localClients_;
  NcclLimits limits_;
  std::uint32_t mostBlocks_;
  cuda::Stream stream_;
  cuda::DeviceMemory sums_;  // of a round
  std::vector<std::unique_ptr<cuda::Event>> done_;
  std::size_t numStarted_ = 0;
  std::size_t numConcluded_ = 0;
};

}  // namespace coarse
