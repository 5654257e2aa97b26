#include "dlpack.hpp"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "coarse/gpu/cuda_pinned_pages.hpp"

namespace py = pybind11;

namespace coarse {
namespace {

// The binary interface of DLPack before version 1, which every framework accepts.

constexpr const char* kUnused = "dltensor";  // the name of a capsule that no tensor was made of
constexpr std::int32_t kCuda = 2;
constexpr std::uint8_t kUnsignedInteger = 1;

struct Device {
  std::int32_t type;
  std::int32_t ordinal;
};

struct ElementType {
  std::uint8_t code;
  std::uint8_t numBits;
  std::uint16_t numLanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t numDimensions;
  ElementType type;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byteOffset;
};

struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*destroy)(ManagedTensor*);
};

/// A tensor and the objects that it refers to.
struct Piece {
  ManagedTensor managed{};
  std::int64_t length = 0;
  std::shared_ptr<const cuda::DeviceMemory> memory;
};

void destroyPiece(ManagedTensor* managed) { delete static_cast<Piece*>(managed->context); }

void destroyUnused(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, kUnused) == 0) return;
  auto* const managed = static_cast<ManagedTensor*>(PyCapsule_GetPointer(capsule, kUnused));
  managed->destroy(managed);
}

}  // namespace

py::capsule dlpackCapsule(std::shared_ptr<const cuda::DeviceMemory> memory, std::size_t start,
                          std::size_t numBytes) {
  if (start > memory->numBytes() || numBytes > memory->numBytes() - start) {
    throw std::out_of_range("bytes " + std::to_string(start) + " to " + std::to_string(start + numBytes) +
                            " of device memory that has " + std::to_string(memory->numBytes()));
  }
  auto piece = std::make_unique<Piece>();
  piece->length = static_cast<std::int64_t>(numBytes);
  piece->managed.tensor = {cuda::pointerTo(memory->address() + start),
                           {kCuda, memory->context()->device()},
                           1,
                           {kUnsignedInteger, 8, 1},
                           &piece->length,
                           nullptr,
                           0};
  piece->managed.context = piece.get();
  piece->managed.destroy = &destroyPiece;
  piece->memory = std::move(memory);
  py::capsule capsule(&piece->managed, kUnused, &destroyUnused);
  piece.release();
  return capsule;
}

}  // namespace coarse
