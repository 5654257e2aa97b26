#include "coarse/gpu/cuda_slot_copies.hpp"

#include <utility>

namespace coarse {

CudaSlotCopies::CudaSlotCopies(std::shared_ptr<const cuda::DeviceMemory> slots, std::shared_ptr<Mapping> view)
    : slots_(std::move(slots)),
      view_(std::move(view)),
      registration_(slots_->context(), view_->data(), view_->numBytes()),
      stream_(slots_->context()) {}

CudaSlotCopies::~CudaSlotCopies() {
  try {
    const cuda::ContextScope scope(*slots_->context());
    stream_.synchronize();  // a failed wait may have left a copy in progress
  } catch (const cuda::Error&) {
    // The GPU is lost, and copies nothing any more.
  }
}

void CudaSlotCopies::stage(std::size_t offset, std::size_t numBytes) {
  const cuda::ContextScope scope(*slots_->context());
  stream_.copyToDevice(slots_->address() + offset, view_->data() + offset, numBytes);
}

void CudaSlotCopies::fetch(std::size_t offset, std::size_t numBytes) {
  const cuda::ContextScope scope(*slots_->context());
  stream_.copyToHost(view_->data() + offset, slots_->address() + offset, numBytes);
}

void CudaSlotCopies::synchronize() {
  const cuda::ContextScope scope(*slots_->context());
  stream_.synchronize();
}

}  // namespace coarse
