/// A view of shared memory in which what a process writes is its own until it gives it back.
#include "coarse/client/private_view.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <memory>
#include <system_error>

namespace coarse::test::private_view_test {
namespace {

class PrivateViewTest : public testing::Test {
 protected:
  void SetUp() override {
    fd_ = createSealedMemory("test", kBytes);
    shared_ = Mapping(fd_, kBytes, Mapping::Access::kReadWrite);
    std::memset(shared_.data(), 1, kBytes);
    try {
      view_ = std::make_unique<PrivateView>(Region(fd_), kBytes);
    } catch (const std::system_error& error) {
      GTEST_SKIP() << "this kernel does not tell which pages were written: " << error.what();
    }
  }
  void TearDown() override { ::close(fd_); }

  std::size_t page() const { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

  static constexpr std::size_t kBytes = (1 << 20) + 100;  // no whole number of pages
  int fd_ = -1;
  Mapping shared_;
  std::unique_ptr<PrivateView> view_;
};

TEST_F(PrivateViewTest, WhatOthersWriteIsSeenWhereNothingWasWrittenHere) {
  EXPECT_TRUE(view_->written().empty());
  shared_.data()[5000] = std::byte{7};
  EXPECT_EQ(view_->data()[5000], std::byte{7});
  EXPECT_TRUE(view_->written().empty());
}

TEST_F(PrivateViewTest, WhatIsWrittenIsSeenHereAloneUntilItIsGivenBack) {
  view_->data()[3 * page() + 70] = std::byte{9};
  shared_.data()[3 * page()] = std::byte{8};  // hidden by the page that was copied
  EXPECT_EQ(shared_.data()[3 * page() + 70], std::byte{1});
  EXPECT_EQ(view_->data()[3 * page()], std::byte{1});
  const auto written = view_->written();
  ASSERT_EQ(written.size(), 1U);
  EXPECT_EQ(written[0].offset, 3 * page());
  EXPECT_EQ(written[0].numBytes, page());
  view_->giveBack(written[0]);
  EXPECT_TRUE(view_->written().empty());
  EXPECT_EQ(view_->data()[3 * page()], std::byte{8});
  view_->data()[3 * page()] = std::byte{2};  // is noticed again
  EXPECT_EQ(view_->written().size(), 1U);
}

TEST_F(PrivateViewTest, OnlyWhatDiffersHasChanged) {
  std::memset(view_->data(), 1, kBytes);
  EXPECT_EQ(view_->written().size(), 1U);
  EXPECT_TRUE(view_->changed(shared_.data()).empty());
  view_->data()[130] = std::byte{2};
  view_->data()[200] = std::byte{2};
  view_->data()[kBytes - 1] = std::byte{2};
  const auto changed = view_->changed(shared_.data());
  ASSERT_EQ(changed.size(), 2U);
  EXPECT_EQ(changed[0].offset, 128U);
  EXPECT_EQ(changed[0].numBytes, 128U);
  EXPECT_EQ(changed[1].offset + changed[1].numBytes, kBytes);
}

TEST_F(PrivateViewTest, ManyRangesAreFound) {
  for (std::size_t at = 0; at < kBytes; at += 2 * page()) view_->data()[at] = std::byte{3};
  EXPECT_EQ(view_->written().size(), (kBytes + 2 * page() - 1) / (2 * page()));
}

TEST_F(PrivateViewTest, SystemCallsMayWriteThere) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  ASSERT_EQ(::write(ends[1], "abc", 3), 3);
  EXPECT_EQ(::read(ends[0], view_->data() + 10, 3), 3);
  EXPECT_EQ(view_->data()[11], std::byte{'b'});
  EXPECT_EQ(shared_.data()[11], std::byte{1});
  EXPECT_EQ(view_->written().size(), 1U);
  for (const int end : ends) ::close(end);
}

}  // namespace
}  // namespace coarse::test::private_view_test
