#pragma once

#include <cstddef>

namespace coarse {

/// Copies tensors between the slots of one worker and the memory in which the worker accesses them, if the
/// slots lie elsewhere: in GPU memory, with the worker's tensors in host memory.
///
/// Thread safety: one caller at a time.
class SlotCopies {
 public:
  virtual ~SlotCopies() = default;

  /// Begins to copy the worker's memory to its slots. Offsets count from the first byte of either memory.
  /// @throws std::runtime_error if the copy fails, as the other functions do.
  virtual void stage(std::size_t offset, std::size_t numBytes) = 0;
  /// Begins to copy slots to the worker's memory.
  virtual void fetch(std::size_t offset, std::size_t numBytes) = 0;
  /// Returns when all copies begun so far are complete.
  virtual void synchronize() = 0;
};

}  // namespace coarse
