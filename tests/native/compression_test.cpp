/// compress() and decompress(): how far values move, what never moves, and the same bits from every
/// instruction set.
#include "coarse/reduce/compression.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "bytes.hpp"
#include "coarse/reduce/reduce.hpp"
#include "reduce_reference.hpp"

namespace coarse::test::compression_test {
namespace {

constexpr Compression kForms[] = {Compression::kBFloat16, Compression::kFloat16, Compression::kInt8};
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargest = std::numeric_limits<float>::max();

/// Around the lengths of vectors and of blocks.
constexpr std::size_t kLengths[] = {1, 2, 5, 31, 64, 100, 255, 256, 257, 511, 513, 1000, 2500};

/// What one compression leaves behind.
struct Sent {
  Bytes bytes;
  std::vector<float> residual;
  std::vector<float> rounded;   // what becomes of the values
  std::vector<float> received;  // from the bytes
};

std::vector<float> decompressed(Compression form, const Bytes& bytes, std::size_t numElements) {
  std::vector<float> values(numElements);
  decompress(form, bytes.data(), numElements, values.data());
  return values;
}

Sent sendWith(Compression form, const std::vector<float>& values, std::vector<float> residual) {
  Sent sent{Bytes(compressedBytes(form, values.size())), std::move(residual), values, {}};
  compress(form, sent.rounded.data(), values.size(), sent.bytes.data(), sent.residual.data());
  sent.received = decompressed(form, sent.bytes, values.size());
  return sent;
}

Sent send(Compression form, const std::vector<float>& values) {
  return sendWith(form, values, std::vector<float>(values.size()));
}

std::vector<float> normal(std::size_t numElements, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution(0, 0.01F);
  std::vector<float> values(numElements);
  for (float& value : values) value = distribution(random);
  return values;
}

/// Blocks of any contents: of one magnitude, of any, tiny, huge, zero, and not finite.
std::vector<float> anything(std::size_t numElements, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values = normal(numElements, seed);
  for (std::size_t i = 0; i < numElements; ++i) {
    switch ((i / kBlockElements + seed) % 7) {
      case 0:
        values[i] = bitCast<float>(static_cast<std::uint32_t>(random()));  // NaN among them
        break;
      case 1:
        values[i] *= 1e-38F;  // subnormal
        break;
      case 2:
        values[i] = std::fmod(values[i], 1.F) * 3e38F;
        break;
      case 3:
        values[i] = 0;
        break;
      case 4:
        if (random() % 50 == 0) values[i] = random() % 2 == 0 ? kInfinity : -kInfinity;
        break;
      default:
        break;
    }
  }
  return values;
}

template <class T>
Bytes bytesOf(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

class EveryInstructionSet : public testing::Test {
 protected:
  ~EveryInstructionSet() override { instructionSets(); }

  template <class Check>
  void forEach(Check check) {
    for (const std::string& name : instructionSets()) {
      ASSERT_TRUE(forceInstructionSet(name.c_str()));
      SCOPED_TRACE(name);
      check();
    }
  }
};

TEST(CompressedBytes, AreHalfOrAByteEachAndAScalePerBlock) {
  EXPECT_EQ(compressedBytes(Compression::kNone, 1000), 4000u);
  EXPECT_EQ(compressedBytes(Compression::kBFloat16, 1000), 2000u);
  EXPECT_EQ(compressedBytes(Compression::kFloat16, 1000), 2000u);
  EXPECT_EQ(compressedBytes(Compression::kInt8, 1), 5u);
  EXPECT_EQ(compressedBytes(Compression::kInt8, 256), 260u);
  EXPECT_EQ(compressedBytes(Compression::kInt8, 257), 265u);
  for (const Compression form : kForms) EXPECT_EQ(compressedBytes(form, 0), 0u);
}

TEST_F(EveryInstructionSet, SixteenBitsAreThoseOfNarrow) {
  forEach([] {
    for (const auto& [form, dtype] : {std::pair(Compression::kBFloat16, DType::kBFloat16),
                                      std::pair(Compression::kFloat16, DType::kFloat16)}) {
      for (const std::size_t length : kLengths) {
        const std::vector<float> values = normal(length, 1);
        const Sent sent = send(form, values);
        Bytes expected(2 * length);
        narrow(dtype, values.data(), expected.data(), length, 1, ReduceOp::kSum);
        ASSERT_TRUE(sent.bytes == expected) << length;
        ASSERT_EQ(sent.residual, std::vector<float>(length)) << "no error feedback";
      }
    }
  });
}

TEST_F(EveryInstructionSet, Int8MovesValuesByHalfAUnitAtMost) {
  forEach([] {
    for (const std::size_t length : kLengths) {
      const std::vector<float> values = normal(length, 2);
      const Sent sent = send(Compression::kInt8, values);
      for (std::size_t start = 0; start < length; start += kBlockElements) {
        const std::size_t end = std::min(length, start + kBlockElements);
        float largest = 0;
        for (std::size_t i = start; i < end; ++i) largest = std::max(largest, std::fabs(values[i]));
        for (std::size_t i = start; i < end; ++i) {
          ASSERT_LE(std::fabs(sent.received[i] - values[i]), largest / 254 * 1.0001F)
              << i << " of " << length;
          ASSERT_EQ(sent.residual[i], values[i] - sent.received[i]);
        }
      }
    }
  });
}

TEST_F(EveryInstructionSet, Int8RoundsTiesToEven) {
  forEach([] {
    const Sent sent = send(Compression::kInt8, {127, 0.5F, 1.5F, 2.5F, -0.5F, -1.5F, -2.5F, 126.5F, -127});
    EXPECT_EQ(sent.received, (std::vector<float>{127, 0, 2, 2, 0, -2, -2, 126, -127}));
  });
}

TEST_F(EveryInstructionSet, TheSenderKeepsWhatTheReceiverGets) {
  forEach([] {
    for (const Compression form : kForms) {
      for (const std::size_t length : kLengths) {
        const Sent sent = send(form, anything(length, static_cast<std::uint32_t>(length)));
        ASSERT_TRUE(bytesOf(sent.rounded) == bytesOf(sent.received)) << length;
      }
    }
  });
}

TEST_F(EveryInstructionSet, InPlaceGivesTheSameBytesAndValues) {
  forEach([] {
    for (const Compression form : kForms) {
      for (const std::size_t length : kLengths) {
        if (compressedBytes(form, length) > 4 * length) continue;
        const std::vector<float> values = anything(length, 3);
        const Sent sent = send(form, values);
        std::vector<float> array = values, residual(length);
        array.push_back(77);
        auto* const bytes = reinterpret_cast<std::byte*>(array.data());
        compress(form, array.data(), length, bytes, residual.data());
        ASSERT_EQ(std::memcmp(bytes, sent.bytes.data(), sent.bytes.size()), 0) << length;
        ASSERT_TRUE(bytesOf(residual) == bytesOf(sent.residual));
        decompress(form, bytes, length, array.data());
        ASSERT_EQ(array.back(), 77) << "written behind the end";
        array.pop_back();
        ASSERT_TRUE(bytesOf(array) == bytesOf(sent.received)) << length;
      }
    }
  });
}

TEST_F(EveryInstructionSet, GivesTheBitsOfTheBaseline) {
  for (const Compression form : kForms) {
    for (std::uint32_t seed = 0; seed < 14; ++seed) {
      const std::vector<float> values = anything(5000, seed), residual = normal(5000, 100 + seed);
      ASSERT_TRUE(forceInstructionSet("baseline") || forceInstructionSet("neon"));
      const Sent expected = sendWith(form, values, residual);
      forEach([&] {
        const Sent sent = sendWith(form, values, residual);
        ASSERT_TRUE(sent.bytes == expected.bytes);
        ASSERT_TRUE(bytesOf(sent.residual) == bytesOf(expected.residual));
        ASSERT_TRUE(bytesOf(sent.received) == bytesOf(expected.received));
      });
    }
  }
}

TEST_F(EveryInstructionSet, WhatIsNotFiniteArrivesInItsPlaceAndTheRestOfItsBlockToo) {
  forEach([] {
    for (const Compression form : kForms) {
      std::vector<float> values = normal(600, 4);
      values[3] = kNan;
      values[4] = kInfinity;
      values[299] = -kInfinity;
      const Sent sent = send(form, values);
      for (std::size_t i = 0; i < values.size(); ++i) {
        if (std::isfinite(values[i])) {
          ASSERT_NEAR(sent.received[i], values[i], 0.05 / 252 + 1e-9) << i;
        } else if (std::isnan(values[i])) {
          ASSERT_TRUE(std::isnan(sent.received[i])) << i;
        } else {
          ASSERT_EQ(sent.received[i], values[i]);
        }
        ASSERT_TRUE(std::isfinite(sent.residual[i])) << "would come again in every later step";
      }
    }
  });
}

TEST_F(EveryInstructionSet, ABlockOfNothingFiniteArrives) {
  forEach([] {
    for (const Compression form : kForms) {
      const Sent sent = send(form, {kInfinity, -kInfinity, kNan, kInfinity});
      EXPECT_EQ(sent.received[0], kInfinity);
      EXPECT_EQ(sent.received[1], -kInfinity);
      EXPECT_TRUE(std::isnan(sent.received[2]));
      EXPECT_EQ(sent.residual, std::vector<float>(4));
    }
  });
}

TEST_F(EveryInstructionSet, ZerosStayZeros) {
  forEach([] {
    for (const Compression form : kForms) {
      const Sent sent = send(form, std::vector<float>(300));
      EXPECT_EQ(sent.received, std::vector<float>(300));
      EXPECT_EQ(sent.residual, std::vector<float>(300));
    }
  });
}

TEST_F(EveryInstructionSet, TheLargestNumbersStayFinite) {
  forEach([] {
    for (const float value : {kLargest, -kLargest, std::nextafter(kLargest, 0.F), kLargest / 1.5F}) {
      const Sent sent = send(Compression::kInt8, {value, 1});
      EXPECT_NEAR(sent.received[0] / value, 1, 1e-6);
    }
  });
}

TEST_F(EveryInstructionSet, TinyBlocksWaitUntilTheyAreLargeEnough) {
  forEach([] {
    const std::vector<float> values = {kSmallestBlock / 4, -kSmallestBlock / 8, 1e-42F};
    std::vector<float> residual(3);
    for (int step = 1; step <= 3; ++step) {
      const Sent sent = sendWith(Compression::kInt8, values, residual);
      ASSERT_EQ(sent.received, std::vector<float>(3));
      residual = sent.residual;
    }
    const Sent sent = sendWith(Compression::kInt8, values, residual);
    EXPECT_NEAR(sent.received[0] / kSmallestBlock, 1, 1e-6);
    EXPECT_NEAR(sent.received[1] / kSmallestBlock, -0.5, 0.01);
  });
}

TEST_F(EveryInstructionSet, ErrorFeedbackSendsASumExactlyInTheLongRun) {
  forEach([] {
    const std::vector<float> values = normal(500, 5);
    std::vector<float> residual(values.size());
    std::vector<double> sums(values.size());
    double largestError = 0;
    constexpr int kSteps = 1000;
    for (int step = 0; step < kSteps; ++step) {
      const Sent sent = sendWith(Compression::kInt8, values, residual);
      residual = sent.residual;
      for (std::size_t i = 0; i < values.size(); ++i) {
        sums[i] += sent.received[i];
        largestError = std::max<double>(largestError, std::fabs(sent.received[i] - values[i]));
      }
    }
    EXPECT_GT(largestError, 5e-5) << "single steps are off";
    for (std::size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(sums[i] / kSteps, values[i], 1e-6);
  });
}

TEST_F(EveryInstructionSet, AResidualDoesNotChangeWhereTheValueIsNotFinite) {
  forEach([] {
    const Sent sent = sendWith(Compression::kInt8, {kInfinity, 1, kNan}, {0.25F, 0, 0.5F});
    EXPECT_EQ(sent.residual[0], 0.25F);
    EXPECT_EQ(sent.residual[2], 0.5F);
  });
}

TEST_F(EveryInstructionSet, AnyBytesAreSomeValues) {
  forEach([] {
    std::mt19937 random(6);
    for (const Compression form : kForms) {
      Bytes bytes(compressedBytes(form, 3000));
      for (std::byte& each : bytes) each = static_cast<std::byte>(random());
      EXPECT_EQ(decompressed(form, bytes, 3000).size(), 3000u);
    }
  });
}

}  // namespace
}  // namespace coarse::test::compression_test
