#include "coarse/client/private_view.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <system_error>

#include "coarse/shared_memory/layout.hpp"

namespace coarse {
namespace {

// From <linux/userfaultfd.h> and <linux/fs.h> of Linux 6.7, which few build systems have yet.
constexpr int kUserModeOnly =
    1;  // needs no privileges; asynchronous faults are resolved in the kernel all the same
constexpr std::uint64_t kFaultsApi = 0xAA;
constexpr std::uint64_t kWriteProtectShared = 1U << 12;
constexpr std::uint64_t kWriteProtectUnpopulated = 1U << 13;
constexpr std::uint64_t kWriteProtectAsync = 1U << 15;
constexpr std::uint64_t kRegisterWriteProtect = 1U << 1;
constexpr std::uint64_t kWriteProtect = 1U << 0;
constexpr std::uint64_t kPageIsWritten = 1U << 1;
constexpr int kPopulateRead = 22;

struct FaultsApi {
  std::uint64_t api, features, ioctls;
};
struct FaultsRegister {
  std::uint64_t start, length, mode, ioctls;
};
struct FaultsWriteProtect {
  std::uint64_t start, length, mode;
};
struct FoundRegion {
  std::uint64_t start, end, categories;
};
struct ScanArguments {
  std::uint64_t size, flags, start, end, walkEnd, found, numFound, maxPages;
  std::uint64_t inverted, allOf, anyOf, returned;
};

constexpr unsigned long kSetApi = _IOWR(0xAA, 0x3F, FaultsApi);
constexpr unsigned long kRegister = _IOWR(0xAA, 0x00, FaultsRegister);
constexpr unsigned long kSetWriteProtect = _IOWR(0xAA, 0x06, FaultsWriteProtect);
constexpr unsigned long kScan = _IOWR('f', 16, ScanArguments);

[[noreturn]] void throwErrno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

std::uint64_t addressOf(const std::byte* place) noexcept { return reinterpret_cast<std::uintptr_t>(place); }

std::size_t pageBytes() noexcept {
  static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

/// Appends a range, merging it with the last one if they are adjacent.
void append(std::vector<ByteRange>& ranges, const ByteRange& next) {
  if (!ranges.empty() && ranges.back().offset + ranges.back().numBytes == next.offset) {
    ranges.back().numBytes += next.numBytes;
  } else {
    ranges.push_back(next);
  }
}

}  // namespace

PrivateView::Pages::Pages(const Region& region, std::size_t length)
    : numBytes((length + pageBytes() - 1) / pageBytes() * pageBytes()) {
  void* const address = ::mmap(nullptr, numBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                               region.fd, static_cast<off_t>(region.offset));
  if (address == MAP_FAILED)
    throwErrno("mapping " + std::to_string(length) + " bytes for this process alone");
  data = static_cast<std::byte*>(address);
}

PrivateView::Pages::~Pages() { ::munmap(data, numBytes); }

PrivateView::FileDescriptor::FileDescriptor(int opened, const char* what) : fd(opened) {
  if (opened < 0) throwErrno(what);
}

PrivateView::FileDescriptor::~FileDescriptor() { ::close(fd); }

PrivateView::PrivateView(const Region& region, std::size_t numBytes)
    : numBytes_(numBytes),
      pages_(region, numBytes),
      faults_(static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | kUserModeOnly)),
              "userfaultfd"),
      pagemap_(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC), "opening /proc/self/pagemap") {
  FaultsApi api{kFaultsApi, kWriteProtectShared | kWriteProtectUnpopulated | kWriteProtectAsync, 0};
  if (::ioctl(faults_.fd, kSetApi, &api) != 0) throwErrno("userfaultfd that write-protects by itself");
  // Before userfaultfd watches the pages, because the kernel then maps several at a time.
  ::madvise(pages_.data, pages_.numBytes, kPopulateRead);
  FaultsRegister area{addressOf(pages_.data), pages_.numBytes, kRegisterWriteProtect, 0};
  if (::ioctl(faults_.fd, kRegister, &area) != 0) throwErrno("watching pages by userfaultfd");
  protect({0, pages_.numBytes});
  static_cast<void>(written());  // throws if the kernel does not report them
}

std::vector<ByteRange> PrivateView::written() const {
  std::vector<ByteRange> ranges;
  std::array<FoundRegion, 64> found;
  ScanArguments scan{};
  scan.size = sizeof(scan);
  scan.start = addressOf(pages_.data);
  scan.end = scan.start + pages_.numBytes;
  scan.found = reinterpret_cast<std::uintptr_t>(found.data());
  scan.numFound = found.size();
  scan.allOf = scan.returned = kPageIsWritten;
  while (scan.start < scan.end) {
    const int count = ::ioctl(pagemap_.fd, kScan, &scan);
    if (count < 0) throwErrno("asking which pages were written");
    for (int i = 0; i < count; ++i) {
      const FoundRegion& each = found[static_cast<std::size_t>(i)];
      append(ranges, {each.start - addressOf(pages_.data), each.end - each.start});
    }
    scan.start = scan.walkEnd;
  }
  return ranges;
}

std::vector<ByteRange> PrivateView::changed(const std::byte* shared) const {
  std::vector<ByteRange> ranges;
  for (const ByteRange& range : written()) {
    const std::size_t end = std::min(range.offset + range.numBytes, numBytes_);
    for (std::size_t at = range.offset; at < end; at += kCacheLineBytes) {
      const std::size_t length = std::min(kCacheLineBytes, end - at);
      if (std::memcmp(pages_.data + at, shared + at, length) != 0) append(ranges, {at, length});
    }
  }
  return ranges;
}

void PrivateView::giveBack(const ByteRange& range) const {
  if (::madvise(pages_.data + range.offset, range.numBytes, MADV_DONTNEED) != 0)
    throwErrno("giving pages back");
  protect(range);
  ::madvise(pages_.data + range.offset, range.numBytes, kPopulateRead);  // instead of one fault per page
}

void PrivateView::protect(const ByteRange& range) const {
  FaultsWriteProtect area{addressOf(pages_.data) + range.offset, range.numBytes, kWriteProtect};
  if (::ioctl(faults_.fd, kSetWriteProtect, &area) != 0) throwErrno("write-protecting pages by userfaultfd");
}

}  // namespace coarse
