#include "coarse/gpu/cuda_pinned_pages.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <system_error>

namespace coarse::cuda {
namespace {

std::shared_ptr<std::byte> allocatePages(std::size_t numBytes) {
  void* pages = ::mmap(nullptr, numBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED)
    throw std::system_error(errno, std::generic_category(), "pages that a GPU writes to");
  return {static_cast<std::byte*>(pages), [numBytes](std::byte* mapped) { ::munmap(mapped, numBytes); }};
}

}  // namespace

PinnedPages::PinnedPages(const SharedContext& context, std::size_t numBytes)
    : pages_(allocatePages(numBytes)), registration_(context, pages_.get(), numBytes) {}

}  // namespace coarse::cuda
