#pragma once

#include <array>
#include <memory>
#include <string>

#include "coarse/cuda_driver.hpp"
#include "coarse/dtype.hpp"
#include "coarse/tensor_memory.hpp"

namespace coarse {

/// The kernels of coarse/kernels/cuda/batches.cuh, as somebody else has loaded them in the primary context of
/// a GPU. By dtype; null where there is none.
struct CudaKernels {
  using ByDType = std::array<cuda::FunctionHandle, kNumDTypes>;
  ByDType reduceSum{};
  ByDType reduceMax{};
  ByDType measure{};
  ByDType update{};
  cuda::FunctionHandle holdUntil = nullptr;  // of delay.cuh; without it nothing is begun before it is due

  /// @throws std::invalid_argument if there is none for a dtype that can be reduced or updated.
  void validate() const;
};

/// Memory of GPUs behind file descriptors, as one GPU reaches it: its own, and that of those which it can
/// access. Kernels reduce and update there.
class CudaTensorMemory : public TensorMemory {
 public:
  /// @throws std::invalid_argument as CudaKernels::validate().
  CudaTensorMemory(cuda::SharedContext context, const CudaKernels& kernels);

  /// @param region all that a cuda::DeviceMemory exported, in this or another process.
  TensorBytes map(const Region& region, std::size_t numBytes, const std::string& what) const override;
  std::unique_ptr<TensorCopies> makeCopies() const override;
  std::unique_ptr<ShardCompute> makeCompute(ShardCompute::Finish finish) const override;

 private:
  cuda::SharedContext context_;
  CudaKernels kernels_;
};

}  // namespace coarse
