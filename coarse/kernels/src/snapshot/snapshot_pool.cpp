#include "coarse/snapshot/snapshot_pool.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <stdexcept>
#include <system_error>

#include "coarse/reduce/copy.hpp"
#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/shared_memory.hpp"
#include "coarse/snapshot/snapshot.hpp"

namespace coarse {
namespace {

constexpr std::size_t kPageBytes = 4096;  // the smallest of any system; blocks are freed in whole pages

/// Copies a block that may be overwritten meanwhile; the caller then detects that and discards the copy.
/// Excluded from the thread sanitizer, which cannot see this.
__attribute__((no_sanitize("thread"))) void copyUnguarded(std::byte* destination, const std::byte* source,
                                                          std::size_t numBytes) noexcept {
  constexpr std::size_t kWord = sizeof(std::uint64_t);
  auto* to = reinterpret_cast<unsigned char*>(destination);
  auto* from = reinterpret_cast<const unsigned char*>(source);
  const auto* const end = from + numBytes;
  while (from < end && reinterpret_cast<std::uintptr_t>(from) % kWord != 0)
    *to++ = __atomic_load_n(from++, __ATOMIC_RELAXED);
  for (; from + kWord <= end; from += kWord, to += kWord) {
    const auto word = __atomic_load_n(reinterpret_cast<const std::uint64_t*>(from), __ATOMIC_RELAXED);
    __builtin_memcpy(to, &word, kWord);
  }
  while (from < end) *to++ = __atomic_load_n(from++, __ATOMIC_RELAXED);
}

/// System calls, not a mapping, write and read memory that was not allocated in advance. This is three times
/// as fast, because no page must be mapped, or cleared before it is overwritten. If the machine has no
/// memory, a call fails where a store would raise SIGBUS.
bool writeAll(int fd, const std::byte* source, std::size_t numBytes, std::size_t offset) noexcept {
  while (numBytes > 0) {
    const ssize_t written = ::pwrite(fd, source, numBytes, static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    const auto count = static_cast<std::size_t>(written);
    source += count;
    offset += count;
    numBytes -= count;
  }
  return true;
}

bool readAll(int fd, std::byte* destination, std::size_t numBytes, std::size_t offset) noexcept {
  while (numBytes > 0) {
    const ssize_t read = ::pread(fd, destination, numBytes, static_cast<off_t>(offset));
    if (read < 0 && errno == EINTR) continue;
    if (read <= 0) return false;
    const auto count = static_cast<std::size_t>(read);
    destination += count;
    offset += count;
    numBytes -= count;
  }
  return true;
}

}  // namespace

std::size_t versionBytes(std::size_t blockBytes) noexcept { return roundUp(blockBytes, kPageBytes); }

SparsePool::SparsePool(const std::vector<std::size_t>& blockBytes, int fd)
    : blockBytes_(blockBytes), isMapped_(blockBytes.size()) {
  blockOffsets_.reserve(blockBytes.size());
  for (const std::size_t each : blockBytes) {
    blockOffsets_.push_back(placeBytes_);
    placeBytes_ += versionBytes(each);
  }
  if (sealedBytes(fd) < numBytes(blockBytes))
    throw std::invalid_argument("snapshot pool: the descriptor has too few bytes");
  fd_ = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "keeping the snapshot pool");
  if (placeBytes_ == 0) return;
  void* const mapped = ::mmap(nullptr, placeBytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_,
                              static_cast<off_t>(kCommonPlace * placeBytes_));
  if (mapped != MAP_FAILED) common_ = static_cast<std::byte*>(mapped);
}

SparsePool::~SparsePool() {
  if (common_ != nullptr) ::munmap(common_, placeBytes_);
  ::close(fd_);
}

std::size_t SparsePool::numBytes(const std::vector<std::size_t>& blockBytes) noexcept {
  std::size_t placeBytes = 0;
  for (const std::size_t each : blockBytes) placeBytes += versionBytes(each);
  return (kCommonPlace + 1) * placeBytes;
}

bool SparsePool::warm(std::size_t block) noexcept {
  const std::size_t numBytes = versionBytes(blockBytes_[block]);
  const auto begin = static_cast<off_t>(offset(block, kCommonPlace));
  while (::fallocate(fd_, 0, begin, static_cast<off_t>(numBytes)) != 0) {
    if (errno != EINTR) return false;
  }
  mapPages(block);  // also clears the pages
  return true;
}

/// Maps all pages of a block at once, in half the time of mapping them one by one at its stores.
void SparsePool::mapPages(std::size_t block) noexcept {
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE of Linux 5.14; on older systems stores map pages
  if (common_ == nullptr || isMapped_[block].exchange(true, std::memory_order_relaxed)) return;
  ::madvise(common_ + blockOffsets_[block], versionBytes(blockBytes_[block]), kPopulateWrite);
}

bool SparsePool::store(std::size_t block, std::size_t place, const std::byte* current) noexcept {
  if (place == kCommonPlace && common_ != nullptr) {
    mapPages(block);
    copyBytesStreaming(common_ + blockOffsets_[block], current, blockBytes_[block]);
    return true;
  }
  if (writeAll(fd_, current, blockBytes_[block], offset(block, place))) return true;
  free(block, place);
  return false;
}

void SparsePool::free(std::size_t block, std::size_t place) noexcept {
  if (place == kCommonPlace) return;
  const auto numBytes = static_cast<off_t>(versionBytes(blockBytes_[block]));
  while (::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                     static_cast<off_t>(offset(block, place)), numBytes) != 0 &&
         errno == EINTR) {
  }
}

bool SparsePool::load(std::size_t block, std::size_t place, std::byte* destination) {
  if (place == kCommonPlace && common_ != nullptr) {
    loadCurrent(block, common_ + blockOffsets_[block], destination);
    return true;
  }
  return readAll(fd_, destination, blockBytes_[block], offset(block, place));
}

void SparsePool::loadCurrent(std::size_t block, const std::byte* current, std::byte* destination) {
  copyUnguarded(destination, current, blockBytes_[block]);
}

}  // namespace coarse
