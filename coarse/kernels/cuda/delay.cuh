// Holds a stream until the links of another machine would be through with a transfer
// (docs/design/emulation.md).
#pragma once

#include "platform.cuh"

namespace coarse::cuda {

/// However wrong a clock may be: a stream is never held for longer.
inline constexpr std::uint64_t kLongestHoldNs = 200'000;

/// Times are nanoseconds of the GPU's global timer.
struct Hold {
  std::uint64_t until;
  std::uint64_t*
      startedAt;  // gets what the timer shows when the kernel begins; of any memory that it can write
};
static_assert(sizeof(Hold) == 16, "a wire format");

/// When a kernel that began at `startedAt` ends.
COARSE_DEVICE std::uint64_t endOf(const Hold& hold, std::uint64_t startedAt) {
  const std::uint64_t latest = startedAt + kLongestHoldNs;
  return hold.until < latest ? hold.until : latest;
}

}  // namespace coarse::cuda
