#pragma once

#include <cstddef>

namespace coarse {

/// Copies with ordinary stores: for data that the next reader finds in this core's or the shared cache.
/// The ranges must not overlap.
void copyBytes(void* destination, const void* source, std::size_t numBytes) noexcept;

/// Copies with non-temporal stores if the processor has them: for destinations that will not be read soon,
/// because such a store neither reads the old line nor evicts others. Ends with a store fence, so that a flag
/// stored with release afterwards publishes the data as after copyBytes(). The ranges must not overlap.
void copyBytesStreaming(void* destination, const void* source, std::size_t numBytes) noexcept;

}  // namespace coarse
