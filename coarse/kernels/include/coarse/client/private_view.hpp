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

/// Shared memory as one process sees it that may write to it for itself alone. A page that this process
/// writes becomes its own, which hides what others write there later, until giveBack(); all other pages are
/// shared.
///
/// The kernel notes which pages are written: userfaultfd write-protects them and resolves faults by itself,
/// so that written() looks at page tables alone (Linux 6.7, ioctl PAGEMAP_SCAN). System calls may write there
/// too. Thread safety: written() and changed() at any time; giveBack() while nobody writes.
class PrivateView {
 public:
  /// Maps `numBytes` from the start of `region`, with all pages that are there. Its descriptor may be closed
  /// at once.
  /// @throws std::system_error if the kernel cannot tell which pages are written, or may not tell this
  /// process.
  PrivateView(const Region& region, std::size_t numBytes);

  std::byte* data() const noexcept { return pages_.data; }
  std::size_t numBytes() const noexcept { return numBytes_; }

  /// The pages that this process has written, ascending.
  /// @throws std::system_error if the kernel does not say.
  std::vector<ByteRange> written() const;
  /// Cache lines of them that differ from the shared memory, which the caller has mapped at `shared`.
  std::vector<ByteRange> changed(const std::byte* shared) const;
  /// From now on these pages are the shared ones again. @pre they are of written().
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

  struct Descriptor {
    Descriptor(int opened, const char* what);
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor();

    int fd;
  };

  void protect(const ByteRange& range) const;

  std::size_t numBytes_;
  Pages pages_;
  Descriptor faults_;   // of userfaultfd
  Descriptor pagemap_;  // of this process
};

}  // namespace coarse
