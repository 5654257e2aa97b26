#pragma once

#include <memory>

#include "coarse/client/slot_copies.hpp"
#include "coarse/gpu/cuda_driver.hpp"
#include "coarse/shared_memory/shared_memory.hpp"

namespace coarse {

/// SlotCopies between pinned memory of the host and a GPU, on a stream of their own.
class CudaSlotCopies : public SlotCopies {
 public:
  /// @param slots of this worker.
  /// @param view is pinned as long as this lives.
  /// @throws cuda::Error if the view cannot be pinned.
  CudaSlotCopies(std::shared_ptr<const cuda::DeviceMemory> slots, std::shared_ptr<Mapping> view);
  ~CudaSlotCopies() override;

  void bring(std::size_t offset, std::size_t numBytes) override;
  void fetch(std::size_t offset, std::size_t numBytes) override;
  void settle() override;

 private:
  std::shared_ptr<const cuda::DeviceMemory> slots_;
  std::shared_ptr<Mapping> view_;
  cuda::HostRegistration registration_;
  cuda::Stream stream_;
};

}  // namespace coarse
