/// Snapshots of blocks in the memory of a GPU. The driver is the stand-in of cuda_stand_in.cpp.
#include "coarse/gpu/cuda_snapshot_pool.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "coarse/snapshot/snapshot.hpp"
#include "fixture.hpp"

extern "C" {
void standInLimitPool(std::size_t numBytes);
std::size_t standInPooledBytes();
void standInFault(bool isSo);
}

namespace coarse::test::cuda_snapshot_pool_test {
namespace {

using std::chrono::milliseconds;
using Words = std::vector<std::uint32_t>;

constexpr std::size_t kMostPooledBytes = std::size_t{1} << 30;
// The second one comes to the host in three pieces, the last one is empty.
const std::vector<std::size_t> kBlockBytes = {4096, (9 << 20) + 8, 12, 0};

/// Blocks of words in the memory of a GPU, which one memory device updates.
class GpuBlocks {
 public:
  explicit GpuBlocks(milliseconds patience = milliseconds(30'000))
      : request_(sizeof(SnapshotRequest)),
        control_(SnapshotControl::numBytes(kBlockBytes.size())),
        trigger_(request_.fd, control_.fd, 0),
        pool_(std::make_shared<CudaSnapshotPool>(context_, kBlockBytes)),
        store_(kBlockBytes, SnapshotFds{request_.fd, control_.fd, -1, pool_}, patience),
        stream_(context_) {
    for (const std::size_t numBytes : kBlockBytes)
      memory_.push_back(cuda::DeviceMemory::allocate(context_, std::max<std::size_t>(numBytes, 1)));
    store_.setLimit(std::size_t{1} << 40);
  }
  ~GpuBlocks() { stream_.synchronize(); }

  SnapshotStore& store() { return store_; }
  std::uint32_t begin() { return trigger_.begin(); }
  /// Writes `value` to every byte of all blocks, as a batch of updates does.
  void updateAll(unsigned char value) {
    std::vector<BlockInPlace> blocks;
    for (std::size_t block = 0; block < memory_.size(); ++block) blocks.push_back({block, at(block)});
    store_.keep(blocks.data(), blocks.size());
    const cuda::ContextScope scope(*context_);
    for (std::size_t block = 0; block < memory_.size(); ++block)
      stream_.fill(memory_[block].address(), value, kBlockBytes[block]);
    stream_.synchronize();
  }
  /// @returns the different bytes of a block in a snapshot; none if it cannot be read.
  std::vector<unsigned char> read(std::uint32_t snapshot, std::size_t block) {
    std::vector<unsigned char> found(kBlockBytes[block]);
    if (!store_.read(snapshot, block, at(block), reinterpret_cast<std::byte*>(found.data()))) return {};
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
  }
  void expectAll(std::uint32_t snapshot, unsigned char value) {
    for (std::size_t block = 0; block + 1 < kBlockBytes.size(); ++block)
      EXPECT_EQ(read(snapshot, block), std::vector<unsigned char>{value}) << "block " << block;
  }

 private:
  const std::byte* at(std::size_t block) const {
    return static_cast<const std::byte*>(cuda::pointerTo(memory_[block].address()));
  }

  cuda::SharedContext context_ = std::make_shared<cuda::Context>(0);
  Memory request_, control_;
  SnapshotTrigger trigger_;
  std::shared_ptr<SnapshotPool> pool_;
  SnapshotStore store_;
  std::vector<cuda::DeviceMemory> memory_;
  cuda::Stream stream_;
};

TEST(CudaSnapshotPool, KeepsWhatWasThereWhenSnapshotsBegan) {
  GpuBlocks blocks;
  blocks.updateAll(1);
  const std::uint32_t first = blocks.begin();
  blocks.expectAll(first, 1);
  blocks.updateAll(2);
  const std::uint32_t second = blocks.begin();
  blocks.updateAll(3);
  blocks.expectAll(first, 1);
  blocks.expectAll(second, 2);
}

TEST(CudaSnapshotPool, TakesMemoryOfTheGpuForWhatIsKeptAndNothingElse) {
  const std::size_t before = standInPooledBytes();
  GpuBlocks blocks;
  blocks.updateAll(1);
  const std::uint32_t snapshot = blocks.begin();
  EXPECT_EQ(standInPooledBytes(), before);
  blocks.updateAll(2);
  EXPECT_EQ(standInPooledBytes() - before, kBlockBytes[0] + kBlockBytes[1] + kBlockBytes[2]);
  blocks.store().letGo(snapshot, 1);
  EXPECT_FALSE(blocks.read(snapshot, 0).empty());  // which waits
  EXPECT_EQ(standInPooledBytes() - before, kBlockBytes[0] + kBlockBytes[2]);
  EXPECT_TRUE(blocks.read(snapshot, 1).empty());
  blocks.store().release(snapshot);
  EXPECT_EQ(standInPooledBytes(), before);
}

TEST(CudaSnapshotPool, GivesItsMemoryBackWhenTheGroupGoes) {
  const std::size_t before = standInPooledBytes();
  {
    GpuBlocks blocks;
    blocks.begin();
    blocks.updateAll(2);
    EXPECT_GT(standInPooledBytes(), before);
  }
  EXPECT_EQ(standInPooledBytes(), before);
}

TEST(CudaSnapshotPool, TellsOfAGpuThatFailed) {
  GpuBlocks blocks;
  blocks.updateAll(1);
  const std::uint32_t snapshot = blocks.begin();
  blocks.updateAll(2);
  blocks.begin();
  standInFault(true);
  EXPECT_THROW(blocks.updateAll(3), cuda::Error);
  EXPECT_THROW(blocks.read(snapshot, 0), cuda::Error);
  EXPECT_NO_THROW(blocks.store().release(snapshot)) << "its memory goes with the GPU";
  standInFault(false);
}

TEST(CudaSnapshotPool, GivesTheOldestSnapshotUpWhereTheGpuIsFull) {
  GpuBlocks blocks(milliseconds(1));
  blocks.updateAll(1);
  const std::uint32_t snapshot = blocks.begin();
  standInLimitPool(standInPooledBytes() + kBlockBytes[0]);
  blocks.updateAll(2);
  standInLimitPool(kMostPooledBytes);
  EXPECT_TRUE(blocks.store().isLost(snapshot));
  EXPECT_EQ(blocks.store().statistics().numLost, 1U);
  EXPECT_EQ(blocks.store().statistics().takenBytes, 0U);
  EXPECT_TRUE(blocks.read(snapshot, 0).empty());
}

#if !defined(__SANITIZE_THREAD__)  // of copies that may be thrown away it cannot know
TEST(CudaSnapshotPool, ReadersAndUpdatesMayMeetAnywhere) {
  constexpr unsigned char kNumUpdates = 20;
  GpuBlocks blocks;
  blocks.updateAll(0);
  for (unsigned char value = 1; value <= kNumUpdates; ++value) {
    const std::uint32_t snapshot = blocks.begin();
    std::thread reader([&blocks, snapshot, value] {
      blocks.expectAll(snapshot, static_cast<unsigned char>(value - 1));
      blocks.store().release(snapshot);
    });
    blocks.updateAll(value);
    reader.join();
  }
}
#endif

}  // namespace
}  // namespace coarse::test::cuda_snapshot_pool_test
