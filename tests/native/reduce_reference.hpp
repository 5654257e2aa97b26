// What reduce() must give, element by element, written for clarity and shared by the tests of the kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "coarse/reduce/reduce.hpp"

namespace coarse::test {

/// The instruction sets this processor runs. Leaves the process with the best one.
inline std::vector<std::string> instructionSets() {
  std::vector<std::string> names;
  for (const char* name : {"baseline", "neon", "avx2", "avx512"}) {
    if (forceInstructionSet(name)) names.emplace_back(name);
  }
  return names;
}

template <class To, class From>
To bitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

/// A 16-bit floating-point format, by its definition.
struct Format16 {
  int exponentBits;
  int mantissaBits;

  int bias() const { return (1 << (exponentBits - 1)) - 1; }
  std::uint16_t infinity() const {
    return static_cast<std::uint16_t>(((1 << exponentBits) - 1) << mantissaBits);
  }

  double decode(std::uint16_t bits) const {
    const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
    const int mantissa = bits & ((1 << mantissaBits) - 1);
    const int exponent = (bits & 0x7fff) >> mantissaBits;
    if (exponent == (1 << exponentBits) - 1) {
      return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                           : sign * std::numeric_limits<double>::infinity();
    }
    const int significand = exponent == 0 ? mantissa : mantissa + (1 << mantissaBits);
    return sign * std::ldexp(significand, std::max(exponent, 1) - bias() - mantissaBits);
  }

  /// Searches all values for the nearest, ties to the even pattern.
  std::uint16_t encode(double value) const {
    if (std::isnan(value)) return static_cast<std::uint16_t>(infinity() | 1);
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(value);
    int low = 0, high = infinity();
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (decode(static_cast<std::uint16_t>(middle)) <= magnitude ? low : high) = middle;
    }
    if (std::isinf(magnitude)) return sign | infinity();
    // Rounding towards infinity counts it as the next power of two.
    const double above =
        high == infinity() ? std::ldexp(1.0, bias() + 1) : decode(static_cast<std::uint16_t>(high));
    const double toLow = magnitude - decode(static_cast<std::uint16_t>(low)), toHigh = above - magnitude;
    const bool takeHigh = toHigh < toLow || (toHigh == toLow && low % 2 == 1);
    return static_cast<std::uint16_t>(sign | (takeHigh ? high : low));
  }
};

inline constexpr Format16 kBFloat16Format{8, 7};
inline constexpr Format16 kFloat16Format{5, 10};

template <class T>
T combineFloats(ReduceOp op, const std::vector<T>& inputs, std::uint32_t divisor) {
  T result = inputs[0];
  for (std::size_t k = 1; k < inputs.size(); ++k) {
    if (op != ReduceOp::kMax) {
      result = result + inputs[k];
    } else if (!std::isnan(result)) {
      result = result > inputs[k] ? result : inputs[k];
    }
  }
  return op == ReduceOp::kMean ? result / static_cast<T>(divisor) : result;
}

/// `Signed` holds the values, `Unsigned` is of the same size and wraps around.
template <class Value, class Unsigned>
Value combineIntegers(ReduceOp op, const std::vector<Value>& inputs, std::uint32_t divisor) {
  Value result = inputs[0];
  for (std::size_t k = 1; k < inputs.size(); ++k) {
    const Unsigned sum =
        static_cast<Unsigned>(static_cast<Unsigned>(result) + static_cast<Unsigned>(inputs[k]));
    result = op == ReduceOp::kMax ? std::max(result, inputs[k]) : static_cast<Value>(sum);
  }
  if (op != ReduceOp::kMean) return result;
  return static_cast<Value>(static_cast<std::int64_t>(result) / static_cast<std::int64_t>(divisor));
}

template <class T, class Bits>
std::vector<T> valuesOf(const std::vector<std::uint64_t>& patterns) {
  std::vector<T> values;
  for (const std::uint64_t pattern : patterns) values.push_back(bitCast<T>(static_cast<Bits>(pattern)));
  return values;
}

inline std::uint64_t reduce16(const Format16& format, ReduceOp op, const std::vector<std::uint64_t>& inputs,
                              std::uint32_t divisor) {
  std::vector<float> values;
  for (const std::uint64_t bits : inputs) {
    values.push_back(static_cast<float>(format.decode(static_cast<std::uint16_t>(bits))));
  }
  return format.encode(combineFloats(op, values, divisor));
}

/// The bit pattern of one output element, from those of its inputs.
inline std::uint64_t referenceElement(DType dtype, ReduceOp op, const std::vector<std::uint64_t>& inputs,
                                      std::uint32_t divisor) {
  switch (dtype) {
    case DType::kFloat32:
      return bitCast<std::uint32_t>(combineFloats(op, valuesOf<float, std::uint32_t>(inputs), divisor));
    case DType::kFloat64:
      return bitCast<std::uint64_t>(combineFloats(op, valuesOf<double, std::uint64_t>(inputs), divisor));
    case DType::kBFloat16:
      return reduce16(kBFloat16Format, op, inputs, divisor);
    case DType::kFloat16:
      return reduce16(kFloat16Format, op, inputs, divisor);
    case DType::kInt32:
      return bitCast<std::uint32_t>(combineIntegers<std::int32_t, std::uint32_t>(
          op, valuesOf<std::int32_t, std::uint32_t>(inputs), divisor));
    case DType::kInt64:
      return bitCast<std::uint64_t>(combineIntegers<std::int64_t, std::uint64_t>(
          op, valuesOf<std::int64_t, std::uint64_t>(inputs), divisor));
    case DType::kUInt8:
      return combineIntegers<std::uint8_t, std::uint8_t>(op, valuesOf<std::uint8_t, std::uint8_t>(inputs),
                                                         divisor);
  }
  return 0;
}

inline bool isNan(DType dtype, std::uint64_t bits) {
  switch (dtype) {
    case DType::kFloat32:
      return std::isnan(bitCast<float>(static_cast<std::uint32_t>(bits)));
    case DType::kFloat64:
      return std::isnan(bitCast<double>(bits));
    case DType::kBFloat16:
      return (bits & 0x7fff) > kBFloat16Format.infinity();
    case DType::kFloat16:
      return (bits & 0x7fff) > kFloat16Format.infinity();
    default:
      return false;
  }
}

/// Equal bits, or both NaN: payload and sign of a NaN are unspecified.
inline bool sameElement(DType dtype, std::uint64_t a, std::uint64_t b) {
  return a == b || (isNan(dtype, a) && isNan(dtype, b));
}

}  // namespace coarse::test
