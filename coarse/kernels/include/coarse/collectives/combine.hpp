#pragma once

#include <cstddef>

#include "coarse/collectives/collective.hpp"

namespace coarse {

/// out[i] = in[0][i] op in[1][i] op ..., in that order. Sums, means and maxima of floating-point types, int32
/// and int64 are those of reduce(); everything else is computed in the elements' own type, integers wrapping
/// around, 16-bit floats in float32. For booleans sums and maxima are "or", products and minima "and". A mean
/// of integers is rounded towards zero. `out` may be one of the inputs; they must not partly overlap.
///
/// @throws std::invalid_argument if `combine` is not defined for `element`.
void combine(ElementType element, Combine op, const void* const* inputs, std::size_t numInputs, void* out,
             std::size_t numElements);

/// Whether combine() supports this combination.
bool canCombine(ElementType element, Combine op) noexcept;

/// The operation's name, as used in errors.
const char* nameOf(Combine op) noexcept;

}  // namespace coarse
