// Elements: how a type is stored, its accumulator, and the operations on it. The arithmetic of
// coarse/kernels/src/reduce/reduce_kernels.inc, to the bit: only the payload of a NaN may differ.
//
// No operation here may be contracted with another (--fmad=false), or flush subnormals.
#pragma once

#include "platform.cuh"

namespace coarse::cuda {

COARSE_DEVICE std::uint32_t select(bool condition, std::uint32_t yes, std::uint32_t no) {
  return condition ? yes : no;
}

template <class T>
struct Plain {
  using Stored = T;
  using Accumulator = T;
  static COARSE_DEVICE T load(T value) { return value; }
  static COARSE_DEVICE T store(T value) { return value; }
};

struct BFloat16 {
  using Stored = std::uint16_t;
  using Accumulator = float;

  static COARSE_DEVICE float load(std::uint16_t value) {
    return bitCast<float>(static_cast<std::uint32_t>(value) << 16);
  }

  static COARSE_DEVICE std::uint16_t store(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    std::uint16_t stored;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(stored) : "f"(value));
    return stored;
#else
    const std::uint32_t bits = bitCast<std::uint32_t>(value);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const std::uint32_t quietNan = (bits >> 16) | 0x40u;
    return static_cast<std::uint16_t>(select((bits & 0x7fffffffu) > 0x7f800000u, quietNan, rounded));
#endif
  }
};

/// By an instruction if there is one; else as in reduce_kernels.inc, which names the source of the method.
struct Float16 {
  using Stored = std::uint16_t;
  using Accumulator = float;

  static COARSE_DEVICE float load(std::uint16_t value) {
#if defined(__CUDA_ARCH__)
    float loaded;
    asm("cvt.f32.f16 %0, %1;" : "=f"(loaded) : "h"(value));
    return loaded;
#else
    constexpr std::uint32_t kSmallestNormal = 113u << 23;  // 2^-14, half's smallest normal, as float32
    const std::uint32_t sign = (value & 0x8000u) << 16;
    const std::uint32_t magnitude = (value & 0x7fffu) << 13;
    const std::uint32_t quiet = select((magnitude & 0x007fffffu) != 0, 0x00400000u, 0);
    const std::uint32_t infOrNan = (magnitude + (224u << 23)) | quiet;
    const float unit = bitCast<float>(kSmallestNormal);
    const std::uint32_t subnormal =
        bitCast<std::uint32_t>(bitCast<float>(magnitude + kSmallestNormal) - unit);
    const std::uint32_t finite = select(magnitude < (1u << 23), subnormal, magnitude + (112u << 23));
    return bitCast<float>(sign | select(magnitude >= (31u << 23), infOrNan, finite));
#endif
  }

  static COARSE_DEVICE std::uint16_t store(float value) {
#if defined(__CUDA_ARCH__)
    std::uint16_t stored;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(stored) : "f"(value));
    return stored;
#else
    constexpr std::uint32_t kSubnormalUnit = 126u << 23;  // its last place is half's subnormal step
    const std::uint32_t bits = bitCast<std::uint32_t>(value);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    const std::uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    const std::uint32_t infOrNan = select(magnitude > 0x7f800000u, nan, 0x7c00u);
    const float unit = bitCast<float>(kSubnormalUnit);
    const std::uint32_t subnormal = bitCast<std::uint32_t>(bitCast<float>(magnitude) + unit) - kSubnormalUnit;
    const std::uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const std::uint32_t finite = select(magnitude < (113u << 23), subnormal, normal);
    const std::uint32_t half = select(magnitude >= (143u << 23), infOrNan, finite);
    return static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | half);
#endif
  }
};

// ---- Operations ----

struct Sum {
  static COARSE_DEVICE float apply(float a, float b) { return a + b; }
  static COARSE_DEVICE double apply(double a, double b) { return a + b; }
  static COARSE_DEVICE std::uint8_t apply(std::uint8_t a, std::uint8_t b) {
    return static_cast<std::uint8_t>(a + b);
  }
  // Signed overflow is undefined, unsigned wraps.
  static COARSE_DEVICE std::int32_t apply(std::int32_t a, std::int32_t b) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(a) + static_cast<std::uint32_t>(b));
  }
  static COARSE_DEVICE std::int64_t apply(std::int64_t a, std::int64_t b) {
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  }
};

struct Max {
  template <class T>
  static COARSE_DEVICE T apply(T a, T b) {
    return ((a > b) | (a != a)) ? a : b;  // a NaN on the left is kept, one on the right fails a > b
  }
};

// ---- Means ----

template <class T>
inline constexpr bool kIsFloatingPoint = static_cast<T>(0.5) != static_cast<T>(0);

/// Hides a value's origin from the compiler.
COARSE_DEVICE void hide([[maybe_unused]] float& value) {
#if defined(__CUDA_ARCH__)
  asm("" : "+f"(value));
#endif
}
COARSE_DEVICE void hide([[maybe_unused]] double& value) {
#if defined(__CUDA_ARCH__)
  asm("" : "+d"(value));
#endif
}

/// a / b. GPUs divide zeros by a function call: therefore b is divided in place of a zero.
template <class T>
COARSE_DEVICE T quotient(T a, T b) {
  const bool isZero = a == 0 && b > 0;
  T divided = isZero ? b : a;
  hide(divided);
  divided = divided / b;
  return isZero ? a : divided;
}

/// Divides `values` as the last step of a mean. A divisor of 0 or 1 leaves them unchanged.
template <unsigned kCount, class T>
COARSE_DEVICE void divide(T (&values)[kCount], std::uint32_t divisor) {
  if (divisor <= 1) return;
  if constexpr (kIsFloatingPoint<T>) {
    const T by = static_cast<T>(divisor);
    // The reciprocal of a power of two is exact, so the product has the quotient's single rounding.
    if ((divisor & (divisor - 1)) == 0) {
      const T factor = T{1} / by;
      COARSE_UNROLL
      for (unsigned i = 0; i < kCount; ++i) values[i] = values[i] * factor;
    } else {
      COARSE_UNROLL
      for (unsigned i = 0; i < kCount; ++i) values[i] = quotient(values[i], by);
    }
  } else {
    const auto by = static_cast<std::int64_t>(divisor);
    COARSE_UNROLL
    for (unsigned i = 0; i < kCount; ++i)
      values[i] = static_cast<T>(static_cast<std::int64_t>(values[i]) / by);
  }
}

}  // namespace coarse::cuda
