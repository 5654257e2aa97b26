#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "coarse/device/group_table.hpp"
#include "coarse/emulation/device_links.hpp"
#include "coarse/shared_memory/descriptor_queue.hpp"
#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/metrics.hpp"
#include "coarse/shared_memory/shard_queue.hpp"
#include "coarse/shared_memory/shared_memory.hpp"
#include "coarse/tensors/tensor_group.hpp"

namespace coarse {

/// How a proxy takes descriptors.
enum class Scheduling : std::uint8_t {
  kQueues =
      0,  // one queue per client, all served together: no order of pushes can block (paper, section III-F)
  kFcfs = 1,  // one shard at a time in order of arrival: deadlocks by design, to show that it does (paper,
              // Fig 10)
};

struct IntakeConfig {
  std::size_t device = 0;
  std::size_t numDevices = 1;
  std::size_t numClients = 1;
  Scheduling scheduling = Scheduling::kQueues;
  std::size_t observer = 0;  // first-come-first-serve: the client whose result ends a shard's turn
  ProcessMetrics metrics;
};

/// Takes the descriptors that clients send to one memory device; in an emulated session, once their
/// contributions have arrived over the link. It checks nothing; `accept` does that.
///
/// Thread safety: addClient() and evict() before any core runs or from drain()'s thread, inbox() from any
/// thread; both drain() from one thread at a time.
class DescriptorIntake {
 public:
  /// Called for each descriptor. @returns whether it was recorded as a contribution.
  using Accept = std::function<bool(std::size_t client, const Descriptor& descriptor)>;

  DescriptorIntake(IntakeConfig config, DeviceLinks& links, FindGroup findGroup, Accept accept);

  /// Starts to serve a client. @throws std::invalid_argument if its memory is unsealed or too small.
  void addClient(std::size_t client, int segmentFd);
  bool hasAllClients() const noexcept;
  /// Discards everything that this client sends from now on.
  void evict(std::size_t client) noexcept { clients_[client]->isEvicted = true; }
  /// @pre the client has been added.
  Inbox& inbox(std::size_t client) const noexcept { return clients_[client]->segment.inbox(); }

  /// Passes on the next descriptors of each client. @returns whether there were any.
  bool drain();
  /// Passes on all that a client has sent which sends nothing more.
  void drain(std::size_t client);
  /// Accepts only updates by means from now on. These are complete: all workers have the means, and push the
  /// rest of a step that some have begun. Any thread may call it.
  void close() noexcept { isClosed_.store(true, std::memory_order_relaxed); }

 private:
  struct Client {
    Mapping mapping;
    ClientSegment segment;
    DescriptorConsumer queue;
    bool isEvicted = false;
    std::optional<Descriptor> head;  // first-come-first-serve: popped, and waiting for its turn
    std::deque<Descriptor> arrived;  // emulated: their contributions have arrived over the link
  };

  bool take(std::size_t client, Descriptor& descriptor);
  bool handOver(std::size_t client, const Descriptor& descriptor);
  void holdUntilArrival(std::size_t client, const Descriptor& descriptor);
  bool isProbe(const Descriptor& descriptor) const noexcept;
  std::size_t contributedBytes(const Descriptor& descriptor) const noexcept;
  bool drainFirstComeFirstServe();
  bool isBlockerDone() const noexcept;

  IntakeConfig config_;
  DeviceLinks& links_;
  FindGroup findGroup_;
  Accept accept_;
  std::vector<std::unique_ptr<Client>> clients_;
  std::atomic<bool> isClosed_{false};
  std::optional<RingEntry> blocker_;  // first-come-first-serve: the shard that blocks the proxy
};

}  // namespace coarse
