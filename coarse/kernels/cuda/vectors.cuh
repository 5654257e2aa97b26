// Loads and stores of 16 bytes at a time; of 8 where narrow elements are paired with wide ones.
#pragma once

#include "elements.cuh"

namespace coarse::cuda {

inline constexpr unsigned kVectorBytes = 16;

/// Bytes that one instruction loads or stores.
template <unsigned kBytes>
struct alignas(kBytes) Words {
  std::uint32_t words[kBytes / 4];
};

/// @pre the address is a multiple of kBytes.
template <unsigned kBytes>
COARSE_DEVICE Words<kBytes> loadWords(const void* address) {
#if defined(__CUDA_ARCH__)
  // Word by word: compilers turn a copy by bitCast() into loads of single bytes.
  if constexpr (kBytes == 16) {
    const uint4 loaded = *static_cast<const uint4*>(address);
    return {loaded.x, loaded.y, loaded.z, loaded.w};
  } else {
    static_assert(kBytes == 8, "an instruction loads 8 or 16 bytes");
    const uint2 loaded = *static_cast<const uint2*>(address);
    return {loaded.x, loaded.y};
  }
#else
  return *static_cast<const Words<kBytes>*>(address);
#endif
}

template <unsigned kBytes>
COARSE_DEVICE void storeWords(void* address, const Words<kBytes>& words) {
#if defined(__CUDA_ARCH__)
  const std::uint32_t* const word = words.words;
  if constexpr (kBytes == 16) {
    *static_cast<uint4*>(address) = make_uint4(word[0], word[1], word[2], word[3]);
  } else {
    static_assert(kBytes == 8, "an instruction stores 8 or 16 bytes");
    *static_cast<uint2*>(address) = make_uint2(word[0], word[1]);
  }
#else
  *static_cast<Words<kBytes>*>(address) = words;
#endif
}

template <class Stored, unsigned kCount>
struct Lanes {
  Stored values[kCount];
};

/// Converts elements from their form in memory to registers.
template <class Element, unsigned kCount>
COARSE_DEVICE void unpack(const Words<kCount * sizeof(typename Element::Stored)>& words,
                          typename Element::Accumulator (&values)[kCount]) {
  const auto lanes = bitCast<Lanes<typename Element::Stored, kCount>>(words);
  COARSE_UNROLL
  for (unsigned i = 0; i < kCount; ++i) values[i] = Element::load(lanes.values[i]);
}

template <class Element, unsigned kCount>
COARSE_DEVICE Words<kCount * sizeof(typename Element::Stored)> pack(
    const typename Element::Accumulator (&values)[kCount]) {
  Lanes<typename Element::Stored, kCount> lanes;
  COARSE_UNROLL
  for (unsigned i = 0; i < kCount; ++i) lanes.values[i] = Element::store(values[i]);
  return bitCast<Words<kCount * sizeof(typename Element::Stored)>>(lanes);
}

/// Loads accumulators, which can be longer than one vector. @pre aligned to 16 bytes.
template <class T, unsigned kCount>
COARSE_DEVICE void loadAccumulators(const T* from, T (&values)[kCount]) {
  constexpr unsigned kStep = kVectorBytes / sizeof(T);
  COARSE_UNROLL
  for (unsigned i = 0; i < kCount; i += kStep) {
    const auto lanes = bitCast<Lanes<T, kStep>>(loadWords<kVectorBytes>(from + i));
    COARSE_UNROLL
    for (unsigned j = 0; j < kStep; ++j) values[i + j] = lanes.values[j];
  }
}

template <class T, unsigned kCount>
COARSE_DEVICE void storeAccumulators(T* to, const T (&values)[kCount]) {
  constexpr unsigned kStep = kVectorBytes / sizeof(T);
  COARSE_UNROLL
  for (unsigned i = 0; i < kCount; i += kStep) {
    Lanes<T, kStep> lanes;
    COARSE_UNROLL
    for (unsigned j = 0; j < kStep; ++j) lanes.values[j] = values[i + j];
    storeWords<kVectorBytes>(to + i, bitCast<Words<kVectorBytes>>(lanes));
  }
}

}  // namespace coarse::cuda
