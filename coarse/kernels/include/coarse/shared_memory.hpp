#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace coarse {

/// A mapping of shared memory; unmaps itself. Movable, not copyable.
class Mapping {
 public:
  enum class Access { kReadOnly, kReadWrite };

  Mapping() = default;
  /// Maps the first `numBytes` of `fd`. The descriptor stays the caller's and may be closed at once.
  /// @throws std::system_error if mmap fails.
  Mapping(int fd, std::size_t numBytes, Access access);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  std::byte* data() const noexcept { return data_; }
  std::size_t numBytes() const noexcept { return numBytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t numBytes_ = 0;
};

/// Makes a memfd of `numBytes` that is fully allocated (so that a later write can't die with SIGBUS),
/// close-on-exec, and sealed against shrinking, growing and further seals (so that no peer can truncate it).
///
/// @returns a file descriptor that the caller closes.
/// @throws std::system_error with ENOSPC or ENOMEM if the memory can't be had; nothing is left allocated.
int createSealedMemory(const std::string& label, std::size_t numBytes);

/// The same without allocating anything: for memory that is written by pwrite(), which fails where there is
/// none.
int createSparseSealedMemory(const std::string& label, std::size_t numBytes);

/// Opens the same memory read-only, for peers that must not write it. The caller closes the descriptor.
/// @throws std::system_error if that fails.
int reopenReadOnly(int fd);

/// Size of the memory behind `fd`, and that it carries the seals of createSealedMemory().
/// @throws std::invalid_argument if it is not sealed, so that its size could change under a mapping.
std::size_t sealedBytes(int fd);

}  // namespace coarse
