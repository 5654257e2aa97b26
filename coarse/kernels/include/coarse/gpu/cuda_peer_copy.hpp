#pragma once

#include <cstddef>
#include <memory>
#include <unordered_map>

#include "coarse/gpu/cuda_driver.hpp"
#include "coarse/shared_memory/address_ranges.hpp"

namespace coarse {

/// Memory of GPUs that one GPU cannot reach, as this process has mapped it for those GPUs, each range with
/// its GPU. Between most GPUs there is none.
using DistantMemory = AddressRanges<cuda::SharedContext>;

/// Copies of distant memory on the GPU of a stream, on which kernels of that stream work instead. CUDA takes
/// them through the host where it has to.
class NearCopies {
 public:
  NearCopies(cuda::Stream& stream, std::shared_ptr<const DistantMemory> distant);

  /// Where the stream's next kernels find what lies at `address`: there, or in a copy that is brought first.
  const void* toRead(const void* address, std::size_t numBytes);
  /// Where they write what is to come to `address`, with sendBack() at the latest.
  void* toWrite(void* address, std::size_t numBytes);
  /// Has what the kernels so far have written go where it belongs, and gives the copies up.
  void sendBack();
  /// What the copies take.
  std::size_t numBytes() const noexcept { return numBytes_; }

 private:
  struct Copy {
    cuda::SharedContext owner;
    cuda::DeviceAddress address = 0;
    std::size_t numBytes = 0;
    bool isBrought = false;
    bool isWritten = false;
  };
  /// Null where the GPU reaches it.
  Copy* find(const void* address, std::size_t numBytes);

  cuda::Stream& stream_;
  std::shared_ptr<const DistantMemory> distant_;
  std::unordered_map<const void*, Copy> copies_;  // by what they are of
  std::size_t numBytes_ = 0;
};

}  // namespace coarse
