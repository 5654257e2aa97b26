#pragma once

#include <cstddef>
#include <vector>

#include "coarse/shared_memory/shared_memory.hpp"

namespace coarse {

/// Some bytes of a mapping, from its start.
struct ByteRange {
  std::size_t offset = 0;
  std::size_t numBytes = 0;
};

/// Shared memory in which one process may write for itself alone. A page that this process writes becomes
/// private and hides later writes of others, until giveBack(); all other pages are shared.
///
/// The kernel tracks which pages are written: userfaultfd write-protects them and resolves faults by itself,
/// so that written() only scans page tables (Linux 6.7, ioctl PAGEMAP_SCAN). System calls may write there
/// too. Thread safety: written() and changed() at any time; giveBack() while no thread writes.
class PrivateView {
 public:
  /// Maps `numBytes` from the start of `region`, with all existing pages. Its descriptor may be closed
  /// immediately.
  /// @throws std::system_error if the kernel cannot report written pages, or may not report them to this
  /// process.
  PrivateView(const Region& region, std::size_t numBytes);

  std::byte* data() const noexcept { return pages_.data; }
  std::size_t numBytes() const noexcept { return numBytes_; }

  /// The pages that this process has written, ascending.
  /// @throws std::system_error if the kernel does not report them.
  std::vector<ByteRange> written() const;
  /// Cache lines of these pages that differ from the shared memory, which the caller has mapped at `shared`.
  std::vector<ByteRange> changed(const std::byte* shared) const;
  /// Makes these pages shared again. @pre they were returned by written().
  /// @throws std::system_error as the constructor.
  void giveBack(const ByteRange& range) const;

 private:
  struct Pages {
    Pages(const Region& region, std::size_t numBytes);
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;
    ~Pages();

    std::size_t numBytes;
    std::byte* data;
  };

  struct FileDescriptor {
    FileDescriptor(int opened, const char* what);
    FileDescriptor(const FileDescriptor&) = delete;
    FileDescriptor& operator=(const FileDescriptor&) = delete;
    ~FileDescriptor();

    int fd;
  };

  void protect(const ByteRange& range) const;

  std::size_t numBytes_;
  Pages pages_;
  FileDescriptor faults_;   // of userfaultfd
  FileDescriptor pagemap_;  // of this process
};

}  // namespace coarse
