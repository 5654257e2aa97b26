#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "coarse/layout.hpp"
#include "coarse/shard_queue.hpp"
#include "coarse/tensor_group.hpp"

namespace coarse {

/// Looks a registered tensor group up by its id; nullptr if there is none.
using FindGroup = std::function<TensorGroup*(std::uint32_t group)>;
/// Called when a shard's result is in the slots of the device's own clients. Clients of other devices may
/// have pushed its next step by then, so what the shard was in this step is handed over, not to be looked up
/// again.
using ShardDone = std::function<void(TensorGroup& group, const RingEntry& entry, const ShardShape& shape)>;

/// Where one sync core stands in one ring.
struct RingLinks {
  const RingLog* log = nullptr;
  RecvBuf* own = nullptr;
  RecvBuf* next = nullptr;
  Doorbell* previousDoorbell = nullptr;
  Doorbell* nextDoorbell = nullptr;
  std::size_t position = 0;  // along the direction of the ring
  std::size_t numDevices = 0;
};

/// One sync core's part in a ring over all memory devices (paper, section IV-A, Fig 11c).
///
/// A shard is worked through in chunks of one entry per device. In 2(p-1) iterations per chunk the core
/// receives an entry in its RecvBuf, combines it with the contributions of its own clients (LocalBuf), and
/// writes the result (SendBuf) straight into its neighbour's RecvBuf. 16-bit types travel as float32 and are
/// rounded once.
///
/// advance() never blocks, so one thread can drive several rings and still serve the queues of its clients.
/// Thread safety: one caller at a time.
class RingCore {
 public:
  /// @param localClients the clients whose contributions this device brings into the ring.
  RingCore(RingLinks links, std::vector<std::size_t> localClients, FindGroup findGroup, ShardDone shardDone);

  /// Does at most one iteration. @returns whether there was anything to do.
  bool advance();
  /// Whether a shard of `group` is being worked on: the group must stay until it is done.
  bool isWorkingOn(const TensorGroup& group) const noexcept { return group_ == &group; }

 private:
  bool start();
  void finish();
  void iterate();
  void receiveAndReduce(std::size_t entry, RingMessage& out);
  void writeResult(std::size_t entry, const RingMessage& result);
  void sendLocal(std::size_t entry, RingMessage& out);
  bool canReceive() const noexcept;
  bool canSend() const noexcept;
  RingMessage& received() const noexcept;
  RingMessage& outgoing() const noexcept;
  void published() noexcept;
  void consumed() noexcept;
  std::uint32_t entryStart(std::size_t entry) const noexcept;
  std::uint32_t entryElements(std::size_t entry) const noexcept;

  RingLinks links_;
  std::vector<std::size_t> localClients_;
  FindGroup findGroup_;
  ShardDone shardDone_;

  std::uint64_t logPosition_ = 0;
  std::uint64_t numSent_ = 0;
  std::uint64_t numReceived_ = 0;

  // The shard being worked on.
  TensorGroup* group_ = nullptr;
  RingEntry entry_;
  ShardShape shape_;
  std::vector<std::byte*> localInputs_;  // contributions of own clients
  std::vector<std::byte*> outputs_;      // slots of own clients
  std::uint32_t divisor_ = 1;
  std::uint32_t elementsPerEntry_ = 0;
  std::uint32_t chunkStart_ = 0;
  std::size_t iteration_ = 0;
  std::vector<float> scratch_;
};

}  // namespace coarse
