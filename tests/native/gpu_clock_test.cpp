/// GpuClock: never early, and late by no more than the best launch plus the drift that is allowed for.
#include "coarse/gpu/gpu_clock.hpp"

#include <gtest/gtest.h>

namespace coarse::test::gpu_clock_test {
namespace {

constexpr MonotonicNs kOffset = 7'000'000'000'000;  // of the timer, in truth
constexpr MonotonicNs kSecond = 1'000'000'000;

/// A kernel that begins `delay` after its launch.
void note(GpuClock& clock, MonotonicNs launchedAt, MonotonicNs delay) {
  clock.note(launchedAt, static_cast<std::uint64_t>(launchedAt + delay + kOffset));
}

TEST(GpuClock, TakesTheBestLaunchWhateverComesBehindIt) {
  GpuClock clock;
  note(clock, kSecond, 90'000);
  note(clock, kSecond + 1000, 4'000);
  note(clock, kSecond + 2000, 140'000);
  const auto exact = static_cast<std::uint64_t>(kSecond + 2000 + kOffset);
  EXPECT_GE(clock.shownAt(kSecond + 2000), exact + 4'000);
  EXPECT_LE(clock.shownAt(kSecond + 2000), exact + 4'000 + 2);
}

TEST(GpuClock, IsNeverEarlyThoughClocksGoApart) {
  GpuClock clock;
  const auto shown = [](MonotonicNs time) {  // 50 us in a second
    return static_cast<std::uint64_t>(time + kOffset + time / 20'000);
  };
  for (MonotonicNs launchedAt = kSecond; launchedAt < 100 * kSecond; launchedAt += kSecond / 20) {
    clock.note(launchedAt, shown(launchedAt + 5'000));
    const MonotonicNs later = launchedAt + kSecond / 10;
    ASSERT_GE(clock.shownAt(later), shown(later));
    ASSERT_LE(clock.shownAt(later), shown(later) + 5'000 + 10'000 + 10);
  }
}

TEST(GpuClock, IsFreshForATenthOfASecond) {
  GpuClock clock;
  EXPECT_FALSE(clock.isFresh(kSecond));
  note(clock, kSecond, 1000);
  EXPECT_TRUE(clock.isFresh(kSecond + kSecond / 10));
  EXPECT_FALSE(clock.isFresh(kSecond + kSecond / 10 + 1));
}

}  // namespace
}  // namespace coarse::test::gpu_clock_test
