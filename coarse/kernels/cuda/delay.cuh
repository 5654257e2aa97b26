// Holds a stream until the emulated links would have completed a transfer (docs/design/emulation.md).
#pragma once

#include "platform.cuh"

namespace coarse::cuda {

/// A stream is never held for longer, even if a clock is wrong.
inline constexpr std::uint64_t kLongestHoldNs = 200'000;

/// Times are nanoseconds of the GPU's global timer.
struct Hold {
  std::uint64_t until;
  std::uint64_t*
      startedAt;  // receives the timer's value when the kernel begins; in any memory that the GPU can write
};
static_assert(sizeof(Hold) == 16, "a wire format");

/// The end of a kernel that began at `startedAt`.
COARSE_DEVICE std::uint64_t endOf(const Hold& hold, std::uint64_t startedAt) {
  const std::uint64_t latest = startedAt + kLongestHoldNs;
  return hold.until < latest ? hold.until : latest;
}

}  // namespace coarse::cuda
