#pragma once

#include <cstdint>

#include "coarse/shared_memory/layout.hpp"

namespace coarse {

/// The client's end of a DescriptorQueue. One thread at a time.
class DescriptorProducer {
 public:
  DescriptorProducer() = default;
  explicit DescriptorProducer(DescriptorQueue& queue) noexcept : queue_(&queue) {}

  /// Publishes `descriptor`. @returns false, without writing, if the queue is full.
  bool push(const Descriptor& descriptor) noexcept;

 private:
  DescriptorQueue* queue_ = nullptr;
  std::uint64_t position_ = 0;
  std::uint64_t consumedCache_ = 0;  // the device's counter as last read: spares a cache miss per push
};

/// The memory device's end of a DescriptorQueue. One thread at a time.
class DescriptorConsumer {
 public:
  DescriptorConsumer() = default;
  explicit DescriptorConsumer(DescriptorQueue& queue) noexcept : queue_(&queue) {}

  /// Copies the next descriptor out. @returns false if the queue is empty.
  bool pop(Descriptor& descriptor) noexcept;

 private:
  DescriptorQueue* queue_ = nullptr;
  std::uint64_t position_ = 0;
};

}  // namespace coarse
