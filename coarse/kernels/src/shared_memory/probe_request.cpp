#include "coarse/shared_memory/probe_request.hpp"

namespace coarse {

ProbeRequest ProbeRequest::of(const Descriptor& descriptor) noexcept {
  return {static_cast<ProbeKind>(descriptor.dtype), descriptor.op, descriptor.slotOwner,
          descriptor.numElements};
}

void ProbeRequest::writeTo(Descriptor& descriptor) const noexcept {
  descriptor.dtype = static_cast<std::uint8_t>(kind);
  descriptor.op = target;
  descriptor.slotOwner = slotOwner;
  descriptor.numElements = numBytes;
}

}  // namespace coarse
