#pragma once

#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "coarse/client/probe.hpp"
#include "coarse/client/slot_copies.hpp"
#include "coarse/device/tensor_group.hpp"
#include "coarse/recovery/heartbeat.hpp"
#include "coarse/shared_memory/descriptor_queue.hpp"
#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/shared_memory.hpp"

namespace coarse {

/// How a wait ended.
enum class WaitStatus : std::uint8_t {
  kDone = 0,
  kTimedOut = 1,
  kAborted = 2,       // a memory device says that a process was lost; its reason waits on the control socket
  kDeviceLost = 3,    // a control socket was closed by its memory device
  kForked = 4,        // called in a child of the process that made the client
  kDeviceSilent = 5,  // a memory device is there, and has not worked for the heartbeat's limit
};

/// A registered tensor: a range of shards.
struct ClientTensor {
  std::uint32_t firstShard = 0;
  std::uint32_t numShards = 0;
  std::uint32_t step = 0;  // pushed last
  bool isPending = false;  // pushed and not pulled
};

/// Shards of one tensor that follow each other, in one of its steps.
struct ShardRange {
  std::uint32_t first = 0;
  std::uint32_t last = 0;  // behind the last one
  std::uint32_t step = 0;
};

/// A transfer that measures a link; `tensor` is of a group for probes, each shard of which is a tensor.
struct ClientProbe {
  std::uint32_t tensor = 0;
  std::uint16_t device = 0;  // that serves it
  ProbeRequest request;
};

struct ClientConfig {
  std::size_t numDevices = 1;
  std::vector<int>
      watchFds;  // a control socket per memory device, looked at during waits; stay open meanwhile
  std::chrono::microseconds spinBudget{50};  // how long a wait looks for its result before it sleeps
  // A memory device is woken once per so many bytes pushed, not once per tensor: a wake-up costs a context
  // switch. Waiting wakes it in any case.
  std::size_t bytesPerRing = 1 << 20;
  bool isEmulated =
      false;  // descriptors carry the time when they were posted, from which emulated links count
  std::chrono::milliseconds heartbeatLimit{0};  // of HeartbeatWatch
};

/// A worker's end of the data path: puts tensors into its slots, tells memory devices, waits for results.
///
/// Thread safety: one caller at a time, whichever thread it is; beside it other threads may call post(),
/// areDone(), flush() and checkPeers(), push() and pull() of other tensors, and one may waitUntil().
class Client {
 public:
  /// @param segmentFd, doorbellsFd shared with the memory devices; stay the caller's.
  /// @param interrupt called about ten times a second during a wait; may throw to end it.
  Client(ClientConfig config, int segmentFd, int doorbellsFd, std::function<void()> interrupt);

  /// Has waits that take long tell it: after so many seconds, and again whenever that time has doubled.
  /// @param onLate told the seconds waited so far, by the thread that waits. @pre nobody waits.
  void tellOfLateness(double afterSeconds, std::function<void(double)> onLate) {
    warnAfterSeconds_ = afterSeconds;
    onLate_ = std::move(onLate);
  }

  /// @param routes the memory device that takes each shard's descriptor.
  /// @returns this client's slots; they stay mapped as long as somebody holds them, also after removeGroup().
  std::shared_ptr<Mapping> addGroup(GroupPlan plan, std::size_t client, int controlFd,
                                    const Region& slotMemory, std::vector<std::uint16_t> routes);
  /// The same where slots lie elsewhere: this client sees its tensors in `view`, and they are copied.
  /// @throws std::invalid_argument for dynamic shards.
  void addGroup(GroupPlan plan, std::size_t client, int controlFd, std::shared_ptr<Mapping> view,
                std::shared_ptr<SlotCopies> copies, std::vector<std::uint16_t> routes);
  /// Gives up the view of such a group: from now on somebody else brings tensors to the slots and fetches
  /// them (GpuTransfers). @pre nothing of the group is under way.
  void giveUpView(std::uint32_t group);
  void removeGroup(std::uint32_t group);
  const GroupPlan& plan(std::uint32_t group) const { return find(group).plan; }
  /// Changes the memory devices that take shards which are pushed from now on.
  /// @throws std::invalid_argument unless there is one for each shard.
  void setRoutes(std::uint32_t group, std::vector<std::uint16_t> routes);
  /// By which path each shard goes from its next push on: flags among kPathFlags.
  /// @throws std::invalid_argument unless there are such flags for each shard.
  void setPathFlags(std::uint32_t group, std::vector<std::uint8_t> flags);

  /// Contributes tensor `tensor` of `group`. With a `source`, its bytes are copied to the slot first, shard
  /// by shard, each told to its memory device as soon as it is there.
  /// @throws std::invalid_argument for a tensor that does not exist, std::logic_error if its last result was
  /// not pulled.
  WaitStatus push(std::uint32_t group, std::uint32_t tensor, std::uint8_t flags, const void* source);
  /// Tells memory devices what push() may have held back to spare wake-ups.
  void flush() noexcept;
  /// The first half of a push(), for tensors that are brought to their slots by somebody else.
  /// @returns all its shards, each of which is to be given to post() once, when its contribution is there.
  ShardRange beginPush(std::uint32_t group, std::uint32_t tensor);
  /// The second half: tells memory devices, at once, that these contributions lie in their slots. @pre the
  /// group stays meanwhile.
  WaitStatus post(std::uint32_t group, const ShardRange& shards, std::uint8_t flags);
  /// Whether the results of these shards are there. @pre as for post().
  bool areDone(std::uint32_t group, const ShardRange& shards) const;
  /// Of the tensor's last push, for areDone().
  ShardRange shardsOf(std::uint32_t group, std::uint32_t tensor);
  /// Waits until `isDone` says so, which is asked whenever a result may have come. Tensors may be pushed
  /// meanwhile, by one thread at a time, and by `isDone` itself pulled.
  WaitStatus waitUntil(const std::function<bool()>& isDone, double timeoutSeconds);
  /// Whether everybody is there that results could come from: kDone, or what became of them.
  WaitStatus checkPeers();
  /// Waits for the result, copies it to `destination` unless that is null, shard by shard as they complete.
  WaitStatus pull(std::uint32_t group, std::uint32_t tensor, void* destination, double timeoutSeconds);
  /// Waits for everything that was pushed to `group` and not pulled.
  WaitStatus pullAll(std::uint32_t group, double timeoutSeconds);
  /// How many clients contributed to the tensor's last result.
  std::uint32_t contributors(std::uint32_t group, std::uint32_t tensor) const;
  /// First shard of `tensor` that is not complete and the clients that have not contributed to it.
  std::vector<std::size_t> missingClients(std::uint32_t group, std::uint32_t tensor) const;
  /// The clients that have contributed to a later step of `tensor` than this one.
  std::vector<std::size_t> clientsAhead(std::uint32_t group, std::uint32_t tensor) const;
  std::vector<std::uint32_t> allContributors(std::uint32_t group) const;
  /// Of each tensor, whose last result was measured and pulled: the sum of its shards' squares in their
  /// order, and the first shard's client that had NaN or Inf.
  std::vector<GradientMeasure> measures(std::uint32_t group) const;
  /// Whether the tensor was pushed and its result is not there.
  bool isLate(std::uint32_t group, std::uint32_t tensor) const;

  /// Reduces a buffer that is not registered through the dynamic shards of `group`, in a pipeline of copies
  /// in, reductions and copies out.
  WaitStatus allReduce(std::uint32_t group, void* buffer, std::size_t numElements, DType dtype, ReduceOp op,
                       bool isPresent, double timeoutSeconds);

  /// Maps the slots of all clients, of which reducePieces() and copyPieces() read; descriptors stay the
  /// caller's.
  /// @throws std::invalid_argument unless there is one for each client, sealed and large enough.
  void addPeers(std::uint32_t group, const std::vector<Region>& slots);
  /// Reduces this client's piece of each of these shards, from all slots into its own one: the first
  /// half of an all-reduce by the workers themselves (dual synchronisation, paper, section III-F). Only this
  /// client reads its piece of any slot until the second half, so that it can be written in place.
  /// @pre the contributions of all clients have been announced with kOwnPath, and pulled.
  /// @throws std::invalid_argument without addPeers(), or for a shard that does not exist.
  void reducePieces(std::uint32_t group, const std::vector<std::uint32_t>& shards);
  /// Copies the other clients' pieces to this one's slots. @pre all clients have done reducePieces(), and
  /// none writes to its slots before all have done this; otherwise as reducePieces().
  void copyPieces(std::uint32_t group, const std::vector<std::uint32_t>& shards);

  /// Times transfers that nothing is reduced of. All are posted, then waited for.
  /// @returns kDone, and the seconds from the first post until the end of each.
  /// @throws std::invalid_argument for a tensor that has not one shard alone, is named twice or is under way.
  WaitStatus probe(std::uint32_t group, const std::vector<ClientProbe>& probes, double timeoutSeconds,
                   std::vector<double>& seconds);

  /// The memory device whose socket was found closed, or that was silent for too long.
  std::size_t lostDevice() const noexcept { return lostDevice_; }

 private:
  struct Group {
    GroupPlan plan;
    std::size_t client;
    Mapping controlMapping;
    GroupControl control;
    std::shared_ptr<Mapping> slots;      // where this client sees them
    std::shared_ptr<SlotCopies> copies;  // null where it sees the slots themselves
    std::mutex copiesMutex;              // guards them
    std::vector<Mapping> peers;          // slots of all clients, read-only; none where devices alone reduce
    std::vector<std::uint16_t> routes;
    std::vector<std::uint8_t> pathFlags;  // of each shard
    std::vector<ClientTensor> tensors;
  };

  /// A buffer that is not registered, cut into pieces that take turns in the dynamic shards of a group.
  struct BufferPieces {
    BufferPieces(const GroupPlan& plan, std::byte* buffer, std::size_t count, DType dtype, ReduceOp op);
    std::uint32_t shardOf(std::size_t element) const noexcept {
      return static_cast<std::uint32_t>(element / perShard % numShards);
    }
    std::size_t endOfHalf(std::size_t begin) const noexcept { return std::min(begin + perHalf, numElements); }

    std::byte* bytes;
    std::size_t numElements;
    std::size_t itemSize;
    DType dtype;
    ReduceOp op;
    std::uint8_t flags = 0;
    std::size_t numShards = 0;  // an even number
    std::size_t perShard = 0;   // elements
    std::size_t perHalf = 0;
  };

  void checkRoutes(const GroupPlan& plan, const std::vector<std::uint16_t>& routes) const;
  WaitStatus contribute(Group& group, const BufferPieces& pieces, std::size_t begin);
  WaitStatus collect(const Group& group, const BufferPieces& pieces, std::size_t begin,
                     double timeoutSeconds);
  Group& find(std::uint32_t group);
  const Group& find(std::uint32_t group) const;
  static ClientTensor& tensorOf(Group& group, std::uint32_t tensor);
  static const std::byte* slotOf(const Group& group, std::size_t client, const Shard& shard) noexcept;
  /// Calls visit(shard) for each of these shards.
  template <typename Visit>
  static void forEachShard(const Group& group, const std::vector<std::uint32_t>& shards, Visit visit);
  static bool isShardDone(const Group& group, std::uint32_t shard) noexcept;
  using Health = WaitStatus (Client::*)();

  WaitStatus postShard(const Group& group, std::uint32_t shard, std::uint32_t step, std::uint8_t flags,
                       Health health);
  WaitStatus postDescriptor(std::uint16_t device, Descriptor descriptor, std::size_t numBytes,
                            Health health = &Client::health);
  void ringHeldBack() noexcept;
  WaitStatus waitForShards(const Group& group, std::uint32_t first, std::uint32_t last,
                           double timeoutSeconds);
  static void bringTensor(Group& group, const ClientTensor& tensor, const void* source);
  static void fetchShards(Group& group, std::uint32_t first, std::uint32_t last);
  static void fetchPending(Group& group);
  static void copyOut(const Group& group, std::uint32_t first, std::uint32_t last, const ClientTensor& tensor,
                      std::byte* destination) noexcept;
  template <typename IsDone>
  WaitStatus wait(IsDone isDone, std::uint32_t wakeAt, double timeoutSeconds);
  WaitStatus health();
  bool isForked() const noexcept;

  ClientConfig config_;
  Mapping segmentMapping_;
  ClientSegment segment_;
  Mapping doorbellMapping_;
  Doorbell* doorbells_;
  HeartbeatWatch heartbeats_;
  std::function<void()> interrupt_;
  double warnAfterSeconds_ = 0;
  std::function<void(double)> onLate_;
  // Lock order: postMutex_, then either of the others.
  std::mutex postMutex_;  // guards producers_, heldBackBytes_ and the groups' routes
  std::vector<DescriptorProducer> producers_;
  std::vector<std::size_t> heldBackBytes_;  // per device, told but not rung for
  mutable std::mutex groupsMutex_;          // guards the table, not what is in it
  std::unordered_map<std::uint32_t, std::unique_ptr<Group>> groups_;
  std::mutex peersMutex_;  // guards heartbeats_
  std::atomic<std::size_t> lostDevice_ = 0;
  pid_t pid_;
};

}  // namespace coarse
