#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "coarse/gpu/cuda_driver.hpp"
#include "coarse/gpu/cuda_tensor_memory.hpp"
#include "coarse/gpu/nccl.hpp"
#include "coarse/tensors/batched_compute.hpp"
#include "coarse/tensors/ring_step.hpp"

namespace coarse {

struct NcclLimits {
  // Bytes of sums in one operation of NCCL, and in one launch.
  std::size_t pieceBytes = 16 << 20;
  std::size_t roundBytes = 64 << 20;
  // Longest wait for the other devices at the end of a session; after it they count as gone.
  std::chrono::milliseconds patience{3000};

  /// @throws std::invalid_argument unless a round has room for a piece, and a piece for a number.
  void validate() const;
};

/// Sums shards over memory devices on different GPUs by NCCL (paper, section IV-B): a kernel sums the
/// contributions of the device's own clients, NCCL sums these sums, and a kernel writes the final result to
/// the slots of the clients. If a device has one client, and sums have the type of its elements, NCCL works
/// in its slot.
///
/// All devices must start the same batches in the same order.
class NcclRunner : public BatchRunner {
 public:
  /// @param localClients the clients whose contributions this device brings.
  /// @param limits the same on all devices.
  /// @throws std::invalid_argument as NcclLimits; cuda::Error as streams and memory do.
  NcclRunner(std::shared_ptr<nccl::Communicator> communicator, std::shared_ptr<const CudaTensorMemory> memory,
             std::vector<std::size_t> localClients, const NcclLimits& limits = {});
  ~NcclRunner() override;

  /// Makes NCCL connect the devices in advance, which takes a second. Blocks until all devices do it. @throws
  /// nccl::Error, cuda::Error if that fails.
  void connect();

  void start(const ShardBatch& batch, MonotonicNs notBefore) override;
  bool conclude() override;
  /// @throws nccl::Error if the batch failed, or the other devices do not reach it within some seconds: then
  /// it was ended, its results are arbitrary, and nothing more can be started.
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
