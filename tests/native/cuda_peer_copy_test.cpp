/// Memory of a GPU that another one cannot reach: kernels of that one work on copies.
#include "coarse/gpu/cuda_peer_copy.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <memory>

extern "C" std::size_t standInPooledBytes();

namespace coarse::test::cuda_peer_copy_test {
namespace {

class Distance : public testing::Test {
 protected:
  cuda::SharedContext here_ = std::make_shared<cuda::Context>(0);
  cuda::SharedContext there_ = std::make_shared<cuda::Context>(0);
  std::shared_ptr<DistantMemory> distant_ = std::make_shared<DistantMemory>();
  std::array<int, 64> memory_{};  // as if on another GPU, but for the last half
  static constexpr std::size_t kNumBytes = sizeof(memory_) / 2;
  cuda::ContextScope scope_{*here_};
  cuda::Stream stream_{here_};
  NearCopies copies_{stream_, distant_};

  void SetUp() override { distant_->add(memory_.data(), kNumBytes, there_); }
};

TEST_F(Distance, IsOfWholeRanges) {
  EXPECT_EQ(distant_->find(&memory_[0]), there_);
  EXPECT_EQ(distant_->find(&memory_[31]), there_);
  EXPECT_EQ(distant_->find(&memory_[32]), std::nullopt);
  EXPECT_EQ(distant_->find(memory_.data() - 1), std::nullopt);
  EXPECT_FALSE(distant_->isEmpty());
  distant_->remove(memory_.data());
  EXPECT_TRUE(distant_->isEmpty());
  EXPECT_EQ(distant_->find(&memory_[0]), std::nullopt);
}

TEST_F(Distance, IsBridgedByCopies) {
  const std::size_t pooledBefore = standInPooledBytes();
  memory_.fill(7);
  const auto* const read = static_cast<const int*>(copies_.toRead(&memory_[8], 8 * sizeof(int)));
  auto* const written = static_cast<int*>(copies_.toWrite(&memory_[8], 8 * sizeof(int)));
  ASSERT_NE(read, &memory_[8]);
  EXPECT_EQ(read, written);  // of one array there is one copy
  EXPECT_EQ(copies_.numBytes(), 8 * sizeof(int));
  stream_.synchronize();
  EXPECT_EQ(read[7], 7);
  stream_.fill(reinterpret_cast<cuda::DeviceAddress>(written), 1, 8 * sizeof(int));
  EXPECT_EQ(memory_[8], 7);
  copies_.sendBack();
  stream_.synchronize();
  EXPECT_EQ(memory_[7], 7);
  EXPECT_EQ(memory_[8], 0x01010101);
  EXPECT_EQ(memory_[15], 0x01010101);
  EXPECT_EQ(memory_[16], 7);
  EXPECT_EQ(copies_.numBytes(), 0U);
  EXPECT_EQ(standInPooledBytes(), pooledBefore);
}

TEST_F(Distance, LeavesWhatIsOnlyReadAsItIs) {
  memory_.fill(7);
  auto* const copy = const_cast<void*>(copies_.toRead(&memory_[0], sizeof(int)));
  stream_.fill(reinterpret_cast<cuda::DeviceAddress>(copy), 1, sizeof(int));
  copies_.sendBack();
  stream_.synchronize();
  EXPECT_EQ(memory_[0], 7);
}

TEST_F(Distance, IsNoneWithinReach) {
  EXPECT_EQ(copies_.toRead(&memory_[40], 4), &memory_[40]);
  EXPECT_EQ(copies_.toWrite(&memory_[40], 4), &memory_[40]);
}

}  // namespace
}  // namespace coarse::test::cuda_peer_copy_test
