#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "coarse/reduce/dtype.hpp"
#include "coarse/reduce/reduce.hpp"

namespace coarse {

/// One memory device's work on one entry that travels around the ring. It adds the received entry (RecvBuf)
/// and its own clients' contributions (LocalBuf). The sum goes to the next device (SendBuf). The finished
/// result, divided by `divisor` for a mean, goes to the slots of its clients. Each of the four may be
/// missing, but not both of the first two (paper, section IV-A, Fig 11c).
struct RingStep {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  std::uint32_t divisor = 1;
  std::size_t numElements = 0;
  const std::byte* received = nullptr;  // this and `sent` are accumulators
  std::vector<const std::byte*> inputs;
  std::byte* sent = nullptr;
  std::vector<std::byte*> outputs;
};

/// Bytes of one element between devices: 16-bit types travel as float32, and are rounded once.
std::size_t accumulatorBytes(DType dtype) noexcept;

/// Runs the steps of one ring, one after the other, where the tensors lie.
///
/// Thread safety: one caller at a time.
class RingCompute {
 public:
  using Done = std::function<void()>;

  virtual ~RingCompute() = default;

  /// @param done called when `sent` and `outputs` are written: from begin(), advance() or drain().
  /// @pre not isBusy().
  virtual void begin(const RingStep& step, Done done) = 0;
  /// Continues the step in progress, without waiting. @returns whether it is done now.
  virtual bool advance() { return false; }
  /// Whether a step is in progress.
  virtual bool isBusy() const noexcept { return false; }
  /// Returns when no step is in progress.
  virtual void drain() {}
};

/// Makes a RingCompute that runs each step in the calling thread, in host memory.
std::unique_ptr<RingCompute> makeHostRingCompute();

}  // namespace coarse
