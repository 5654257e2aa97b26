#include "coarse/shared_memory/shared_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <stdexcept>
#include <system_error>
#include <utility>
#include <vector>

namespace coarse {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void throwErrno(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

[[noreturn]] void closeAndThrow(int fd, int error, const std::string& what) {
  ::close(fd);
  throwErrno(error, what);
}

int fallocateRestarting(int fd, std::size_t numBytes) {
  int error = 0;
  do {
    error = ::posix_fallocate(fd, 0, static_cast<off_t>(numBytes));
  } while (error == EINTR);
  return error;
}

/// The policy belongs to the memory, not to a mapping: it applies to pages allocated by any process in any
/// way.
int bindToNodes(int fd, std::size_t numBytes, const std::vector<unsigned>& nodes) {
  constexpr unsigned kBitsPerWord = 8 * sizeof(unsigned long);
  constexpr int kBind = 2, kInterleave = 3;  // MPOL_ of <linux/mempolicy.h>, which not every system has
  std::vector<unsigned long> mask;
  for (const unsigned node : nodes) {
    mask.resize(std::max<std::size_t>(mask.size(), node / kBitsPerWord + 1), 0);
    mask[node / kBitsPerWord] |= 1UL << (node % kBitsPerWord);
  }
  void* const address = ::mmap(nullptr, numBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) return errno;
  // One bit more than there are: the kernel ignores the last one.
  const auto count = static_cast<unsigned long>(mask.size() * kBitsPerWord + 1);
  const int policy = nodes.size() == 1 ? kBind : kInterleave;
  const long status = ::syscall(SYS_mbind, address, numBytes, policy, mask.data(), count, 0);
  const int error = status == 0 ? 0 : errno;
  ::munmap(address, numBytes);
  return error;
}

int createMemory(const std::string& label, std::size_t numBytes, bool isAllocated,
                 const std::vector<unsigned>& nodes = {}) {
  const std::string what = "allocating " + std::to_string(numBytes) + " bytes for " + label;
  const int fd = ::memfd_create(label.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throwErrno(errno, what);
  if (::ftruncate(fd, static_cast<off_t>(numBytes)) != 0) closeAndThrow(fd, errno, what);
  if (!nodes.empty()) {
    const int unbound = bindToNodes(fd, numBytes, nodes);
    std::string where;
    for (const unsigned node : nodes) where += " " + std::to_string(node);
    if (unbound != 0) closeAndThrow(fd, unbound, what + " on NUMA node" + where);
  }
  const int error = isAllocated ? fallocateRestarting(fd, numBytes) : 0;
  if (error != 0) closeAndThrow(fd, error, what);
  if (::fcntl(fd, F_ADD_SEALS, kSeals) != 0) closeAndThrow(fd, errno, what);
  return fd;
}

/// Sysfs gives the size of a character device; a file on a DAX file system has its own size.
std::size_t deviceBytes(int fd) {
  struct stat status{};
  if (::fstat(fd, &status) != 0) throwErrno(errno, "reading the size of device memory");
  if (S_ISREG(status.st_mode)) return static_cast<std::size_t>(status.st_size);
  if (!S_ISCHR(status.st_mode))
    throw std::invalid_argument("a descriptor of no device was offered as device memory");
  std::size_t numBytes = 0;
  std::ifstream("/sys/dev/char/" + std::to_string(major(status.st_rdev)) + ":" +
                std::to_string(minor(status.st_rdev)) + "/size") >>
      numBytes;
  return numBytes;
}

std::size_t availableBytes(const Region& region) {
  if (region.isSealed()) return sealedBytes(region.fd);
  const std::size_t all = deviceBytes(region.fd);
  return region.offset <= all && region.numBytes <= all - region.offset ? region.numBytes : 0;
}

}  // namespace

Region::Region(int deviceFd, std::size_t rangeOffset, std::size_t rangeBytes, std::string ofGpu)
    : fd(deviceFd), offset(rangeOffset), numBytes(rangeBytes), gpu(std::move(ofGpu)) {
  if (rangeBytes == 0) throw std::invalid_argument("a range of a device file has no bytes");
}

std::size_t Region::totalBytes() const noexcept {
  std::size_t total = numBytes;
  for (const Region& each : rest) total += each.totalBytes();
  return total;
}

Mapping::Mapping(const Region& region, std::size_t numBytes, Access access)
    : numBytes_(numBytes), access_(access), mappedBytes_(region.isSealed() ? numBytes : region.numBytes) {
  const int protection = access == Access::kReadWrite ? PROT_READ | PROT_WRITE : PROT_READ;
  void* address =
      ::mmap(nullptr, mappedBytes_, protection, MAP_SHARED, region.fd, static_cast<off_t>(region.offset));
  if (address == MAP_FAILED)
    throwErrno(errno, "mapping " + std::to_string(numBytes) + " bytes of device memory");
  data_ = static_cast<std::byte*>(address);
  // Only a hint: without huge pages for shared memory the mapping works too.
  ::madvise(address, mappedBytes_, MADV_HUGEPAGE);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      numBytes_(std::exchange(other.numBytes_, 0)),
      access_(other.access_),
      mappedBytes_(std::exchange(other.mappedBytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(numBytes_, other.numBytes_);
  std::swap(access_, other.access_);
  std::swap(mappedBytes_, other.mappedBytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, mappedBytes_);
}

void Mapping::populate() const {
  constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ of Linux 5.14
  if (::madvise(data_, mappedBytes_, kPopulateRead) == 0) return;
  if (errno != EINVAL) throwErrno(errno, "mapping the pages of device memory");
  const auto pageBytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  for (std::size_t at = 0; at < mappedBytes_; at += pageBytes)
    static_cast<void>(*static_cast<const volatile std::byte*>(data_ + at));
}

int createSealedMemory(const std::string& label, std::size_t numBytes) {
  return createMemory(label, numBytes, true);
}

int createSparseSealedMemory(const std::string& label, std::size_t numBytes) {
  return createMemory(label, numBytes, false);
}

int createBoundMemory(const std::string& label, std::size_t numBytes, const std::vector<unsigned>& nodes,
                      bool isAllocated) {
  return createMemory(label, numBytes, isAllocated, nodes);
}

int reopenReadOnly(int fd) {
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  const int readOnly = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (readOnly < 0) throwErrno(errno, "opening device memory read-only");
  return readOnly;
}

std::size_t sealedBytes(int fd) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    throw std::invalid_argument("a descriptor that is no sealed memory was offered as device memory");
  }
  struct stat status{};
  if (::fstat(fd, &status) != 0) throwErrno(errno, "reading the size of device memory");
  return static_cast<std::size_t>(status.st_size);
}

Mapping mapShared(const Region& region, std::size_t numBytes, Mapping::Access access,
                  const std::string& what) {
  if (!region.rest.empty()) throw std::invalid_argument(what + ": the host maps no memory in pieces");
  const std::size_t available = availableBytes(region);
  if (available < numBytes) {
    throw std::invalid_argument(what + ": needs " + std::to_string(numBytes) + " bytes, the descriptor has " +
                                std::to_string(available));
  }
  return Mapping(region, numBytes, access);
}

}  // namespace coarse
