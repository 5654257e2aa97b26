#pragma once

#include <cstdint>
#include <memory>

#include "batches.cuh"
#include "coarse/device/ring_step.hpp"
#include "coarse/gpu/cuda_driver.hpp"
#include "coarse/gpu/cuda_kernels.hpp"
#include "coarse/gpu/cuda_peer_copy.hpp"

namespace coarse {

/// Does steps of one ring in the memory of GPUs: each is a kernel on a stream of this object's own, with an
/// event behind it. So rings run beside each other, and no kernel waits for another device.
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
  Done done_;  // of the step under way
};

/// Appends what a step does to a batch. @returns false, and nothing changes, if the batch has no room for it.
bool append(cuda::ReduceBatch& batch, const RingStep& step);
/// @throws std::invalid_argument for a step that no batch has room for.
[[noreturn]] void throwTooManyContributions();

}  // namespace coarse
