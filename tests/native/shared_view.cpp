// For the thread sanitizer only. Processes see shared memory at addresses of their own, and so do the devices
// and workers of a test; the sanitizer identifies memory by its address, and would see neither conflicting
// accesses nor their order. Here every mapping of the same memory, from its start on, gets the same
// address (linked with --wrap), so that it judges the whole protocol across devices.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <utility>

extern "C" {
void* __real_mmap(void* address, std::size_t numBytes, int protection, int flags, int fd, off_t offset);
int __real_munmap(void* address, std::size_t numBytes);
void* __wrap_mmap(void* address, std::size_t numBytes, int protection, int flags, int fd, off_t offset);
int __wrap_munmap(void* address, std::size_t numBytes);
}

namespace {

struct View {
  void* address = nullptr;
  std::size_t numBytes = 0;
  int numUsers = 0;
};

struct Views {
  std::mutex mutex;
  std::map<std::pair<dev_t, ino_t>, View> byFile;
};

Views& views() {
  static auto* all = new Views;  // outlives every object that unmaps at exit
  return *all;
}

}  // namespace

void* __wrap_mmap(void* address, std::size_t numBytes, int protection, int flags, int fd, off_t offset) {
  struct stat file{};
  const bool isShared = fd >= 0 && offset == 0 && (flags & MAP_SHARED) != 0 && ::fstat(fd, &file) == 0;
  const bool isRefused = (protection & PROT_WRITE) != 0 && (::fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY;
  if (!isShared || isRefused) return __real_mmap(address, numBytes, protection, flags, fd, offset);
  const std::lock_guard<std::mutex> lock(views().mutex);
  View& view = views().byFile[{file.st_dev, file.st_ino}];
  if (view.numUsers > 0 && numBytes <= view.numBytes) {
    ++view.numUsers;
    return view.address;
  }
  void* mapped = __real_mmap(address, numBytes, protection, flags, fd, offset);
  if (view.numUsers == 0 && mapped != MAP_FAILED && (protection & PROT_WRITE) != 0)
    view = {mapped, numBytes, 1};
  return mapped;
}

int __wrap_munmap(void* address, std::size_t numBytes) {
  const std::lock_guard<std::mutex> lock(views().mutex);
  for (auto& [file, view] : views().byFile) {
    if (view.numUsers == 0 || view.address != address) continue;
    return --view.numUsers > 0 ? 0 : __real_munmap(address, view.numBytes);
  }
  return __real_munmap(address, numBytes);
}

// Memory that was sent from is written again only after the other node has received all of it and
// answered. That order goes through the kernel and another node, where the sanitizer does not see it.
extern "C" const char* __tsan_default_suppressions() { return "race:sendPieces\n"; }
