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

#include "coarse/client/slot_copies.hpp"
#include "coarse/recovery/heartbeat.hpp"
#include "coarse/shared_memory/descriptor_queue.hpp"
#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/metrics.hpp"
#include "coarse/shared_memory/probe_request.hpp"
#include "coarse/shared_memory/shared_memory.hpp"
#include "coarse/tensors/tensor_group.hpp"
#include "coarse/timeline/recorder.hpp"

namespace coarse {

/// How a wait ended.
enum class WaitStatus : std::uint8_t {
  kDone = 0,
  kTimedOut = 1,
  kAborted = 2,       // a memory device reports a lost process; the control socket carries the reason
  kDeviceLost = 3,    // a control socket was closed by its memory device
  kForked = 4,        // called in a child of the process that made the client
  kDeviceSilent = 5,  // a memory device is alive, but has made no progress for the heartbeat limit
  kNoContribution =
      6,  // no client has contributed to some piece of a buffer: the one that was to do so is lost
};

/// A registered tensor: a range of shards.
struct ClientTensor {
  std::uint32_t firstShard = 0;
  std::uint32_t numShards = 0;
  std::uint32_t step = 0;  // of the last push
  bool isPending = false;  // pushed and not pulled
};

/// Consecutive shards of one tensor, in one of its steps.
struct ShardRange {
  std::uint32_t first = 0;
  std::uint32_t last = 0;  // exclusive
  std::uint32_t step = 0;
};

/// A transfer that measures a link. `tensor` belongs to a group for probes, where each shard is a tensor.
struct ClientProbe {
  std::uint32_t tensor = 0;
  std::uint16_t device = 0;  // the device that serves it
  ProbeRequest request;
};

/// Each client's weight in a weighted sum; empty for other results.
struct Weights {
  const double* values = nullptr;
  std::size_t count = 0;
};

struct ClientConfig {
  std::size_t numDevices = 1;
  std::vector<int>
      watchFds;  // a control socket per memory device, polled during waits; must stay open meanwhile
  std::chrono::microseconds spinBudget{50};  // time for which a wait polls before it sleeps
  // A push wakes a memory device once per this many bytes, not once per tensor, because a wake-up costs a
  // context switch. Waiting always wakes it.
  std::size_t bytesPerRing = 1 << 20;
  bool isEmulated =
      false;  // descriptors carry the time at which they were posted, from which emulated links count
  std::chrono::milliseconds heartbeatLimit{0};  // of HeartbeatWatch
  ProcessMetrics metrics;
  int epochsFd = -1;        // a read-only EpochTable; the caller closes it. Without one there is one epoch
  bool isNewcomer = false;  // the client may push nothing before enterEpoch()
};

/// A worker's end of the data path: copies tensors into its slots, notifies memory devices, waits for
/// results.
///
/// Thread safety: one caller at a time, from any thread. Concurrently, other threads may call post(),
/// areDone(), flush() and checkPeers(), and push() and pull() for other tensors, and one thread may call
/// waitUntil().
class Client {
 public:
  /// @param segmentFd, doorbellsFd shared with the memory devices; the caller closes them.
  /// @param interrupt called about ten times a second during a wait; may throw to end it.
  Client(ClientConfig config, int segmentFd, int doorbellsFd, std::function<void()> interrupt);

  /// Reports long waits: after `afterSeconds`, and again each time the waited time has doubled.
  /// @param onLate receives the seconds waited so far, in the waiting thread. @pre no thread waits.
  void tellOfLateness(double afterSeconds, std::function<void(double)> onLate) {
    warnAfterSeconds_ = afterSeconds;
    onLate_ = std::move(onLate);
  }

  /// @param routes the memory device that takes each shard's descriptor.
  /// @returns this client's slots; they stay mapped while a reference exists, even after removeGroup().
  std::shared_ptr<Mapping> addGroup(GroupPlan plan, std::size_t client, int controlFd,
                                    const Region& slotMemory, std::vector<std::uint16_t> routes);
  /// The same for slots that lie elsewhere: this client accesses its tensors in `view`, and `copies` copies
  /// them.
  /// @throws std::invalid_argument for dynamic shards.
  void addGroup(GroupPlan plan, std::size_t client, int controlFd, std::shared_ptr<Mapping> view,
                std::shared_ptr<SlotCopies> copies, std::vector<std::uint16_t> routes);
  /// Gives up the view of such a group: from now on another object (GpuTransfers) copies tensors to the slots
  /// and results back. @pre no operation of the group is in progress.
  void giveUpView(std::uint32_t group);
  void removeGroup(std::uint32_t group);
  const GroupPlan& plan(std::uint32_t group) const { return find(group).plan; }
  /// Sets the memory devices that take shards pushed from now on.
  /// @throws std::invalid_argument unless there is one for each shard.
  void setRoutes(std::uint32_t group, std::vector<std::uint16_t> routes);
  /// Sets the way of each shard from its next push on: kDirectAllReduceFlags, and a Relay; all kRing if
  /// `relays` is empty.
  /// @throws std::invalid_argument unless each shard has valid flags and a valid relay.
  void setDirectAllReduceFlags(std::uint32_t group, std::vector<std::uint8_t> flags,
                               std::vector<std::uint8_t> relays = {});

  /// Contributes tensor `tensor` of `group`. With a `source`, copies its bytes to the slot first, shard by
  /// shard, and notifies the memory device of each shard when it is copied.
  /// @throws std::invalid_argument for a tensor that does not exist, std::logic_error if its last result was
  /// not pulled.
  WaitStatus push(std::uint32_t group, std::uint32_t tensor, std::uint8_t flags, const void* source);
  /// Notifies memory devices of pushes whose wake-ups push() has delayed.
  void flush() noexcept;
  /// The first half of a push(), for tensors that another component copies to their slots.
  /// @returns all its shards; pass each to post() once, when its contribution is in place.
  ShardRange beginPush(std::uint32_t group, std::uint32_t tensor);
  /// The second half: notifies memory devices, immediately, that these contributions lie in their slots. @pre
  /// the group is not removed meanwhile.
  WaitStatus post(std::uint32_t group, const ShardRange& shards, std::uint8_t flags);
  /// Whether the results of these shards are complete. @pre as for post().
  bool areDone(std::uint32_t group, const ShardRange& shards) const;
  /// The shards of the tensor's last push, for areDone().
  ShardRange shardsOf(std::uint32_t group, std::uint32_t tensor);
  /// Waits until `isDone` returns true; it is called whenever a result may have arrived. Meanwhile one thread
  /// at a time may push tensors, and `isDone` itself may pull them.
  WaitStatus waitUntil(const std::function<bool()>& isDone, double timeoutSeconds);
  /// Whether all processes are alive that results may come from: kDone, or the failure found.
  WaitStatus checkPeers();
  /// Waits for the result and copies it to `destination`, unless that is null, shard by shard as they
  /// complete.
  WaitStatus pull(std::uint32_t group, std::uint32_t tensor, void* destination, double timeoutSeconds);
  /// Waits for everything that was pushed to `group` and not pulled.
  WaitStatus pullAll(std::uint32_t group, double timeoutSeconds);
  /// How many clients contributed to the tensor's last result; if they differ between its shards, the fewest.
  std::uint32_t contributors(std::uint32_t group, std::uint32_t tensor) const;
  /// The clients that have not contributed to the first incomplete shard of `tensor`.
  std::vector<std::size_t> missingClients(std::uint32_t group, std::uint32_t tensor) const;
  /// The clients that have contributed to a later step of `tensor` than this client.
  std::vector<std::size_t> clientsAhead(std::uint32_t group, std::uint32_t tensor) const;
  std::vector<std::uint32_t> allContributors(std::uint32_t group) const;
  /// Corrects a weighted sum to which clients have not contributed because they were lost: scales each shard
  /// so that the weights of those that have contributed are as much as all weights were. All clients compute
  /// the same bits. Tensors of integers stay as they are. No client may have taken a lost one's place.
  /// @param result the tensor, as pull() has copied it.
  /// @throws std::invalid_argument unless each client has a weight.
  void compensateForLost(std::uint32_t group, std::uint32_t tensor, std::byte* result,
                         const Weights& weights) const;
  /// What compensateForLost() multiplies each shard of a tensor by; 1 where all have contributed.
  std::vector<double> compensations(std::uint32_t group, std::uint32_t tensor, const Weights& weights) const;
  /// The clients that were lost before they contributed to the first tensor, which was pulled and is not
  /// dynamic: a memory device stood in for them. All clients get the same answer for the same step.
  std::vector<std::size_t> standIns(std::uint32_t group) const;
  /// The same with workers of all nodes, by rank, if there are several. @pre GroupPlan::numRanks is not 0.
  std::vector<std::size_t> absentRanks(std::uint32_t group) const;
  /// The number of the newest epoch. It changes only after all members have pushed the boundary of the last
  /// one.
  std::uint32_t newestEpoch() const noexcept;
  /// The first epoch in which the worker of this place contributes; kNoEpoch if it is no member yet.
  std::uint8_t memberSince(std::size_t client) const noexcept;
  /// The places whose workers are new in an epoch that has begun; the same for all clients.
  std::vector<std::size_t> newcomersOf(std::uint32_t epoch) const;
  /// From its next push on, this client contributes in `epoch`, together with these clients that are new
  /// there. All members call it between the same two pushes. @pre nothing is pushed meanwhile.
  void enterEpoch(std::uint8_t epoch, const std::vector<std::size_t>& newcomers);
  /// The step of the last push of each tensor of a group.
  std::vector<std::uint32_t> steps(std::uint32_t group) const;
  /// Goes on from the steps of another client. @throws std::invalid_argument unless each tensor has one.
  void setSteps(std::uint32_t group, const std::vector<std::uint32_t>& steps);
  /// Whether all of these steps are complete, so that no memory device writes to this client's slots any
  /// more.
  bool areStepsDone(std::uint32_t group) const;
  /// The optimizer's last step, and the number of each tensor's last update. @pre no update is in progress.
  std::pair<std::uint32_t, std::vector<std::uint32_t>> updates(std::uint32_t group) const;
  /// For each tensor whose last result was measured and pulled: the sum of its shards' squares in shard
  /// order, and the first shard's client that had NaN or Inf.
  std::vector<GradientMeasure> measures(std::uint32_t group) const;
  /// Whether the tensor was pushed and its result is not complete.
  bool isLate(std::uint32_t group, std::uint32_t tensor) const;

  /// Reduces an unregistered buffer through the dynamic shards of `group`, in a pipeline of copies in,
  /// reductions and copies out.
  /// @returns also kNoContribution, for a buffer of which nobody has contributed some piece; the others are
  /// there.
  WaitStatus allReduce(std::uint32_t group, void* buffer, std::size_t numElements, DType dtype, ReduceOp op,
                       bool isPresent, double timeoutSeconds);

  /// Maps the slots of all clients, from which reducePieces() and copyPieces() read; the caller closes the
  /// descriptors.
  /// @throws std::invalid_argument unless each client has one that is sealed and large enough.
  void addPeers(std::uint32_t group, const std::vector<Region>& slots);
  /// Reduces this client's piece of each of these shards, from all slots into its own: the first half of an
  /// all-reduce by the workers themselves (dual synchronisation, paper, section III-F). Until the second half
  /// only this client reads its piece of any slot, so it can be written in place.
  /// @pre the contributions of all clients have been announced with kDirectAllReduce, and pulled.
  /// @throws std::invalid_argument without addPeers(), or for a shard that does not exist.
  void reducePieces(std::uint32_t group, const std::vector<std::uint32_t>& shards);
  /// Copies the other clients' pieces to this client's slots. @pre all clients have returned from
  /// reducePieces(), and none writes to its slots before all have returned from copyPieces(); otherwise as
  /// reducePieces().
  void copyPieces(std::uint32_t group, const std::vector<std::uint32_t>& shards);

  /// Times transfers without reduction. Posts all of them, then waits.
  /// @returns kDone, and the seconds from the first post until the end of each.
  /// @throws std::invalid_argument for a tensor that has more than one shard, is named twice or is in
  /// progress.
  WaitStatus probe(std::uint32_t group, const std::vector<ClientProbe>& probes, double timeoutSeconds,
                   std::vector<double>& seconds);

  /// This client in the timeline of its process.
  std::uint16_t timelineSession() const noexcept { return timelineSession_; }

  /// The memory device whose socket was closed, or that made no progress for too long.
  std::size_t lostDevice() const noexcept { return lostDevice_; }

 private:
  struct Group {
    GroupPlan plan;
    std::size_t client;
    Mapping controlMapping;
    GroupControl control;
    std::shared_ptr<Mapping> slots;      // as this client accesses them
    std::shared_ptr<SlotCopies> copies;  // null if this client accesses the slots directly
    std::mutex copiesMutex;              // guards `copies`
    std::vector<Mapping> peers;          // slots of all clients, read-only; empty if only devices reduce
    std::vector<std::uint16_t> routes;
    std::vector<std::uint8_t> directAllReduceFlags;  // of each shard
    std::vector<std::uint8_t> relays;                // likewise
    std::vector<ClientTensor> tensors;
    std::uint64_t numBytes = 0;                 // of its shards
    std::atomic<std::int64_t> firstPushed{-1};  // the tensor whose pushes begin steps; -1 before the first
    std::vector<std::uint32_t> joinedAfter;     // for each client, the first tensor's last step without it
    MonotonicNs stepBegan = 0;                  // used by that tensor's pushes; 0 before the first
  };

  /// An unregistered buffer, cut into pieces that take turns in the dynamic shards of a group.
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
    bool isIncomplete = false;  // whether nobody has contributed to some piece
  };

  void checkRoutes(const GroupPlan& plan, const std::vector<std::uint16_t>& routes) const;
  WaitStatus contribute(Group& group, const BufferPieces& pieces, std::size_t begin);
  WaitStatus collect(const Group& group, BufferPieces& pieces, std::size_t begin, double timeoutSeconds);
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
  /// Fills in an event of these shards of a group.
  void describe(TimelineEvent& event, EventKind kind, const Group& group,
                const ShardRange& shards) const noexcept;
  /// The same for any of its shards.
  void describePieces(TimelineEvent& event, EventKind kind, const Group& group,
                      const std::vector<std::uint32_t>& shards) const noexcept;
  /// The same for a tensor, or for kEveryTensor.
  void describeTensor(TimelineEvent& event, EventKind kind, const Group& group,
                      std::uint32_t tensor) const noexcept;
  WaitStatus waitForShards(const Group& group, std::uint32_t first, std::uint32_t last, WaitCause cause,
                           double timeoutSeconds);
  void noteStep(Group& group, std::uint32_t tensor, std::uint8_t flags) noexcept;
  void chooseStepGroup();
  void countPush(const Group& group, std::uint32_t shard, std::uint8_t flags,
                 std::size_t numBytes) const noexcept;
  static void bringTensor(Group& group, const ClientTensor& tensor, const void* source);
  static void fetchShards(Group& group, std::uint32_t first, std::uint32_t last);
  static void fetchPending(Group& group);
  static void beginFetch(const Group& group, std::uint32_t first, std::uint32_t last);
  static std::uint32_t contributorsOf(const Group& group, const ClientTensor& tensor) noexcept;
  static bool hasStandIn(const Group& group, std::uint32_t shard, std::size_t client,
                         std::uint32_t step) noexcept;
  static double compensation(const Group& group, std::uint32_t shard, std::uint32_t step,
                             const Weights& weights);
  static void copyOut(const Group& group, std::uint32_t first, std::uint32_t last, const ClientTensor& tensor,
                      std::byte* destination) noexcept;
  template <typename IsDone>
  WaitStatus wait(IsDone isDone, std::uint32_t wakeAt, WaitCause cause, double timeoutSeconds);
  WaitStatus health();
  bool isForked() const noexcept;
  /// @throws std::logic_error if this client is no member yet.
  std::uint8_t ownEpoch() const;

  ClientConfig config_;
  Mapping segmentMapping_;
  ClientSegment segment_;
  Mapping doorbellMapping_;
  Doorbell* doorbells_;
  Mapping epochsMapping_;
  const EpochTable* epochs_ = nullptr;
  std::atomic<std::uint8_t> epoch_;  // of this client's pushes
  HeartbeatWatch heartbeats_;
  std::function<void()> interrupt_;
  double warnAfterSeconds_ = 0;
  std::function<void(double)> onLate_;
  // Lock order: postMutex_, then one of the others.
  std::mutex postMutex_;  // guards producers_, heldBackBytes_ and the groups' routes
  std::vector<DescriptorProducer> producers_;
  std::vector<std::size_t> heldBackBytes_;  // per device: posted, without a wake-up
  mutable std::mutex groupsMutex_;          // guards the table, not its values
  std::unordered_map<std::uint32_t, std::unique_ptr<Group>> groups_;
  std::atomic<const Group*> stepGroup_ = nullptr;  // the largest group, whose pushes are timed as steps
  std::mutex peersMutex_;                          // guards heartbeats_
  std::atomic<std::size_t> lostDevice_ = 0;
  std::uint16_t timelineSession_ = nextTimelineSession();
  pid_t pid_;
};

}  // namespace coarse
