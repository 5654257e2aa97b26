#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace coarse {

/// Memory that other processes can map: all of a descriptor's memory, or a range of a device file; or several
/// of these, in sequence. A Region does not own its descriptors.
struct Region {
  int fd = -1;
  std::size_t offset = 0;
  std::size_t numBytes = 0;  // length to map for a device file; 0 stands for sealed memory, mapped completely
  std::vector<Region> rest{};  // regions mapped after it; for GPU memory
  std::string gpu{};           // the UUID of the GPU that has the memory; empty if processors map it

  // Implicit: most memory is sealed.
  Region(int sealedFd) : fd(sealedFd) {}  // NOLINT(google-explicit-constructor)
  /// @throws std::invalid_argument if `rangeBytes` is 0.
  Region(int deviceFd, std::size_t rangeOffset, std::size_t rangeBytes, std::string ofGpu = {});

  bool isSealed() const noexcept { return numBytes == 0; }
  /// Total length to map of all pieces.
  std::size_t totalBytes() const noexcept;
};

/// A mapping of shared memory; unmaps itself. Movable, not copyable.
class Mapping {
 public:
  enum class Access { kReadOnly, kReadWrite };

  Mapping() = default;
  /// Maps `numBytes` from the start of `region`. Its descriptor may be closed immediately.
  /// @throws std::system_error if mmap fails.
  Mapping(const Region& region, std::size_t numBytes, Access access);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  /// Maps every page now. @throws std::system_error if a page can't be mapped.
  void populate() const;

  std::byte* data() const noexcept { return data_; }
  std::size_t numBytes() const noexcept { return numBytes_; }
  bool isReadOnly() const noexcept { return access_ == Access::kReadOnly; }

 private:
  std::byte* data_ = nullptr;
  std::size_t numBytes_ = 0;
  Access access_ = Access::kReadOnly;
  std::size_t mappedBytes_ = 0;  // device files are mapped in whole units of their alignment
};

/// Makes a memfd of `numBytes` that is fully allocated (so that a later write can't die with SIGBUS),
/// close-on-exec, and sealed against shrinking, growing and further seals (so that no peer can truncate it).
///
/// @returns a file descriptor that the caller closes.
/// @throws std::system_error with ENOSPC or ENOMEM if there is not enough memory; nothing stays allocated.
int createSealedMemory(const std::string& label, std::size_t numBytes);

/// The same without allocation: for memory that is written by pwrite(), which fails if there is no memory.
int createSparseSealedMemory(const std::string& label, std::size_t numBytes);

/// The same as both functions above, with all pages on one NUMA node, or interleaved over several, whichever
/// process touches them first.
/// @throws std::system_error as above; with EINVAL if this process can't have memory of that node, with EPERM
/// or ENOSYS if it may not set the placement of its memory.
int createBoundMemory(const std::string& label, std::size_t numBytes, const std::vector<unsigned>& nodes,
                      bool isAllocated);

/// Opens the same memory read-only, for peers that must not write it. The caller closes the descriptor.
/// @throws std::system_error if that fails.
int reopenReadOnly(int fd);

/// Size of the memory behind `fd`, after checking that it has the seals of createSealedMemory().
/// @throws std::invalid_argument if it is not sealed, so that its size could change under a mapping.
std::size_t sealedBytes(int fd);

/// Maps the first `numBytes` of a region after checking that they exist: a device file has no seals, but a
/// size.
/// @throws std::invalid_argument if they do not; the message begins with `what`.
Mapping mapShared(const Region& region, std::size_t numBytes, Mapping::Access access,
                  const std::string& what);

/// The same for memory that must be sealed.
inline Mapping mapSealed(int fd, std::size_t numBytes, Mapping::Access access, const std::string& what) {
  return mapShared(fd, numBytes, access, what);
}

}  // namespace coarse
