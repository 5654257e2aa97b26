#pragma once

#include <cstdint>
#include <memory>

#include "batches.cuh"
#include "coarse/gpu/cuda_driver.hpp"
#include "coarse/gpu/cuda_kernels.hpp"
#include "coarse/gpu/cuda_peer_copy.hpp"
#include "coarse/tensors/ring_step.hpp"

namespace coarse {

/// Runs the steps of one ring in GPU memory: each is a kernel on this object's own stream, followed by an
/// event. Rings therefore run concurrently, and no kernel waits for another device.
class CudaRingCompute : public RingCompute {
 public:
  /// @param kernels must outlive this.
  CudaRingCompute(cuda::SharedContext context, const CudaKernels& kernels,
                  std::shared_ptr<const DistantMemory> distant);
  ~CudaRingCompute() override;

  void begin(const RingStep& step, Done done) override;
  bool advance() override;
  bool isBusy() const noexcept override { return static_cast<bool>(done_); }
  void drain() override;

 private:
  void finish();

  cuda::SharedContext context_;
  const CudaKernels& kernels_;
  std::uint32_t mostBlocks_;
  cuda::Stream stream_;
  NearCopies near_;  // of messages to a neighbour that this GPU cannot reach
  cuda::Event launched_;
  Done done_;  // of the step in progress
};

/// Appends a step's work to a batch. @returns false, without any change, if the batch has no room for it.
bool append(cuda::ReduceBatch& batch, const RingStep& step);
/// @throws std::invalid_argument for a step that fits in no batch.
[[noreturn]] void throwTooManyContributions();

}  // namespace coarse
