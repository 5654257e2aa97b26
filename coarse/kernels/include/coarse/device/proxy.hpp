#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "coarse/device/descriptor_intake.hpp"
#include "coarse/device/descriptor_validation.hpp"
#include "coarse/device/device_collectives.hpp"
#include "coarse/device/device_exchange.hpp"
#include "coarse/device/device_rings.hpp"
#include "coarse/device/emulated_direct_allreduce.hpp"
#include "coarse/device/group_table.hpp"
#include "coarse/device/lost_clients.hpp"
#include "coarse/device/prober.hpp"
#include "coarse/device/sync_cores.hpp"
#include "coarse/emulation/device_links.hpp"
#include "coarse/node/node_exchange.hpp"
#include "coarse/recovery/recovery.hpp"
#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/metrics.hpp"
#include "coarse/shared_memory/shared_memory.hpp"
#include "coarse/tensors/shard_compute.hpp"
#include "coarse/tensors/tensor_group.hpp"
#include "coarse/tensors/tensor_memory.hpp"

namespace coarse {

struct ProxyConfig {
  std::size_t device = 0;
  std::size_t numDevices = 1;
  std::size_t numClients = 1;
  std::size_t numSyncCores = 1;
  Scheduling scheduling = Scheduling::kQueues;
  std::vector<std::size_t> localClients;  // clients whose contributions this device brings into a ring
  std::uint32_t spinMicroseconds = 50;    // time for which an idle sync core polls before it sleeps
  int exchangeLogsFd = -1;   // an ExchangeLog per device, for exchanged groups; the caller closes it
  int linkTableFd = -1;      // Pacer's table, in an emulated session; the caller closes it
  std::size_t node = 0;      // of the endpoints of that table; all nodes have as many clients and devices
  std::size_t numNodes = 1;  // likewise
  std::vector<int> ranks;    // of the clients, for messages; empty: the clients' numbers
  int epochsFd = -1;      // an EpochTable, if newcomers take the places of lost clients; the caller closes it
  LinkOptions nodeLinks;  // those to other nodes
  Compression nodeCompression = Compression::kNone;  // of gradients between nodes
  bool mayLoseNodes = false;                         // whether the other nodes go on without a lost one
  ProcessMetrics metrics;

  /// @throws std::invalid_argument if a number is out of range.
  void validate() const;
};

/// In ProxyEvent: this memory device, which has stopped working.
inline constexpr int kThisDevice = -2;

/// An event that ends the synchronisation of one client or of all. `client` is -1 if no particular client
/// caused it.
struct ProxyEvent {
  int client = -1;
  std::string message;
};

struct ProxyStatistics {
  std::uint64_t numShards = 0;  // shards that this device's sync cores completed
  std::uint64_t numBytes = 0;   // bytes of these shards, counted for one client
};

/// The data path of one memory device. It takes descriptors from one queue per client
/// (descriptor_intake.hpp), validates them (descriptor_validation.hpp) and counts the contributions. Its sync
/// cores reduce or update complete shards (shard_reducer.hpp), together with those of the other memory
/// devices.
///
/// Thread safety: one control thread may call all public functions; sync cores run on their own threads.
/// Locks: eventsMutex_ and nodeTasksMutex_; a thread that holds the latter may take the former.
class Proxy {
 public:
  /// Maps the memory that the devices of a session share. `doorbellsFd` comes from device 0; the caller
  /// closes all descriptors. The proxy writes to the eventfd `eventFd` when takeEvents() has new events.
  /// @throws std::invalid_argument if a descriptor is unsealed or too small.
  Proxy(ProxyConfig config, int doorbellsFd, int eventFd, const RingMemory& rings = {},
        const CollectiveMemory& collectives = {});
  /// Stops the sync cores and joins them.
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  /// Makes this the device of one of several nodes; parameters as for NodeExchange. Call before start().
  void joinNodes(std::size_t node, std::vector<std::vector<int>> ranks,
                 const std::vector<std::vector<int>>& fds);
  /// Starts to serve a client. Call before start(); for newcomers there is admitNewcomer().
  void addClient(std::size_t client, int segmentFd);
  /// Starts the sync cores. @pre addClient() was called for every client.
  void start();
  /// Ends the threads, after sending other nodes the results that they wait for. Idempotent.
  void stop() noexcept;

  /// Starts to synchronise a tensor group. Set `initialise` on the device that created the control memory.
  /// `nodeSegment` is required with several nodes, `optimizerFds` for a group with an optimizer, `updates` if
  /// parameters and states are not new, `rowsFds` for tables. Tensors lie in `memory`.
  /// @throws std::invalid_argument if a descriptor is unsealed or too small, or the group exists already; as
  /// TensorMemory::map().
  void addGroup(GroupPlan plan, int controlFd, const std::vector<Region>& slots, bool initialise,
                const Region& nodeSegment = -1, const OptimizerFds& optimizerFds = {},
                const GroupUpdates& updates = {}, const std::vector<int>& rowsFds = {},
                const std::shared_ptr<const TensorMemory>& memory = hostMemory());
  /// Unmaps a tensor group. If a sync core still works on it, the next call unmaps it. @pre every pushed
  /// shard is complete, and no client will push to the group any more.
  void removeGroup(std::uint32_t group);
  /// Snapshots of a group, through the mappings to which its updates store old versions. After this call use
  /// only their store, because the group may be removed.
  /// @returns nullptr if the group does not exist or has no snapshots.
  std::shared_ptr<GroupSnapshots> snapshotsOf(std::uint32_t group) const noexcept;

  /// Brings each group that has an optimizer to one step, and returns these steps. @pre stop() was called on
  /// all devices, and no worker is alive.
  /// @param lostClients, isOwnerLost as for finishUpdates() and finishReplica().
  std::vector<GroupUpdates> finishGroupUpdates(const std::vector<std::size_t>& lostClients = {});
  /// The same for the replicas that this device keeps.
  std::vector<GroupUpdates> finishReplicas(const std::vector<std::size_t>& lostClients, bool isOwnerLost);

  /// Accepts no more contributions, except those that DescriptorIntake::close() permits, and wakes these
  /// clients for good: nothing else will complete.
  void abort(const std::vector<std::size_t>& clients) noexcept;
  /// `client` will push no more. Pushes of others that can therefore never complete are reported as events.
  void clientLeft(std::size_t client);
  /// The process of `client` has ended, and the others go on: docs/design/membership.md. takeDrained()
  /// returns the client when this device has taken the last of its contributions.
  void clientEnded(std::size_t client);
  /// All memory devices have taken the last contributions of `client`, which takeDrained() has returned. From
  /// now on its contribution to every shard to which a client that lives contributes here is absent.
  void standInFor(std::size_t client);
  /// A worker with this segment takes the place of `client`, which all memory devices had lost. They stand in
  /// until it is a member. @pre standInFor(client).
  void admitNewcomer(std::size_t client, int segmentFd);
  /// Whether a newcomer may become a member: all memory devices have admitted it, and it waits for that.
  void setReady(std::size_t client, bool isReady) noexcept { isReady_[client].store(isReady); }
  /// The first epoch of the worker in a place, of which it may be the next one; kNoEpoch if it is no member
  /// yet.
  std::uint8_t memberSince(std::size_t client) const noexcept;
  /// The process of a newcomer has ended before it was a member.
  void newcomerEnded(std::size_t client);
  /// Each completion of this group begins a new epoch if any newcomer is ready. Call it before addGroup().
  void setBoundary(std::uint32_t group) noexcept { boundary_.store(group); }
  /// Clients since the last call, as for clientEnded().
  std::vector<std::size_t> takeDrained();
  /// The highest step of any shard to which `client` has contributed, at any device.
  std::uint32_t lastStep(std::size_t client) const noexcept;
  /// Errors since the last call.
  std::vector<ProxyEvent> takeEvents();
  /// Messages and failures of other nodes since the last call.
  std::vector<NodeEvent> takeNodeEvents();
  /// Informs other nodes that `client` is lost and the others go on; `text` describes the loss.
  void loseWorker(std::size_t client, const std::string& text);
  /// A worker of another node will push no more; otherwise as clientLeft().
  void workerLeftNode(std::size_t node);
  /// All devices of another node have ended. Shards that still wait for them can never complete, and are
  /// reported as events.
  void nodeEnded(std::size_t node);
  /// Suspends the exchange with `node`, which is lost; `text` is for it, should it live. Contributions to its
  /// shards wait until resumeWithout().
  void suspendNode(std::size_t node, const std::string& text);
  /// As NodeExchange::report().
  void reportWithout(std::size_t node) { nodeExchange_->report(node); }
  /// As NodeExchange::settle().
  void settleWithout(std::size_t node) { nodeExchange_->settle(node); }
  /// As NodeExchange::resume().
  void resumeWithout(std::size_t node);
  /// Sends a text to the control threads of another node's home device, or of all devices of all nodes.
  void tellNode(std::size_t node, const std::string& text);
  void tellAllNodes(const std::string& text);
  /// Notifies all other nodes that the session is over; no effect with a single node.
  void abortNodes(const std::string& text);
  /// The connections to other nodes, to replace those that broke; any thread may. @pre joinNodes() was
  /// called.
  NodeLinks& nodeLinks() noexcept { return nodeExchange_->links(); }
  ProxyStatistics statistics() const noexcept;

 private:
  static constexpr std::size_t kHomeDevice = 0;  // allocates the group's memory that exists once

  class CompleteShard;
  struct SyncMethod;
  static const SyncMethod kSyncMethods[];

  struct MemoryInUse {
    std::shared_ptr<const TensorMemory> memory;
    std::unique_ptr<ShardCompute> compute;
    std::vector<ReplicaStaging> stagings;  // of each sync core
  };

  void openRings(const RingMemory& rings, const CollectiveMemory& collectives);
  void openLinks();
  SessionPaths paths(const TensorMemory& memory) const noexcept;
  void addMemory(const std::shared_ptr<const TensorMemory>& memory);
  MemoryInUse& memoryOf(const TensorGroup& group) noexcept;
  ShardCompute& computeOf(const TensorGroup& group) noexcept { return *memoryOf(group).compute; }
  bool isWorkingOn(const TensorGroup& group) noexcept;

  bool work(std::size_t core);
  bool accept(std::size_t client, const Descriptor& descriptor);
  void evict(std::size_t client, const std::string& reason);
  void record(TensorGroup& group, std::size_t client, const Descriptor& descriptor);
  bool serveLostClients();
  void standInForAll(TensorGroup& group, std::size_t client, const Descriptor& descriptor);
  void standIn(TensorGroup& group, const Descriptor& contributed, std::size_t contributor,
               std::size_t absent);
  void beginEpoch() noexcept;
  std::optional<std::size_t> waitingClient(const TensorGroup& group, std::uint32_t shard) const noexcept;
  void complete(TensorGroup& group, const RingEntry& entry);
  // Begin a SyncMethod.
  void passToOwner(TensorGroup& group, const RingEntry& entry);
  void emulateDirectAllReduce(TensorGroup& group, const RingEntry& entry);
  void leaveToWorkers(TensorGroup& group, const RingEntry& entry);
  void exchange(TensorGroup& group, const RingEntry& entry);
  NodePacing nodePacing();
  void finishNodesShard(TensorGroup& group, const RingEntry& entry);
  void passToHomeDevice(TensorGroup& group, const RingEntry& entry);
  void passAroundRing(TensorGroup& group, const RingEntry& entry);
  void proposeCollective(TensorGroup& group, const RingEntry& entry);
  void beginShard(TensorGroup& group, const RingEntry& entry);
  void passToAnySyncCore(TensorGroup& group, const RingEntry& entry);

  bool runReadyShard(std::size_t core);
  bool runReplicatedShard(TensorGroup& group, std::size_t core);
  void reserveStaging(const TensorGroup& group);
  bool copyToReplica(TensorGroup& group, std::size_t core);
  bool advanceComputes();
  std::optional<MonotonicNs> untilNext() const noexcept;
  void reduceForNodes(TensorGroup& group, const RingEntry& entry, ShardArrays arrays);
  bool beginNodeTasks();
  void finishNodeTasks();
  void takeMean(TensorGroup& group, const RingEntry& entry);
  void concludeShard(TensorGroup& group, const RingEntry& entry) noexcept;
  void letPull(TensorGroup& group, const RingEntry& entry, const ShardShape& shape, std::size_t client);
  void finishShard(TensorGroup& group, const RingEntry& entry, std::size_t client) noexcept;
  void finishForAll(TensorGroup& group, const RingEntry& entry) noexcept;
  /// Before client 0 may push the shard again.
  void count(const TensorGroup& group, std::uint32_t shard) noexcept;
  void count(const TensorGroup& group, std::uint32_t shard, const ShardShape& shape,
             std::size_t way) noexcept;
  void wakeOthers() noexcept;
  bool hasUnfinishedShard() const noexcept;
  void report(int client, std::string message);
  void notify() noexcept;

  ProxyConfig config_;
  Mapping doorbellMapping_;
  Doorbell* doorbells_ = nullptr;
  Mapping exchangeMapping_;
  GroupTable groups_;                  // both are read by sync cores, and changed only while these are parked
  std::vector<MemoryInUse> memories_;  // in the order in which groups were placed there
  // Driven by core 0.
  DeviceLinks links_;
  DescriptorIntake intake_;
  std::unique_ptr<DeviceRings> rings_;              // null if no group is reduced by rings; used by any core
  std::unique_ptr<DeviceCollectives> collectives_;  // likewise, for a library's collectives
  std::unique_ptr<DeviceExchange> deviceExchange_;  // likewise, for exchanged groups
  std::unique_ptr<EmulatedDirectAllReduce> emulatedDirectAllReduce_;  // likewise, if links are emulated
  std::unique_ptr<Prober> prober_;

  std::uint32_t numPushedReady_ = 0;  // counted by core 0, since it last woke others
  bool hasPushedRing_ = false;

  struct NodeArrival {
    MonotonicNs due;
    std::function<void()> action;
  };

  // Guards the next three. Recursive, because a task that a stopped device finishes may leave another one.
  std::recursive_mutex nodeTasksMutex_;
  std::vector<ShardTask> nodeTasks_;       // for core 0, if the host does not compute itself
  std::vector<NodeArrival> nodeArrivals_;  // for core 0, if links are emulated
  bool areCoresStopped_ = false;

  std::atomic<int> numLeft_{0};  // clients of this node
  std::atomic<bool> hasLeftElsewhere_{false};
  LostClients lostClients_;
  Mapping epochsMapping_;
  EpochTable* epochs_ = nullptr;            // null if the places of lost clients stay vacant
  std::vector<std::atomic<bool>> isReady_;  // by client
  std::atomic<std::uint64_t> boundary_{std::uint64_t{1} << 32};  // no group at first
  std::mutex eventsMutex_;                                       // guards the next three
  std::vector<ProxyEvent> events_;
  std::vector<std::size_t> drained_;
  std::vector<NodeEvent> nodeEvents_;
  int eventFd_;
  std::atomic<std::uint64_t> numShards_{0};
  std::atomic<std::uint64_t> numBytes_{0};

  // Last: their threads use the members above.
  std::unique_ptr<SyncCores> syncCores_;
  std::unique_ptr<NodeExchange> nodeExchange_;  // with several nodes only
};

}  // namespace coarse
