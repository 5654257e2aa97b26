// What clients contribute in the tests of the data path, and the one result that it can have.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "bytes.hpp"
#include "coarse/reduce/dtype.hpp"
#include "coarse/reduce/reduce.hpp"
#include "reduce_reference.hpp"

namespace coarse::test {

inline constexpr DType kEveryDType[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16,
                                        DType::kInt32,   DType::kInt64,   DType::kUInt8};
inline constexpr ReduceOp kEveryOp[] = {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMax};

/// The bits of a small whole number.
inline std::uint64_t encode(DType dtype, std::uint64_t value) {
  switch (dtype) {
    case DType::kFloat32:
      return bitCast<std::uint32_t>(static_cast<float>(value));
    case DType::kFloat64:
      return bitCast<std::uint64_t>(static_cast<double>(value));
    case DType::kBFloat16:
      return kBFloat16Format.encode(static_cast<double>(value));
    case DType::kFloat16:
      return kFloat16Format.encode(static_cast<double>(value));
    case DType::kUInt8:
      return value & 0xff;
    default:
      return value;
  }
}

/// Values repeat after so many elements: a prime, so that an element in a wrong place shows.
inline constexpr std::size_t kPeriod = 5;
using Pattern = std::array<std::uint64_t, kPeriod>;

/// What `client` contributes at `step`, in bits. Powers of two, so that a sum tells who is in it.
inline Pattern contributedPattern(DType dtype, std::size_t client, std::uint32_t step) {
  Pattern pattern;
  for (std::size_t i = 0; i < kPeriod; ++i)
    pattern[i] = encode(dtype, (std::uint64_t{1} << client) * (1 + (i + step) % kPeriod));
  return pattern;
}

inline Bytes repeated(DType dtype, const Pattern& pattern, std::size_t numElements) {
  const std::size_t itemSize = itemBytes(dtype);
  Bytes bytes(numElements * itemSize);
  for (std::size_t i = 0; i < std::min(kPeriod, numElements); ++i)
    std::memcpy(bytes.data() + i * itemSize, &pattern[i], itemSize);
  for (std::size_t filled = kPeriod * itemSize; filled < bytes.size(); filled *= 2)
    std::memcpy(bytes.data() + filled, bytes.data(), std::min(filled, bytes.size() - filled));
  return bytes;
}

inline Bytes contribution(DType dtype, std::size_t numElements, std::size_t client, std::uint32_t step) {
  return repeated(dtype, contributedPattern(dtype, client, step), numElements);
}

/// The result of the contributions of `clients` at `step`. Whole numbers add up exactly in any order, so
/// every algorithm must give these very bits.
inline Bytes result(DType dtype, ReduceOp op, std::size_t numElements,
                    const std::vector<std::size_t>& clients, std::uint32_t step, std::uint32_t divisor) {
  Pattern pattern;
  for (std::size_t i = 0; i < kPeriod; ++i) {
    std::vector<std::uint64_t> inputs;
    for (const std::size_t client : clients) inputs.push_back(contributedPattern(dtype, client, step)[i]);
    pattern[i] = referenceElement(dtype, op, inputs, divisor);
  }
  return repeated(dtype, pattern, numElements);
}

}  // namespace coarse::test
