#pragma once

#include <array>

#include "coarse/gpu/cuda_api.hpp"
#include "coarse/reduce/dtype.hpp"

namespace coarse {

/// The kernels of coarse/kernels/cuda/batches.cuh, which another component has loaded in the primary context
/// of a GPU. By dtype; null if there is none.
struct CudaKernels {
  using ByDType = std::array<cuda::FunctionHandle, kNumDTypes>;
  ByDType reduceSum{};
  ByDType reduceMax{};
  ByDType ringSum{};
  ByDType ringMax{};
  ByDType measure{};
  ByDType update{};
  cuda::FunctionHandle holdUntil = nullptr;  // of delay.cuh; without it no work begins before it is due

  /// @throws std::invalid_argument if a dtype that can be reduced or updated has no kernel.
  void validate() const;
};

}  // namespace coarse
