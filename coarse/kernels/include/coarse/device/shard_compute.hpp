#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "coarse/device/shard_queue.hpp"
#include "coarse/emulation/pacer.hpp"
#include "coarse/reduce/reduce.hpp"

namespace coarse {

class TensorGroup;

/// Elements [begin, end) of a shard.
struct ShardPiece {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
};

/// What a shard is reduced of, and whereto, where that is not only what its own clients have in their slots:
/// where there are several nodes.
struct ShardArrays {
  std::vector<const void*> inputs{};  // in the order in which they are added; at least one
  std::vector<void*> outputs{};       // perhaps none
  ReduceOp op = ReduceOp::kSum;
  std::uint32_t divisor = 1;       // of a mean
  bool isMeasured = false;         // whether the GradientMeasure of the result is noted; not whose NaN it has
  std::function<void()> finish{};  // called when the result is in place, instead of ShardCompute::Finish
};

/// A shard that is to be reduced, measured or updated.
struct ShardTask {
  TensorGroup* group = nullptr;
  RingEntry entry;
  std::vector<ShardPiece> pieces{};  // which alone are to be reduced; all of the shard if there are none
  MonotonicNs notBefore = 0;         // when emulated links have brought what is read; 0 if all is there
  std::shared_ptr<const ShardArrays> arrays{};  // of which alone it is to be reduced; null for its slots
};

/// What the sync cores of one memory device reduce and update shards with, where their tensors lie: each core
/// itself, or a GPU that one of them has do it meanwhile. The one place where kinds of memory differ for a
/// memory device.
///
/// Thread safety: that of the host's memory any; others one caller at a time.
class ShardCompute {
 public:
  /// Called with each task whose result is in place, in the order of begin(), from any function of this
  /// class.
  using Finish = std::function<void(const ShardTask& task)>;

  virtual ~ShardCompute() = default;

  /// Has a shard reduced, measured or updated, as its contributions say.
  /// @pre all contributions have arrived and agree; the group lives until the shard is finished; only what is
  /// reduced has pieces, and these are not empty.
  virtual void begin(const ShardTask& task) = 0;
  /// How long before their `notBefore` tasks may be begun, which then start by themselves; not more than a
  /// fraction of a millisecond.
  virtual MonotonicNs lead() const noexcept { return 0; }
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
