#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "coarse/reduce/dtype.hpp"

/// Optimizer updates, elementwise like reductions (reduce.hpp), with the same guarantees: bitwise the same
/// for any instruction set, alignment and position of an element; no state; no checks.
namespace coarse {

/// Maximum number of state tensors that an update rule keeps for a parameter.
inline constexpr std::size_t kMostStates = 3;

/// The values are part of the wire format: add at the end, never renumber.
enum class UpdateRule : std::uint32_t {
  kNone = 0,         // an optimizer that never received settings
  kSgd = 1,          // no state
  kSgdMomentum = 2,  // state: momentum buffer
  kSgdNesterov = 3,  // state: momentum buffer
  kAdam = 4,         // state: first and second moment; AdamW by `parameterScale`
  kAdagrad = 5,      // state: sum of squares
  kLion = 6,         // state: first moment
  kAmsgrad = 7,      // state: as kAdam, and the largest second moment so far
};

inline constexpr std::uint32_t kNumUpdateRules = 8;

/// State tensors that a rule needs.
constexpr std::size_t numStates(UpdateRule rule) noexcept {
  switch (rule) {
    case UpdateRule::kNone:
    case UpdateRule::kSgd:
      return 0;
    case UpdateRule::kSgdMomentum:
    case UpdateRule::kSgdNesterov:
    case UpdateRule::kAdagrad:
    case UpdateRule::kLion:
      return 1;
    case UpdateRule::kAdam:
      return 2;
    case UpdateRule::kAmsgrad:
      return 3;
  }
  return kMostStates;
}

/// The settings of one tensor's update in one step: the coefficients of its rule, rounded to float32 from the
/// doubles of torch's optimizers. With g the gradient and p the parameter, states in the order of UpdateRule,
///
///   g = gradientScale * g + gradientDecay * p
///   kSgd:          d = g
///   kSgdMomentum:  b = firstDecay * b + firstWeight * g;  d = b
///   kSgdNesterov:  b as before;                           d = g + momentum * b
///   kAdam:         m = m + firstWeight * (g - m);  v = secondDecay * v + secondWeight * g * g
///                  d = m / (sqrt(v) / secondScale + epsilon)
///   kAmsgrad:      m, v as before;  w = max(w, v);  d = m / (sqrt(w) / secondScale + epsilon)
///   kAdagrad:      s = s + g * g;                   d = g / (sqrt(s) + epsilon)
///   kLion:         d = sign(firstDecay * m + firstWeight * g);  m = secondDecay * m + secondWeight * g
///   p = parameterScale * p - stepSize * d
///
/// Every operation rounds once, in this order, multiplications and divisions from the left: stepSize times
/// the numerator of d is divided.
///
/// Source: torch.optim's single-tensor SGD, Adam and Adagrad; Kingma and Ba, "Adam", algorithm 1; Loshchilov
/// and Hutter, "Decoupled Weight Decay Regularization", algorithms 1 and 2; Reddi et al., "On the Convergence
/// of Adam and Beyond", algorithm 2; Duchi et al., "Adaptive Subgradient Methods"; Chen et al., "Symbolic
/// Discovery of Optimization Algorithms", program 1.
struct alignas(64) UpdateSettings {
  UpdateRule rule = UpdateRule::kNone;
  float gradientScale = 1;  // includes the sign, loss unscaling and norm clipping
  float gradientDecay = 0;
  float parameterScale = 1;
  float stepSize = 0;
  float firstDecay = 0;
  float firstWeight = 1;
  float momentum = 0;
  float secondDecay = 0;
  float secondWeight = 0;
  float secondScale = 1;
  float epsilon = 0;
  std::uint32_t updateNumber = 0;  // of its next update, from 1 on; workers that skipped a step disagree
  std::uint32_t written =
      0;  // digest of the values that this worker itself has written to the parameter since the last update
  std::uint32_t hasGradient = 0;  // whether this worker has one; workers may differ; for finishUpdates()
  std::uint32_t reserved = 0;
};
static_assert(sizeof(UpdateSettings) == 64 && std::is_trivially_copyable_v<UpdateSettings>);

/// Whether settings name a rule that needs no more than `availableStates`.
constexpr bool isRunnable(const UpdateSettings& settings, std::size_t availableStates) noexcept {
  const auto rule = static_cast<std::uint32_t>(settings.rule);
  return rule != 0 && rule < kNumUpdateRules && numStates(settings.rule) <= availableStates;
}

/// Whether parameters of this type can be updated.
constexpr bool isUpdatable(DType dtype) noexcept {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

/// The arrays of one update. Gradients and the parameter are of one updatable dtype, the rest is float32.
struct UpdateArrays {
  const void* const* gradients = nullptr;
  std::size_t numGradients = 0;  // at least 1
  void* parameter = nullptr;
  float* master = nullptr;         // of a 16-bit parameter; else unused
  float* const* states = nullptr;  // as many as numStates() of the rule
  std::size_t numElements = 0;
};

/// Updates a parameter and its states in place by the mean of gradients, in one pass over memory: the mean,
/// as reduce() computes it (sum over `numGradients` divided by `divisor`, rounded to `dtype`), stays in the
/// cache.
///
/// The update changes the master weights of a 16-bit parameter; the parameter is their rounding. If it is
/// not, because another writer changed the parameter or because the master weights are new, the parameter
/// first becomes the master weight.
///
/// @pre gradients overlap neither the parameter nor states.
void update(const UpdateSettings& settings, DType dtype, const UpdateArrays& arrays,
            std::uint32_t divisor) noexcept;

}  // namespace coarse
