/// The queue from one client to one memory device: all descriptors, in order, once.
#include "coarse/shared_memory/descriptor_queue.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "fixture.hpp"

namespace coarse::test::descriptor_queue_test {
namespace {

Descriptor numbered(std::uint32_t number) {
  Descriptor descriptor;
  descriptor.group = number;
  descriptor.shard = number + 1;
  descriptor.step = number + 2;
  descriptor.numElements = number + 3;
  descriptor.flags = static_cast<std::uint8_t>(number + 4);
  descriptor.dtype = static_cast<std::uint8_t>(number + 5);
  descriptor.op = static_cast<std::uint8_t>(number + 6);
  return descriptor;
}

bool isNumbered(const Descriptor& descriptor, std::uint32_t number) {
  const Descriptor expected = numbered(number);
  return std::memcmp(&descriptor, &expected, sizeof(Descriptor)) == 0;
}

class DescriptorQueues : public testing::Test {
 protected:
  std::unique_ptr<DescriptorQueue> queue_ =
      std::make_unique<DescriptorQueue>();  // zero, as new shared memory
  DescriptorProducer producer_{*queue_};
  DescriptorConsumer consumer_{*queue_};
};

TEST_F(DescriptorQueues, EmptyGivesNothing) {
  Descriptor descriptor = numbered(1);
  EXPECT_FALSE(consumer_.pop(descriptor));
  EXPECT_TRUE(isNumbered(descriptor, 1)) << "written although there was nothing";
  ASSERT_TRUE(producer_.push(numbered(2)));
  EXPECT_TRUE(consumer_.pop(descriptor));
  EXPECT_FALSE(consumer_.pop(descriptor)) << "taken twice";
}

TEST_F(DescriptorQueues, KeepsOrderAndEveryField) {
  for (std::uint32_t i = 0; i < 100; ++i) ASSERT_TRUE(producer_.push(numbered(i)));
  Descriptor descriptor;
  for (std::uint32_t i = 0; i < 100; ++i) {
    ASSERT_TRUE(consumer_.pop(descriptor));
    ASSERT_TRUE(isNumbered(descriptor, i)) << i;
  }
}

TEST_F(DescriptorQueues, FullRefusesUntilOneIsTaken) {
  for (std::uint32_t i = 0; i < kDescriptorCapacity; ++i) ASSERT_TRUE(producer_.push(numbered(i)));
  EXPECT_FALSE(producer_.push(numbered(77777)));
  Descriptor descriptor;
  ASSERT_TRUE(consumer_.pop(descriptor));
  EXPECT_TRUE(isNumbered(descriptor, 0)) << "overwritten by the descriptor that was refused";
  EXPECT_TRUE(producer_.push(numbered(kDescriptorCapacity)));
  EXPECT_FALSE(producer_.push(numbered(77777)));
  for (std::uint32_t i = 1; i <= kDescriptorCapacity; ++i) {
    ASSERT_TRUE(consumer_.pop(descriptor));
    ASSERT_TRUE(isNumbered(descriptor, i)) << i;
  }
  EXPECT_FALSE(consumer_.pop(descriptor));
}

TEST_F(DescriptorQueues, GivesACopyThatThePeerCannotChangeAfterwards) {
  ASSERT_TRUE(producer_.push(numbered(5)));
  Descriptor descriptor;
  ASSERT_TRUE(consumer_.pop(descriptor));
  queue_->cells[0].descriptor = numbered(6);
  EXPECT_TRUE(isNumbered(descriptor, 5));
}

TEST_F(DescriptorQueues, ACommitWordOfAnotherLapIsNotTaken) {
  Descriptor descriptor;
  for (const std::uint64_t commit :
       {std::uint64_t{2}, kDescriptorCapacity, kDescriptorCapacity + 1, ~std::uint64_t{0}}) {
    queue_->cells[0].commit.store(commit);
    EXPECT_FALSE(consumer_.pop(descriptor)) << commit;
  }
}

TEST_F(DescriptorQueues, OneThreadPushesAndAnotherPopsManyLaps) {
  constexpr std::uint32_t kNumDescriptors = 9 * kDescriptorCapacity + 17;
  // Written before the descriptor and read after it, as a tensor's data is; no other order between the
  // threads.
  std::vector<std::uint32_t> data(kNumDescriptors);
  together(2, [&](std::size_t thread) {
    for (std::uint32_t i = 0; i < kNumDescriptors; ++i) {
      if (thread == 0) {
        data[i] = 3 * i;
        ASSERT_TRUE(eventually([&] { return producer_.push(numbered(i)); })) << "stuck at " << i;
      } else {
        Descriptor descriptor;
        ASSERT_TRUE(eventually([&] { return consumer_.pop(descriptor); })) << "stuck at " << i;
        ASSERT_TRUE(isNumbered(descriptor, i)) << i;
        ASSERT_EQ(data[i], 3 * i);
      }
    }
  });
}

}  // namespace
}  // namespace coarse::test::descriptor_queue_test
