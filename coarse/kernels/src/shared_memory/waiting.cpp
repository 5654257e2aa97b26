#include "coarse/shared_memory/waiting.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

namespace coarse {
namespace {

// Polls the awaited word a few times before each system call: a yield costs about as much as ten polls.
constexpr int kPausesPerYield = 8;
constexpr std::chrono::hours kCenturies{100 * 365 * 24};

inline void pauseProcessor() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void futexWait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
               std::chrono::nanoseconds timeout) noexcept {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
  timespec relative{};
  relative.tv_sec = static_cast<time_t>(seconds.count());
  relative.tv_nsec = static_cast<long>((timeout - seconds).count());
  ::syscall(SYS_futex, &word, FUTEX_WAIT, expected, &relative, nullptr, 0);
}

void futexWake(std::atomic<std::uint32_t>& word, int count) noexcept {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, count, nullptr, nullptr, 0);
}

void makeSleepsExact() noexcept { ::prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL); }

Clock::time_point AttendedClock::now(Clock::time_point look) noexcept {
  missed_ += std::max<Clock::duration>(look - lastLook_ - kLongestGap, Clock::duration::zero());
  lastLook_ = look;
  return look - missed_;
}

Clock::time_point AttendedClock::in(std::chrono::milliseconds limit) noexcept {
  return now() + std::min<std::chrono::milliseconds>(limit, kCenturies);
}

bool YieldingSpin::yield() noexcept {
  const auto now = Clock::now();
  if (!started_) {
    started_ = true;
    deadline_ = now + budget_;
  } else if (now >= deadline_) {
    return false;
  }
  for (int i = 0; i < kPausesPerYield; ++i) pauseProcessor();
  ::sched_yield();
  return true;
}

}  // namespace coarse
