/// widen() and narrow(): bfloat16 and float16 against their definitions, exhaustively.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "coarse/reduce/reduce.hpp"
#include "reduce_reference.hpp"

namespace coarse::test::conversion_test {
namespace {

struct Case {
  DType dtype;
  Format16 format;
  const char* name;
};

class Conversion : public testing::TestWithParam<Case> {
 protected:
  ~Conversion() override { instructionSets(); }

  std::vector<float> widened() const {
    std::vector<std::uint16_t> all(65536);
    std::iota(all.begin(), all.end(), std::uint16_t{0});
    std::vector<float> values(all.size());
    widen(GetParam().dtype, all.data(), values.data(), all.size());
    return values;
  }

  std::vector<std::uint16_t> narrowed(const std::vector<float>& values, std::uint32_t divisor = 1,
                                      ReduceOp op = ReduceOp::kSum) const {
    std::vector<std::uint16_t> result(values.size());
    narrow(GetParam().dtype, values.data(), result.data(), values.size(), divisor, op);
    return result;
  }

  void expectNarrowed(const std::vector<float>& values) const {
    const std::vector<std::uint16_t> result = narrowed(values);
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_TRUE(sameElement(GetParam().dtype, result[i], GetParam().format.encode(values[i])))
          << std::hexfloat << values[i] << " gives " << std::hex << result[i] << " with " << instructionSet();
    }
  }
};

TEST_P(Conversion, WidensEveryValueExactly) {
  for (const std::string& name : instructionSets()) {
    ASSERT_TRUE(forceInstructionSet(name.c_str()));
    const std::vector<float> values = widened();
    for (std::size_t bits = 0; bits < values.size(); ++bits) {
      const float expected = static_cast<float>(GetParam().format.decode(static_cast<std::uint16_t>(bits)));
      const auto actual = bitCast<std::uint32_t>(values[bits]);
      ASSERT_TRUE(sameElement(DType::kFloat32, actual, bitCast<std::uint32_t>(expected))) << std::hex << bits;
    }
  }
}

TEST_P(Conversion, RoundTripKeepsEveryValue) {
  for (const std::string& name : instructionSets()) {
    ASSERT_TRUE(forceInstructionSet(name.c_str()));
    const std::vector<std::uint16_t> result = narrowed(widened());
    for (std::size_t bits = 0; bits < result.size(); ++bits) {
      ASSERT_TRUE(sameElement(GetParam().dtype, result[bits], bits)) << std::hex << bits;
    }
  }
}

TEST_P(Conversion, RoundsToNearestEvenAroundEveryMidpoint) {
  const Format16& format = GetParam().format;
  std::vector<float> values;
  for (std::uint16_t bits = 0; bits < format.infinity(); ++bits) {
    const auto next = static_cast<std::uint16_t>(bits + 1);
    const double above = next == format.infinity() ? std::ldexp(1.0, format.bias() + 1) : format.decode(next);
    const float middle = static_cast<float>((format.decode(bits) + above) / 2);
    for (const float value : {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, INFINITY)}) {
      values.push_back(value);
      values.push_back(-value);
    }
  }
  for (const std::string& name : instructionSets()) {
    ASSERT_TRUE(forceInstructionSet(name.c_str()));
    expectNarrowed(values);
  }
}

TEST_P(Conversion, NanInfinityAndSubnormalsSurvive) {
  std::vector<float> values;
  for (const std::uint32_t bits : {0x7f800000u, 0x7f800001u, 0x7fbfffffu, 0x7fc00000u, 0x7fffffffu,
                                   0x00000001u, 0x007fffffu, 0x00800000u, 0x7f7fffffu, 0x00000000u}) {
    for (int i = 0; i < 9; ++i) values.push_back(bitCast<float>(bits));
    values.push_back(bitCast<float>(bits | 0x80000000u));
  }
  for (const std::string& name : instructionSets()) {
    ASSERT_TRUE(forceInstructionSet(name.c_str()));
    expectNarrowed(values);
  }
}

TEST_P(Conversion, RingInFloat32GivesTheBitsOfReduce) {
  constexpr std::size_t kNumElements = 65536;
  std::vector<std::uint16_t> a(kNumElements), b(kNumElements), c(kNumElements);
  std::iota(a.begin(), a.end(), std::uint16_t{0});
  std::iota(b.begin(), b.end(), std::uint16_t{7919});
  std::iota(c.begin(), c.end(), std::uint16_t{31337});
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMax}) {
    std::vector<std::uint16_t> direct(kNumElements);
    const void* inputs[] = {a.data(), b.data(), c.data()};
    void* outputs[] = {direct.data()};
    reduce(GetParam().dtype, op, inputs, 3, outputs, 1, kNumElements, 3);
    std::vector<float> sum(kNumElements), next(kNumElements);
    widen(GetParam().dtype, a.data(), sum.data(), kNumElements);
    for (const auto* input : {&b, &c}) {
      widen(GetParam().dtype, input->data(), next.data(), kNumElements);
      reduceInto(DType::kFloat32, op, sum.data(), next.data(), kNumElements);
    }
    const std::vector<std::uint16_t> ring = narrowed(sum, 3, op);
    for (std::size_t i = 0; i < kNumElements; ++i) {
      ASSERT_TRUE(sameElement(GetParam().dtype, ring[i], direct[i])) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Conversion,
                         testing::Values(Case{DType::kBFloat16, kBFloat16Format, "bfloat16"},
                                         Case{DType::kFloat16, kFloat16Format, "float16"}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(ConversionOfFloat32, CopiesAndDividesInPlace) {
  std::vector<float> values = {1, 2, 3, -4.5f, INFINITY};
  widen(DType::kFloat32, values.data(), values.data(), values.size());
  narrow(DType::kFloat32, values.data(), values.data(), values.size(), 3, ReduceOp::kMean);
  EXPECT_EQ(values, (std::vector<float>{1.0f / 3, 2.0f / 3, 1, -1.5f, INFINITY}));
}

TEST(ConversionOfOtherTypes, WritesNothing) {
  float value = 7;
  const std::int64_t integer = 1;
  for (const DType dtype : {DType::kFloat64, DType::kInt32, DType::kInt64, DType::kUInt8}) {
    widen(dtype, &integer, &value, 1);
    std::int64_t out = 9;
    narrow(dtype, &value, &out, 1, 1, ReduceOp::kSum);
    EXPECT_EQ(out, 9);
  }
  EXPECT_EQ(value, 7);
}

}  // namespace
}  // namespace coarse::test::conversion_test
