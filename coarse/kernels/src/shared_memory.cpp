#include "coarse/shared_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

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

int createMemory(const std::string& label, std::size_t numBytes, bool isAllocated) {
  const std::string what = "allocating " + std::to_string(numBytes) + " bytes for " + label;
  const int fd = ::memfd_create(label.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throwErrno(errno, what);
  if (::ftruncate(fd, static_cast<off_t>(numBytes)) != 0) closeAndThrow(fd, errno, what);
  const int error = isAllocated ? fallocateRestarting(fd, numBytes) : 0;
  if (error != 0) closeAndThrow(fd, error, what);
  if (::fcntl(fd, F_ADD_SEALS, kSeals) != 0) closeAndThrow(fd, errno, what);
  return fd;
}

}  // namespace

Mapping::Mapping(int fd, std::size_t numBytes, Access access) : numBytes_(numBytes) {
  const int protection = access == Access::kReadWrite ? PROT_READ | PROT_WRITE : PROT_READ;
  void* address = ::mmap(nullptr, numBytes, protection, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED)
    throwErrno(errno, "mapping " + std::to_string(numBytes) + " bytes of device memory");
  data_ = static_cast<std::byte*>(address);
  // Advice only: without huge pages for shared memory the mapping works all the same.
  ::madvise(address, numBytes, MADV_HUGEPAGE);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), numBytes_(std::exchange(other.numBytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(numBytes_, other.numBytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, numBytes_);
}

int createSealedMemory(const std::string& label, std::size_t numBytes) {
  return createMemory(label, numBytes, true);
}

int createSparseSealedMemory(const std::string& label, std::size_t numBytes) {
  return createMemory(label, numBytes, false);
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

}  // namespace coarse
