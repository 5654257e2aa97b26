// Memory devices and workers of one job within a process, for the tests of the data path. No test sleeps, and
// none waits without a bound.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "coarse/client/client.hpp"
#include "coarse/device/proxy.hpp"
#include "deferred_memory.hpp"
#include "host_collectives.hpp"

namespace coarse::test {

/// What should happen at once has happened long before this, on the slowest machine under any sanitizer.
inline constexpr double kPatienceSeconds = 30;
/// What must not happen would have happened within this.
inline constexpr double kMomentSeconds = 0.2;

class Deadline {
 public:
  bool isOver() const { return std::chrono::steady_clock::now() >= end_; }

 private:
  std::chrono::steady_clock::time_point end_ =
      std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                             std::chrono::duration<double>(kPatienceSeconds));
};

/// Gives the processor away until `condition` holds. @returns false if it never does.
template <typename Condition>
bool eventually(Condition condition) {
  const Deadline deadline;
  while (!condition()) {
    if (deadline.isOver()) return false;
    std::this_thread::yield();
  }
  return true;
}

/// Runs function(0), ..., function(count - 1) at once, each on a thread of its own, and joins them.
template <typename Function>
void together(std::size_t count, Function function) {
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < count; ++i) threads.emplace_back([&function, i] { function(i); });
  for (std::thread& thread : threads) thread.join();
}

/// A variable of the environment, until the end of a scope.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  ~Variable() { ::unsetenv(name_); }

 private:
  const char* name_;
};

/// A file descriptor that closes itself.
class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() { close(); }
  void close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }
  operator int() const { return fd_; }
  operator Region() const noexcept { return fd_; }

 private:
  int fd_;
};

/// Sealed memory, mapped.
struct Memory {
  explicit Memory(std::size_t numBytes)
      : fd(createSealedMemory("test", numBytes)), mapping(fd, numBytes, Mapping::Access::kReadWrite) {}
  std::byte* data() const { return mapping.data(); }
  Fd fd;
  Mapping mapping;
};

inline std::vector<int> fdsOf(const std::vector<Memory>& memories) {
  std::vector<int> fds;
  for (const Memory& memory : memories) fds.push_back(memory.fd);
  return fds;
}

inline std::vector<Region> regionsOf(const std::vector<Memory>& memories) {
  const std::vector<int> fds = fdsOf(memories);
  return {fds.begin(), fds.end()};
}

struct TensorSpec {
  std::uint32_t numElements = 0;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  Algorithm algorithm = Algorithm::kDirect;
};

/// Cuts tensors into shards of at most `shardElements`.
inline GroupPlan makePlan(std::uint32_t id, std::size_t numClients, const std::vector<TensorSpec>& tensors,
                          std::uint32_t shardElements = 1 << 30) {
  GroupPlan plan;
  plan.id = id;
  plan.numClients = numClients;
  for (std::uint32_t tensor = 0; tensor < tensors.size(); ++tensor) {
    const TensorSpec& spec = tensors[tensor];
    plan.slotBytes = roundUp(plan.slotBytes, kCacheLineBytes);
    for (std::uint32_t start = 0; start < spec.numElements; start += shardElements) {
      const std::uint32_t numElements = std::min(shardElements, spec.numElements - start);
      plan.shards.push_back(
          {tensor, numElements, plan.slotBytes, spec.dtype, spec.op, spec.algorithm, false});
      plan.slotBytes += numElements * itemBytes(spec.dtype);
    }
  }
  return plan;
}

/// A window of dynamic shards, through which allReduce() passes buffers.
inline GroupPlan makeDynamicPlan(std::uint32_t id, std::size_t numClients, std::uint32_t window,
                                 std::uint32_t shardBytes, Algorithm algorithm) {
  GroupPlan plan;
  plan.id = id;
  plan.numClients = numClients;
  plan.slotBytes = std::size_t{window} * shardBytes;
  for (std::uint32_t i = 0; i < window; ++i)
    plan.shards.push_back(
        {i, shardBytes, std::uint64_t{i} * shardBytes, DType::kUInt8, ReduceOp::kSum, algorithm, true});
  return plan;
}

struct ClusterShape {
  std::size_t numClients = 2;
  std::size_t numDevices = 1;
  std::size_t numSyncCores = 1;
  Scheduling scheduling = Scheduling::kQueues;
  bool isDeferred = false;                       // memory devices have others compute (deferred_memory.hpp)
  bool hasReplica = false;                       // of groups with an optimizer, at device 1
  bool hasEpochs = false;                        // newcomers may take the places of lost clients
  Compression compression = Compression::kNone;  // of gradients between nodes
  bool mayLoseNodes = false;                     // the others go on without a lost one
};

template <std::size_t numClients, std::size_t numDevices, std::size_t numSyncCores>
inline constexpr ClusterShape kDeferred{numClients, numDevices, numSyncCores, Scheduling::kQueues, true};

inline void PrintTo(const ClusterShape& shape, std::ostream* out) {
  *out << shape.numClients << " clients, " << shape.numDevices << " devices, " << shape.numSyncCores
       << " sync cores" << (shape.isDeferred ? ", deferred" : "");
}

inline std::string nameOf(const testing::TestParamInfo<ClusterShape>& info) {
  return std::to_string(info.param.numClients) + "clients_" + std::to_string(info.param.numDevices) +
         "devices_" + std::to_string(info.param.numSyncCores) + "cores" +
         (info.param.isDeferred ? "_deferred" : "");
}

/// The memory that devices and workers of one job share.
struct SharedState {
  explicit SharedState(const ClusterShape& shape)
      : doorbells(shape.numDevices * sizeof(Doorbell)),
        ringLogs(sizeof(RingLogs)),
        collectiveLogs(sizeof(CollectiveLogs)),
        exchangeLogs(shape.numDevices * sizeof(ExchangeLog)),
        metrics(MetricsSegment::numBytes(shape.numDevices, shape.numClients)),
        epochs(sizeof(EpochTable)) {
    for (std::size_t i = 0; i < shape.numDevices; ++i) {
      rings.emplace_back(sizeof(RingSegment));
      messages.emplace_back(ringMessagesBytes(kHostMessageBytes));
    }
    for (std::size_t i = 0; i < shape.numClients; ++i)
      segments.push_back(std::make_unique<Memory>(ClientSegment::numBytes(shape.numDevices)));
  }
  Memory doorbells, ringLogs, collectiveLogs, exchangeLogs, metrics, epochs;
  std::vector<Memory> rings, messages;
  std::vector<std::unique_ptr<Memory>> segments;
};

inline std::shared_ptr<const Memory> makeLinkTable(const LinkTableValues& links) {
  auto table = std::make_shared<Memory>(Pacer::numBytes(links.paths.size(), links.gbytesPerSecond.size()));
  Pacer::write(table->fd, links);
  return table;
}

/// A bucket for every ordered pair of endpoints: links that share nothing.
inline LinkTableValues separateLinks(std::size_t numEndpoints, double gbytesPerSecond, double latencyUs) {
  LinkTableValues values;
  values.paths.assign(numEndpoints, std::vector<std::optional<PathValues>>(numEndpoints));
  for (std::size_t source = 0; source < numEndpoints; ++source) {
    for (std::size_t target = 0; target < numEndpoints; ++target) {
      if (source == target) continue;
      values.paths[source][target] =
          PathValues{latencyUs, {static_cast<std::uint32_t>(values.gbytesPerSecond.size())}};
      values.gbytesPerSecond.push_back(gbytesPerSecond);
    }
  }
  return values;
}

/// All proxies and clients of a job. Client c is local to device c % numDevices.
///
/// Threads: a Client belongs to the thread that uses it, the proxies' control functions to the test's own.
class Cluster {
 public:
  explicit Cluster(ClusterShape shape) : Cluster(shape, nullptr, {}) {}
  /// @param links those that are emulated; none without.
  Cluster(ClusterShape shape, const std::optional<LinkTableValues>& links)
      : Cluster(shape, links ? makeLinkTable(*links) : nullptr, {}) {}
  /// @param linkTable that of all nodes; null for real links.
  Cluster(ClusterShape shape, std::shared_ptr<const Memory> linkTable, NodeIndex index)
      : shape_(shape),
        meeting_(std::make_shared<HostMeeting>(shape.numDevices, gate_)),
        index_(index),
        shared_(shape),
        linkTable_(std::move(linkTable)) {
    if (shape.isDeferred) tensorMemory_ = std::make_shared<DeferredMemory>(gate_);
    for (std::size_t device = 0; device < shape.numDevices; ++device) {
      int ends[2];
      if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) std::abort();
      clientSockets_.emplace_back(ends[0]);
      deviceSockets_.emplace_back(ends[1]);
      eventFds_.emplace_back(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
      proxies_.push_back(makeProxy(device));
    }
    for (std::size_t client = 0; client < shape.numClients; ++client)
      clients_.push_back(makeClient(client, false));
  }

  /// A newcomer takes the place of a client that all devices have lost; it registers these groups.
  void admitNewcomer(std::size_t client, const std::vector<GroupPlan>& plans) {
    shared_.segments[client] = std::make_unique<Memory>(ClientSegment::numBytes(shape_.numDevices));
    for (auto& proxy : proxies_) proxy->admitNewcomer(client, shared_.segments[client]->fd);
    clients_[client] = makeClient(client, true);
    for (const GroupPlan& plan : plans) addToClient(plan, client);
  }

  MetricsSegment metrics() const { return {shared_.metrics.fd, shape_.numDevices, shape_.numClients}; }

  /// Makes these the devices of one of several nodes; `fds[device][node]` are their connections. Before
  /// start().
  void joinNodes(NodeIndex index, const std::vector<std::vector<int>>& ranks,
                 const std::vector<std::vector<std::vector<int>>>& fds) {
    index_ = index;
    for (std::size_t device = 0; device < shape_.numDevices; ++device)
      proxies_[device]->joinNodes(index.node, ranks, fds[device]);
  }

  Cluster& start() {
    for (auto& proxy : proxies_) proxy->start();
    return *this;
  }

  const ClusterShape& shape() const { return shape_; }
  /// For deferred memory.
  Gate& gate() { return gate_; }
  Pacer pacer() const { return Pacer(linkTable_->fd); }
  Proxy& proxy(std::size_t device) { return *proxies_[device]; }
  Client& client(std::size_t client) { return *clients_[client]; }
  Inbox& inbox(std::size_t client) { return ClientSegment(shared_.segments[client]->data()).inbox(); }
  DescriptorQueue& queue(std::size_t client, std::size_t device) {
    return ClientSegment(shared_.segments[client]->data()).queue(device);
  }
  /// Stands in for a client: the requests of a misbehaving worker. Not to be mixed with pushes of Client.
  void tell(std::size_t client, std::size_t device, const Descriptor& descriptor) {
    const auto producer =
        producers_.try_emplace(client * shape_.numDevices + device, queue(client, device)).first;
    ASSERT_TRUE(producer->second.push(descriptor));
    doorbell(device).ring();
  }
  Doorbell& doorbell(std::size_t device) {
    return reinterpret_cast<Doorbell*>(shared_.doorbells.data())[device];
  }
  void loseDevice(std::size_t device) { deviceSockets_[device].close(); }

  /// Registers with all proxies, then with all clients; shard s of client c goes to device (s + c) %
  /// numDevices.
  void addGroup(const GroupPlan& plan) {
    addToProxies(plan);
    for (std::size_t client = 0; client < shape_.numClients; ++client) addToClient(plan, client);
  }
  void addToProxies(const GroupPlan& plan) {
    auto memory = std::make_unique<GroupMemory>(plan, index_, shape_);
    for (std::size_t device = 0; device < shape_.numDevices; ++device)
      proxies_[device]->addGroup(plan, memory->control.fd, regionsOf(memory->slots), device == 0,
                                 memory->nodeSegment.fd, memory->optimizerFds(), {}, memory->rowsFds(),
                                 tensorMemory_);
    const std::lock_guard<std::mutex> lock(memoryMutex_);
    memory_[plan.id] = std::move(memory);
  }
  /// @pre addToProxies(plan) happened before.
  std::shared_ptr<Mapping> addToClient(const GroupPlan& plan, std::size_t client) {
    std::vector<std::uint16_t> routes(plan.shards.size());
    for (std::size_t shard = 0; shard < routes.size(); ++shard)
      routes[shard] = static_cast<std::uint16_t>((shard + client) % shape_.numDevices);
    return addToClient(plan, client, std::move(routes));
  }
  std::shared_ptr<Mapping> addToClient(const GroupPlan& plan, std::size_t client,
                                       std::vector<std::uint16_t> routes) {
    const GroupMemory& memory = memoryOf(plan);
    const Fd readOnly(reopenReadOnly(memory.control.fd));
    if (shape_.isDeferred && !plan.hasOptimizer && !plan.shards[0].isDynamic) {
      const Fd viewFd(createSealedMemory("view", plan.slotBytes));
      auto view = std::make_shared<Mapping>(viewFd, plan.slotBytes, Mapping::Access::kReadWrite);
      auto slots = hostMemory()->map(memory.slots[client].fd, plan.slotBytes, "slots");
      clients_[client]->addGroup(plan, client, readOnly, view,
                                 std::make_shared<HostSlotCopies>(std::move(slots), view), std::move(routes));
      return view;
    }
    return clients_[client]->addGroup(plan, client, readOnly, memory.slots[client].fd, std::move(routes));
  }
  std::byte* slots(const GroupPlan& plan, std::size_t client) const {
    return memoryOf(plan).slots[client].data();
  }
  /// A client's settings for the tensors of a group that has an optimizer.
  UpdateSettings* settings(const GroupPlan& plan, std::size_t client) const {
    return reinterpret_cast<UpdateSettings*>(memoryOf(plan).settings[client].data());
  }
  std::vector<Region> slotsOf(const GroupPlan& plan) const { return regionsOf(memoryOf(plan).slots); }
  /// A client's segment of rows, which stays the cluster's.
  int rowsFd(const GroupPlan& plan, std::size_t client) const { return memoryOf(plan).rowsFds()[client]; }
  /// A client's rows of a table.
  RowBuffer rows(const GroupPlan& plan, std::size_t client, std::uint32_t tensor) const {
    const RowTable table = plan.rowTables().at(tensor);
    return {memoryOf(plan).rows[client].data() + table.offset, table.numRows, table.rowBytes};
  }
  std::byte* parameters(const GroupPlan& plan) const { return memoryOf(plan).parameters.data(); }
  /// The number of the shape's replica.
  std::byte* replicatedParameters(const GroupPlan& plan) const { return memoryOf(plan).replica[1].data(); }
  SnapshotTrigger snapshotTrigger(const GroupPlan& plan) const {
    const OptimizerFds fds = memoryOf(plan).optimizerFds();
    return {fds.snapshots.request, fds.snapshots.control, 0};
  }
  /// What one device of the group sees of its snapshots; reads parameters and states where they lie.
  GroupSnapshots snapshots(const GroupPlan& plan) const {
    const GroupMemory& memory = memoryOf(plan);
    return {plan, memory.parameters.data(), memory.states.data(), memory.optimizerFds().snapshots};
  }
  void removeFromProxies(std::uint32_t group) {
    for (auto& proxy : proxies_) proxy->removeGroup(group);
  }
  GroupControl control(const GroupPlan& plan) const {
    return {memoryOf(plan).control.data(), plan.shards.size(), plan.numClients, plan.numRanks};
  }

  /// What `device` reports next, all that it has by then. Empty if it reports nothing.
  std::vector<ProxyEvent> events(std::size_t device, double seconds = kPatienceSeconds) {
    pollfd watched{eventFds_[device], POLLIN, 0};
    std::uint64_t count = 0;
    if (::poll(&watched, 1, static_cast<int>(seconds * 1000)) > 0 &&
        ::read(eventFds_[device], &count, sizeof(count)) < 0)
      ADD_FAILURE() << "the eventfd can't be read";
    return proxies_[device]->takeEvents();
  }

 private:
  struct GroupMemory {
    GroupMemory(const GroupPlan& plan, NodeIndex index, const ClusterShape& shape)
        : control(GroupControl::numBytes(plan.shards.size(), plan.numClients, plan.numRanks)),
          nodeSegment(
              NodeSegment::numBytes(plan, index, shape.isDeferred, shape.compression, shape.mayLoseNodes)),
          parameters(plan.hasOptimizer ? plan.parameterBytes() : 1),
          states(std::max<std::size_t>(plan.keptBytes(), 1)),
          snapshotRequest(sizeof(SnapshotRequest)),
          snapshotControl(SnapshotControl::numBytes(GroupSnapshots::blockBytes(plan).size())),
          snapshotPool(createSparseSealedMemory(
              "test", std::max<std::size_t>(SparsePool::numBytes(GroupSnapshots::blockBytes(plan)), 1))) {
      for (std::size_t i = 0; i < plan.numClients; ++i) {
        slots.emplace_back(plan.clientBytes());
        settings.emplace_back(std::max<std::size_t>(plan.settingsBytes(), 1));
      }
      if (shape.hasReplica && plan.hasOptimizer) {
        for (const std::size_t length :
             {ReplicaControl::numBytes(plan.shards.size()), plan.parameterBytes(), plan.keptBytes()})
          replica.emplace_back(std::max<std::size_t>(length, 1));
      }
      for (std::size_t i = 0; plan.rowsBytes() > 0 && i < plan.numClients; ++i) {
        rowFds.emplace_back(createSparseSealedMemory("test", plan.rowsBytes()));
        rows.emplace_back(rowFds.back(), plan.rowsBytes(), Mapping::Access::kReadWrite);
      }
    }
    std::vector<int> rowsFds() const { return {rowFds.begin(), rowFds.end()}; }
    OptimizerFds optimizerFds() const {
      OptimizerFds fds{
          fdsOf(settings), parameters.fd, states.fd, {snapshotRequest.fd, snapshotControl.fd, snapshotPool}};
      if (!replica.empty()) fds.replica = {replica[0].fd, replica[1].fd, replica[2].fd, 0, 1, false};
      return fds;
    }
    Memory control, nodeSegment, parameters, states, snapshotRequest, snapshotControl;
    Fd snapshotPool;
    std::vector<Memory> slots, settings, replica;
    std::vector<Fd> rowFds;  // these two only where there are tables
    std::vector<Mapping> rows;
  };

  const GroupMemory& memoryOf(const GroupPlan& plan) const {
    const std::lock_guard<std::mutex> lock(memoryMutex_);
    return *memory_.at(plan.id);
  }

  std::unique_ptr<Client> makeClient(std::size_t client, bool isNewcomer) {
    ClientConfig config;
    config.numDevices = shape_.numDevices;
    config.watchFds = {clientSockets_.begin(), clientSockets_.end()};
    config.isEmulated = linkTable_ != nullptr;
    config.metrics = metrics().client(client);
    config.epochsFd = shape_.hasEpochs ? shared_.epochs.fd : -1;
    config.isNewcomer = isNewcomer;
    return std::make_unique<Client>(config, shared_.segments[client]->fd, shared_.doorbells.fd, nullptr);
  }

  std::unique_ptr<Proxy> makeProxy(std::size_t device) {
    ProxyConfig config;
    config.device = device;
    config.numDevices = shape_.numDevices;
    config.numClients = shape_.numClients;
    config.numSyncCores = shape_.numSyncCores;
    config.scheduling = shape_.scheduling;
    config.exchangeLogsFd = shared_.exchangeLogs.fd;
    config.metrics = metrics().device(device);
    config.nodeCompression = shape_.compression;
    config.mayLoseNodes = shape_.mayLoseNodes;
    if (shape_.hasEpochs) config.epochsFd = shared_.epochs.fd;
    if (linkTable_ != nullptr) {
      config.linkTableFd = linkTable_->fd;
      config.node = index_.node;
      config.numNodes = index_.numNodes;
    }
    std::vector<std::vector<std::size_t>> clientsOf(shape_.numDevices);
    for (std::size_t client = 0; client < shape_.numClients; ++client)
      clientsOf[client % shape_.numDevices].push_back(client);
    config.localClients = clientsOf[device];
    RingMemory rings{shared_.ringLogs.fd, fdsOf(shared_.rings), regionsOf(shared_.messages),
                     kHostMessageBytes, tensorMemory_};
    const CollectiveMemory collectives{
        shared_.collectiveLogs.fd, clientsOf,
        std::make_shared<HostCollectives>(meeting_, device, config.localClients), tensorMemory_};
    auto proxy = std::make_unique<Proxy>(config, shared_.doorbells.fd, eventFds_[device], rings, collectives);
    for (std::size_t client = 0; client < shape_.numClients; ++client)
      proxy->addClient(client, shared_.segments[client]->fd);
    return proxy;
  }

  ClusterShape shape_;
  Gate gate_;
  std::shared_ptr<const TensorMemory> tensorMemory_ = hostMemory();
  std::shared_ptr<HostMeeting> meeting_;
  NodeIndex index_;
  SharedState shared_;
  std::shared_ptr<const Memory> linkTable_;
  std::vector<Fd> clientSockets_, deviceSockets_, eventFds_;
  mutable std::mutex memoryMutex_;  // guards memory_
  std::unordered_map<std::uint32_t, std::unique_ptr<GroupMemory>> memory_;
  std::unordered_map<std::size_t, DescriptorProducer> producers_;
  std::vector<std::unique_ptr<Client>> clients_;
  std::vector<std::unique_ptr<Proxy>> proxies_;  // last: their sync cores stop before memory goes
};

}  // namespace coarse::test
