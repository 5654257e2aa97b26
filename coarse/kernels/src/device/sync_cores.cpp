#include "coarse/device/sync_cores.hpp"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "coarse/shared_memory/waiting.hpp"
#include "coarse/timeline/recorder.hpp"

namespace coarse {
namespace {

// Sleeping sync cores check for work this often even without a ring, so that no lost wake-up can hang a
// session.
constexpr std::chrono::milliseconds kLongestSleep{100};

// Emulated links: a sleep is too inexact for shorter waits than this, and takes up to this long to end.
constexpr std::chrono::microseconds kShortestSleep{200};
constexpr std::chrono::microseconds kWakeUpTime{100};

}  // namespace

SyncCores::SyncCores(SyncCoresConfig config, Doorbell& doorbell, Work work, UntilNext untilNext, Fail fail)
    : config_(config),
      doorbell_(doorbell),
      work_(std::move(work)),
      untilNext_(std::move(untilNext)),
      fail_(std::move(fail)) {}

template <typename Piece>
bool SyncCores::attempt(const Piece& piece) noexcept {
  if (hasFailed_.load(std::memory_order_acquire)) return false;
  try {
    return piece();
  } catch (const std::exception& error) {
    if (!hasFailed_.exchange(true, std::memory_order_acq_rel)) fail_(error.what());
    return false;
  }
}

void SyncCores::start() {
  for (std::size_t core = 0; core < config_.numCores; ++core) {
    threads_.emplace_back([this, core] { run(core); });
  }
}

void SyncCores::stop() noexcept {
  isStopping_.store(true, std::memory_order_seq_cst);
  doorbell_.ring();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void SyncCores::finish(const std::function<void()>& rest) noexcept {
  attempt([&] {
    rest();
    return true;
  });
}

void SyncCores::whilePaused(const std::function<void()>& change) {
  std::unique_lock<std::mutex> lock(mutex_);
  isPausing_.store(true, std::memory_order_seq_cst);
  doorbell_.ring();
  changed_.wait(lock, [this] { return numParked_ == threads_.size(); });
  const struct Pause {
    SyncCores& cores;
    ~Pause() {
      cores.isPausing_.store(false, std::memory_order_seq_cst);
      cores.changed_.notify_all();
    }
  } pause{*this};
  change();
}

void SyncCores::parkWhilePaused() {
  std::unique_lock<std::mutex> lock(mutex_);
  ++numParked_;
  changed_.notify_all();
  changed_.wait(lock, [this] { return !isPausing_.load(std::memory_order_relaxed); });
  --numParked_;
}

void SyncCores::run(std::size_t core) {
  nameThread(("sync core " + std::to_string(core)).c_str());
  if (config_.needsExactSleeps) makeSleepsExact();
  YieldingSpin spin(config_.spinBudget);
  std::uint32_t numTurns = 0;
  while (!isStopping_.load(std::memory_order_acquire)) {
    if (isPausing_.load(std::memory_order_acquire)) parkWhilePaused();
    if (core == 0) doorbell_.beats.store(++numTurns, std::memory_order_relaxed);
    // Read before looking for work: a ring in between changes it, and sleep() returns immediately.
    const std::uint32_t seenRings = doorbell_.rings.load(std::memory_order_seq_cst);
    const auto began = Clock::now();
    if (attempt([&] { return work_(core); })) {
      const std::chrono::nanoseconds busy = Clock::now() - began;
      config_.metrics.add(Metric::kSyncCoreBusySeconds, static_cast<std::uint64_t>(busy.count()));
      spin.reset();
    } else if (!spin.yield()) {
      sleep(core, seenRings);
      spin.reset();
    }
  }
}

void SyncCores::sleep(std::size_t core, std::uint32_t seenRings) noexcept {
  std::chrono::nanoseconds longest = kLongestSleep;
  if (const auto untilNext = untilNext_(core)) {
    const std::chrono::nanoseconds wait(*untilNext);
    if (wait < kShortestSleep) return;  // the caller continues to spin
    longest = std::min(longest, wait - kWakeUpTime);
  }
  doorbell_.sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (!isStopping_.load() && !isPausing_.load()) futexWait(doorbell_.rings, seenRings, longest);
  doorbell_.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace coarse
