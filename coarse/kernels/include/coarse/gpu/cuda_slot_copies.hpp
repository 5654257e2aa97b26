#pragma once

#include <memory>

#include "coarse/client/slot_copies.hpp"
#include "coarse/gpu/cuda_driver.hpp"
#include "coarse/shared_memory/shared_memory.hpp"

namespace coarse {

/// SlotCopies between pinned host memory and a GPU, on its own stream.
class CudaSlotCopies : public SlotCopies {
 public:
  /// @param slots of this worker.
  /// @param view pinned as long as this object lives.
  /// @throws cuda::Error if the view cannot be pinned.
  CudaSlotCopies(std::shared_ptr<const cuda::DeviceMemory> slots, std::shared_ptr<Mapping> view);
  ~CudaSlotCopies() override;

  void stage(std::size_t offset, std::size_t numBytes) override;
  void fetch(std::size_t offset, std::size_t numBytes) override;
  void synchronize() override;

 private:
  std::shared_ptr<const cuda::DeviceMemory> slots_;
  std::shared_ptr<Mapping> view_;
  cuda::HostRegistration registration_;
  cuda::Stream stream_;
};

}  // namespace coarse
