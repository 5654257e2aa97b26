#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

namespace coarse {

/// Maps ranges of addresses, which must not overlap, to values.
///
/// Thread safety: any.
template <class Value>
class AddressRanges {
 public:
  void add(const void* begin, std::size_t numBytes, Value value) {
    const std::lock_guard lock(mutex_);
    ranges_[static_cast<const std::byte*>(begin)] = {numBytes, std::move(value)};
    isEmpty_.store(false, std::memory_order_release);
  }
  void remove(const void* begin) noexcept {
    const std::lock_guard lock(mutex_);
    ranges_.erase(static_cast<const std::byte*>(begin));
    isEmpty_.store(ranges_.empty(), std::memory_order_release);
  }
  bool isEmpty() const noexcept { return isEmpty_.load(std::memory_order_acquire); }
  /// The value of the range that contains `address`, if any.
  std::optional<Value> find(const void* address) const {
    const auto* const wanted = static_cast<const std::byte*>(address);
    const std::lock_guard lock(mutex_);
    // In descending order: the first range that does not begin after the address.
    const auto range = ranges_.lower_bound(wanted);
    if (range == ranges_.end() || wanted >= range->first + range->second.numBytes) return std::nullopt;
    return range->second.value;
  }

 private:
  struct Range {
    std::size_t numBytes = 0;
    Value value{};
  };

  mutable std::mutex mutex_;  // guards ranges_
  std::map<const std::byte*, Range, std::greater<>> ranges_;
  std::atomic<bool> isEmpty_{true};
};

}  // namespace coarse
