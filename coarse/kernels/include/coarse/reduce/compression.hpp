#pragma once

#include <cstddef>
#include <cstdint>

/// The narrower forms in which float32 values travel between nodes (docs/design/nodes.md#compression).
///
/// Guarantees, for every function here:
/// - Results are bitwise the same for any instruction set and alignment.
/// - NaN stays NaN and inf stays inf, at their places; all else is rounded to nearest even.
/// - Functions keep no state: any number of threads may call them at once on disjoint arrays.
namespace coarse {

/// The values are part of the wire format: add at the end, never renumber.
enum class Compression : std::uint8_t {
  kNone = 0,
  kBFloat16 = 1,
  kFloat16 = 2,  // values beyond its range, 65504, become inf
  kInt8 = 3,     // blocks of kBlockElements values, each block with a scale
};

inline constexpr std::size_t kNumCompressions = 4;

/// Values that share a scale with kInt8. In a block, the scale comes first, as a float32, then a byte per
/// value.
inline constexpr std::size_t kBlockElements = 256;

/// Blocks all of whose magnitudes are smaller are sent as zeros: quotients by their scale might overflow.
inline constexpr float kSmallestBlock = 0x1p-100F;

/// Bytes of the compressed form of `numElements` values.
std::size_t compressedBytes(Compression compression, std::size_t numElements) noexcept;

/// Writes the compressed form of `values` to `out`, which is `values` itself or elsewhere. In the latter
/// case, `values` become what decompress() gives.
///
/// With kInt8 there is error feedback: `residual` is added to the values first, and becomes their rounding
/// error. It does not change where the sum is not finite. Other forms do not use it.
/// @pre `compression` is not kNone; in place, compressedBytes() is at most that of the values.
void compress(Compression compression, float* values, std::size_t numElements, std::byte* out,
              float* residual) noexcept;

/// Writes the values of a compressed form to `out`, which may begin where `in` does.
/// @pre as for compress(); `in` may have any contents.
void decompress(Compression compression, const std::byte* in, std::size_t numElements, float* out) noexcept;

/// One block of kInt8: adds `residual` to `values`, and writes codes, the values that they stand for to
/// `rounded`, which may be `values`, and the error to `residual`. @returns the scale; negative if some values
/// are not finite.
float quantizeBlock(const float* values, float* residual, std::size_t numElements, std::int8_t* codes,
                    float* rounded) noexcept;

/// The values of one block of kInt8.
void dequantizeBlock(const std::int8_t* codes, float scale, std::size_t numElements, float* out) noexcept;

}  // namespace coarse
