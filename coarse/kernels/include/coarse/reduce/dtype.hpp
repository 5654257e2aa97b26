#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace coarse {

/// Element types that can be synchronised. The values are part of the wire format: add at the end, never
/// renumber.
enum class DType : std::uint8_t {
  kFloat32 = 0,
  kFloat64 = 1,
  kBFloat16 = 2,
  kFloat16 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kUInt8 = 6,
};

inline constexpr std::size_t kNumDTypes = 7;

/// Bytes of one element.
/// @throws std::invalid_argument if `dtype` is not one of the enumerators (it may have come over a wire).
constexpr std::size_t itemBytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kUInt8:
      return 1;
  }
  throw std::invalid_argument("itemBytes: not a DType; expected a value from 0 (float32) to 6 (uint8)");
}

}  // namespace coarse
