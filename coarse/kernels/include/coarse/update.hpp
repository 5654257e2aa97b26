#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

/// Optimizer updates, elementwise like reductions (reduce.hpp), and with the same guarantees: bitwise the
/// same whatever the instruction set, the alignment and the place of an element; no state; nothing checked.
namespace coarse {

/// State tensors that an update rule keeps beside a parameter, at most.
inline constexpr std::size_t kMostStates = 2;

/// The values are part of the wire format: add at the end, never renumber.
enum class UpdateRule : std::uint32_t {
  kNone = 0,         // an optimizer that was never told its settings
  kSgd = 1,          // no state
  kSgdMomentum = 2,  // state: momentum buffer
  kSgdNesterov = 3,  // state: momentum buffer
  kAdam = 4,         // state: first and second moment; AdamW by `parameterScale`
};

inline constexpr std::uint32_t kNumUpdateRules = 5;

/// State tensors that a rule needs.
constexpr std::size_t numStates(UpdateRule rule) noexcept {
  if (rule == UpdateRule::kAdam) return 2;
  return rule == UpdateRule::kSgdMomentum || rule == UpdateRule::kSgdNesterov ? 1 : 0;
}

/// How one tensor is updated in one step: the coefficients of its rule, rounded to float32 from what torch's
/// optimizers compute in double. With g the gradient and p the parameter,
///
///   g = gradientSign * g + gradientDecay * p
///   kSgd:          p = parameterScale * p - stepSize * g
///   kSgdMomentum:  b = firstDecay * b + firstWeight * g;  p = parameterScale * p - stepSize * b
///   kSgdNesterov:  b as before;                           p = parameterScale * p - stepSize * (g + momentum
///   * b) kAdam:         m = m + firstWeight * (g - m);  v = secondDecay * v + secondWeight * g * g
///                  p = parameterScale * p - stepSize * m / (sqrt(v) / secondScale + epsilon)
///
/// Every operation rounds once, in this order, multiplications from the left.
///
/// Source: torch.optim's single-tensor SGD and Adam; Kingma and Ba, "Adam", algorithm 1; Loshchilov and
/// Hutter, "Decoupled Weight Decay Regularization", algorithms 1 and 2.
struct alignas(64) UpdateSettings {
  UpdateRule rule = UpdateRule::kNone;
  float gradientSign = 1;
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
  std::uint32_t updateNumber = 0;  // of this tensor, from 1 on: workers that skipped a step disagree
  std::uint32_t reserved[3] = {};
};
static_assert(sizeof(UpdateSettings) == 64 && std::is_trivially_copyable_v<UpdateSettings>);

/// Whether settings name a rule, and one that needs no more than `availableStates`.
constexpr bool isRunnable(const UpdateSettings& settings, std::size_t availableStates) noexcept {
  const auto rule = static_cast<std::uint32_t>(settings.rule);
  return rule != 0 && rule < kNumUpdateRules && numStates(settings.rule) <= availableStates;
}

/// Updates a float32 parameter and its states in place by the mean of float32 gradients, in one pass over
/// memory: the mean (as reduce() gives it, sum over `numGradients` divided by `divisor`) stays in the cache.
///
/// @param states as many as numStates(settings.rule).
/// @pre numGradients >= 1; gradients overlap neither the parameter nor states.
void update(const UpdateSettings& settings, const float* const* gradients, std::size_t numGradients,
            std::uint32_t divisor, float* parameter, float* const* states, std::size_t numElements) noexcept;

}  // namespace coarse
