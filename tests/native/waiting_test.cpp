/// Clocks of waits, and what forks have of objects with threads.
#include "coarse/shared_memory/waiting.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "coarse/shared_memory/forks.hpp"

namespace coarse::test::waiting_test {
namespace {

using namespace std::chrono_literals;

TEST(AttendedClock, GoesOnWhileSomebodyLooksAndStandsStillOtherwise) {
  AttendedClock clock;
  const auto start = Clock::now(), first = clock.now(start);
  for (int i = 1; i < 20; ++i) EXPECT_EQ(clock.now(start + i * 500ms) - first, i * 500ms);
  EXPECT_EQ(clock.now(start + 1h) - first, 9500ms + kLongestGap);
}

TEST(APatience, IsOverWhenItsTimeIs) {
  const auto start = Clock::now();
  Patience patience(10.0);
  for (int i = 1; i < 20; ++i) EXPECT_FALSE(patience.isOver(start + i * 500ms)) << i;
  EXPECT_TRUE(patience.isOver(start + 21 * 500ms));
}

TEST(APatience, DoesNotCountTimeInWhichNobodyLooked) {
  const auto start = Clock::now();
  Patience patience(10.0);
  EXPECT_FALSE(patience.isOver(start + 1h));
  EXPECT_FALSE(patience.isOver(start + 1h + 900ms));
}

TEST(AttendedClock, HasNoLimitThatIsTooLong) {
  AttendedClock clock;
  EXPECT_GT(clock.in(std::chrono::milliseconds::max()) - clock.now(), std::chrono::hours(24 * 365));
}

/// Has a thread that waits until there is work, as many here.
class Waiter {
 public:
  Waiter() : thread_([this] { serve(); }) {}
  ~Waiter() {
    {
      const std::lock_guard lock(mutex_);
      isStopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void awaitSleep() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return isWaiting_; });
  }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    isWaiting_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return isStopping_; });
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool isWaiting_ = false, isStopping_ = false;
  std::thread thread_;
};

TEST(LeakInForks, LetsForksEnd) {
  std::unique_ptr<Waiter, LeakInForks> waiter(new Waiter);
  waiter->awaitSleep();
  const pid_t child = ::fork();
  if (child == 0) {
    waiter.reset();
    ::_exit(7);
  }
  int status = 0;
  const auto began = Clock::now();
  while (::waitpid(child, &status, WNOHANG) == 0) {
    ASSERT_LT(Clock::now() - began, 30s) << "the fork hangs";
    std::this_thread::sleep_for(1ms);
  }
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

}  // namespace
}  // namespace coarse::test::waiting_test
