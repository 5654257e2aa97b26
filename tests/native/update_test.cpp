/// update(): every rule, number of gradients, length, alignment and instruction set against formulas in
/// double.
#include "coarse/update.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "coarse/reduce.hpp"

namespace coarse::test {
namespace {

/// Around the widths of vectors (4 to 16) and of tiles (2048).
constexpr std::size_t kLengths[] = {0,  1,  2,  3,  4,  5,   7,    8,    9,    15,   16,   17,
                                    31, 32, 33, 63, 65, 127, 1000, 2047, 2048, 2049, 4099, 10001};
constexpr std::size_t kOffsets[] = {0, 1, 3};
constexpr UpdateRule kRules[] = {UpdateRule::kSgd, UpdateRule::kSgdMomentum, UpdateRule::kSgdNesterov,
                                 UpdateRule::kAdam};
constexpr float kGuard = -77.25F;
constexpr std::size_t kMargin = 16;

/// Values that start `offset` elements after some address, with guards on both sides.
class Values {
 public:
  Values(std::size_t numElements, std::size_t offset, float low, float high, std::mt19937& random)
      : begin_(kMargin + offset), end_(begin_ + numElements), values_(end_ + kMargin, kGuard) {
    std::uniform_real_distribution<float> distribution(low, high);
    for (std::size_t i = begin_; i < end_; ++i) values_[i] = distribution(random);
  }
  float* data() { return values_.data() + begin_; }
  float operator[](std::size_t i) const { return values_[begin_ + i]; }
  bool areGuardsIntact() const {
    for (std::size_t i = 0; i < values_.size(); ++i) {
      if ((i < begin_ || i >= end_) && values_[i] != kGuard) return false;
    }
    return true;
  }
  bool operator==(const Values& other) const { return values_ == other.values_; }

 private:
  std::size_t begin_, end_;
  std::vector<float> values_;
};

struct Tensors {
  Tensors(std::size_t numGradients, std::size_t numElements, std::size_t offset)
      : random(static_cast<unsigned>(numElements * 7 + offset)),
        parameter(numElements, offset, -2, 2, random),
        states{Values(numElements, offset, -1, 1, random), Values(numElements, offset, 0.01F, 1, random)} {
    for (std::size_t k = 0; k < numGradients; ++k)
      gradients.emplace_back(numElements, offset, -3.F, 3.F, random);
  }
  void run(const UpdateSettings& settings, std::uint32_t divisor, std::size_t numElements) {
    std::vector<const float*> inputs;
    for (Values& gradient : gradients) inputs.push_back(gradient.data());
    float* const pointers[] = {states[0].data(), states[1].data()};
    update(settings, inputs.data(), inputs.size(), divisor, parameter.data(), pointers, numElements);
  }
  std::mt19937 random;
  Values parameter;
  std::array<Values, kMostStates> states;
  std::vector<Values> gradients;
};

UpdateSettings settingsOf(UpdateRule rule) {
  UpdateSettings settings;
  settings.rule = rule;
  settings.gradientSign = -1;
  settings.gradientDecay = 0.05F;
  settings.parameterScale = 0.9375F;
  settings.stepSize = 0.125F;
  settings.firstDecay = 0.9F;
  settings.firstWeight = rule == UpdateRule::kAdam ? 0.1F : 0.7F;
  settings.momentum = 0.9F;
  settings.secondDecay = 0.99F;
  settings.secondWeight = 0.01F;
  settings.secondScale = 0.3F;
  settings.epsilon = 1e-3F;
  return settings;
}

struct Element {
  double parameter, first, second;
};

/// The formulas of update.hpp, in double.
Element expected(const UpdateSettings& s, const Tensors& before, std::size_t i, std::uint32_t divisor) {
  double mean = 0;
  for (const Values& gradient : before.gradients) mean += gradient[i];
  mean /= divisor == 0 ? 1 : divisor;
  const double p = before.parameter[i];
  const double g = s.gradientSign * mean + s.gradientDecay * p;
  Element after{0, before.states[0][i], before.states[1][i]};
  double direction = g;
  if (s.rule == UpdateRule::kSgdMomentum || s.rule == UpdateRule::kSgdNesterov) {
    after.first = double{s.firstDecay} * after.first + double{s.firstWeight} * g;
    direction = s.rule == UpdateRule::kSgdNesterov ? g + double{s.momentum} * after.first : after.first;
  } else if (s.rule == UpdateRule::kAdam) {
    after.first += double{s.firstWeight} * (g - after.first);
    after.second = double{s.secondDecay} * after.second + double{s.secondWeight} * g * g;
    direction = after.first / (std::sqrt(after.second) / s.secondScale + s.epsilon);
  }
  after.parameter = double{s.parameterScale} * p - double{s.stepSize} * direction;
  return after;
}

class Update : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    before_ = instructionSet();
    if (!forceInstructionSet(GetParam())) GTEST_SKIP() << "this processor or binary lacks " << GetParam();
  }
  void TearDown() override { forceInstructionSet(before_.c_str()); }

 private:
  std::string before_;
};

TEST_P(Update, FollowsTheFormulas) {
  for (const UpdateRule rule : kRules) {
    for (const std::size_t numGradients : {std::size_t{1}, std::size_t{2}, std::size_t{3}, std::size_t{5}}) {
      for (const std::size_t numElements : kLengths) {
        for (const std::size_t offset : kOffsets) {
          const UpdateSettings settings = settingsOf(rule);
          const auto divisor = static_cast<std::uint32_t>(numGradients);
          const Tensors before(numGradients, numElements, offset);
          Tensors after(numGradients, numElements, offset);
          after.run(settings, divisor, numElements);
          SCOPED_TRACE("rule " + std::to_string(static_cast<int>(rule)) + ", " +
                       std::to_string(numGradients) + " gradients of " + std::to_string(numElements));
          ASSERT_EQ(after.gradients, before.gradients);
          ASSERT_TRUE(after.parameter.areGuardsIntact());
          for (std::size_t k = 0; k < kMostStates; ++k) {
            ASSERT_TRUE(after.states[k].areGuardsIntact());
            if (k >= numStates(rule)) {
              ASSERT_EQ(after.states[k], before.states[k]);
            }
          }
          for (std::size_t i = 0; i < numElements; ++i) {
            const Element element = expected(settings, before, i, divisor);
            ASSERT_NEAR(after.parameter[i], element.parameter, 2e-6 * (1 + std::abs(element.parameter))) << i;
            ASSERT_NEAR(after.states[0][i], element.first, 2e-6 * (1 + std::abs(element.first))) << i;
            ASSERT_NEAR(after.states[1][i], element.second, 2e-6 * (1 + std::abs(element.second))) << i;
          }
        }
      }
    }
  }
}

TEST_P(Update, HasTheBitsOfTheBaselineOnAnyPieceOfATensor) {
  constexpr std::size_t kNumElements = 5003;
  for (const UpdateRule rule : kRules) {
    const UpdateSettings settings = settingsOf(rule);
    ASSERT_TRUE(forceInstructionSet(GetParam()));
    Tensors whole(3, kNumElements, 0);
    whole.run(settings, 3, kNumElements);
#if defined(__aarch64__)
    ASSERT_TRUE(forceInstructionSet("neon"));
#else
    ASSERT_TRUE(forceInstructionSet("baseline"));
#endif
    Tensors pieces(3, kNumElements, 0);
    for (std::size_t start = 0; start < kNumElements; start += 617) {
      const std::size_t count = std::min<std::size_t>(617, kNumElements - start);
      const float* inputs[3];
      for (std::size_t k = 0; k < 3; ++k) inputs[k] = pieces.gradients[k].data() + start;
      float* const states[] = {pieces.states[0].data() + start, pieces.states[1].data() + start};
      update(settings, inputs, 3, 3, pieces.parameter.data() + start, states, count);
    }
    EXPECT_EQ(whole.parameter, pieces.parameter);
    EXPECT_EQ(whole.states, pieces.states);
  }
}

TEST_P(Update, OfOneMeanIsThatOfItsGradients) {
  constexpr std::size_t kNumElements = 4099;
  const UpdateSettings settings = settingsOf(UpdateRule::kAdam);
  Tensors atOnce(3, kNumElements, 1), afterwards(3, kNumElements, 1);
  atOnce.run(settings, 3, kNumElements);
  const void* const inputs[] = {afterwards.gradients[0].data(), afterwards.gradients[1].data(),
                                afterwards.gradients[2].data()};
  void* const outputs[] = {afterwards.gradients[0].data()};
  reduce(DType::kFloat32, ReduceOp::kMean, inputs, 3, outputs, 1, kNumElements, 3);
  afterwards.gradients.resize(1, afterwards.gradients[0]);
  afterwards.run(settings, 1, kNumElements);
  EXPECT_EQ(atOnce.parameter, afterwards.parameter);
  EXPECT_EQ(atOnce.states, afterwards.states);
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, Update, testing::Values("baseline", "avx2", "avx512", "neon"),
                         [](const auto& info) { return std::string(info.param); });

TEST(UpdateSettings, NoRuleChangesNothing) {
  const Tensors before(1, 100, 0);
  Tensors after(1, 100, 0);
  after.run(settingsOf(UpdateRule::kNone), 1, 100);
  EXPECT_EQ(before.parameter, after.parameter);
  EXPECT_EQ(before.states, after.states);
}

}  // namespace
}  // namespace coarse::test
