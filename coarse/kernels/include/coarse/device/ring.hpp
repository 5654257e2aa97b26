#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "coarse/device/group_table.hpp"
#include "coarse/emulation/device_links.hpp"
#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/shard_queue.hpp"
#include "coarse/tensors/ring_step.hpp"
#include "coarse/tensors/tensor_group.hpp"

namespace coarse {

/// Called when a shard's result is in the slots of the device's own clients. Clients of other devices may
/// have pushed its next step by then, so `shape` gives the shard's shape in this step; do not look it up
/// again. With emulated links, `entry.completedAt` is when the last message had arrived.
using ShardDone = std::function<void(TensorGroup& group, const RingEntry& entry, const ShardShape& shape)>;

/// One sync core's place in one ring.
struct RingLinks {
  const RingLog* log = nullptr;
  RecvBuf* own = nullptr;
  RecvBuf* next = nullptr;
  std::byte* ownMessages = nullptr;  // kRingDepth messages, as mapped for the processor that computes there
  std::byte* nextMessages = nullptr;
  std::size_t messageBytes = 0;  // of each, at most; a multiple of 512
  Doorbell* previousDoorbell = nullptr;
  Doorbell* nextDoorbell = nullptr;
  std::size_t device = 0;
  std::size_t nextDevice = 0;
  std::size_t position = 0;  // along the direction of the ring
  std::size_t numDevices = 0;
};

/// One sync core's part in a ring over all memory devices (paper, section IV-A, Fig 11c).
///
/// A shard is processed in chunks of one entry per device. In 2(p-1) iterations per chunk the core receives
/// an entry in its RecvBuf, combines it with the contributions of its own clients (LocalBuf), and writes the
/// result (SendBuf) straight into its neighbour's RecvBuf: a RingStep.
///
/// Emulated links delay each message, and steps take no time besides. The core has its own clock, which the
/// messages move: a delay of its thread does not reach the next message.
///
/// advance() never blocks, so one thread can drive several rings and still serve the queues of its clients.
/// Thread safety: one caller at a time.
class RingCore {
 public:
  /// @param deviceLinks those of this device; if paced, this core and all other users of them are one caller.
  /// @param localClients the clients whose contributions this device brings into the ring.
  RingCore(RingLinks links, DeviceLinks& deviceLinks, std::unique_ptr<RingCompute> compute,
           std::vector<std::size_t> localClients, FindGroup findGroup, ShardDone shardDone);

  /// Begins or ends at most one iteration. @returns whether there was work.
  bool advance();
  /// Whether an iteration is in progress.
  bool isBusy() const noexcept { return compute_->isBusy(); }
  /// Returns when no iteration is in progress.
  void drain() { compute_->drain(); }
  /// Whether a shard of `group` is in progress: the group must stay until it is done.
  bool isWorkingOn(const TensorGroup& group) const noexcept { return group_ == &group; }

 private:
  bool start();
  void finish();
  void beginIteration();
  void endIteration();
  void send();
  void handBack();
  bool describe(std::size_t entry);
  bool sends() const noexcept { return iteration_ < 2 * links_.numDevices - 2; }
  bool receives() const noexcept { return iteration_ > 0; }
  bool hasMessage();
  bool canSend() const noexcept;
  std::size_t entryStart(std::size_t entry) const noexcept;
  std::size_t entryElements(std::size_t entry) const noexcept;

  RingLinks links_;
  DeviceLinks& deviceLinks_;
  std::unique_ptr<RingCompute> compute_;
  std::vector<std::size_t> localClients_;
  FindGroup findGroup_;
  ShardDone shardDone_;

  std::uint64_t logPosition_ = 0;
  std::uint64_t numSent_ = 0;
  std::uint64_t numReceived_ = 0;
  bool isAwaiting_ = false;  // the next message is on its way
  bool hasArrived_ = false;  // and there
  MonotonicNs clock_ = 0;    // with emulated links: until when messages have delayed this core

  // The shard in progress.
  TensorGroup* group_ = nullptr;
  RingEntry entry_;
  ShardShape shape_;
  std::vector<std::byte*> localInputs_;  // contributions of own clients
  std::vector<std::byte*> outputs_;      // slots of own clients
  std::size_t elementsPerEntry_ = 0;
  std::size_t chunkStart_ = 0;
  std::size_t iteration_ = 0;
  RingStep step_;  // of this iteration
};

}  // namespace coarse
