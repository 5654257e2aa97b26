#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "coarse/emulation/pacer.hpp"
#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/metrics.hpp"

namespace coarse {

struct SyncCoresConfig {
  std::size_t numCores = 1;
  std::chrono::microseconds spinBudget{50};  // time for which an idle core polls before it sleeps
  bool needsExactSleeps = false;             // emulated links
  ProcessMetrics metrics;
};

/// The sync cores of one memory device (paper, section IV-A): threads that work while work exists, and
/// otherwise sleep on the device's doorbell.
///
/// Thread safety: one control thread; the cores call the functions. Locks: mutex_ alone.
class SyncCores {
 public:
  /// Does one piece of work of `core`. @returns whether there was any.
  using Work = std::function<bool(std::size_t core)>;
  /// Time until `core` has work for which no one rings the doorbell.
  using UntilNext = std::function<std::optional<MonotonicNs>(std::size_t core)>;
  /// Called once after work has thrown, as when a GPU fails; no more work is done then.
  using Fail = std::function<void(std::string reason)>;

  SyncCores(SyncCoresConfig config, Doorbell& doorbell, Work work, UntilNext untilNext, Fail fail);
  ~SyncCores() { stop(); }
  SyncCores(const SyncCores&) = delete;
  SyncCores& operator=(const SyncCores&) = delete;

  void start();
  /// Joins the threads. Idempotent.
  void stop() noexcept;
  /// Does the cores' unfinished work in the calling thread. Call after stop().
  void finish(const std::function<void()>& rest) noexcept;
  /// Runs `change` while no core works. The cores continue even if it throws.
  void whilePaused(const std::function<void()>& change);

 private:
  void run(std::size_t core);
  /// Does a piece of work, unless an earlier one has thrown. @returns its result; false if it throws.
  template <typename Piece>
  bool attempt(const Piece& piece) noexcept;
  void parkWhilePaused();
  void sleep(std::size_t core, std::uint32_t seenRings) noexcept;

  SyncCoresConfig config_;
  Doorbell& doorbell_;
  Work work_;
  UntilNext untilNext_;
  Fail fail_;
  std::vector<std::thread> threads_;
  std::atomic<bool> isStopping_{false};
  std::atomic<bool> hasFailed_{false};
  std::atomic<bool> isPausing_{false};
  std::mutex mutex_;  // guards numParked_
  std::condition_variable changed_;
  std::size_t numParked_ = 0;
};

}  // namespace coarse
