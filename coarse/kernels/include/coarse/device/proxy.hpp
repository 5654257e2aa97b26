#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "coarse/client/own_path.hpp"
#include "coarse/client/probe.hpp"
#include "coarse/device/descriptor_intake.hpp"
#include "coarse/device/descriptor_validation.hpp"
#include "coarse/device/device_collectives.hpp"
#include "coarse/device/device_exchange.hpp"
#include "coarse/device/device_rings.hpp"
#include "coarse/device/group_table.hpp"
#include "coarse/device/shard_compute.hpp"
#include "coarse/device/sync_cores.hpp"
#include "coarse/device/tensor_group.hpp"
#include "coarse/emulation/device_links.hpp"
#include "coarse/node/node_exchange.hpp"
#include "coarse/recovery/recovery.hpp"
#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/shared_memory.hpp"
#include "coarse/shared_memory/tensor_memory.hpp"

namespace coarse {

struct ProxyConfig {
  std::size_t device = 0;
  std::size_t numDevices = 1;
  std::size_t numClients = 1;
  std::size_t numSyncCores = 1;
  Scheduling scheduling = Scheduling::kQueues;
  std::vector<std::size_t> localClients;  // whose contributions this device brings into a ring
  std::uint32_t spinMicroseconds = 50;    // how long an idle sync core looks for work before it sleeps
  int exchangeLogsFd = -1;  // an ExchangeLog per device, where groups are exchanged; stays the caller's
  int linkTableFd = -1;     // of Pacer, in an emulated session; stays the caller's
  std::vector<int> ranks;   // of the clients, for messages; their numbers if there are none

  /// @throws std::invalid_argument if a number is out of range.
  void validate() const;
};

/// In ProxyEvent: the memory device itself, which works no more.
inline constexpr int kThisDevice = -2;

/// Something that ends a client's or everybody's synchronisation. client is -1 if it is nobody's fault in
/// particular.
struct ProxyEvent {
  int client = -1;
  std::string message;
};

struct ProxyStatistics {
  std::uint64_t numShards = 0;  // shards that sync cores of this device completed
  std::uint64_t numBytes = 0;   // bytes of those, of one client
};

/// The data path of one memory device: takes descriptors from one queue per client (descriptor_intake.hpp),
/// checks them (acceptance.hpp), counts who has contributed, and has complete shards reduced or updated on
/// its sync cores (shard_reducer.hpp), together with those of the other memory devices.
///
/// Thread safety: all public functions may be called from one control thread; sync cores run on threads of
/// their own. Locks: eventsMutex_ and nodeTasksMutex_; whoever has the latter may take the former.
class Proxy {
 public:
  /// Maps what the devices of a session share. `doorbellsFd` comes from device 0; all descriptors stay the
  /// caller's. `eventFd` is an eventfd that is written when takeEvents() has something.
  /// @throws std::invalid_argument if a descriptor is unsealed or too small.
  Proxy(ProxyConfig config, int doorbellsFd, int eventFd, const RingMemory& rings = {},
        const CollectiveMemory& collectives = {});
  /// Stops the sync cores and joins them.
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  /// Makes this the device of one of several nodes; parameters as for NodeExchange. Before start().
  void joinNodes(std::size_t node, std::vector<std::vector<int>> ranks,
                 const std::vector<std::vector<int>>& fds);
  /// Starts to serve a client. Before start().
  void addClient(std::size_t client, int segmentFd);
  /// Starts the sync cores. @pre every client has been added.
  void start();
  /// Ends the threads; other nodes get what they wait for before it returns. Idempotent.
  void stop() noexcept;

  /// Starts to synchronise a tensor group. `initialise` is set on the device that made the control memory;
  /// `nodeSegment` is needed where there are several nodes, `optimizerFds` for a group that has an
  /// optimizer, `updates` where parameters and states are not new, `rowsFds` where there are tables; `memory`
  /// is where tensors lie.
  /// @throws std::invalid_argument if a descriptor is unsealed or too small, or the group is there already;
  /// as TensorMemory::map().
  void addGroup(GroupPlan plan, int controlFd, const std::vector<Region>& slots, bool initialise,
                const Region& nodeSegment = -1, const OptimizerFds& optimizerFds = {},
                const GroupUpdates& updates = {}, const std::vector<int>& rowsFds = {},
                const std::shared_ptr<const TensorMemory>& memory = hostMemory());
  /// Unmaps a tensor group, unless a sync core is still at it: then the next call unmaps it. @pre every shard
  /// that was pushed is complete, and no client will push to it any more.
  void removeGroup(std::uint32_t group);
  /// Snapshots of a group, through the mappings to which its updates store old versions. From then on only
  /// their store may be used, for the group may go.
  /// @returns nullptr if there is no such group, or it has none.
  std::shared_ptr<GroupSnapshots> snapshotsOf(std::uint32_t group) const noexcept;

  /// Brings each group that has an optimizer to one step, and tells which. @pre stop() was called, on all
  /// devices, and no worker lives any more.
  /// @param lostClients, isOwnerLost as for finishUpdates() and finishReplica().
  std::vector<GroupUpdates> finishGroupUpdates(const std::vector<std::size_t>& lostClients = {});
  /// The same for the replicas that this device keeps.
  std::vector<GroupUpdates> finishReplicas(const std::vector<std::size_t>& lostClients, bool isOwnerLost);

  /// Takes no more contributions, but for DescriptorIntake::close()'s, and wakes these clients for good:
  /// nothing else will complete any more.
  void abort(const std::vector<std::size_t>& clients) noexcept;
  /// `client` will push no more. What others have pushed or will push can never complete, and is an event.
  void clientLeft(std::size_t client);
  /// The highest step of any shard that `client` has contributed to, at whichever device.
  std::uint32_t lastStep(std::size_t client) const noexcept;
  /// What has gone wrong since the last call.
  std::vector<ProxyEvent> takeEvents();
  /// What other nodes have said or suffered since the last call.
  std::vector<NodeEvent> takeNodeEvents();
  /// A worker of another node will push no more; otherwise as clientLeft().
  void workerLeftNode(std::size_t node);
  /// All devices of another node have ended. What still waits for them can never complete, and is an event.
  void nodeEnded(std::size_t node);
  /// Tells all other nodes that the session is over; does nothing where there is one.
  void abortNodes(const std::string& text);
  ProxyStatistics statistics() const noexcept;

 private:
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
  void complete(TensorGroup& group, const RingEntry& entry);
  static bool runsAtHome(const TensorGroup& group, std::uint32_t shard) noexcept;
  bool runReadyShard(std::size_t core);
  bool runReplicatedShard(TensorGroup& group, std::size_t core);
  void reserveStaging(const TensorGroup& group);
  bool copyToReplica(TensorGroup& group, std::size_t core);
  bool advanceComputes();
  std::optional<MonotonicNs> untilNext() const noexcept;
  void runShard(TensorGroup& group, const RingEntry& entry);
  void reduceForNodes(TensorGroup& group, const RingEntry& entry, ShardArrays arrays);
  bool beginNodeTasks();
  void finishNodeTasks();
  void takeMean(TensorGroup& group, const RingEntry& entry);
  void concludeShard(TensorGroup& group, const RingEntry& entry) noexcept;
  void finishShard(TensorGroup& group, const RingEntry& entry, std::size_t client) noexcept;
  void finishForAll(TensorGroup& group, const RingEntry& entry, const ShardShape& shape) noexcept;
  void count(const ShardShape& shape) noexcept;
  void wakeOthers() noexcept;
  bool hasUnfinishedShard() const noexcept;
  void report(int client, std::string message);
  void notify() noexcept;

  ProxyConfig config_;
  Mapping doorbellMapping_;
  Doorbell* doorbells_ = nullptr;
  Mapping exchangeMapping_;
  GroupTable groups_;                  // these two are read by sync cores, changed only while they are parked
  std::vector<MemoryInUse> memories_;  // in the order in which groups came to lie there
  // Driven by core 0.
  DeviceLinks links_;
  DescriptorIntake intake_;
  std::unique_ptr<DeviceRings> rings_;              // null where no group is reduced by rings; any core's
  std::unique_ptr<DeviceCollectives> collectives_;  // likewise, by collectives of a library
  std::unique_ptr<DeviceExchange> deviceExchange_;  // likewise, exchanged
  std::unique_ptr<OwnPath> ownPath_;                // likewise
  std::unique_ptr<Prober> prober_;

  std::uint32_t numPushedReady_ = 0;  // by core 0, since it last woke others
  bool hasPushedRing_ = false;

  std::mutex nodeTasksMutex_;         // guards these two
  std::vector<ShardTask> nodeTasks_;  // for core 0, where the host does not compute itself
  bool areCoresStopped_ = false;

  std::atomic<int> numLeft_{0};  // clients of this node
  std::atomic<bool> hasLeftElsewhere_{false};
  std::mutex eventsMutex_;  // guards events_, nodeEvents_
  std::vector<ProxyEvent> events_;
  std::vector<NodeEvent> nodeEvents_;
  int eventFd_;
  std::atomic<std::uint64_t> numShards_{0};
  std::atomic<std::uint64_t> numBytes_{0};

  // Last: their threads use the rest.
  std::unique_ptr<SyncCores> syncCores_;
  std::unique_ptr<NodeExchange> nodeExchange_;  // where there are several nodes
};

}  // namespace coarse
