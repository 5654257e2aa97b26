#include "coarse/reduce/reduce.hpp"

#include <atomic>
#include <cassert>
#include <cstring>

#include "coarse/reduce/compression.hpp"
#include "coarse/reduce/update.hpp"
#include "reduce_table.inc"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace coarse {
namespace {

using detail::KernelTable;

#if defined(__x86_64__)
bool hasF16c() noexcept {
  // __builtin_cpu_supports does not support "f16c" before GCC 11; the earlier AVX2 check guarantees the
  // system's part.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

bool hasAvx2() noexcept { return __builtin_cpu_supports("avx2") && hasF16c(); }

bool hasAvx512() noexcept {
  return hasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

/// The table at `rank` among those this processor can run, best first; null after the last.
const KernelTable* runnableKernels(int rank) noexcept {
  const KernelTable* runnable[4] = {};
  int count = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (hasAvx512()) runnable[count++] = &detail::kAvx512Kernels;
  if (hasAvx2()) runnable[count++] = &detail::kAvx2Kernels;
#endif
  runnable[count++] = &detail::kBaselineKernels;
  return runnable[rank];
}

// Relaxed everywhere: the tables are constant, and every thread that finds null computes the same pointer.
std::atomic<const KernelTable*> activeTable{nullptr};

const KernelTable& kernels() noexcept {
  const KernelTable* table = activeTable.load(std::memory_order_relaxed);
  if (table == nullptr) {
    table = runnableKernels(0);
    activeTable.store(table, std::memory_order_relaxed);
  }
  return *table;
}

std::size_t index(DType dtype) noexcept {
  assert(static_cast<std::size_t>(dtype) < kNumDTypes);
  return static_cast<std::size_t>(dtype);
}

std::size_t index(ReduceOp op) noexcept {
  assert(static_cast<std::size_t>(op) < kNumReduceOps);
  return static_cast<std::size_t>(op);
}

}  // namespace

void reduce(DType dtype, ReduceOp op, const void* const* inputs, std::size_t numInputs, void* const* outputs,
            std::size_t numOutputs, std::size_t numElements, std::uint32_t divisor) noexcept {
  kernels().reduce[index(dtype)][index(op)]({inputs, numInputs, outputs, numOutputs, numElements}, divisor);
}

void reduceInto(DType dtype, ReduceOp op, void* accumulator, const void* input,
                std::size_t numElements) noexcept {
  const void* const inputs[] = {accumulator, input};
  void* const outputs[] = {accumulator};
  const ReduceOp step = op == ReduceOp::kMean ? ReduceOp::kSum : op;
  reduce(dtype, step, inputs, 2, outputs, 1, numElements, 1);
}

void widen(DType dtype, const void* in, float* out, std::size_t numElements) noexcept {
  const auto kernel = kernels().widen[index(dtype)];
  if (kernel != nullptr) kernel(in, out, numElements);
}

void narrow(DType dtype, const float* in, void* out, std::size_t numElements, std::uint32_t divisor,
            ReduceOp op) noexcept {
  const auto kernel = kernels().narrow[index(dtype)][index(op)];
  if (kernel != nullptr) kernel(in, out, numElements, divisor);
}

double sumOfSquares(DType dtype, const void* in, std::size_t numElements) noexcept {
  const auto kernel = kernels().sumOfSquares[index(dtype)];
  return kernel == nullptr ? 0 : kernel(in, numElements);
}

void update(const UpdateSettings& settings, DType dtype, const UpdateArrays& arrays,
            std::uint32_t divisor) noexcept {
  const auto kernel = kernels().update[index(dtype)];
  if (kernel != nullptr) kernel(settings, arrays, divisor);
}

float quantizeBlock(const float* values, float* residual, std::size_t numElements, std::int8_t* codes,
                    float* rounded) noexcept {
  return kernels().quantize(values, residual, numElements, codes, rounded);
}

void dequantizeBlock(const std::int8_t* codes, float scale, std::size_t numElements, float* out) noexcept {
  kernels().dequantize(codes, scale, numElements, out);
}

const char* instructionSet() noexcept { return kernels().name; }

bool forceInstructionSet(const char* name) noexcept {
  for (int rank = 0;; ++rank) {
    const KernelTable* table = runnableKernels(rank);
    if (table == nullptr) return false;
    if (std::strcmp(table->name, name) == 0) {
      activeTable.store(table, std::memory_order_relaxed);
      return true;
    }
  }
}

}  // namespace coarse
