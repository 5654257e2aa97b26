/// reduce(): every type, operation, number of arrays, length and instruction set against an element-wise
/// reference.
#include "coarse/reduce/reduce.hpp"

#include <gtest/gtest.h>

#include <random>
#include <tuple>

#include "reduce_reference.hpp"

namespace coarse::test::reduce_test {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16,
                             DType::kInt32,   DType::kInt64,   DType::kUInt8};
constexpr const char* kDTypeNames[] = {"float32", "float64", "bfloat16", "float16",
                                       "int32",   "int64",   "uint8"};
constexpr const char* kOpNames[] = {"sum", "mean", "max"};

/// Around the widths of vectors (4 to 64) and of tiles (2048).
constexpr std::size_t kLengths[] = {0, 1, 2, 7, 8, 9, 31, 33, 64, 65, 127, 1000, 2047, 2048, 2049, 4099};

/// An array of elements that starts `offset` elements after an aligned address, with guards on both sides.
class Array {
 public:
  Array(DType dtype, std::size_t numElements, std::size_t offset)
      : dtype_(dtype), numElements_(numElements), offset_(offset + 8) {
    words_.assign((offset_ + numElements + 16) * itemBytes(dtype) / 8 + 1, kGuard);
  }

  void* data() { return bytes() + offset_ * itemBytes(dtype_); }

  std::uint64_t get(std::size_t i) const {
    std::uint64_t bits = 0;
    std::memcpy(&bits, bytes() + (offset_ + i) * itemBytes(dtype_), itemBytes(dtype_));
    return bits;
  }

  void set(std::size_t i, std::uint64_t bits) {
    std::memcpy(bytes() + (offset_ + i) * itemBytes(dtype_), &bits, itemBytes(dtype_));
  }

  bool guardsIntact() const {
    const std::size_t begin = offset_ * itemBytes(dtype_), end = begin + numElements_ * itemBytes(dtype_);
    for (std::size_t at = 0; at < words_.size() * 8; ++at) {
      if ((at < begin || at >= end) && bytes()[at] != static_cast<char>(kGuard)) return false;
    }
    return true;
  }

 private:
  static constexpr std::uint64_t kGuard = 0x5a5a5a5a5a5a5a5a;

  char* bytes() { return reinterpret_cast<char*>(words_.data()); }
  const char* bytes() const { return reinterpret_cast<const char*>(words_.data()); }

  DType dtype_;
  std::size_t numElements_;
  std::size_t offset_;
  std::vector<std::uint64_t> words_;
};

/// Any bit pattern: finite values of all sizes, subnormals, infinities, NaN.
std::uint64_t anyPattern(DType dtype, std::mt19937_64& random) {
  const int numBits = static_cast<int>(8 * itemBytes(dtype));
  const std::uint64_t mask = numBits == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << numBits) - 1;
  const std::uint64_t bits = random() & mask;
  if (dtype == DType::kInt32 || dtype == DType::kInt64 || dtype == DType::kUInt8) return bits;
  const int exponentBits = dtype == DType::kFloat16 ? 5 : dtype == DType::kFloat64 ? 11 : 8;
  const std::uint64_t exponent = ((std::uint64_t{1} << exponentBits) - 1) << (numBits - 1 - exponentBits);
  const std::uint64_t sign = bits & (std::uint64_t{1} << (numBits - 1));
  switch (random() % 20) {
    case 0:
      return bits | exponent;  // NaN
    case 1:
      return sign | exponent;  // infinity
    case 2:
    case 3:
      return bits & ~exponent;  // subnormal
    case 4:
      return sign;  // zero
    default:
      return bits;
  }
}

std::vector<Array> randomArrays(DType dtype, std::size_t numArrays, std::size_t numElements,
                                std::size_t offset) {
  std::mt19937_64 random(numArrays * 1000003 + numElements);
  std::vector<Array> arrays(numArrays, Array(dtype, numElements, offset));
  for (Array& array : arrays) {
    for (std::size_t i = 0; i < numElements; ++i) array.set(i, anyPattern(dtype, random));
  }
  return arrays;
}

std::vector<std::uint64_t> reference(DType dtype, ReduceOp op, const std::vector<Array>& inputs,
                                     std::size_t numElements, std::uint32_t divisor) {
  std::vector<std::uint64_t> result;
  for (std::size_t i = 0; i < numElements; ++i) {
    std::vector<std::uint64_t> elements;
    for (const Array& input : inputs) elements.push_back(input.get(i));
    result.push_back(referenceElement(dtype, op, elements, divisor));
  }
  return result;
}

void reduceArrays(DType dtype, ReduceOp op, std::vector<Array>& inputs, std::vector<Array*> outputs,
                  std::size_t numElements, std::uint32_t divisor) {
  std::vector<const void*> in;
  std::vector<void*> out;
  for (Array& input : inputs) in.push_back(input.data());
  for (Array* output : outputs) out.push_back(output->data());
  reduce(dtype, op, in.data(), in.size(), out.data(), out.size(), numElements, divisor);
}

void expectElements(DType dtype, const Array& actual, const std::vector<std::uint64_t>& expected) {
  ASSERT_TRUE(actual.guardsIntact());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_TRUE(sameElement(dtype, actual.get(i), expected[i]))
        << "element " << i << " of " << expected.size() << std::hex << ": 0x" << actual.get(i) << ", not 0x"
        << expected[i] << " with " << instructionSet();
  }
}

using Parameters = std::tuple<DType, ReduceOp, int>;

class Reduce : public testing::TestWithParam<Parameters> {
 protected:
  ~Reduce() override { instructionSets(); }

  DType dtype() const { return std::get<0>(GetParam()); }
  ReduceOp op() const { return std::get<1>(GetParam()); }
  std::size_t numInputs() const { return static_cast<std::size_t>(std::get<2>(GetParam())); }

  /// Calls body(inputs, expected, numElements, divisor) with fresh inputs for all lengths and instruction
  /// sets.
  template <class Body>
  void forAllLengths(Body body) {
    for (const std::size_t numElements : kLengths) {
      const std::size_t offset = numElements % 5;
      const std::vector<Array> fresh = randomArrays(dtype(), numInputs(), numElements, offset);
      for (const std::uint32_t divisor : {2u, 3u}) {
        const auto expected = reference(dtype(), op(), fresh, numElements, divisor);
        for (const std::string& name : instructionSets()) {
          ASSERT_TRUE(forceInstructionSet(name.c_str()));
          std::vector<Array> inputs = fresh;
          body(inputs, expected, numElements, divisor);
          if (HasFatalFailure()) return;
        }
        if (op() != ReduceOp::kMean) break;
      }
    }
  }
};

TEST_P(Reduce, WritesEveryInputInPlace) {
  forAllLengths(
      [this](std::vector<Array>& inputs, const auto& expected, std::size_t numElements, auto divisor) {
        std::vector<Array*> outputs;
        for (Array& input : inputs) outputs.push_back(&input);
        reduceArrays(dtype(), op(), inputs, outputs, numElements, divisor);
        for (const Array& output : inputs) ASSERT_NO_FATAL_FAILURE(expectElements(dtype(), output, expected));
      });
}

TEST_P(Reduce, WritesElsewhereAndKeepsTheInputs) {
  forAllLengths(
      [this](std::vector<Array>& inputs, const auto& expected, std::size_t numElements, auto divisor) {
        for (std::size_t numOutputs = 1; numOutputs <= 5; ++numOutputs) {
          const std::vector<Array> before = inputs;
          std::vector<Array> results(numOutputs, Array(dtype(), numElements, numOutputs));
          std::vector<Array*> outputs;
          for (Array& result : results) outputs.push_back(&result);
          reduceArrays(dtype(), op(), inputs, outputs, numElements, divisor);
          for (const Array& result : results)
            ASSERT_NO_FATAL_FAILURE(expectElements(dtype(), result, expected));
          for (std::size_t k = 0; k < inputs.size(); ++k) {
            for (std::size_t i = 0; i < numElements; ++i) ASSERT_EQ(inputs[k].get(i), before[k].get(i));
          }
        }
      });
}

TEST_P(Reduce, WritesInPlaceAndElsewhereInAnyOrder) {
  forAllLengths(
      [this](std::vector<Array>& inputs, const auto& expected, std::size_t numElements, auto divisor) {
        Array elsewhere(dtype(), numElements, 3);
        reduceArrays(dtype(), op(), inputs, {&elsewhere, &inputs.back()}, numElements, divisor);
        ASSERT_NO_FATAL_FAILURE(expectElements(dtype(), elsewhere, expected));
        ASSERT_NO_FATAL_FAILURE(expectElements(dtype(), inputs.back(), expected));
      });
}

class ReduceInto : public Reduce {};

TEST_P(ReduceInto, AccumulatesAndRoundsAtEveryStep) {
  forAllLengths([this](std::vector<Array>& inputs, const auto&, std::size_t numElements, auto) {
    const ReduceOp step = op() == ReduceOp::kMean ? ReduceOp::kSum : op();
    const auto expected = reference(dtype(), step, inputs, numElements, 1);
    reduceInto(dtype(), op(), inputs[0].data(), inputs[1].data(), numElements);
    ASSERT_NO_FATAL_FAILURE(expectElements(dtype(), inputs[0], expected));
  });
}

std::string nameOf(const testing::TestParamInfo<Parameters>& info) {
  const auto [dtype, op, numInputs] = info.param;
  return std::string(kDTypeNames[static_cast<int>(dtype)]) + "_" + kOpNames[static_cast<int>(op)] + "_of_" +
         std::to_string(numInputs);
}

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMax};

INSTANTIATE_TEST_SUITE_P(All, Reduce,
                         testing::Combine(testing::ValuesIn(kDTypes), testing::ValuesIn(kOps),
                                          testing::Range(1, 6)),
                         nameOf);
INSTANTIATE_TEST_SUITE_P(All, ReduceInto,
                         testing::Combine(testing::ValuesIn(kDTypes), testing::ValuesIn(kOps),
                                          testing::Values(2)),
                         nameOf);

TEST(ReduceValues, SumIsTheSetOfContributors) {
  for (std::size_t numInputs = 1; numInputs <= 20; ++numInputs) {
    std::vector<std::vector<float>> inputs;
    std::vector<void*> pointers;
    for (std::size_t k = 0; k < numInputs; ++k)
      inputs.emplace_back(3001, std::ldexp(1.0f, static_cast<int>(k)));
    for (auto& input : inputs) pointers.push_back(input.data());
    reduce(DType::kFloat32, ReduceOp::kSum, pointers.data(), numInputs, pointers.data(), numInputs, 3001, 1);
    const long double sum = std::ldexp(1.0L, static_cast<int>(numInputs)) - 1;
    for (const auto& output : inputs) {
      for (const float value : output) ASSERT_EQ(static_cast<long double>(value), sum);
    }
  }
}

TEST(ReduceValues, AdditionsAreInTheOrderOfTheInputs) {
  const float big = 16777216, one = 1;  // big + one rounds back to big
  float out = 0;
  void* outputs[] = {&out};
  const void* inOrder[] = {&big, &one, &one};
  reduce(DType::kFloat32, ReduceOp::kSum, inOrder, 3, outputs, 1, 1, 1);
  EXPECT_EQ(out, 16777216);
  const void* onesFirst[] = {&one, &one, &big};
  reduce(DType::kFloat32, ReduceOp::kSum, onesFirst, 3, outputs, 1, 1, 1);
  EXPECT_EQ(out, 16777218);
}

TEST(ReduceValues, SixteenBitTypesRoundOnce) {
  // In bfloat16 256 + 1 is 256 again; in float32 the sum is 260, which bfloat16 has.
  std::uint16_t values[5] = {0x4380, 0x3f80, 0x3f80, 0x3f80, 0x3f80};
  const void* inputs[] = {&values[0], &values[1], &values[2], &values[3], &values[4]};
  std::uint16_t out = 0;
  void* outputs[] = {&out};
  reduce(DType::kBFloat16, ReduceOp::kSum, inputs, 5, outputs, 1, 1, 1);
  EXPECT_EQ(out, 0x4382);
}

TEST(ReduceValues, MeanOfIntegersIsExactTowardsZero) {
  std::mt19937_64 random(1);
  for (const std::string& name : instructionSets()) {
    ASSERT_TRUE(forceInstructionSet(name.c_str()));
    for (const std::uint32_t divisor :
         {1u, 2u, 3u, 7u, 255u, 65537u, 2147483647u, 2147483648u, 4294967295u}) {
      std::vector<std::int32_t> values = {INT32_MIN, INT32_MIN + 1, INT32_MAX, INT32_MAX - 1, -1, 0, 1, -7,
                                          7};
      for (int i = 0; i < 1000; ++i) values.push_back(static_cast<std::int32_t>(random()));
      const std::vector<std::int32_t> before = values;
      void* array[] = {values.data()};
      reduce(DType::kInt32, ReduceOp::kMean, array, 1, array, 1, values.size(), divisor);
      for (std::size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(values[i], std::int64_t{before[i]} / std::int64_t{divisor})
            << before[i] << " / " << divisor;
      }
    }
  }
}

TEST(ReduceValues, DivisorZeroCountsAsOne) {
  std::int32_t integer = 7;
  float real = 7;
  void* integers[] = {&integer};
  void* reals[] = {&real};
  reduce(DType::kInt32, ReduceOp::kMean, integers, 1, integers, 1, 1, 0);
  reduce(DType::kFloat32, ReduceOp::kMean, reals, 1, reals, 1, 1, 0);
  EXPECT_EQ(integer, 7);
  EXPECT_EQ(real, 7);
}

TEST(ReduceValues, NothingIsWrittenWithoutInputsOrOutputs) {
  float value = 7;
  void* array[] = {&value};
  reduce(DType::kFloat32, ReduceOp::kSum, nullptr, 0, array, 1, 1, 1);
  reduce(DType::kFloat32, ReduceOp::kSum, array, 1, nullptr, 0, 1, 1);
  EXPECT_EQ(value, 7);
}

TEST(Dispatch, ForcingTakesOnlyWhatTheProcessorHas) {
  const std::vector<std::string> names = instructionSets();
  ASSERT_FALSE(names.empty());
  for (const std::string& name : names) {
    EXPECT_TRUE(forceInstructionSet(name.c_str()));
    EXPECT_EQ(instructionSet(), name);
  }
  EXPECT_FALSE(forceInstructionSet("mmx"));
  EXPECT_EQ(instructionSet(), names.back());
}

TEST(DTypes, ItemBytesRefusesWhatIsNoDType) {
  constexpr std::size_t kExpected[] = {4, 8, 2, 2, 4, 8, 1};
  for (std::size_t i = 0; i < kNumDTypes; ++i) EXPECT_EQ(itemBytes(static_cast<DType>(i)), kExpected[i]);
  EXPECT_THROW(itemBytes(static_cast<DType>(7)), std::invalid_argument);
}

}  // namespace
}  // namespace coarse::test::reduce_test
