#pragma once

#include <cstddef>
#include <memory>
#include <unordered_map>

#include "coarse/gpu/cuda_driver.hpp"
#include "coarse/shared_memory/address_ranges.hpp"

namespace coarse {

/// GPU memory that one GPU cannot reach, as this process has mapped it for other GPUs: each range with its
/// GPU. For most pairs of GPUs there is none.
using DistantMemory = AddressRanges<cuda::SharedContext>;

/// Copies of distant memory on the GPU of a stream; kernels of that stream use the copies instead. CUDA
/// copies through the host where necessary.
class NearCopies {
 public:
  NearCopies(cuda::Stream& stream, std::shared_ptr<const DistantMemory> distant);

  /// The address at which the stream's next kernels read the contents of `address`: the same, or a copy that
  /// is made first.
  const void* toRead(const void* address, std::size_t numBytes);
  /// The address at which they write the contents of `address`; sendBack() copies them there at the latest.
  void* toWrite(void* address, std::size_t numBytes);
  /// Copies the kernels' output to its destination, and frees the copies.
  void sendBack();
  /// Bytes of all copies.
  std::size_t numBytes() const noexcept { return numBytes_; }

 private:
  struct Copy {
    cuda::SharedContext owner;
    cuda::DeviceAddress address = 0;
    std::size_t numBytes = 0;
    bool isBrought = false;
    bool isWritten = false;
  };
  /// Null if the GPU reaches the memory.
  Copy* find(const void* address, std::size_t numBytes);

  cuda::Stream& stream_;
  std::shared_ptr<const DistantMemory> distant_;
  std::unordered_map<const void*, Copy> copies_;  // by source address
  std::size_t numBytes_ = 0;
};

}  // namespace coarse
