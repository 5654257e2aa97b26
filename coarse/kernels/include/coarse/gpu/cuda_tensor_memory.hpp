#pragma once

#include <memory>
#include <string>

#include "coarse/device/batched_compute.hpp"
#include "coarse/gpu/cuda_driver.hpp"
#include "coarse/gpu/cuda_kernels.hpp"
#include "coarse/gpu/cuda_peer_copy.hpp"
#include "coarse/shared_memory/tensor_memory.hpp"

namespace coarse {

/// Memory of GPUs behind file descriptors, where one GPU reduces and updates: its own, and that of those
/// which it can access. Of the memory of others it takes copies.
class CudaTensorMemory : public TensorMemory {
 public:
  /// @throws std::invalid_argument as CudaKernels::validate().
  CudaTensorMemory(cuda::SharedContext context, const CudaKernels& kernels);

  const cuda::SharedContext& context() const noexcept { return context_; }
  const CudaKernels& kernels() const noexcept { return kernels_; }
  /// What the GPU cannot reach of what is mapped.
  DistantMemory& distant() const noexcept { return *distant_; }

  /// @param region all that one or more cuda::DeviceMemory exported, in this or other processes.
  TensorBytes map(const Region& region, std::size_t numBytes, const std::string& what) const override;
  TensorBytes allocate(std::size_t numBytes) const override;
  TensorBytes reach(std::byte* memory, std::size_t numBytes) const override;
  std::unique_ptr<TensorCopies> makeCopies() const override;
  std::unique_ptr<ShardCompute> makeCompute(ShardCompute::Finish finish) const override;
  std::unique_ptr<RingCompute> makeRingCompute() const override;
  /// What makeCompute() has run its batches. It must not outlive this.
  std::unique_ptr<BatchRunner> makeRunner() const;
  /// @throws std::invalid_argument if a region has fewer bytes.
  static void checkLength(const Region& region, std::size_t numBytes, const std::string& what);

 private:
  TensorBytes mapDistant(const Region& region) const;

  cuda::SharedContext context_;
  CudaKernels kernels_;
  std::shared_ptr<DistantMemory> distant_;
};

}  // namespace coarse
