#include "coarse/shared_memory/descriptor_queue.hpp"

#include <cstring>

namespace coarse {

bool DescriptorProducer::push(const Descriptor& descriptor) noexcept {
  if (position_ - consumedCache_ >= kDescriptorCapacity) {
    // acquire: the device has copied the old descriptor out before we overwrite it.
    consumedCache_ = queue_->consumed.load(std::memory_order_acquire);
    if (position_ - consumedCache_ >= kDescriptorCapacity) return false;
  }
  DescriptorCell& cell = queue_->cells[position_ % kDescriptorCapacity];
  cell.descriptor = descriptor;
  ++position_;
  // release: data and descriptor before the flag.
  cell.commit.store(position_, std::memory_order_release);
  return true;
}

bool DescriptorConsumer::pop(Descriptor& descriptor) noexcept {
  const DescriptorCell& cell = queue_->cells[position_ % kDescriptorCapacity];
  // acquire: pairs with the producer's commit, and so with the tensor data written before it.
  if (cell.commit.load(std::memory_order_acquire) != position_ + 1) return false;
  std::memcpy(&descriptor, &cell.descriptor, sizeof(descriptor));
  ++position_;
  queue_->consumed.store(position_, std::memory_order_release);
  return true;
}

}  // namespace coarse
