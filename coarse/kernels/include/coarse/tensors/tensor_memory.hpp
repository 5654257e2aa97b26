#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "coarse/shared_memory/shared_memory.hpp"
#include "coarse/tensors/ring_step.hpp"
#include "coarse/tensors/shard_compute.hpp"

namespace coarse {

/// Mapped memory, as long as this or a copy of it lives. The address is valid for the processor that computes
/// there: for the host, or for a GPU, and then the host cannot read it.
using TensorBytes = std::shared_ptr<std::byte>;

/// When the copied data is read again.
enum class NextUse { kSoon, kLate };

/// Copies tensors within one kind of memory.
///
/// Thread safety: any for host memory; one caller at a time for others.
class TensorCopies {
 public:
  virtual ~TensorCopies() = default;

  /// Begins to copy. @throws std::runtime_error if the copy fails, as synchronize().
  virtual void copy(std::byte* to, const std::byte* from, std::size_t numBytes,
                    NextUse use = NextUse::kLate) = 0;
  /// Returns when all copies begun so far are complete.
  virtual void synchronize() {}
};

/// A kind of memory in which the tensors of a group lie: how a process maps it, and how it computes there
/// (docs/design/gpu.md). Control structures always lie in host memory.
///
/// Thread safety: any.
class TensorMemory {
 public:
  virtual ~TensorMemory() = default;

  /// Whether the host accesses it directly.
  virtual bool isHost() const noexcept { return false; }

  /// Maps the first `numBytes` of a region of this kind of memory; the caller closes the descriptor.
  /// @throws std::invalid_argument if there are fewer bytes; std::system_error or another std::runtime_error
  /// if it cannot be mapped.
  virtual TensorBytes map(const Region& region, std::size_t numBytes, const std::string& what) const = 0;

  /// Allocates memory of this kind, private to this process, as long as the result or a copy of it lives.
  /// @throws std::bad_alloc, or another std::runtime_error, if there is not enough memory.
  virtual TensorBytes allocate(std::size_t numBytes) const = 0;

  /// Makes host memory accessible to the processor that computes here, as long as the result or a copy of it
  /// lives.
  /// @param memory, numBytes as mmap returned them; must outlive the result.
  /// @returns the memory's address for a ShardCompute.
  /// @throws std::runtime_error if it cannot be accessed.
  virtual TensorBytes reach(std::byte* memory, std::size_t numBytes) const = 0;

  virtual std::unique_ptr<TensorCopies> makeCopies() const = 0;

  /// The ShardCompute of a memory device. It must not outlive this.
  virtual std::unique_ptr<ShardCompute> makeCompute(ShardCompute::Finish finish) const = 0;

  /// The RingCompute of a memory device for one ring. It must not outlive this.
  virtual std::unique_ptr<RingCompute> makeRingCompute() const = 0;
};

/// Sealed host memory, in which sync cores themselves compute.
std::shared_ptr<const TensorMemory> hostMemory();

/// Copies the first `numBytes` of a region to another one of the same kind of memory; returns when the copy
/// is complete. @throws as TensorMemory::map().
void copyRegion(const TensorMemory& memory, const Region& from, const Region& to, std::size_t numBytes);

}  // namespace coarse
