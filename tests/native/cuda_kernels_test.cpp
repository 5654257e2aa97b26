// The logic of the CUDA kernels, compiled for the host: what the threads of every block do, one after the
// other, gives the bits of the sync cores.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "batches.cuh"
#include "coarse/reduce/reduce.hpp"
#include "coarse/reduce/update.hpp"
#include "coarse/shared_memory/layout.hpp"
#include "contributions.hpp"
#include "cuda_blocks.hpp"
#include "delay.cuh"
#include "host_kernels.hpp"
#include "measure.cu"
#include "reduce.cuh"
#include "update.cuh"

namespace coarse::test::cuda_kernels_test {
namespace {

#define COARSE_SAME_FIELD(field)                                                          \
  static_assert(offsetof(cuda::RuleSettings, field) == offsetof(UpdateSettings, field) && \
                    sizeof(cuda::RuleSettings::field) == sizeof(UpdateSettings::field),   \
                "kernels and sync cores read the same settings")
COARSE_SAME_FIELD(rule);
COARSE_SAME_FIELD(gradientScale);
COARSE_SAME_FIELD(gradientDecay);
COARSE_SAME_FIELD(parameterScale);
COARSE_SAME_FIELD(stepSize);
COARSE_SAME_FIELD(firstDecay);
COARSE_SAME_FIELD(firstWeight);
COARSE_SAME_FIELD(momentum);
COARSE_SAME_FIELD(secondDecay);
COARSE_SAME_FIELD(secondWeight);
COARSE_SAME_FIELD(secondScale);
COARSE_SAME_FIELD(epsilon);
static_assert(sizeof(cuda::RuleSettings) == sizeof(UpdateSettings));
static_assert(sizeof(cuda::ShardMeasure) == sizeof(GradientMeasure));
static_assert(cuda::kNobody == coarse::kNobody && cuda::kEverybody == coarse::kEverybody);
constexpr bool isSameRule(cuda::Rule rule, UpdateRule of) {
  return static_cast<std::uint32_t>(rule) == static_cast<std::uint32_t>(of) &&
         static_cast<std::size_t>(cuda::numStatesOf(rule)) == numStates(of);
}
static_assert(isSameRule(cuda::Rule::kNone, UpdateRule::kNone));
static_assert(isSameRule(cuda::Rule::kSgd, UpdateRule::kSgd));
static_assert(isSameRule(cuda::Rule::kSgdMomentum, UpdateRule::kSgdMomentum));
static_assert(isSameRule(cuda::Rule::kSgdNesterov, UpdateRule::kSgdNesterov));
static_assert(isSameRule(cuda::Rule::kAdam, UpdateRule::kAdam));
static_assert(isSameRule(cuda::Rule::kAdagrad, UpdateRule::kAdagrad));
static_assert(isSameRule(cuda::Rule::kLion, UpdateRule::kLion));
static_assert(isSameRule(cuda::Rule::kAmsgrad, UpdateRule::kAmsgrad));

/// Around the lengths of vectors and tiles of every item size.
constexpr std::size_t kLengths[] = {0,    1,    3,    4,    15,   16,   17,   255,  1023, 1024,
                                    1025, 2047, 2048, 2049, 4096, 4099, 8192, 8193, 10007};
constexpr std::byte kGuard{0xa5};
constexpr std::size_t kMarginBytes = 32;

/// An array that starts `offsetBytes` behind a multiple of 16, with guards on both sides.
class Array {
 public:
  Array(std::size_t numBytes, std::size_t offsetBytes = 0)
      : storage_(numBytes + offsetBytes + 2 * kMarginBytes + 16, kGuard), numBytes_(numBytes) {
    const auto start = reinterpret_cast<std::uintptr_t>(storage_.data());
    begin_ = roundUp(start, 16) - start + kMarginBytes + offsetBytes;
  }
  Array(const Array& other) : Array(other.numBytes_, (other.begin_ + other.address()) % 16) {
    std::memcpy(data(), other.data(), numBytes_);
  }
  Array& operator=(const Array&) = delete;
  std::byte* data() const { return const_cast<std::byte*>(storage_.data()) + begin_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data());
  }
  std::size_t numBytes() const { return numBytes_; }
  bool areGuardsIntact() const {
    for (std::size_t i = 0; i < storage_.size(); ++i) {
      if ((i < begin_ || i >= begin_ + numBytes_) && storage_[i] != kGuard) return false;
    }
    return true;
  }

 private:
  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(storage_.data()); }
  std::vector<std::byte> storage_;
  std::size_t numBytes_;
  std::size_t begin_ = 0;
};

std::uint64_t elementAt(const Array& array, std::size_t itemSize, std::size_t i) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, array.data() + i * itemSize, itemSize);
  return bits;
}

/// Any bits at all, so that there are NaN, Inf and subnormals; or ordinary numbers.
void fill(const Array& array, std::mt19937_64& random) {
  for (std::size_t i = 0; i < array.numBytes(); ++i) array.data()[i] = static_cast<std::byte>(random());
}

void fillFloats(const Array& array, DType dtype, float low, float high, std::mt19937_64& random) {
  std::uniform_real_distribution<float> distribution(low, high);
  for (std::size_t i = 0; i < array.numBytes() / itemBytes(dtype); ++i) {
    const float value = distribution(random);
    narrow(dtype, &value, array.data() + i * itemBytes(dtype), 1, 1, ReduceOp::kSum);
  }
}

void expectSame(DType dtype, const Array& array, const Array& expected) {
  const std::size_t itemSize = itemBytes(dtype);
  for (std::size_t i = 0; i < array.numBytes() / itemSize; ++i) {
    const std::uint64_t bits = elementAt(array, itemSize, i), right = elementAt(expected, itemSize, i);
    ASSERT_TRUE(sameElement(dtype, bits, right)) << "element " << i << ": " << bits << " is not " << right;
  }
  ASSERT_TRUE(array.areGuardsIntact());
}

std::vector<void*> pointersOf(const std::vector<Array>& arrays) {
  std::vector<void*> pointers;
  for (const Array& array : arrays) pointers.push_back(array.data());
  return pointers;
}

// ---- Kernels on the host ----

template <class Element, class Op>
void runReduce(const cuda::ReduceBatch& batch, bool isRing) {
  forEveryThread(batch, [&](const cuda::ReduceShard& shard, std::uint32_t tile, unsigned thread) {
    if (isRing) {
      cuda::reduceTile<Element, Op, true>(batch, shard, tile, thread);
    } else {
      cuda::reduceTile<Element, Op, false>(batch, shard, tile, thread);
    }
  });
}

template <class Element>
void runReduce(ReduceOp op, const cuda::ReduceBatch& batch, bool isRing) {
  op == ReduceOp::kMax ? runReduce<Element, cuda::Max>(batch, isRing)
                       : runReduce<Element, cuda::Sum>(batch, isRing);
}

void runReduce(DType dtype, ReduceOp op, const cuda::ReduceBatch& batch, bool isRing = false) {
  switch (dtype) {
    case DType::kFloat32:
      return runReduce<cuda::Plain<float>>(op, batch, isRing);
    case DType::kFloat64:
      return runReduce<cuda::Plain<double>>(op, batch, isRing);
    case DType::kBFloat16:
      return runReduce<cuda::BFloat16>(op, batch, isRing);
    case DType::kFloat16:
      return runReduce<cuda::Float16>(op, batch, isRing);
    case DType::kInt32:
      return runReduce<cuda::Plain<std::int32_t>>(op, batch, isRing);
    case DType::kInt64:
      return runReduce<cuda::Plain<std::int64_t>>(op, batch, isRing);
    case DType::kUInt8:
      return runReduce<cuda::Plain<std::uint8_t>>(op, batch, isRing);
  }
}

void runUpdate(DType dtype, const cuda::UpdateBatch& batch) {
  if (dtype == DType::kFloat32) return test::runUpdate<cuda::Plain<float>>(&batch);
  if (dtype == DType::kBFloat16) return test::runUpdate<cuda::BFloat16>(&batch);
  test::runUpdate<cuda::Float16>(&batch);
}

template <class Element>
cuda::ShardMeasure runMeasure(const cuda::ReduceBatch& batch) {
  cuda::ShardMeasure measure{0, cuda::kNobody, 0};
  for (std::uint32_t tile = 0; tile < batch.numTiles; ++tile)
    measureTile<Element>(batch, batch.shards[0], tile, measure);
  return measure;
}

// ---- Reductions ----

struct Reduction {
  DType dtype;
  ReduceOp op;
  std::size_t numInputs;
  std::size_t numElements;
  std::size_t offsetElements;
  std::uint32_t divisor;
};

/// Both ways on the same contributions: in place, and one more output.
void expectReduction(const Reduction& of, std::mt19937_64& random) {
  const std::size_t itemSize = itemBytes(of.dtype);
  std::vector<Array> inputs;
  for (std::size_t k = 0; k < of.numInputs; ++k) {
    inputs.emplace_back(of.numElements * itemSize, of.offsetElements * itemSize);
    fill(inputs.back(), random);
  }
  const std::vector<Array> reference = inputs;
  const std::vector<void*> in = pointersOf(inputs), expected = pointersOf(reference);
  cuda::ReduceBatch batch{};
  const std::uint32_t divisor = of.op == ReduceOp::kMean ? of.divisor : 1;
  const auto count = static_cast<std::uint32_t>(in.size());
  ASSERT_TRUE(cuda::append(batch, itemSize, of.numElements, divisor, in.data(), count, in.data(), count));
  runReduce(of.dtype, of.op, batch);
  reduce(of.dtype, of.op, expected.data(), count, expected.data(), count, of.numElements, of.divisor);
  for (std::size_t k = 0; k < inputs.size(); ++k) expectSame(of.dtype, inputs[k], reference[k]);
}

TEST(CudaKernels, ReductionsHaveTheBitsOfTheSyncCores) {
  std::mt19937_64 random(1);
  for (const DType dtype : kEveryDType) {
    for (const ReduceOp op : kEveryOp) {
      for (const std::size_t numInputs : {1, 2, 3, 4, 5, 8, 9}) {
        for (const std::size_t numElements : {0, 1, 17, 2049, 8193, 10007}) {
          for (const std::size_t offset : {0, 1}) {
            const auto divisor = static_cast<std::uint32_t>(numInputs);
            SCOPED_TRACE("dtype " + std::to_string(static_cast<int>(dtype)) + ", op " +
                         std::to_string(static_cast<int>(op)) + ", " + std::to_string(numInputs) + " of " +
                         std::to_string(numElements));
            expectReduction({dtype, op, numInputs, numElements, offset, divisor}, random);
            if (testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(CudaKernels, ReductionsAreRightAtEveryLength) {
  std::mt19937_64 random(2);
  for (const DType dtype : kEveryDType) {
    for (const std::size_t numElements : kLengths) {
      for (const std::size_t offset : {0, 1, 3}) {
        for (const std::uint32_t divisor : {0U, 3U, 4U}) {
          SCOPED_TRACE("dtype " + std::to_string(static_cast<int>(dtype)) + " of " +
                       std::to_string(numElements));
          expectReduction({dtype, ReduceOp::kMean, 2, numElements, offset, divisor}, random);
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(CudaKernels, AShardCanHaveContributionsOfAllClients) {
  std::mt19937_64 random(3);
  expectReduction({DType::kBFloat16, ReduceOp::kMean, cuda::kMostArrays, 100, 0, 255}, random);
}

TEST(CudaKernels, NoContributionsWriteNothing) {
  const Array output(4000);
  std::mt19937_64 random(4);
  fill(output, random);
  const Array before(output);
  void* const outputs[] = {output.data()};
  cuda::ReduceBatch batch{};
  ASSERT_TRUE(cuda::append(batch, 4, 1000, 1, nullptr, 0, outputs, 1));
  runReduce(DType::kFloat32, ReduceOp::kSum, batch);
  expectSame(DType::kUInt8, output, before);
}

TEST(CudaKernels, ShardsOfABatchDoNotMix) {
  std::mt19937_64 random(5);
  std::vector<Array> arrays;
  cuda::ReduceBatch batch{};
  std::size_t numShards = 0;
  for (; numShards < cuda::kMostReduceShards; ++numShards) {
    const std::size_t numElements = kLengths[numShards % std::size(kLengths)];
    for (int k = 0; k < 2; ++k) {
      arrays.emplace_back(numElements * 4);
      fillFloats(arrays.back(), DType::kFloat32, -1, 1, random);
    }
  }
  const std::vector<Array> reference = arrays;
  for (std::size_t shard = 0; shard < numShards; ++shard) {
    const std::size_t numElements = kLengths[shard % std::size(kLengths)];
    void* const in[] = {arrays[2 * shard].data(), arrays[2 * shard + 1].data()};
    void* const expected[] = {reference[2 * shard].data(), reference[2 * shard + 1].data()};
    const auto divisor = static_cast<std::uint32_t>(shard);
    ASSERT_TRUE(cuda::append(batch, 4, numElements, divisor, in, 2, in, 2));
    reduce(DType::kFloat32, ReduceOp::kMean, expected, 2, expected, 2, numElements, divisor);
  }
  runReduce(DType::kFloat32, ReduceOp::kMean, batch);
  for (std::size_t i = 0; i < arrays.size(); ++i) expectSame(DType::kFloat32, arrays[i], reference[i]);
}

TEST(CudaKernels, AFullBatchTakesNoMore) {
  std::vector<const void*> inputs(cuda::kMostArrays, nullptr);
  std::vector<void*> outputs(1, nullptr);
  cuda::ReduceBatch batch{};
  EXPECT_FALSE(cuda::append(batch, 4, 1, 1, inputs.data(), cuda::kMostArrays, outputs.data(), 1));
  EXPECT_EQ(batch.numShards, 0U);
  EXPECT_EQ(batch.numTiles, 0U);
  EXPECT_TRUE(cuda::append(batch, 4, 1, 1, inputs.data(), cuda::kMostArrays - 1, outputs.data(), 1));
  EXPECT_FALSE(cuda::append(batch, 4, 1, 1, inputs.data(), 1, outputs.data(), 0));

  cuda::UpdateBatch updates{};
  UpdateSettings settings;
  for (std::uint32_t i = 0; i < cuda::kMostSettings; ++i) {
    settings.updateNumber = i;
    EXPECT_TRUE(cuda::append(updates, 4, {}, 0, &settings, inputs.data(), 1));
  }
  settings.updateNumber = cuda::kMostSettings;
  EXPECT_FALSE(cuda::append(updates, 4, {}, 0, &settings, inputs.data(), 1));
  EXPECT_EQ(updates.numShards, cuda::kMostSettings);
}

// ---- Conversions ----

TEST(CudaKernels, EveryNarrowValueIsWidenedAndNarrowedAsOnTheHost) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    constexpr std::size_t kNumElements = 1 << 16;
    const Array stored(2 * kNumElements), wide(4 * kNumElements), expectedWide(4 * kNumElements);
    for (std::size_t i = 0; i < kNumElements; ++i)
      stored.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(i);
    const void* const input[] = {stored.data()};
    cuda::ReduceBatch widening{};
    ASSERT_TRUE(cuda::append(widening, 2, kNumElements, 1, input, 1, nullptr, 0, nullptr, wide.data()));
    runReduce(dtype, ReduceOp::kSum, widening, true);
    widen(dtype, stored.data(), expectedWide.as<float>(), kNumElements);
    expectSame(DType::kFloat32, wide, expectedWide);

    // Also what lies between: the last places of float32 are filled up.
    std::mt19937_64 random(6);
    for (std::size_t i = 0; i < kNumElements; ++i)
      wide.as<std::uint32_t>()[i] ^= static_cast<std::uint32_t>(random() & 0xffff);
    const Array narrowed(2 * kNumElements), expectedNarrow(2 * kNumElements);
    void* const output[] = {narrowed.data()};
    cuda::ReduceBatch narrowing{};
    ASSERT_TRUE(cuda::append(narrowing, 2, kNumElements, 3, nullptr, 0, output, 1, wide.data()));
    runReduce(dtype, ReduceOp::kMean, narrowing, true);
    narrow(dtype, wide.as<float>(), expectedNarrow.data(), kNumElements, 3, ReduceOp::kMean);
    expectSame(dtype, narrowed, expectedNarrow);
  }
}

// ---- Rings ----

bool isNarrow(DType dtype) { return dtype == DType::kBFloat16 || dtype == DType::kFloat16; }

/// A step of a ring as a sync core takes it (ring.cpp): what was received, then the contributions, in float32
/// for 16-bit types.
void referenceStep(DType dtype, ReduceOp op, const std::vector<Array>& inputs, const Array* received,
                   const Array& sent, std::size_t numElements) {
  const ReduceOp partial = op == ReduceOp::kMax ? op : ReduceOp::kSum;
  const DType wide = isNarrow(dtype) ? DType::kFloat32 : dtype;
  bool isFirst = true;
  if (received != nullptr) {
    std::memcpy(sent.data(), received->data(), sent.numBytes());
    isFirst = false;
  }
  for (const Array& input : inputs) {
    Array values(sent.numBytes());
    if (isNarrow(dtype)) {
      widen(dtype, input.data(), values.as<float>(), numElements);
    } else {
      std::memcpy(values.data(), input.data(), values.numBytes());
    }
    if (isFirst) {
      std::memcpy(sent.data(), values.data(), values.numBytes());
    } else {
      reduceInto(wide, partial, sent.data(), values.data(), numElements);
    }
    isFirst = false;
  }
}

TEST(CudaKernels, StepsOfRingsHaveTheBitsOfTheSyncCores) {
  std::mt19937_64 random(7);
  for (const DType dtype : kEveryDType) {
    const std::size_t itemSize = itemBytes(dtype), wideSize = isNarrow(dtype) ? 4 : itemSize;
    const DType wide = isNarrow(dtype) ? DType::kFloat32 : dtype;
    for (const ReduceOp op : kEveryOp) {
      for (const std::size_t numLocal : {0, 1, 3, 5}) {
        for (const bool hasReceived : {false, true}) {
          for (const std::size_t numElements : {1, 1025, 8200}) {
            for (const std::size_t offset : {0, 1}) {
              if (numLocal == 0 && !hasReceived) continue;
              SCOPED_TRACE("dtype " + std::to_string(static_cast<int>(dtype)) + ", " +
                           std::to_string(numLocal) + " of " + std::to_string(numElements));
              std::vector<Array> inputs;
              for (std::size_t k = 0; k < numLocal; ++k) {
                inputs.emplace_back(numElements * itemSize, offset * itemSize);
                fill(inputs.back(), random);
              }
              const Array received(numElements * wideSize), sent(numElements * wideSize),
                  expectedSent(numElements * wideSize);
              fill(received, random);
              const Array output(numElements * itemSize, offset * itemSize), expected(numElements * itemSize);
              const std::vector<void*> in = pointersOf(inputs);
              void* const out[] = {output.data()};
              cuda::ReduceBatch batch{};
              const std::uint32_t divisor = op == ReduceOp::kMean ? 3 : 1;
              ASSERT_TRUE(cuda::append(batch, itemSize, numElements, divisor, in.data(),
                                       static_cast<std::uint32_t>(numLocal), out, 1,
                                       hasReceived ? received.data() : nullptr, sent.data()));
              runReduce(dtype, op, batch, true);
              referenceStep(dtype, op, inputs, hasReceived ? &received : nullptr, expectedSent, numElements);
              expectSame(wide, sent, expectedSent);
              if (isNarrow(dtype)) {
                narrow(dtype, expectedSent.as<float>(), expected.data(), numElements, divisor, op);
              } else {
                const void* const sums[] = {expectedSent.data()};
                void* const results[] = {expected.data()};
                reduce(dtype, op, sums, 1, results, 1, numElements, divisor);
              }
              expectSame(dtype, output, expected);
              if (testing::Test::HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
}

// ---- Measures ----

/// reduceAndMeasureShard(), for arrays that are reduced in place.
GradientMeasure measureOnHost(DType dtype, std::size_t numElements, const std::vector<Array>& arrays) {
  constexpr std::size_t kHostTileBytes = 8192;
  const std::size_t itemSize = itemBytes(dtype);
  const auto count = static_cast<std::uint32_t>(arrays.size());
  GradientMeasure measure{0, kNobody, 0};
  for (std::size_t offset = 0; offset < numElements * itemSize; offset += kHostTileBytes) {
    const std::size_t tileElements = std::min(kHostTileBytes, numElements * itemSize - offset) / itemSize;
    std::vector<void*> tile;
    for (const Array& array : arrays) tile.push_back(array.data() + offset);
    std::int32_t first = kEverybody;
    for (std::size_t k = tile.size(); k-- > 0;) {
      if (!std::isfinite(sumOfSquares(dtype, tile[k], tileElements))) first = static_cast<std::int32_t>(k);
    }
    reduce(dtype, ReduceOp::kMean, tile.data(), count, tile.data(), count, tileElements, count);
    const double squares = sumOfSquares(dtype, tile[0], tileElements);
    measure.sumOfSquares += squares;
    if (!std::isfinite(squares) && measure.nonFiniteOf == kNobody) measure.nonFiniteOf = first;
  }
  return measure;
}

void expectSame(const cuda::ShardMeasure& measure, const GradientMeasure& expected) {
  EXPECT_TRUE(sameElement(DType::kFloat64, bitCast<std::uint64_t>(measure.sumOfSquares),
                          bitCast<std::uint64_t>(expected.sumOfSquares)))
      << measure.sumOfSquares << " is not " << expected.sumOfSquares;
  EXPECT_EQ(measure.nonFiniteOf, expected.nonFiniteOf);
}

template <class Element>
void expectMeasure(DType dtype, std::size_t numElements, const std::vector<Array>& inputs) {
  const std::vector<Array> reference = inputs;
  const GradientMeasure expected = measureOnHost(dtype, numElements, reference);
  const std::vector<void*> in = pointersOf(inputs);
  const auto count = static_cast<std::uint32_t>(inputs.size());
  cuda::ReduceBatch batch{};
  ASSERT_TRUE(cuda::append(batch, itemBytes(dtype), numElements, count, in.data(), count, in.data(), count));
  const cuda::ShardMeasure measure = runMeasure<Element>(batch);
  for (std::size_t k = 0; k < inputs.size(); ++k) expectSame(dtype, inputs[k], reference[k]);
  expectSame(measure, expected);
}

void expectMeasure(DType dtype, std::size_t numElements, const std::vector<Array>& inputs) {
  if (dtype == DType::kFloat32) return expectMeasure<cuda::Plain<float>>(dtype, numElements, inputs);
  if (dtype == DType::kBFloat16) return expectMeasure<cuda::BFloat16>(dtype, numElements, inputs);
  expectMeasure<cuda::Float16>(dtype, numElements, inputs);
}

std::vector<Array> gradients(DType dtype, std::size_t numElements, std::size_t count, std::size_t offset,
                             std::mt19937_64& random) {
  std::vector<Array> arrays;
  for (std::size_t k = 0; k < count; ++k) {
    arrays.emplace_back(numElements * itemBytes(dtype), offset * itemBytes(dtype));
    fillFloats(arrays.back(), dtype, -3, 3, random);
  }
  return arrays;
}

TEST(CudaKernels, SumsOfSquaresHaveTheBitsOfTheSyncCores) {
  std::mt19937_64 random(8);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const std::size_t numElements : kLengths) {
      for (const std::size_t offset : {0, 1}) {
        SCOPED_TRACE("dtype " + std::to_string(static_cast<int>(dtype)) + " of " +
                     std::to_string(numElements));
        expectMeasure(dtype, numElements, gradients(dtype, numElements, 3, offset, random));
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(CudaKernels, TheFirstWhoBroughtNanOrInfIsFound) {
  std::mt19937_64 random(9);
  constexpr std::size_t kNumElements = 9000;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const std::vector<Array> inputs = gradients(dtype, kNumElements, 3, 0, random);
    const float infinity = std::numeric_limits<float>::infinity();
    for (const auto& [client, element] : {std::pair{2, 8500}, std::pair{1, 8999}, std::pair{0, 8600}}) {
      narrow(dtype, &infinity,
             inputs[static_cast<std::size_t>(client)].data() +
                 static_cast<std::size_t>(element) * itemBytes(dtype),
             1, 1, ReduceOp::kSum);
      expectMeasure(dtype, kNumElements, std::vector<Array>(inputs));
    }
  }
}

TEST(CudaKernels, AMeanThatOverflowsIsNobodysFault) {
  const float most = 3e38F;
  std::vector<Array> inputs;
  for (int k = 0; k < 2; ++k) {
    inputs.emplace_back(4 * 3000);
    for (std::size_t i = 0; i < 3000; ++i) inputs.back().as<float>()[i] = most;
  }
  expectMeasure(DType::kFloat32, 3000, inputs);
}

TEST(CudaKernels, BlocksOfThreadsMeasureAllShardsOfABatch) {
  std::mt19937_64 random(13);
  constexpr DType kDType = DType::kBFloat16;
  constexpr std::size_t kShardElements[] = {10007, 1, 0, 9000, 4096};
  constexpr std::size_t kNumShards = std::size(kShardElements);
  for (const unsigned numBlocks : {1U, 3U}) {
    std::vector<std::vector<Array>> shards;
    cuda::MeasureBatch batch{};
    for (const std::size_t numElements : kShardElements) {
      shards.push_back(gradients(kDType, numElements, 2, 0, random));
      if (numElements == 9000) {
        shards.back()[1].as<std::uint16_t>()[8500] = kBFloat16Format.infinity();
        shards.back()[0].as<std::uint16_t>()[8999] = kBFloat16Format.infinity();
      }
      const std::vector<void*> in = pointersOf(shards.back());
      ASSERT_TRUE(cuda::append(batch.reduce, 2, numElements, 2, in.data(), 2, in.data(), 2));
    }
    const std::vector<std::vector<Array>> reference = shards;
    std::vector<double> tileSums(batch.reduce.numTiles);
    std::vector<std::int32_t> tileOffenders(batch.reduce.numTiles);
    std::vector<std::uint32_t> tilesDone(kNumShards);
    std::vector<cuda::ShardMeasure> measures(kNumShards);
    batch.tileSums = tileSums.data();
    batch.tileOffenders = tileOffenders.data();
    batch.tilesDone = tilesDone.data();
    batch.measures = measures.data();
    cuda::launch(&measure_bfloat16, numBlocks, batch);
    for (std::size_t i = 0; i < kNumShards; ++i) {
      SCOPED_TRACE("shard " + std::to_string(i) + ", " + std::to_string(numBlocks) + " blocks");
      expectSame(measures[i], measureOnHost(kDType, kShardElements[i], reference[i]));
      for (std::size_t k = 0; k < 2; ++k) expectSame(kDType, shards[i][k], reference[i][k]);
    }
    EXPECT_EQ(tilesDone, std::vector<std::uint32_t>(kNumShards, 0));
  }
}

// ---- Updates ----

constexpr UpdateRule kRules[] = {UpdateRule::kSgd,    UpdateRule::kSgdMomentum, UpdateRule::kSgdNesterov,
                                 UpdateRule::kAdam,   UpdateRule::kAdagrad,     UpdateRule::kLion,
                                 UpdateRule::kAmsgrad};

UpdateSettings settingsOf(UpdateRule rule) {
  UpdateSettings settings;
  settings.rule = rule;
  settings.gradientScale = -1.1F;
  settings.gradientDecay = 0.05F;
  settings.parameterScale = 0.93F;
  settings.stepSize = 0.123F;
  settings.firstDecay = 0.9F;
  settings.firstWeight = 0.1F;
  settings.momentum = 0.9F;
  settings.secondDecay = 0.99F;
  settings.secondWeight = 0.01F;
  settings.secondScale = 0.3F;
  settings.epsilon = 1e-3F;
  return settings;
}

/// A shard with an optimizer.
struct Updated {
  Updated(DType dtype, std::size_t numGradients, std::size_t numElements, std::size_t offset,
          std::mt19937_64& random)
      : dtype(dtype),
        numElements(numElements),
        gradientArrays(gradients(dtype, numElements, numGradients, offset, random)),
        parameter(numElements * itemBytes(dtype), offset * itemBytes(dtype)) {
    fillFloats(parameter, dtype, -2, 2, random);
    for (std::size_t k = 0; k < kMostStates; ++k) {
      states.emplace_back(numElements * 4, offset * 4);
      fillFloats(states.back(), DType::kFloat32, 0, 1, random);
    }
    // Half of the master weights round to their parameter, the others are stale.
    master.emplace_back(numElements * 4, offset * 4);
    fillFloats(master[0], DType::kFloat32, -2, 2, random);
    if (dtype != DType::kFloat32) widen(dtype, parameter.data(), master[0].as<float>(), numElements / 2);
  }
  cuda::UpdateShard shard(std::uint32_t divisor) const {
    cuda::UpdateShard result{};
    result.numElements = numElements;
    result.parameter = parameter.data();
    if (dtype != DType::kFloat32) result.master = master[0].as<float>();
    for (std::size_t k = 0; k < kMostStates; ++k) result.states[k] = states[k].as<float>();
    result.divisor = divisor;
    return result;
  }
  void updateOnHost(const UpdateSettings& settings, std::uint32_t divisor) const {
    const std::vector<void*> inputs = pointersOf(gradientArrays);
    float* const pointers[] = {states[0].as<float>(), states[1].as<float>(), states[2].as<float>()};
    UpdateArrays arrays;
    arrays.gradients = inputs.data();
    arrays.numGradients = inputs.size();
    arrays.parameter = parameter.data();
    arrays.master = master[0].as<float>();
    arrays.states = pointers;
    arrays.numElements = numElements;
    update(settings, dtype, arrays, divisor);
  }
  void expectSameAs(const Updated& expected) const {
    expectSame(dtype, parameter, expected.parameter);
    expectSame(DType::kFloat32, master[0], expected.master[0]);
    for (std::size_t k = 0; k < kMostStates; ++k) expectSame(DType::kFloat32, states[k], expected.states[k]);
    for (std::size_t k = 0; k < gradientArrays.size(); ++k)
      expectSame(DType::kUInt8, gradientArrays[k], expected.gradientArrays[k]);
  }
  DType dtype;
  std::size_t numElements;
  std::vector<Array> gradientArrays;
  Array parameter;
  std::vector<Array> states;
  std::vector<Array> master;
};

bool appendTo(cuda::UpdateBatch& batch, const Updated& tensors, const UpdateSettings& settings,
              std::uint32_t divisor) {
  const std::vector<void*> inputs = pointersOf(tensors.gradientArrays);
  return cuda::append(batch, itemBytes(tensors.dtype), tensors.shard(divisor),
                      static_cast<std::uint32_t>(numStates(settings.rule)), &settings, inputs.data(),
                      static_cast<std::uint32_t>(inputs.size()));
}

TEST(CudaKernels, UpdatesHaveTheBitsOfTheSyncCores) {
  std::mt19937_64 random(10);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const UpdateRule rule : kRules) {
      for (const std::size_t numGradients : {1, 2, 3, 5}) {
        for (const std::size_t numElements : {1, 7, 1025, 2048, 4099}) {
          for (const std::size_t offset : {0, 1}) {
            SCOPED_TRACE("dtype " + std::to_string(static_cast<int>(dtype)) + ", rule " +
                         std::to_string(static_cast<int>(rule)) + ", " + std::to_string(numGradients) +
                         " of " + std::to_string(numElements));
            const Updated tensors(dtype, numGradients, numElements, offset, random);
            const Updated expected = tensors;
            const auto divisor = static_cast<std::uint32_t>(numGradients);
            cuda::UpdateBatch batch{};
            ASSERT_TRUE(appendTo(batch, tensors, settingsOf(rule), divisor));
            runUpdate(dtype, batch);
            expected.updateOnHost(settingsOf(rule), divisor);
            tensors.expectSameAs(expected);
            if (testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(CudaKernels, UpdatesOfABatchTakeTheirOwnSettings) {
  std::mt19937_64 random(11);
  std::vector<Updated> tensors;
  for (const std::size_t numElements : kLengths)
    tensors.emplace_back(DType::kBFloat16, 2, numElements, 0, random);
  const std::vector<Updated> expected = tensors;
  cuda::UpdateBatch batch{};
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const UpdateSettings settings = settingsOf(kRules[i / 4]);
    ASSERT_TRUE(appendTo(batch, tensors[i], settings, 2));
    expected[i].updateOnHost(settings, 2);
  }
  EXPECT_EQ(batch.numSettings, 5U);
  runUpdate(DType::kBFloat16, batch);
  for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].expectSameAs(expected[i]);
}

TEST(CudaKernels, NoRuleChangesNothing) {
  std::mt19937_64 random(12);
  const Updated tensors(DType::kFloat32, 1, 5000, 0, random);
  const Updated before = tensors;
  cuda::UpdateBatch batch{};
  ASSERT_TRUE(appendTo(batch, tensors, settingsOf(UpdateRule::kNone), 1));
  runUpdate(DType::kFloat32, batch);
  tensors.expectSameAs(before);
}

// ---- Delays ----

TEST(Delays, EndWhenTheyAreToButSoon) {
  const cuda::Hold hold{1'000'000, nullptr};
  EXPECT_EQ(cuda::endOf(hold, 900'000), 1'000'000U);
  EXPECT_EQ(cuda::endOf(hold, 2'000'000), 1'000'000U) << "over before it began";
  EXPECT_EQ(cuda::endOf(hold, 100'000), 100'000U + cuda::kLongestHoldNs);
}

}  // namespace
}  // namespace coarse::test::cuda_kernels_test
