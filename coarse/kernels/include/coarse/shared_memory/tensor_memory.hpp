#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "coarse/device/ring_step.hpp"
#include "coarse/device/shard_compute.hpp"
#include "coarse/shared_memory/shared_memory.hpp"

namespace coarse {

/// Mapped memory, as long as this or a copy of it lives. The address is one of whoever computes there: of the
/// host's, or of a GPU's, and then nothing that the host can read.
using TensorBytes = std::shared_ptr<std::byte>;

/// When what was copied is read again.
enum class NextUse { kSoon, kLate };

/// Copies tensors within one kind of memory.
///
/// Thread safety: that of the host's memory any; others one caller at a time.
class TensorCopies {
 public:
  virtual ~TensorCopies() = default;

  /// Begins to copy. @throws std::runtime_error if it cannot, as settle().
  virtual void copy(std::byte* to, const std::byte* from, std::size_t numBytes,
                    NextUse use = NextUse::kLate) = 0;
  /// Returns when all that was begun is there.
  virtual void settle() {}
};

/// A kind of memory in which the tensors of a group lie: how one process maps it, and what reduces and
/// updates there (docs/design/gpu.md). Control structures always lie in host memory.
///
/// Thread safety: any.
class TensorMemory {
 public:
  virtual ~TensorMemory() = default;

  /// Whether the host reads and writes it as its own.
  virtual bool isHost() const noexcept { return false; }

  /// Maps the first `numBytes` of a region of this kind of memory, the descriptor of which stays the
  /// caller's.
  /// @throws std::invalid_argument if there are fewer; std::system_error or another std::runtime_error if it
  /// cannot be mapped.
  virtual TensorBytes map(const Region& region, std::size_t numBytes, const std::string& what) const = 0;

  /// Takes memory of this kind that no other process sees, as long as the result or a copy of it lives.
  /// @throws std::bad_alloc, or another std::runtime_error, if there is not so much.
  virtual TensorBytes allocate(std::size_t numBytes) const = 0;

  /// Has what computes here read and write memory of the host as well, as long as the result or a copy of it
  /// lives.
  /// @param memory, numBytes as mmap returned them; must outlive the result.
  /// @returns the address by which to name it to a ShardCompute.
  /// @throws std::runtime_error if it cannot be reached.
  virtual TensorBytes reach(std::byte* memory, std::size_t numBytes) const = 0;

  virtual std::unique_ptr<TensorCopies> makeCopies() const = 0;

  /// What a memory device reduces and updates with. It must not outlive this.
  virtual std::unique_ptr<ShardCompute> makeCompute(ShardCompute::Finish finish) const = 0;

  /// What a memory device does the steps of one ring with. It must not outlive this.
  virtual std::unique_ptr<RingCompute> makeRingCompute() const = 0;
};

/// Sealed memory of the host, on which sync cores work themselves.
std::shared_ptr<const TensorMemory> hostMemory();

/// Copies the first `numBytes` of a region to another one of the same kind of memory; returns when they are
/// there. @throws as TensorMemory::map().
void copyRegion(const TensorMemory& memory, const Region& from, const Region& to, std::size_t numBytes);

}  // namespace coarse
