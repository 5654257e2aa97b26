/// update(): every rule, number of gradients, length, alignment and instruction set against formulas in
/// double.
#include "coarse/reduce/update.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "coarse/reduce/reduce.hpp"

namespace coarse::test::update_test {
namespace {

/// Around the widths of vectors (4 to 16) and of tiles (2048).
constexpr std::size_t kLengths[] = {0,  1,  2,  3,  4,  5,   7,    8,    9,    15,   16,   17,
                                    31, 32, 33, 63, 65, 127, 1000, 2047, 2048, 2049, 4099, 10001};
constexpr std::size_t kOffsets[] = {0, 1, 3};
constexpr UpdateRule kRules[] = {UpdateRule::kSgd,    UpdateRule::kSgdMomentum, UpdateRule::kSgdNesterov,
                                 UpdateRule::kAdam,   UpdateRule::kAdagrad,     UpdateRule::kLion,
                                 UpdateRule::kAmsgrad};
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
        states{Values(numElements, offset, 0.01F, 1, random), Values(numElements, offset, 0.01F, 1, random),
               Values(numElements, offset, 0.01F, 1, random)} {
    for (std::size_t k = 0; k < numGradients; ++k)
      gradients.emplace_back(numElements, offset, -3.F, 3.F, random);
  }
  void run(const UpdateSettings& settings, std::uint32_t divisor, std::size_t numElements) {
    runPiece(settings, divisor, 0, numElements);
  }
  void runPiece(const UpdateSettings& settings, std::uint32_t divisor, std::size_t start,
                std::size_t numElements) {
    std::vector<const void*> inputs;
    for (Values& gradient : gradients) inputs.push_back(gradient.data() + start);
    float* pointers[kMostStates];
    for (std::size_t k = 0; k < kMostStates; ++k) pointers[k] = states[k].data() + start;
    UpdateArrays arrays;
    arrays.gradients = inputs.data();
    arrays.numGradients = inputs.size();
    arrays.parameter = parameter.data() + start;
    arrays.states = pointers;
    arrays.numElements = numElements;
    update(settings, DType::kFloat32, arrays, divisor);
  }
  std::mt19937 random;
  Values parameter;
  std::array<Values, kMostStates> states;
  std::vector<Values> gradients;
};

UpdateSettings settingsOf(UpdateRule rule) {
  UpdateSettings settings;
  settings.rule = rule;
  settings.gradientScale = -1;
  settings.gradientDecay = 0.05F;
  settings.parameterScale = 0.9375F;
  settings.stepSize = 0.125F;
  settings.firstDecay = 0.9F;
  settings.firstWeight = rule == UpdateRule::kAdam || rule == UpdateRule::kAmsgrad ? 0.1F : 0.7F;
  settings.momentum = 0.9F;
  settings.secondDecay = 0.99F;
  settings.secondWeight = 0.01F;
  settings.secondScale = 0.3F;
  settings.epsilon = 1e-3F;
  return settings;
}

struct Element {
  double parameter;
  std::array<double, kMostStates> states;
};

/// The formulas of update.hpp, in double.
Element expected(const UpdateSettings& s, const Tensors& before, std::size_t i, std::uint32_t divisor) {
  double mean = 0;
  for (const Values& gradient : before.gradients) mean += gradient[i];
  mean /= divisor == 0 ? 1 : divisor;
  const double p = before.parameter[i];
  const double g = s.gradientScale * mean + s.gradientDecay * p;
  Element after{0, {before.states[0][i], before.states[1][i], before.states[2][i]}};
  auto& [first, second, largest] = after.states;
  double direction = g;
  if (s.rule == UpdateRule::kSgdMomentum || s.rule == UpdateRule::kSgdNesterov) {
    first = double{s.firstDecay} * first + double{s.firstWeight} * g;
    direction = s.rule == UpdateRule::kSgdNesterov ? g + double{s.momentum} * first : first;
  } else if (s.rule == UpdateRule::kAdam || s.rule == UpdateRule::kAmsgrad) {
    first += double{s.firstWeight} * (g - first);
    second = double{s.secondDecay} * second + double{s.secondWeight} * g * g;
    if (s.rule == UpdateRule::kAmsgrad) largest = std::max(largest, second);
    const double moment = s.rule == UpdateRule::kAmsgrad ? largest : second;
    direction = first / (std::sqrt(moment) / s.secondScale + s.epsilon);
  } else if (s.rule == UpdateRule::kAdagrad) {
    first += g * g;
    direction = g / (std::sqrt(first) + s.epsilon);
  } else if (s.rule == UpdateRule::kLion) {
    const double interpolated = double{s.firstDecay} * first + double{s.firstWeight} * g;
    first = double{s.secondDecay} * first + double{s.secondWeight} * g;
    direction = interpolated > 0 ? 1 : interpolated < 0 ? -1 : 0;
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
            for (std::size_t k = 0; k < kMostStates; ++k) {
              const double state = element.states[k];
              ASSERT_NEAR(after.states[k][i], state, 2e-6 * (1 + std::abs(state))) << i;
            }
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
      pieces.runPiece(settings, 3, start, count);
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

/// A 16-bit parameter with its gradients and master weights, of which the first is not its rounding.
struct NarrowTensors {
  NarrowTensors(DType dtype, std::size_t numElements) : wide(2, numElements, 0), dtype(dtype) {
    for (Values& gradient : wide.gradients) gradients.push_back(narrowed(gradient, numElements));
    parameter = narrowed(wide.parameter, numElements);
    if (numElements > 0) parameter[0] = narrowed(wide.gradients[0], 1)[0];
  }
  std::vector<std::uint16_t> narrowed(Values& values, std::size_t numElements) const {
    std::vector<std::uint16_t> narrow16(numElements);
    narrow(dtype, values.data(), narrow16.data(), numElements, 1, ReduceOp::kSum);
    return narrow16;
  }
  void run(const UpdateSettings& settings, std::size_t numElements) {
    const void* const inputs[] = {gradients[0].data(), gradients[1].data()};
    float* const pointers[] = {wide.states[0].data(), wide.states[1].data(), wide.states[2].data()};
    UpdateArrays arrays;
    arrays.gradients = inputs;
    arrays.numGradients = 2;
    arrays.parameter = parameter.data();
    arrays.master = wide.parameter.data();
    arrays.states = pointers;
    arrays.numElements = numElements;
    update(settings, dtype, arrays, 2);
  }
  Tensors wide;  // the master weights and states; gradients before rounding
  DType dtype;
  std::vector<std::uint16_t> parameter;
  std::vector<std::vector<std::uint16_t>> gradients;
};

TEST_P(Update, OfANarrowParameterIsThatOfItsMasterWeightsByTheRoundedMean) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const UpdateRule rule : kRules) {
      for (const std::size_t numElements : kLengths) {
        SCOPED_TRACE("rule " + std::to_string(static_cast<int>(rule)) + " on " + std::to_string(numElements));
        const UpdateSettings settings = settingsOf(rule);
        NarrowTensors tensors(dtype, numElements);
        NarrowTensors reference(dtype, numElements);
        tensors.run(settings, numElements);

        std::vector<std::uint16_t> mean(numElements);
        const void* const inputs[] = {reference.gradients[0].data(), reference.gradients[1].data()};
        void* const outputs[] = {mean.data()};
        reduce(dtype, ReduceOp::kMean, inputs, 2, outputs, 1, numElements, 2);
        reference.wide.gradients.resize(1, reference.wide.gradients[0]);
        widen(dtype, mean.data(), reference.wide.gradients[0].data(), numElements);
        if (numElements > 0) widen(dtype, reference.parameter.data(), reference.wide.parameter.data(), 1);
        reference.wide.run(settings, 1, numElements);

        ASSERT_EQ(tensors.wide.parameter, reference.wide.parameter);
        ASSERT_EQ(tensors.wide.states, reference.wide.states);
        ASSERT_EQ(tensors.parameter, reference.narrowed(reference.wide.parameter, numElements));
        ASSERT_EQ(tensors.gradients, reference.gradients);
      }
    }
  }
}

TEST_P(Update, OfANarrowParameterAddsUpWhatItsRoundingLoses) {
  UpdateSettings settings;
  settings.rule = UpdateRule::kSgd;
  settings.stepSize = 1.F / 1024;  // far below the last place of 1 in bfloat16
  std::vector<std::uint16_t> parameter(100, 0x3f80), gradient(100, 0x3f80);  // all 1
  std::vector<float> master(100, 0);
  const void* const inputs[] = {gradient.data()};
  UpdateArrays arrays;
  arrays.gradients = inputs;
  arrays.numGradients = 1;
  arrays.parameter = parameter.data();
  arrays.master = master.data();
  arrays.numElements = parameter.size();
  for (int step = 0; step < 512; ++step) update(settings, DType::kBFloat16, arrays, 1);
  EXPECT_EQ(parameter, std::vector<std::uint16_t>(100, 0x3f00));  // all one half
}

TEST_P(Update, SumsOfSquaresHaveTheSameBitsAndAreExactEnough) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const std::size_t numElements : kLengths) {
      std::mt19937 random(static_cast<unsigned>(numElements));
      Values wide(numElements, 1, -3, 3, random);
      std::vector<std::uint16_t> narrow16(numElements);
      if (dtype != DType::kFloat32) {
        narrow(dtype, wide.data(), narrow16.data(), numElements, 1, ReduceOp::kSum);
        widen(dtype, narrow16.data(), wide.data(), numElements);
      }
      const void* const in = dtype == DType::kFloat32 ? static_cast<void*>(wide.data()) : narrow16.data();
      double expected = 0;
      for (std::size_t i = 0; i < numElements; ++i) expected += double{wide[i]} * wide[i];
      ASSERT_TRUE(forceInstructionSet(GetParam()));
      const double sum = sumOfSquares(dtype, in, numElements);
      ASSERT_NEAR(sum, expected, 1e-12 * (1 + expected)) << numElements;
#if defined(__aarch64__)
      ASSERT_TRUE(forceInstructionSet("neon"));
#else
      ASSERT_TRUE(forceInstructionSet("baseline"));
#endif
      ASSERT_EQ(sum, sumOfSquares(dtype, in, numElements)) << numElements;
    }
  }
}

TEST_P(Update, SumsOfSquaresAreFiniteIfAllElementsAre) {
  std::vector<float> values(3000, 3e38F);
  EXPECT_TRUE(std::isfinite(sumOfSquares(DType::kFloat32, values.data(), values.size())));
  values[2999] = std::numeric_limits<float>::infinity();
  EXPECT_FALSE(std::isfinite(sumOfSquares(DType::kFloat32, values.data(), values.size())));
  values[2999] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(std::isfinite(sumOfSquares(DType::kFloat32, values.data(), values.size())));
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
}  // namespace coarse::test::update_test
