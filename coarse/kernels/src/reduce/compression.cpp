#include "coarse/reduce/compression.hpp"

#include <algorithm>
#include <cstring>

#include "coarse/reduce/reduce.hpp"

namespace coarse {
namespace {

constexpr std::size_t kScaleBytes = sizeof(float);
constexpr std::size_t kMostPieceBytes = 2 * kBlockElements;  // of the compressed form of a block's values
static_assert(kScaleBytes + kBlockElements <= kMostPieceBytes);

DType halfOf(Compression compression) noexcept {
  return compression == Compression::kBFloat16 ? DType::kBFloat16 : DType::kFloat16;
}

/// Compresses at most kBlockElements values to `piece`.
void compressPiece(Compression compression, const float* values, std::size_t numElements, std::byte* piece,
                   float* residual, float* rounded) noexcept {
  if (compression == Compression::kInt8) {
    auto* const codes = reinterpret_cast<std::int8_t*>(piece + kScaleBytes);
    const float scale = quantizeBlock(values, residual, numElements, codes, rounded);
    std::memcpy(piece, &scale, kScaleBytes);
    return;
  }
  const DType half = halfOf(compression);
  narrow(half, values, piece, numElements, 1, ReduceOp::kSum);
  widen(half, piece, rounded, numElements);
}

void decompressPiece(Compression compression, const std::byte* piece, std::size_t numElements,
                     float* out) noexcept {
  if (compression != Compression::kInt8) return widen(halfOf(compression), piece, out, numElements);
  float scale = 0;
  std::memcpy(&scale, piece, kScaleBytes);
  dequantizeBlock(reinterpret_cast<const std::int8_t*>(piece + kScaleBytes), scale, numElements, out);
}

}  // namespace

std::size_t compressedBytes(Compression compression, std::size_t numElements) noexcept {
  switch (compression) {
    case Compression::kNone:
      break;
    case Compression::kBFloat16:
    case Compression::kFloat16:
      return 2 * numElements;
    case Compression::kInt8:
      return numElements + kScaleBytes * ((numElements + kBlockElements - 1) / kBlockElements);
  }
  return numElements * sizeof(float);
}

void compress(Compression compression, float* values, std::size_t numElements, std::byte* out,
              float* residual) noexcept {
  const bool isInPlace = out == reinterpret_cast<std::byte*>(values);
  alignas(64) std::byte piece[kMostPieceBytes];
  alignas(64) float unused[kBlockElements];
  for (std::size_t start = 0; start < numElements; start += kBlockElements) {
    const std::size_t count = std::min(kBlockElements, numElements - start);
    float* const errors = residual == nullptr ? nullptr : residual + start;
    compressPiece(compression, values + start, count, piece, errors, isInPlace ? unused : values + start);
    // In place, these bytes come no later than those of the values that were read.
    const std::size_t numBytes = compressedBytes(compression, count);
    std::memcpy(out, piece, numBytes);
    out += numBytes;
  }
}

void decompress(Compression compression, const std::byte* in, std::size_t numElements, float* out) noexcept {
  alignas(64) std::byte piece[kMostPieceBytes];
  // From the end, so that in place no piece is overwritten before it was read.
  for (std::size_t end = numElements; end > 0;) {
    const std::size_t start = (end - 1) / kBlockElements * kBlockElements;
    std::memcpy(piece, in + compressedBytes(compression, start), compressedBytes(compression, end - start));
    decompressPiece(compression, piece, end - start, out + start);
    end = start;
  }
}

}  // namespace coarse
