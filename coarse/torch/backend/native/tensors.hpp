#pragma once

#include <ATen/ATen.h>

#include <coarse/collective.hpp>
#include <cstring>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <utility>
#include <vector>

namespace coarse_torch {

inline std::string dtypeName(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kChar:
      return "int8";
    case at::kByte:
      return "uint8";
    case at::kShort:
      return "int16";
    case at::kInt:
      return "int32";
    case at::kLong:
      return "int64";
    case at::kBool:
      return "bool";
    default:
      return c10::toString(type);
  }
}

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
  }

  const at::Tensor& memory() const { return memory_; }
  void* data() const { return memory_.data_ptr(); }
  void store() {
    if (!memory_.is_same(user_)) user_.copy_(memory_);
  }

 private:
  at::Tensor user_;
  at::Tensor memory_;
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
