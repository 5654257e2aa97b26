#include "coarse/emulation/device_links.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace coarse {

DeviceLinks::DeviceLinks(std::unique_ptr<Pacer> pacer, const LinkEndpoints& endpoints)
    : pacer_(std::move(pacer)), endpoints_(endpoints) {
  if (pacer_ != nullptr && pacer_->numEndpoints() != endpoints.count())
    throw std::invalid_argument("a link table has an endpoint for every worker and memory device");
}

MonotonicNs DeviceLinks::reserve(std::size_t source, std::size_t target, std::size_t numBytes,
                                 MonotonicNs sentAt, std::uint32_t tag) noexcept {
  return isPaced() ? pacer_->reserve(source, target, numBytes, sentAt, tag) : sentAt;
}

void DeviceLinks::at(MonotonicNs due, Action action) {
  if (isPaced()) {
    arrivals_.push({due, numScheduled_++, std::move(action)});
  } else {
    action(due);
  }
}

bool DeviceLinks::runDue() {
  if (arrivals_.empty()) return false;
  const MonotonicNs now = monotonicNow();
  const MonotonicNs due = arrivals_.top().due;
  if (due > now) return false;
  // The action may schedule others, so it leaves the queue first.
  Action action = std::move(const_cast<Arrival&>(arrivals_.top()).action);
  arrivals_.pop();
  pacer_->countArrival(due, now);
  action(due);
  return true;
}

std::optional<MonotonicNs> DeviceLinks::untilNext() const noexcept {
  if (arrivals_.empty()) return std::nullopt;
  return std::max<MonotonicNs>(0, arrivals_.top().due - monotonicNow());
}

}  // namespace coarse
