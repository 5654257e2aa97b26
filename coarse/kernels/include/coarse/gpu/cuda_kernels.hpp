#pragma once

#include <array>

#include "coarse/gpu/cuda_api.hpp"
#include "coarse/reduce/dtype.hpp"

namespace coarse {

/// The kernels of coarse/kernels/cuda/batches.cuh, as somebody else has loaded them in the primary context of
/// a GPU. By dtype; null where there is none.
struct CudaKernels {
  using ByDType = std::array<cuda::FunctionHandle, kNumDTypes>;
  ByDType reduceSum{};
  ByDType reduceMax{};
  ByDType ringSum{};
  ByDType ringMax{};
  ByDType measure{};
  ByDType update{};
  cuda::FunctionHandle holdUntil = nullptr;  // of delay.cuh; without it nothing is begun before it is due

  /// @throws std::invalid_argument if there is none for a dtype that can be reduced or updated.
  void validate() const;
};

}  // namespace coarse
