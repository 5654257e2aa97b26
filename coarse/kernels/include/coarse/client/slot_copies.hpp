#pragma once

#include <cstddef>

namespace coarse {

/// Carries tensors between the slots of one worker and the memory in which it sees them, where the slots lie
/// elsewhere: in the memory of a GPU, with the worker's tensors in the host's.
///
/// Thread safety: one caller at a time.
class SlotCopies {
 public:
  virtual ~SlotCopies() = default;

  /// Begins to copy what the worker sees to its slots. Offsets count from the first byte of either memory.
  /// @throws std::runtime_error if it cannot be copied, as the others.
  virtual void bring(std::size_t offset, std::size_t numBytes) = 0;
  /// Begins to copy slots to where the worker sees them.
  virtual void fetch(std::size_t offset, std::size_t numBytes) = 0;
  /// Returns when everything that was begun is there.
  virtual void settle() = 0;
};

}  // namespace coarse
