// The kernels that the libcuda of cuda_stand_in.cpp has.
#pragma once

#include <gtest/gtest.h>

#include <iterator>
#include <string>
#include <vector>

#include "coarse/gpu/cuda_kernels.hpp"
#include "contributions.hpp"

extern "C" coarse::cuda::Result cuModuleGetFunction(coarse::cuda::FunctionHandle* function,
                                                    coarse::cuda::ModuleHandle module, const char* name);

namespace coarse::test {

inline CudaKernels::ByDType standInKernels(const std::string& name, const std::vector<DType>& dtypes) {
  static const char* const names[] = {"float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8"};
  CudaKernels::ByDType kernels{};
  for (const DType dtype : dtypes) {
    const auto index = static_cast<std::size_t>(dtype);
    EXPECT_EQ(cuModuleGetFunction(&kernels[index], nullptr, (name + "_" + names[index]).c_str()),
              cuda::kSuccess);
  }
  return kernels;
}

inline CudaKernels standInKernels() {
  const std::vector<DType> all(std::begin(kEveryDType), std::end(kEveryDType));
  const std::vector<DType> gradients = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  CudaKernels kernels;
  kernels.reduceSum = standInKernels("reduce_sum", all);
  kernels.reduceMax = standInKernels("reduce_max", all);
  kernels.ringSum = standInKernels("ring_sum", all);
  kernels.ringMax = standInKernels("ring_max", all);
  kernels.measure = standInKernels("measure", gradients);
  kernels.update = standInKernels("update", gradients);
  EXPECT_EQ(cuModuleGetFunction(&kernels.holdUntil, nullptr, "hold_until"), cuda::kSuccess);
  return kernels;
}

}  // namespace coarse::test
