#pragma once

#include <cstddef>
#include <functional>

#include "coarse/shard_queue.hpp"

namespace coarse {

class TensorGroup;

/// What the sync cores of one memory device reduce and update shards with, where their tensors lie: each core
/// itself, or a GPU that one of them has do it meanwhile. The one place where kinds of memory differ for a
/// memory device.
///
/// Thread safety: that of the host's memory any; others one caller at a time.
class ShardCompute {
 public:
  /// Called with each shard whose result is in place, in the order of begin(), from any function of this
  /// class.
  using Finish = std::function<void(TensorGroup& group, const RingEntry& entry)>;

  virtual ~ShardCompute() = default;

  /// Has a shard reduced, measured or updated, as its contributions say.
  /// @pre all contributions have arrived and agree; the group lives until the shard is finished.
  virtual void begin(TensorGroup& group, const RingEntry& entry) = 0;
  /// Goes on with what was begun, without waiting. @returns whether that has started or finished anything.
  virtual bool advance() { return false; }
  /// Returns when all that was begun is finished.
  virtual void drain() {}
  /// Whether something was begun and is not finished.
  virtual bool isBusy() const noexcept { return false; }
  /// The same, of one group.
  virtual bool isWorkingOn(const TensorGroup&) const noexcept { return false; }
};

}  // namespace coarse
