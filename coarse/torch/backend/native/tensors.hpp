#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <coarse/collectives/collective.hpp>
#include <cstring>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <utility>
#include <vector>

namespace coarse_torch {

/// As torch names it in Python: ranks whose backend is in Python compare it with theirs.
inline std::string dtypeName(at::ScalarType type) { return std::string(c10::getDtypeNames(type).first); }

inline coarse::ElementType elementType(at::ScalarType type) {
  using coarse::ElementType;
  switch (type) {
    case at::kFloat:
      return ElementType::kFloat32;
    case at::kDouble:
      return ElementType::kFloat64;
    case at::kHalf:
      return ElementType::kFloat16;
    case at::kBFloat16:
      return ElementType::kBFloat16;
    case at::kChar:
      return ElementType::kInt8;
    case at::kByte:
      return ElementType::kUInt8;
    case at::kShort:
      return ElementType::kInt16;
    case at::kInt:
      return ElementType::kInt32;
    case at::kLong:
      return ElementType::kInt64;
    case at::kBool:
      return ElementType::kBool;
    default:
      return ElementType::kOpaque;
  }
}

inline coarse::Combine combineOf(const c10d::ReduceOp& op) {
  using coarse::Combine;
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return Combine::kSum;
    case c10d::ReduceOp::AVG:
      return Combine::kMean;
    case c10d::ReduceOp::PRODUCT:
      return Combine::kProduct;
    case c10d::ReduceOp::MIN:
      return Combine::kMin;
    case c10d::ReduceOp::MAX:
      return Combine::kMax;
    case c10d::ReduceOp::BAND:
      return Combine::kBitAnd;
    case c10d::ReduceOp::BOR:
      return Combine::kBitOr;
    case c10d::ReduceOp::BXOR:
      return Combine::kBitXor;
    default:
      break;
  }
  TORCH_CHECK_VALUE(false, "coarse: reduce op ", static_cast<int>(op.op_),
                    " is not supported; supported are SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and BXOR");
}

inline void checkReducible(const at::Tensor& tensor, coarse::Combine combine) {
  const bool isBitwise = combine >= coarse::Combine::kBitAnd;
  const auto type = tensor.scalar_type();
  const bool isKnown = elementType(type) != coarse::ElementType::kOpaque;
  const bool fits =
      !(isBitwise && tensor.is_floating_point()) && !(type == at::kBool && combine == coarse::Combine::kMean);
  TORCH_CHECK_VALUE(isKnown && fits, "coarse: tensors of ", dtypeName(type),
                    " cannot be reduced by this operator");
}

inline void checkTensor(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu() || tensor.device().is_cuda(),
                    "coarse: serves tensors on cpu and cuda, not ", tensor.device());
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "coarse: takes dense tensors here, not ",
                    tensor.layout());
}

/// A tensor that is read: dense, in this order, in the host's memory. Of a CUDA tensor that is a copy, made
/// in the caller's thread behind what its current stream does.
inline at::Tensor readable(const at::Tensor& tensor) {
  checkTensor(tensor);
  at::NoGradGuard noGrad;
  return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
}

/// The work on the caller's current stream of a GPU so far, which another thread can wait for:
/// that thread's own current stream knows nothing of it.
class StreamOrder {
 public:
  explicit StreamOrder(c10::Device device) : device_(device), event_(device.type()) {
    event_.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }

  /// Runs work on a stream behind that, but not behind what the caller's is given later, which may wait for
  /// the work.
  template <typename Work>
  void follow(const Work& work) {
    const c10::StreamGuard guard(
        c10::impl::VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_));
    event_.block(guard.current_stream());
    work();
  }

 private:
  c10::Device device_;
  c10::Event event_;
};

/// A tensor that is written: the user's own memory where that is dense, else memory that is copied there.
class Writable {
 public:
  /// @param isRead whether the operation reads it too.
  Writable(const at::Tensor& tensor, bool isRead) : user_(tensor.detach()) {
    checkTensor(tensor);
    at::NoGradGuard noGrad;
    const bool isPlain =
        tensor.device().is_cpu() && tensor.is_contiguous() && !tensor.is_neg() && !tensor.is_conj();
    if (isPlain) {
      memory_ = user_;
    } else {
      memory_ =
          isRead ? readable(tensor).clone(at::MemoryFormat::Contiguous)
                 : at::empty(tensor.sizes(),
                             tensor.options().device(at::kCPU).memory_format(at::MemoryFormat::Contiguous));
    }
    if (!tensor.is_cpu()) order_.emplace(tensor.device());
  }

  const at::Tensor& memory() const { return memory_; }
  void* data() const { return memory_.data_ptr(); }
  /// Returns when the user's memory has the result. From any thread.
  void store() {
    if (memory_.is_same(user_)) return;
    if (order_) {
      order_->follow([this] { user_.copy_(memory_); });
    } else {
      user_.copy_(memory_);
    }
  }

 private:
  at::Tensor user_;
  at::Tensor memory_;
  std::optional<StreamOrder> order_;
};

/// Complex numbers are added as pairs of real ones.
inline at::Tensor asReal(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (!tensor.is_complex()) return tensor;
  TORCH_CHECK_VALUE(c10d::isComplexViewAsRealAllowed(op), "coarse: complex tensors take SUM and AVG alone");
  return at::view_as_real(tensor);
}

/// The header of a call whose piece is `piece`.
inline coarse::Collective collectiveOf(coarse::CollectiveKind kind, const at::Tensor& piece) {
  coarse::Collective call;
  call.header.kind = kind;
  call.header.pieceBytes = piece.nbytes();
  call.header.numDims = static_cast<std::size_t>(piece.dim()) > coarse::kMostDims
                            ? coarse::kDimsNotTold
                            : static_cast<std::uint8_t>(piece.dim());
  if (call.header.numDims != coarse::kDimsNotTold) {
    std::copy(piece.sizes().begin(), piece.sizes().end(), call.header.dims);
  }
  std::strncpy(call.header.dtype, dtypeName(piece.scalar_type()).c_str(), coarse::kDTypeNameBytes - 1);
  call.element = elementType(piece.scalar_type());
  call.elementBytes = piece.element_size();
  return call;
}

}  // namespace coarse_torch
