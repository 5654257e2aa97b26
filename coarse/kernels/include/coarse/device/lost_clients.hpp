#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace coarse {

/// What one memory device knows of the clients that were lost while the others go on, and of the newcomers in
/// their places (docs/design/membership.md). A client passes through the states in their order; a newcomer
/// begins anew.
///
/// Thread safety: the control thread calls noteEnd() and noteAllDrained(), and admit() while core 0 is
/// parked; core 0 calls all other functions that are not const; any thread the const ones.
class LostClients {
 public:
  explicit LostClients(std::size_t numClients) : states_(numClients) {}

  /// The client's process has ended, so that it pushes nothing more.
  void noteEnd(std::size_t client) noexcept { advance(client, kEnded); }
  /// No memory device has a descriptor of the client left.
  void noteAllDrained(std::size_t client) noexcept { advance(client, kAbsent); }
  /// This device has taken the client's last descriptor.
  void noteDrained(std::size_t client) noexcept { states_[client].store(kDrained); }
  /// A newcomer has the place of a lost client.
  void admit(std::size_t client) {
    states_[client].store(kMember, std::memory_order_release);
    absent_.erase(std::remove(absent_.begin(), absent_.end(), client), absent_.end());
    if (std::find(newcomers_.begin(), newcomers_.end(), client) == newcomers_.end())
      newcomers_.push_back(client);
  }

  /// Whether the control thread has noted anything since the last call.
  bool takeNews() noexcept {
    return hasNews_.load(std::memory_order_relaxed) && hasNews_.exchange(false, std::memory_order_acquire);
  }
  /// Stands in from now on for each client that no device has a descriptor of.
  void beginToStandIn() { absent_ = clientsIn(kAbsent, kAbsent); }
  /// The clients for which this device stands in. For core 0.
  const std::vector<std::size_t>& absent() const noexcept { return absent_; }
  /// Newcomers, for which this device stands in until they are members. For core 0.
  const std::vector<std::size_t>& newcomers() const noexcept { return newcomers_; }
  /// Whether this device may have to stand in for any client. For core 0.
  bool mayLackAny() const noexcept { return !absent_.empty() || !newcomers_.empty(); }

  /// Whether the client has ended. The control thread may know it a moment before.
  bool hasEnded(std::size_t client) const noexcept {
    return states_[client].load(std::memory_order_acquire) != kMember;
  }
  bool hasAny() const noexcept {
    for (std::size_t client = 0; client < states_.size(); ++client) {
      if (hasEnded(client)) return true;
    }
    return false;
  }
  /// Clients that have ended, and whose last descriptors this device may still have.
  std::vector<std::size_t> undrained() const { return clientsIn(kEnded, kEnded); }
  /// Clients whose last descriptor this device has taken.
  std::vector<std::size_t> drained() const { return clientsIn(kDrained, kAbsent); }

 private:
  enum State : std::uint8_t { kMember = 0, kEnded = 1, kDrained = 2, kAbsent = 3 };

  void advance(std::size_t client, State state) noexcept {
    states_[client].store(state, std::memory_order_release);
    hasNews_.store(true, std::memory_order_release);
  }
  std::vector<std::size_t> clientsIn(State first, State last) const {
    std::vector<std::size_t> found;
    for (std::size_t client = 0; client < states_.size(); ++client) {
      const std::uint8_t state = states_[client].load(std::memory_order_acquire);
      if (first <= state && state <= last) found.push_back(client);
    }
    return found;
  }

  std::vector<std::atomic<std::uint8_t>> states_;
  std::atomic<bool> hasNews_{false};
  std::vector<std::size_t> absent_;
  std::vector<std::size_t> newcomers_;
};

}  // namespace coarse
