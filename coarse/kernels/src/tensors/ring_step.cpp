#include "coarse/tensors/ring_step.hpp"

#include <cstring>

namespace coarse {
namespace {

bool isHalf(DType dtype) noexcept { return dtype == DType::kBFloat16 || dtype == DType::kFloat16; }

/// Only the device that finishes a sum divides it for a mean.
ReduceOp partialOp(ReduceOp op) noexcept { return op == ReduceOp::kMean ? ReduceOp::kSum : op; }

class HostRingCompute : public RingCompute {
 public:
  void begin(const RingStep& step, Done done) override {
    const std::byte* sum = step.received;
    if (step.sent != nullptr) {
      if (step.inputs.empty()) {
        std::memcpy(step.sent, step.received, step.numElements * accumulatorBytes(step.dtype));
      } else if (isHalf(step.dtype)) {
        addHalves(step);
      } else {
        add(step);
      }
      sum = step.sent;
    }
    for (std::byte* output : step.outputs) finish(step, sum, output);
    done();
  }

 private:
  void addHalves(const RingStep& step) {
    auto* const sum = reinterpret_cast<float*>(step.sent);
    std::size_t next = 0;
    if (step.received != nullptr) {
      std::memcpy(sum, step.received, step.numElements * sizeof(float));
    } else {
      widen(step.dtype, step.inputs[next++], sum, step.numElements);
    }
    if (wide_.size() < step.numElements) wide_.resize(step.numElements);
    for (; next < step.inputs.size(); ++next) {
      widen(step.dtype, step.inputs[next], wide_.data(), step.numElements);
      reduceInto(DType::kFloat32, partialOp(step.op), sum, wide_.data(), step.numElements);
    }
  }

  static void add(const RingStep& step) {
    std::size_t next = 0;
    const std::byte* const first = step.received != nullptr ? step.received : step.inputs[next++];
    if (next == step.inputs.size()) {
      std::memcpy(step.sent, first, step.numElements * itemBytes(step.dtype));
      return;
    }
    const void* const both[] = {first, step.inputs[next++]};
    void* const sum[] = {step.sent};
    reduce(step.dtype, partialOp(step.op), both, 2, sum, 1, step.numElements, 1);
    for (; next < step.inputs.size(); ++next)
      reduceInto(step.dtype, partialOp(step.op), step.sent, step.inputs[next], step.numElements);
  }

  static void finish(const RingStep& step, const std::byte* sum, std::byte* output) {
    if (isHalf(step.dtype)) {
      narrow(step.dtype, reinterpret_cast<const float*>(sum), output, step.numElements, step.divisor,
             step.op);
      return;
    }
    const void* const inputs[] = {sum};
    void* const outputs[] = {output};
    reduce(step.dtype, step.op, inputs, 1, outputs, 1, step.numElements, step.divisor);
  }

  std::vector<float> wide_;  // a contribution of a 16-bit type
};

}  // namespace

std::size_t accumulatorBytes(DType dtype) noexcept {
  return isHalf(dtype) ? sizeof(float) : itemBytes(dtype);
}

std::unique_ptr<RingCompute> makeHostRingCompute() { return std::make_unique<HostRingCompute>(); }

}  // namespace coarse
