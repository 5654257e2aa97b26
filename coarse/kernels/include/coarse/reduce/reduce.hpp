#pragma once

#include <cstddef>
#include <cstdint>

#include "coarse/reduce/dtype.hpp"

/// Elementwise reductions, the arithmetic of the sync cores.
///
/// Guarantees, for every function here:
/// - Results are bitwise the same for any instruction set, outputs, alignment and position of an element in
/// its array; only the payload and sign of a NaN are unspecified.
/// - Functions keep no state: any number of threads may call them at once on disjoint outputs.
/// - Nothing is checked at run time: the dtype and op are valid enumerators, arrays are aligned to their
/// elements.
namespace coarse {

/// The values are part of the wire format: add at the end, never renumber.
enum class ReduceOp : std::uint8_t { kSum = 0, kMean = 1, kMax = 2 };

inline constexpr std::size_t kNumReduceOps = 3;

/// out[j][i] = op over k of in[k][i], for every j, combined in the order in[0], in[1], ...
///
/// kSum and kMean:
/// - bfloat16 and float16 accumulate in float32 and are rounded once, to nearest even; NaN stays NaN, inf
/// stays inf.
/// - Integers wrap around in their own width.
/// kMean divides the sum by `divisor`: correctly rounded for floating point (`divisor` is itself rounded to
/// the accumulator's type, exact up to 2^24), towards zero for integers. A divisor of 0 counts as 1. kMax
/// gives NaN where any input has NaN, as torch.max and np.maximum do.
///
/// Inputs and outputs may be the same arrays (in place) in any combination; they must not partly overlap.
/// Every input is read from memory once, every output written once. With numInputs == 0 nothing is written.
/// numInputs == 1 copies, or divides for kMean.
void reduce(DType dtype, ReduceOp op, const void* const* inputs, std::size_t numInputs, void* const* outputs,
            std::size_t numOutputs, std::size_t numElements, std::uint32_t divisor) noexcept;

/// accumulator[i] = accumulator[i] op input[i]. kMean adds, as kSum does: the last step of a ring divides, by
/// reduce() of one input. 16-bit types round at every call; a ring that must round once uses widen() and
/// narrow().
void reduceInto(DType dtype, ReduceOp op, void* accumulator, const void* input,
                std::size_t numElements) noexcept;

/// out[i] = float32(in[i]), exact. `dtype` is kBFloat16, kFloat16 or kFloat32; for any other nothing is
/// written. The arrays must not overlap, except that for kFloat32 they may be the same.
void widen(DType dtype, const void* in, float* out, std::size_t numElements) noexcept;

/// out[i] = in[i] rounded to `dtype` (to nearest even) after division by `divisor` if `op` is kMean, so that
/// widen, float32 reduceInto and narrow give the bits of reduce(). Dtypes and overlap as for widen().
void narrow(DType dtype, const float* in, void* out, std::size_t numElements, std::uint32_t divisor,
            ReduceOp op) noexcept;

/// The sum of in[i]^2 in float64, in an order that depends on `numElements` alone. Exact squares: it is
/// finite if all elements are. `dtype` is as for widen(); for any other the result is 0.
double sumOfSquares(DType dtype, const void* in, std::size_t numElements) noexcept;

/// The result of run-time dispatch: "avx512", "avx2" or "baseline" on x86-64, "neon" on aarch64, else
/// "baseline".
const char* instructionSet() noexcept;

/// Test hook: makes the whole process use `name` from now on.
/// @return false, without any change, if this processor or binary does not have it.
bool forceInstructionSet(const char* name) noexcept;

}  // namespace coarse
