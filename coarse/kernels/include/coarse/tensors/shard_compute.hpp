#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "coarse/emulation/pacer.hpp"
#include "coarse/reduce/reduce.hpp"
#include "coarse/shared_memory/shard_queue.hpp"

namespace coarse {

class TensorGroup;

/// Elements [begin, end) of a shard.
struct ShardPiece {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
};

/// The inputs and outputs of a shard's reduction, if they are not only the slots of its own clients: with
/// several nodes.
struct ShardArrays {
  std::vector<const void*> inputs{};  // in the order of addition; at least one
  std::vector<void*> outputs{};       // may be empty
  ReduceOp op = ReduceOp::kSum;
  std::uint32_t divisor = 1;       // of a mean
  bool isMeasured = false;         // record the result's GradientMeasure, without its nonFiniteOf
  std::function<void()> finish{};  // called when the result is in place, instead of ShardCompute::Finish
};

/// A shard that is to be reduced, measured or updated.
struct ShardTask {
  TensorGroup* group = nullptr;
  RingEntry entry;
  std::vector<ShardPiece> pieces{};  // the only pieces to reduce; the whole shard if empty
  MonotonicNs notBefore = 0;         // when emulated links have delivered the inputs; 0 if all have arrived
  std::shared_ptr<const ShardArrays> arrays{};  // replace the slots in the reduction; null for slots
};

/// Reduces and updates shards in one memory device, where the tensors lie: each core does it itself, or a GPU
/// does it for one of them. Memory devices handle kinds of memory differently only here.
///
/// Thread safety: any for host memory; one caller at a time for others.
class ShardCompute {
 public:
  /// Called for each task whose result is in place, in the order of begin(), from any function of this class.
  using Finish = std::function<void(const ShardTask& task)>;

  virtual ~ShardCompute() = default;

  /// Starts to reduce, measure or update a shard, as its contributions request.
  /// @pre all contributions have arrived and agree; the group lives until the shard is finished; only
  /// reductions have pieces, and these are not empty.
  virtual void begin(const ShardTask& task) = 0;
  /// How long before their `notBefore` tasks may be begun; they then start by themselves. At most a fraction
  /// of a millisecond.
  virtual MonotonicNs lead() const noexcept { return 0; }
  /// Continues tasks in progress, without waiting. @returns whether it started or finished any.
  virtual bool advance() { return false; }
  /// Returns when all tasks are finished.
  virtual void drain() {}
  /// Whether a task is in progress.
  virtual bool isBusy() const noexcept { return false; }
  /// The same, for one group.
  virtual bool isWorkingOn(const TensorGroup&) const noexcept { return false; }
};

}  // namespace coarse
