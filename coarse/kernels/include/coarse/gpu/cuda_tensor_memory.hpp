#pragma once

#include <memory>
#include <string>

#include "coarse/gpu/cuda_driver.hpp"
#include "coarse/gpu/cuda_kernels.hpp"
#include "coarse/gpu/cuda_peer_copy.hpp"
#include "coarse/tensors/batched_compute.hpp"
#include "coarse/tensors/tensor_memory.hpp"

namespace coarse {

/// GPU memory behind file descriptors, for a GPU that reduces and updates in its own memory and in that of
/// GPUs which it can access. It copies the memory of other GPUs.
class CudaTensorMemory : public TensorMemory {
 public:
  /// @throws std::invalid_argument as CudaKernels::validate().
  CudaTensorMemory(cuda::SharedContext context, const CudaKernels& kernels);

  const cuda::SharedContext& context() const noexcept { return context_; }
  const CudaKernels& kernels() const noexcept { return kernels_; }
  /// The mapped memory that the GPU cannot reach.
  DistantMemory& distant() const noexcept { return *distant_; }

  /// @param region everything that one or more cuda::DeviceMemory exported, in this or other processes.
  TensorBytes map(const Region& region, std::size_t numBytes, const std::string& what) const override;
  TensorBytes allocate(std::size_t numBytes) const override;
  TensorBytes reach(std::byte* memory, std::size_t numBytes) const override;
  std::unique_ptr<TensorCopies> makeCopies() const override;
  std::unique_ptr<ShardCompute> makeCompute(ShardCompute::Finish finish) const override;
  std::unique_ptr<RingCompute> makeRingCompute() const override;
  /// The runner of makeCompute()'s batches. It must not outlive this.
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
