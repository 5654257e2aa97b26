#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "coarse/gpu/cuda_driver.hpp"

namespace coarse::cuda {

/// An address as the pointer that device code takes.
inline void* pointerTo(DeviceAddress address) noexcept {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
}
inline DeviceAddress addressOf(const void* pointer) noexcept {
  return static_cast<DeviceAddress>(reinterpret_cast<std::uintptr_t>(pointer));
}

/// Host pages that a device reads and writes; private to this process.
class PinnedPages {
 public:
  /// @throws std::system_error, Error if there is not enough memory, or it cannot be pinned.
  PinnedPages(const SharedContext& context, std::size_t numBytes);
  std::byte* data() const noexcept { return pages_.get(); }
  void* onDevice() const noexcept { return pointerTo(registration_.deviceAddress()); }

 private:
  std::shared_ptr<std::byte> pages_;
  HostRegistration registration_;
};

}  // namespace coarse::cuda
