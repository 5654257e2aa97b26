#include "coarse/collectives/combine.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "coarse/reduce/reduce.hpp"

namespace coarse {
namespace {

// Elements per tile, so that accumulators stay in the first-level cache.
constexpr std::size_t kTile = 1024;

bool isFloating(ElementType element) noexcept {
  return element >= ElementType::kFloat32 && element <= ElementType::kFloat16;
}

bool isBitwise(Combine op) noexcept { return op >= Combine::kBitAnd; }

/// The type and operation of reduce() that implement it; false if there are none.
bool asReduction(ElementType element, Combine op, DType& dtype, ReduceOp& reduceOp) noexcept {
  switch (element) {
    case ElementType::kFloat32:
      dtype = DType::kFloat32;
      break;
    case ElementType::kFloat64:
      dtype = DType::kFloat64;
      break;
    case ElementType::kBFloat16:
      dtype = DType::kBFloat16;
      break;
    case ElementType::kFloat16:
      dtype = DType::kFloat16;
      break;
    case ElementType::kInt32:
      dtype = DType::kInt32;
      break;
    case ElementType::kInt64:
      dtype = DType::kInt64;
      break;
    default:
      return false;
  }
  switch (op) {
    case Combine::kSum:
      reduceOp = ReduceOp::kSum;
      break;
    case Combine::kMean:
      reduceOp = ReduceOp::kMean;
      break;
    case Combine::kMax:
      reduceOp = ReduceOp::kMax;
      break;
    default:
      return false;
  }
  return true;
}

template <typename T>
T add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) + static_cast<std::make_unsigned_t<T>>(b));
  } else {
    return a + b;
  }
}

template <typename T>
T multiply(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    // In 64 bits: narrower unsigned types would be promoted to int, which may overflow.
    return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  } else {
    return a * b;
  }
}

template <typename T>
bool isNan(T value) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::isnan(value);
  } else {
    return false;
  }
}

template <typename T>
T smaller(T a, T b) {
  return isNan(a) || a < b ? a : b;
}

template <typename T>
T larger(T a, T b) {
  return isNan(a) || a > b ? a : b;
}

template <typename T, typename Operation>
void accumulate(T* total, const T* in, std::size_t count, Operation operation) {
  for (std::size_t i = 0; i < count; ++i) total[i] = operation(total[i], in[i]);
}

template <typename T>
void accumulate(Combine op, T* total, const T* in, std::size_t count) {
  switch (op) {
    case Combine::kSum:
    case Combine::kMean:
      return accumulate(total, in, count, add<T>);
    case Combine::kMax:
      return accumulate(total, in, count, larger<T>);
    case Combine::kMin:
      return accumulate(total, in, count, smaller<T>);
    case Combine::kProduct:
      return accumulate(total, in, count, multiply<T>);
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (op == Combine::kBitAnd) accumulate(total, in, count, [](T a, T b) { return static_cast<T>(a & b); });
    if (op == Combine::kBitOr) accumulate(total, in, count, [](T a, T b) { return static_cast<T>(a | b); });
    if (op == Combine::kBitXor) accumulate(total, in, count, [](T a, T b) { return static_cast<T>(a ^ b); });
  }
}

/// Means of integers, rounded towards zero: sums of narrow types are wider than the types.
template <typename T>
void averageWholeNumbers(const void* const* inputs, std::size_t numInputs, void* out,
                         std::size_t numElements) {
  using Wide = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
  for (std::size_t i = 0; i < numElements; ++i) {
    Wide total = 0;
    for (std::size_t k = 0; k < numInputs; ++k) total = add<Wide>(total, static_cast<const T*>(inputs[k])[i]);
    static_cast<T*>(out)[i] = static_cast<T>(total / static_cast<Wide>(numInputs));
  }
}

template <typename T>
void combineAs(Combine op, const void* const* inputs, std::size_t numInputs, void* out,
               std::size_t numElements) {
  if constexpr (std::is_integral_v<T>) {
    if (op == Combine::kMean) return averageWholeNumbers<T>(inputs, numInputs, out, numElements);
  }
  T total[kTile];
  for (std::size_t first = 0; first < numElements; first += kTile) {
    const std::size_t count = std::min(kTile, numElements - first);
    std::memcpy(total, static_cast<const T*>(inputs[0]) + first, count * sizeof(T));
    for (std::size_t k = 1; k < numInputs; ++k) {
      accumulate(op, total, static_cast<const T*>(inputs[k]) + first, count);
    }
    if (op == Combine::kMean) {
      for (std::size_t i = 0; i < count; ++i) total[i] = static_cast<T>(total[i] / static_cast<T>(numInputs));
    }
    std::memcpy(static_cast<T*>(out) + first, total, count * sizeof(T));
  }
}

void combineNarrowFloats(DType dtype, Combine op, const void* const* inputs, std::size_t numInputs, void* out,
                         std::size_t numElements) {
  float total[kTile];
  float term[kTile];
  for (std::size_t first = 0; first < numElements; first += kTile) {
    const std::size_t count = std::min(kTile, numElements - first);
    for (std::size_t k = 0; k < numInputs; ++k) {
      widen(dtype, static_cast<const std::uint16_t*>(inputs[k]) + first, k == 0 ? total : term, count);
      if (k > 0) accumulate(op, total, term, count);
    }
    narrow(dtype, total, static_cast<std::uint16_t*>(out) + first, count, 1, ReduceOp::kSum);
  }
}

void combineBooleans(Combine op, const void* const* inputs, std::size_t numInputs, void* out,
                     std::size_t numElements) {
  const bool isAnd = op == Combine::kProduct || op == Combine::kMin || op == Combine::kBitAnd;
  const Combine bitwise = isAnd ? Combine::kBitAnd : op == Combine::kBitXor ? op : Combine::kBitOr;
  combineAs<std::uint8_t>(bitwise, inputs, numInputs, out, numElements);
}

}  // namespace

bool canCombine(ElementType element, Combine op) noexcept {
  if (element == ElementType::kOpaque || element > ElementType::kBool) return false;
  if (op == Combine::kNone || op > Combine::kBitXor) return false;
  if (element == ElementType::kBool) return op != Combine::kMean;
  return !(isFloating(element) && isBitwise(op));
}

void combine(ElementType element, Combine op, const void* const* inputs, std::size_t numInputs, void* out,
             std::size_t numElements) {
  if (!canCombine(element, op)) throw std::invalid_argument("elements of this type have no such reduction");
  if (numInputs == 0) return;
  DType dtype{};
  ReduceOp reduceOp{};
  if (asReduction(element, op, dtype, reduceOp)) {
    reduce(dtype, reduceOp, inputs, numInputs, &out, 1, numElements, static_cast<std::uint32_t>(numInputs));
    return;
  }
  switch (element) {
    case ElementType::kFloat32:
      return combineAs<float>(op, inputs, numInputs, out, numElements);
    case ElementType::kFloat64:
      return combineAs<double>(op, inputs, numInputs, out, numElements);
    case ElementType::kBFloat16:
    case ElementType::kFloat16:
      return combineNarrowFloats(dtype, op, inputs, numInputs, out, numElements);
    case ElementType::kInt8:
      return combineAs<std::int8_t>(op, inputs, numInputs, out, numElements);
    case ElementType::kUInt8:
      return combineAs<std::uint8_t>(op, inputs, numInputs, out, numElements);
    case ElementType::kInt16:
      return combineAs<std::int16_t>(op, inputs, numInputs, out, numElements);
    case ElementType::kInt32:
      return combineAs<std::int32_t>(op, inputs, numInputs, out, numElements);
    case ElementType::kInt64:
      return combineAs<std::int64_t>(op, inputs, numInputs, out, numElements);
    default:
      return combineBooleans(op, inputs, numInputs, out, numElements);
  }
}

const char* nameOf(Combine op) noexcept {
  switch (op) {
    case Combine::kNone:
      return "none";
    case Combine::kSum:
      return "sum";
    case Combine::kMean:
      return "mean";
    case Combine::kMax:
      return "max";
    case Combine::kMin:
      return "min";
    case Combine::kProduct:
      return "product";
    case Combine::kBitAnd:
      return "bitwise and";
    case Combine::kBitOr:
      return "bitwise or";
    case Combine::kBitXor:
      return "bitwise xor";
  }
  return "unknown";
}

}  // namespace coarse
