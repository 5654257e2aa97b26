// The rules of coarse/reduce/update.hpp for one element, with the operations of reduce_kernels.inc in their
// order.
#pragma once

#include "batches.cuh"
#include "elements.cuh"

namespace coarse::cuda {

/// UpdateRule of coarse/reduce/update.hpp.
enum class Rule : std::uint32_t {
  kNone = 0,
  kSgd = 1,
  kSgdMomentum = 2,
  kSgdNesterov = 3,
  kAdam = 4,
  kAdagrad = 5,
  kLion = 6,
  kAmsgrad = 7,
};

COARSE_DEVICE constexpr int numStatesOf(Rule rule) {
  switch (rule) {
    case Rule::kNone:
    case Rule::kSgd:
      return 0;
    case Rule::kSgdMomentum:
    case Rule::kSgdNesterov:
    case Rule::kAdagrad:
    case Rule::kLion:
      return 1;
    case Rule::kAdam:
      return 2;
    case Rule::kAmsgrad:
      return 3;
  }
  return 0;
}

COARSE_DEVICE float squareRoot(float value) {
#if defined(__CUDA_ARCH__)
  const bool isZero = value == 0;  // as in quotient()
  float of = isZero ? 1.0F : value;
  hide(of);
  return isZero ? value : __fsqrt_rn(of);
#else
  return __builtin_sqrtf(value);
#endif
}

/// The parameter after an update; `states` are updated in place.
template <Rule kRule>
COARSE_DEVICE float updated(const RuleSettings& s, float gradient, float p, float (&states)[3]) {
  const float g = s.gradientScale * gradient + s.gradientDecay * p;
  if constexpr (kRule == Rule::kSgd) {
    return s.parameterScale * p - s.stepSize * g;
  } else if constexpr (kRule == Rule::kSgdMomentum || kRule == Rule::kSgdNesterov) {
    const float b = s.firstDecay * states[0] + s.firstWeight * g;
    states[0] = b;
    return s.parameterScale * p - s.stepSize * (kRule == Rule::kSgdNesterov ? g + s.momentum * b : b);
  } else if constexpr (kRule == Rule::kAdam || kRule == Rule::kAmsgrad) {
    const float m = states[0] + s.firstWeight * (g - states[0]);
    const float v = s.secondDecay * states[1] + s.secondWeight * g * g;
    states[0] = m;
    states[1] = v;
    float w = v;
    if constexpr (kRule == Rule::kAmsgrad) {
      w = Max::apply(states[2], v);
      states[2] = w;
    }
    return s.parameterScale * p -
           quotient(s.stepSize * m, quotient(squareRoot(w), s.secondScale) + s.epsilon);
  } else if constexpr (kRule == Rule::kAdagrad) {
    const float a = states[0] + g * g;
    states[0] = a;
    return s.parameterScale * p - quotient(s.stepSize * g, squareRoot(a) + s.epsilon);
  } else {
    static_assert(kRule == Rule::kLion, "every rule has its formula");
    const float m = states[0];
    const float c = s.firstDecay * m + s.firstWeight * g;
    states[0] = s.secondDecay * m + s.secondWeight * g;
    const float sign = static_cast<float>(static_cast<int>(c > 0) - static_cast<int>(c < 0));
    return s.parameterScale * p - s.stepSize * sign;
  }
}

}  // namespace coarse::cuda
