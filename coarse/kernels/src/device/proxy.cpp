#include "coarse/device/proxy.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "coarse/recovery/recovery.hpp"
#include "coarse/shared_memory/shard_queue.hpp"
#include "coarse/tensors/shard_reducer.hpp"
#include "coarse/timeline/recorder.hpp"

namespace coarse {
namespace {

static_assert(kMostPlaces == kMostClients);

constexpr std::size_t kMostDevices = 256;  // a contribution stores its device in one byte
constexpr std::size_t kCopiedTogetherBytes = std::size_t{16} << 20;  // to a replica, on a GPU

/// The newest entry of a shard to which all clients have contributed.
RingEntry newestEntry(const TensorGroup& group, std::uint32_t shard) noexcept {
  return {group.plan().id, shard, group.control().contribution(shard, 0).step.load(std::memory_order_relaxed),
          0};
}

void describe(TimelineEvent& event, EventKind kind, const TensorGroup& group, const RingEntry& entry,
              const ShardShape& shape) noexcept {
  event.kind = kind;
  event.group = group.plan().id;
  event.index = entry.shard;
  event.step = entry.step;
  event.numBytes = shape.numElements * itemBytes(shape.dtype);
}

/// Records in the timeline that others than sync cores have finished a shard.
void noteReduced(const TensorGroup& group, const RingEntry& entry, const ShardShape& shape) noexcept {
  Recorder* const timeline = recorder();
  if (timeline == nullptr) return;
  TimelineEvent event;
  describe(event, EventKind::kReduced, group, entry, shape);
  event.startNs = timelineNow();
  timeline->record(event);
}

IntakeConfig intakeConfig(const ProxyConfig& config) {
  IntakeConfig intake;
  intake.device = config.device;
  intake.numDevices = config.numDevices;
  intake.numClients = config.numClients;
  intake.scheduling = config.scheduling;
  intake.metrics = config.metrics;
  if (!config.localClients.empty()) intake.observer = config.localClients.front();
  return intake;
}

}  // namespace

void ProxyConfig::validate() const {
  if (numDevices < 1 || device >= numDevices) throw std::invalid_argument("device must be below numDevices");
  if (numClients < 1) throw std::invalid_argument("a proxy needs at least one client");
  if (numDevices > kMostDevices)
    throw std::invalid_argument("there can be at most " + std::to_string(kMostDevices) + " memory devices");
  if (numClients > kMostClients)
    throw std::invalid_argument("a proxy serves at most " + std::to_string(kMostClients) + " clients");
  if (numSyncCores < 1) throw std::invalid_argument("a memory device needs at least one sync core");
  for (const std::size_t client : localClients) {
    if (client >= numClients) throw std::invalid_argument("localClients names a client that does not exist");
  }
  if (!ranks.empty() && ranks.size() != numClients)
    throw std::invalid_argument("every client needs a rank, or none has one");
}

Proxy::Proxy(ProxyConfig config, int doorbellsFd, int eventFd, const RingMemory& rings,
             const CollectiveMemory& collectives)
    : config_(std::move(config)),
      intake_(
          intakeConfig(config_), links_, [this](std::uint32_t group) { return groups_.find(group); },
          [this](std::size_t client, const Descriptor& descriptor) { return accept(client, descriptor); }),
      lostClients_(config_.numClients),
      isReady_(config_.numClients),
      eventFd_(eventFd) {
  config_.validate();
  constexpr auto kWritable = Mapping::Access::kReadWrite;
  doorbellMapping_ = mapSealed(doorbellsFd, config_.numDevices * sizeof(Doorbell), kWritable, "doorbells");
  doorbells_ = reinterpret_cast<Doorbell*>(doorbellMapping_.data());
  if (config_.epochsFd >= 0) {
    epochsMapping_ = mapSealed(config_.epochsFd, sizeof(EpochTable), kWritable, "epochs");
    epochs_ = reinterpret_cast<EpochTable*>(epochsMapping_.data());
  }
  openRings(rings, collectives);
  openLinks();
  SyncCoresConfig cores;
  cores.numCores = config_.numSyncCores;
  cores.spinBudget = std::chrono::microseconds(config_.spinMicroseconds);
  cores.needsExactSleeps = links_.isPaced();
  cores.metrics = config_.metrics;
  config_.metrics.set(Metric::kSyncCores, config_.numSyncCores);
  syncCores_ = std::make_unique<SyncCores>(
      cores, doorbells_[config_.device], [this](std::size_t core) { return work(core); },
      [this](std::size_t core) { return core == 0 ? untilNext() : std::nullopt; },
      [this](std::string reason) { report(kThisDevice, std::move(reason)); });
}

void Proxy::openLinks() {
  if (config_.linkTableFd >= 0) {
    links_ = DeviceLinks(std::make_unique<Pacer>(config_.linkTableFd),
                         {config_.numClients, config_.numDevices, config_.node, config_.numNodes});
  }
  prober_ = std::make_unique<Prober>(config_.device, config_.numDevices, links_,
                                     [this](const RingEntry& entry, std::size_t client) {
                                       TensorGroup* group = groups_.find(entry.group);
                                       if (group != nullptr) finishShard(*group, entry, client);
                                     });
  if (config_.exchangeLogsFd < 0) return;
  exchangeMapping_ = mapSealed(config_.exchangeLogsFd, config_.numDevices * sizeof(ExchangeLog),
                               Mapping::Access::kReadWrite, "exchange logs");
  ExchangePeers peers;
  peers.device = config_.device;
  peers.numDevices = config_.numDevices;
  peers.logs = reinterpret_cast<ExchangeLog*>(exchangeMapping_.data());
  peers.doorbells = doorbells_;
  deviceExchange_ = std::make_unique<DeviceExchange>(
      peers, links_, [this](std::uint32_t group) { return groups_.find(group); },
      [this](const TensorGroup& group) -> ShardCompute& { return computeOf(group); },
      [this](TensorGroup& group, const RingEntry& entry, std::size_t client) {
        if (client == 0) count(group, entry.shard);
        finishShard(group, entry, client);
      },
      config_.numNodes == 1
          ? DeviceExchange::PassToNodes()
          : [this](TensorGroup& group, const RingEntry& entry) { nodeExchange_->contribute(group, entry); });
  if (!links_.isPaced()) return;
  emulatedDirectAllReduce_ = std::make_unique<EmulatedDirectAllReduce>(
      links_, [this](std::uint32_t group) { return groups_.find(group); },
      [this](TensorGroup& group, const RingEntry& entry) {
        nodeExchange_ == nullptr ? beginShard(group, entry) : nodeExchange_->reduce(group, entry);
      });
}

/// Frames to other nodes over emulated links. Sync core 0 takes those that arrive.
NodePacing Proxy::nodePacing() {
  NodePacing pacing;
  pacing.arrivalOf = [this](const TensorGroup& group, std::size_t node, const FrameHeader& header,
                            MonotonicNs sentAt) {
    // In a direct all-reduce the workers exchange the bytes.
    if (group.usesDirectAllReduce(header.shard)) return sentAt;
    return links_.reserve(links_.endpointOfDevice(config_.device),
                          links_.endpointOfDevice(config_.device, node), header.payloadBytes, sentAt,
                          header.shard);
  };
  pacing.at = [this](MonotonicNs due, std::function<void()> action) {
    const std::lock_guard<std::recursive_mutex> lock(nodeTasksMutex_);
    nodeArrivals_.push_back({due, std::move(action)});
    doorbells_[config_.device].ring();
  };
  pacing.gathered = [this](TensorGroup& group, const RingEntry& entry, std::uint32_t numPresent) {
    if (group.usesDirectAllReduce(entry.shard)) {
      emulatedDirectAllReduce_->start(group, entry, numPresent);
    } else {
      nodeExchange_->reduce(group, entry);
    }
  };
  return pacing;
}

/// Finishes a shard whose result over all nodes is in every slot.
void Proxy::finishNodesShard(TensorGroup& group, const RingEntry& entry) {
  if (!links_.isPaced()) return takeMean(group, entry);
  if (!group.usesDirectAllReduce(entry.shard)) return deviceExchange_->deliver(group, entry);
  // Each client's result counts as an arrival, which shows how late reduction and sockets are.
  count(group, entry.shard);
  for (std::size_t client = 0; client < config_.numClients; ++client) {
    links_.at(timeOf(entry.completedAt, monotonicNow()), [this, entry, client](MonotonicNs) {
      TensorGroup* finished = groups_.find(entry.group);
      if (finished != nullptr) finishShard(*finished, entry, client);
    });
  }
}

/// For both, each device finishes the shards for its own clients.
void Proxy::openRings(const RingMemory& rings, const CollectiveMemory& collectives) {
  const auto findGroup = [this](std::uint32_t group) { return groups_.find(group); };
  const auto finish = [this](TensorGroup& group, const RingEntry& entry, const ShardShape& shape) {
    // Clients of other devices may have pushed the next step, with another shape and other flags.
    const auto way = static_cast<std::size_t>(group.plan().shards[entry.shard].algorithm);
    count(group, entry.shard, shape, way);
    noteReduced(group, entry, shape);
    for (const std::size_t client : config_.localClients) letPull(group, entry, shape, client);
  };
  if (!rings.bufferFds.empty()) {
    rings_ = std::make_unique<DeviceRings>(rings, links_, config_.device, config_.numDevices, doorbells_,
                                           config_.localClients, findGroup, finish);
  }
  if (collectives.logsFd >= 0) {
    collectives_ = std::make_unique<DeviceCollectives>(collectives, config_.device, config_.numDevices,
                                                       doorbells_, findGroup, finish);
  }
}

Proxy::~Proxy() { stop(); }

void Proxy::joinNodes(std::size_t node, std::vector<std::vector<int>> ranks,
                      const std::vector<std::vector<int>>& fds) {
  config_.ranks = ranks.at(node);
  config_.validate();
  if (links_.isPaced() && (node != config_.node || ranks.size() != config_.numNodes))
    throw std::invalid_argument("the link table is for another node or number of nodes");
  nodeExchange_ = std::make_unique<NodeExchange>(
      node, std::move(ranks), fds,
      [this](TensorGroup& group, const RingEntry& entry, ShardArrays arrays) {
        reduceForNodes(group, entry, std::move(arrays));
      },
      [this](TensorGroup& group, const RingEntry& entry) { finishNodesShard(group, entry); },
      [this](std::string message) { report(-1, std::move(message)); },
      [this](NodeEvent event) {
        const std::lock_guard<std::mutex> lock(eventsMutex_);
        nodeEvents_.push_back(std::move(event));
        notify();
      },
      links_.isPaced() ? nodePacing() : NodePacing(), config_.metrics, config_.nodeLinks,
      config_.nodeCompression, config_.mayLoseNodes);
}

void Proxy::addClient(std::size_t client, int segmentFd) { intake_.addClient(client, segmentFd); }

void Proxy::start() {
  if (!intake_.hasAllClients())
    throw std::logic_error("a proxy can't start before all its clients are known");
  syncCores_->start();
  if (nodeExchange_) nodeExchange_->start();
}

void Proxy::stop() noexcept {
  for (const TensorGroup* group : groups_.all()) {
    if (group->snapshots() != nullptr) group->snapshots()->store().stopWaiting();
  }
  syncCores_->stop();
  syncCores_->finish([this] {
    {
      const std::lock_guard<std::recursive_mutex> lock(nodeTasksMutex_);
      areCoresStopped_ = true;
      // Their continuations may leave further tasks.
      for (const MemoryInUse& each : memories_) each.compute->drain();
      finishNodeTasks();
    }
    if (rings_) rings_->drain();
    if (collectives_) collectives_->drain();
  });
  if (nodeExchange_) nodeExchange_->stop();
}

void Proxy::addGroup(GroupPlan plan, int controlFd, const std::vector<Region>& slots, bool initialise,
                     const Region& nodeSegment, const OptimizerFds& optimizerFds, const GroupUpdates& updates,
                     const std::vector<int>& rowsFds, const std::shared_ptr<const TensorMemory>& memory) {
  const std::uint32_t id = plan.id;
  if (plan.numClients != config_.numClients)
    throw std::invalid_argument("a tensor group belongs to all clients");
  if (std::string reason = unsupported(plan, paths(*memory)); !reason.empty())
    throw std::invalid_argument(reason);
  if (groups_.find(id) != nullptr)
    throw std::invalid_argument("tensor group " + std::to_string(id) + " is there already");
  auto group =
      std::make_shared<TensorGroup>(std::move(plan), controlFd, slots, optimizerFds, rowsFds, memory);
  if (initialise) group->control().initialise();
  if (group->snapshots() != nullptr)
    group->snapshots()->store().beatWhileWaiting(doorbells_[config_.device].beats);
  if (initialise && updates.step > 0) noteUpdates(*group, updates.step, updates.updateNumbers);
  if (Replica* replica = group->replica(); replica != nullptr && replica->keeper() == config_.device) {
    if (updates.step > 0) replica->begin(*group, updates.step, updates.updateNumbers);
  }
  if (nodeExchange_) nodeExchange_->addGroup(group, nodeSegment);
  syncCores_->whilePaused([&] {
    addMemory(memory);
    if (group->replica() != nullptr && !memory->isHost()) reserveStaging(*group);
    group->forget(lostClients_.drained());
    groups_.add(std::move(group));
  });
}

/// Allocates the staging of copies to a replica on a GPU at once: a later failure could not be reported.
void Proxy::reserveStaging(const TensorGroup& group) {
  if (group.replica()->keeper() != config_.device) return;
  std::size_t allBytes = 0, largestBytes = 0;
  for (std::uint32_t shard = 0; shard < group.plan().shards.size(); ++shard) {
    allBytes += group.partBytes(shard);
    largestBytes = std::max(largestBytes, group.partBytes(shard));
  }
  memoryOf(group).stagings.front().reserve(std::min(allBytes, kCopiedTogetherBytes + largestBytes));
}

void Proxy::addMemory(const std::shared_ptr<const TensorMemory>& memory) {
  for (const MemoryInUse& each : memories_) {
    if (each.memory == memory) return;
  }
  memories_.push_back({memory,
                       memory->makeCompute([this](const ShardTask& task) {
                         if (!task.group->memory().isHost())
                           noteReduced(*task.group, task.entry, task.group->shape(task.entry.shard));
                         if (task.arrays != nullptr) return task.arrays->finish();
                         if (task.pieces.empty()) return concludeShard(*task.group, task.entry);
                         deviceExchange_->reduced(task.entry);
                       }),
                       {}});
  for (std::size_t core = 0; core < config_.numSyncCores; ++core)
    memories_.back().stagings.emplace_back(*memory);
}

Proxy::MemoryInUse& Proxy::memoryOf(const TensorGroup& group) noexcept {
  return *std::find_if(memories_.begin(), memories_.end(),
                       [&](const MemoryInUse& each) { return each.memory.get() == &group.memory(); });
}

SessionPaths Proxy::paths(const TensorMemory& memory) const noexcept {
  SessionPaths paths;
  paths.numDevices = config_.numDevices;
  paths.numNodes = nodeExchange_ == nullptr ? 1 : nodeExchange_->numNodes();
  paths.hasRings = rings_ != nullptr && &rings_->memory() == &memory;
  paths.hasCollectives = collectives_ != nullptr && &collectives_->memory() == &memory;
  paths.hasExchange = deviceExchange_ != nullptr;
  paths.isPaced = links_.isPaced();
  paths.isHostMemory = memory.isHost();
  return paths;
}

void Proxy::removeGroup(std::uint32_t id) {
  if (nodeExchange_) nodeExchange_->removeGroup(id);
  GroupTable::Groups unused;  // unmapped after the sync cores run again
  syncCores_->whilePaused(
      [&] { unused = groups_.remove(id, [this](const TensorGroup& group) { return isWorkingOn(group); }); });
}

std::shared_ptr<GroupSnapshots> Proxy::snapshotsOf(std::uint32_t id) const noexcept {
  const TensorGroup* const group = groups_.find(id);
  return group == nullptr ? nullptr : group->sharedSnapshots();
}

bool Proxy::isWorkingOn(const TensorGroup& group) noexcept {
  // Clients have their results when their own devices are done with a shard; another device may still have
  // the shard's last step around the ring to do.
  if (rings_ && rings_->isWorkingOn(group)) return true;
  if (collectives_ && collectives_->isWorkingOn(group)) return true;
  return computeOf(group).isWorkingOn(group);
}

std::vector<GroupUpdates> Proxy::finishGroupUpdates(const std::vector<std::size_t>& lostClients) {
  std::vector<GroupUpdates> updates;
  for (TensorGroup* group : groups_.all()) {
    if (group->plan().hasOptimizer) updates.push_back(finishUpdates(*group, lostClients));
  }
  return updates;
}

std::vector<GroupUpdates> Proxy::finishReplicas(const std::vector<std::size_t>& lostClients,
                                                bool isOwnerLost) {
  std::vector<GroupUpdates> updates;
  for (TensorGroup* group : groups_.all()) {
    if (group->replica() != nullptr && group->replica()->keeper() == config_.device)
      updates.push_back(finishReplica(*group, lostClients, isOwnerLost));
  }
  return updates;
}

void Proxy::abort(const std::vector<std::size_t>& clients) noexcept {
  intake_.close();
  for (const std::size_t client : clients) intake_.inbox(client).abort();
}

void Proxy::clientLeft(std::size_t client) {
  numLeft_.fetch_add(1, std::memory_order_seq_cst);
  if (hasUnfinishedShard()) report(static_cast<int>(client), "");
  if (nodeExchange_) nodeExchange_->workerLeft(static_cast<std::uint32_t>(config_.ranks[client]));
}

void Proxy::clientEnded(std::size_t client) {
  setReady(client, false);
  lostClients_.noteEnd(client);
  doorbells_[config_.device].ring();
}

void Proxy::standInFor(std::size_t client) {
  lostClients_.noteAllDrained(client);
  doorbells_[config_.device].ring();
}

void Proxy::admitNewcomer(std::size_t client, int segmentFd) {
  // All devices store this before the first of them can know that all have admitted the newcomer.
  epochs_->memberSince[client].store(kNoEpoch, std::memory_order_release);
  syncCores_->whilePaused([&] {
    serveLostClients();  // for the former client of the place, if that is still to be done
    intake_.addClient(client, segmentFd);
    lostClients_.admit(client);
    for (TensorGroup* group : groups_.all()) group->remember(client);
  });
}

std::uint8_t Proxy::memberSince(std::size_t client) const noexcept {
  return epochs_ == nullptr ? 0 : epochs_->memberSince[client].load(std::memory_order_acquire);
}

void Proxy::newcomerEnded(std::size_t client) {
  setReady(client, false);
  standInFor(client);
}

std::vector<std::size_t> Proxy::takeDrained() {
  const std::lock_guard<std::mutex> lock(eventsMutex_);
  return std::exchange(drained_, {});
}

void Proxy::loseWorker(std::size_t client, const std::string& text) {
  if (nodeExchange_) nodeExchange_->workerLost(static_cast<std::uint32_t>(config_.ranks[client]), text);
}

void Proxy::workerLeftNode(std::size_t node) {
  // Shards that also lack contributions of this node are reported when the last of them arrives.
  hasLeftElsewhere_.store(true);
  if (nodeExchange_) nodeExchange_->workerLeftNode(node);
}

void Proxy::nodeEnded(std::size_t node) {
  if (nodeExchange_) nodeExchange_->nodeEnded(node);
}

void Proxy::suspendNode(std::size_t node, const std::string& text) {
  nodeExchange_->links().cut(node, text);
  syncCores_->whilePaused([&] { nodeExchange_->suspend(node); });
}

void Proxy::resumeWithout(std::size_t node) {
  syncCores_->whilePaused([&] { nodeExchange_->resume(node, config_.device == kHomeDevice); });
}

void Proxy::tellNode(std::size_t node, const std::string& text) {
  FrameHeader header;
  header.kind = FrameKind::kAgreement;
  nodeExchange_->links().sendHome(node, header, text);
}

void Proxy::tellAllNodes(const std::string& text) {
  FrameHeader header;
  header.kind = FrameKind::kAgreement;
  nodeExchange_->links().sendToAll(header, text);
}

void Proxy::abortNodes(const std::string& text) {
  if (nodeExchange_) nodeExchange_->abort(text);
}

bool Proxy::hasUnfinishedShard() const noexcept {
  const bool hasLost = lostClients_.hasAny();
  for (const TensorGroup* group : groups_.all()) {
    for (std::uint32_t shard = 0; shard < group->plan().shards.size(); ++shard) {
      // seq_cst pairs with accept(), as there.
      const bool isBegun = group->control().arrivals(shard).load(std::memory_order_seq_cst) != 0;
      // Nobody needs a step to which only lost clients have contributed.
      if (isBegun && (!hasLost || waitingClient(*group, shard))) return true;
    }
  }
  return false;
}

std::uint32_t Proxy::lastStep(std::size_t client) const noexcept {
  std::uint32_t last = 0;
  for (const TensorGroup* group : groups_.all()) {
    for (std::size_t shard = 0; shard < group->plan().shards.size(); ++shard) {
      if (group->plan().shards[shard].isDynamic) continue;  // buffers have their own steps
      last =
          std::max(last, group->control().contribution(shard, client).step.load(std::memory_order_acquire));
    }
  }
  return last;
}

std::vector<ProxyEvent> Proxy::takeEvents() {
  const std::lock_guard<std::mutex> lock(eventsMutex_);
  return std::exchange(events_, {});
}

std::vector<NodeEvent> Proxy::takeNodeEvents() {
  const std::lock_guard<std::mutex> lock(eventsMutex_);
  return std::exchange(nodeEvents_, {});
}

ProxyStatistics Proxy::statistics() const noexcept {
  return {numShards_.load(std::memory_order_relaxed), numBytes_.load(std::memory_order_relaxed)};
}

// ---- sync cores ----

bool Proxy::work(std::size_t core) {
  const bool servesQueues = core == 0;
  bool progressed = servesQueues && intake_.drain();
  if (servesQueues) progressed |= serveLostClients();
  if (servesQueues) wakeOthers();
  progressed |= runReadyShard(core);
  if (servesQueues && nodeExchange_ != nullptr) progressed |= beginNodeTasks();
  if (servesQueues) progressed |= advanceComputes();
  if (rings_) progressed |= rings_->advance(core, config_.numSyncCores);
  if (servesQueues && collectives_) progressed |= collectives_->advance();
  if (servesQueues) progressed |= links_.runDue();
  if (servesQueues && deviceExchange_ != nullptr) progressed |= deviceExchange_->advance();
  return progressed;
}

void Proxy::wakeOthers() noexcept {
  const bool hasSpareWork = std::exchange(numPushedReady_, 0) > 1;
  const bool hasRingWork = std::exchange(hasPushedRing_, false);
  if (!hasSpareWork && !hasRingWork) return;
  for (std::size_t device = 0; device < config_.numDevices; ++device) {
    if (device != config_.device || config_.numSyncCores > 1) doorbells_[device].ring();
  }
}

// ---- contributions ----

/// @returns whether a contribution was recorded.
bool Proxy::accept(std::size_t client, const Descriptor& descriptor) {
  TensorGroup* group = groups_.find(descriptor.group);
  if (std::string reason = rejection(group, client, descriptor, *prober_); !reason.empty()) {
    evict(client, reason);
    return false;
  }
  if (group->plan().shards[descriptor.shard].algorithm == Algorithm::kProbe) {
    prober_->serve(*group, client, descriptor);
    return false;
  }
  if (memberSince(client) > descriptor.slotOwner) {
    evict(client,
          "a contribution to epoch " + std::to_string(descriptor.slotOwner) + ", of which it is no member");
    return false;
  }
  if (!group->control().claim(descriptor.shard, client, descriptor.step)) {
    evict(client, "step " + std::to_string(descriptor.step) + " of shard " +
                      std::to_string(descriptor.shard) + ", which another memory device has taken");
    return false;
  }
  // Read before this arrival: a worker of another node that leaves later may already have its results.
  const bool lacksNodes = !isUpdateByMean(descriptor.flags) && hasLeftElsewhere_.load();
  record(*group, client, descriptor);
  if (lostClients_.mayLackAny() && !lostClients_.hasEnded(client)) standInForAll(*group, client, descriptor);
  // seq_cst pairs with clientLeft(): either it sees this arrival, or we see that a client left.
  const bool lacksClients = numLeft_.load(std::memory_order_seq_cst) > 0 && !lostClients_.hasEnded(client);
  if (lacksNodes || lacksClients) report(static_cast<int>(client), "");
  return true;
}

void Proxy::evict(std::size_t client, const std::string& reason) {
  intake_.evict(client);
  report(static_cast<int>(client), "sent a descriptor that cannot be: " + reason);
}

void Proxy::record(TensorGroup& group, std::size_t client, const Descriptor& descriptor) {
  Contribution& contribution = group.control().contribution(descriptor.shard, client);
  // relaxed, because Client::standIns() may read it meanwhile.
  __atomic_store_n(&contribution.numElements, descriptor.numElements, __ATOMIC_RELAXED);
  contribution.flags = descriptor.flags;
  contribution.dtype = descriptor.dtype;
  contribution.op = descriptor.op;
  contribution.device = static_cast<std::uint8_t>(config_.device);
  contribution.step.store(descriptor.step, std::memory_order_release);
  // At least acq_rel: the last arrival sees the contributions that every other proxy recorded before its own
  // arrival.
  const std::uint32_t arrived =
      group.control().arrivals(descriptor.shard).fetch_add(1, std::memory_order_seq_cst) + 1;
  if (arrived == config_.numClients)
    complete(group, {descriptor.group, descriptor.shard, descriptor.step, descriptor.sentAt});
}

// ---- lost clients ----

/// Takes the last contributions of clients that have ended, and stands in for those of which no device has
/// any left.
bool Proxy::serveLostClients() {
  if (!lostClients_.takeNews()) return false;
  for (const std::size_t client : lostClients_.undrained()) {
    intake_.drain(client);
    for (TensorGroup* group : groups_.all()) group->forget({client});
    lostClients_.noteDrained(client);
    const std::lock_guard<std::mutex> lock(eventsMutex_);
    drained_.push_back(client);
    notify();
  }
  lostClients_.beginToStandIn();
  for (TensorGroup* group : groups_.all()) group->forget(lostClients_.absent());
  // Shards to which others contribute later are found by accept(), on this thread too.
  for (TensorGroup* group : groups_.all()) {
    for (std::uint32_t shard = 0; shard < group->plan().shards.size(); ++shard) {
      const auto client = waitingClient(*group, shard);
      if (!client) continue;
      Descriptor waiting;
      waiting.shard = shard;
      waiting.step = group->control().contribution(shard, *client).step.load(std::memory_order_acquire);
      for (const std::size_t absent : lostClients_.absent()) standIn(*group, waiting, *client, absent);
    }
  }
  return true;
}

/// A client that lives, has contributed to the shard, and has no result yet.
std::optional<std::size_t> Proxy::waitingClient(const TensorGroup& group,
                                                std::uint32_t shard) const noexcept {
  if (group.plan().shards[shard].algorithm == Algorithm::kProbe) return std::nullopt;
  for (std::size_t client = 0; client < config_.numClients; ++client) {
    if (lostClients_.hasEnded(client)) continue;
    const GroupControl& control = group.control();
    const std::uint32_t step = control.contribution(shard, client).step.load(std::memory_order_acquire);
    if (step == control.done(client, shard).load(std::memory_order_acquire) + 1) return client;
  }
  return std::nullopt;
}

/// Stands in where `client` has contributed: for all who are absent, and for newcomers that are no members in
/// its epoch.
void Proxy::standInForAll(TensorGroup& group, std::size_t client, const Descriptor& descriptor) {
  for (const std::size_t absent : lostClients_.absent()) standIn(group, descriptor, client, absent);
  for (const std::size_t newcomer : lostClients_.newcomers()) {
    if (memberSince(newcomer) > descriptor.slotOwner) standIn(group, descriptor, client, newcomer);
  }
}

/// Contributes nothing for `absent` where `contributor` has contributed, unless `absent` has contributed,
/// too.
void Proxy::standIn(TensorGroup& group, const Descriptor& contributed, std::size_t contributor,
                    std::size_t absent) {
  const std::uint32_t shard = contributed.shard, step = contributed.step;
  const Contribution& given = group.control().contribution(shard, contributor);
  // Another device may stand in, too, or has taken the contribution.
  if (!group.control().claim(shard, absent, step)) return;
  Descriptor absence;
  absence.group = group.plan().id;
  absence.shard = shard;
  absence.step = step;
  // Contribution::numElements: the last step's stand-in, if there was one, has the first one's step.
  const std::uint32_t first = group.control().contribution(shard, absent).numElements;
  absence.numElements = group.plan().shards[shard].isDynamic ? given.numElements : first == 0 ? step : first;
  absence.flags = static_cast<std::uint8_t>((given.flags & ~kPresent) | kJoined);
  absence.dtype = given.dtype;
  absence.op = given.op;
  record(group, absent, absence);
}

/// Makes all newcomers that are ready members of the next epoch, if there are any.
void Proxy::beginEpoch() noexcept {
  const std::uint32_t next = epochs_->newest.load(std::memory_order_relaxed) + 1;
  if (next >= kNoEpoch) return;
  bool hasAny = false;
  for (std::size_t client = 0; client < config_.numClients; ++client) {
    if (!isReady_[client].load() || memberSince(client) != kNoEpoch) continue;
    epochs_->newcomers[next][client / 64].fetch_or(std::uint64_t{1} << client % 64,
                                                   std::memory_order_relaxed);
    epochs_->memberSince[client].store(static_cast<std::uint8_t>(next), std::memory_order_release);
    hasAny = true;
  }
  // release: a client that reads the number sees the members. Flags of this shard are written afterwards.
  if (hasAny) epochs_->newest.store(next, std::memory_order_release);
}

// ---- reduction ----

bool Proxy::runReadyShard(std::size_t core) {
  for (TensorGroup* group : groups_.all()) {
    const bool isHost = group->memory().isHost();
    if (!isHost && core != 0) continue;
    if (group->replica() != nullptr && runReplicatedShard(*group, core)) return true;
    if (!isHost && config_.device != kHomeDevice) continue;
    ReadyShard ready;
    if (!popReady(group->control(), ready)) continue;
    beginShard(*group, {group->plan().id, ready.shard, ready.step, 0});
    return true;
  }
  return false;
}

/// Updates a shard if this device is its owner, or copies some if it keeps the replica.
bool Proxy::runReplicatedShard(TensorGroup& group, std::size_t core) {
  const Replica& replica = *group.replica();
  std::uint32_t shard = 0;
  if (replica.owner() == config_.device && replica.control().updates().take(shard)) {
    beginShard(group, newestEntry(group, shard));
    return true;
  }
  return replica.keeper() == config_.device && copyToReplica(group, core);
}

bool Proxy::copyToReplica(TensorGroup& group, std::size_t core) {
  Replica& replica = *group.replica();
  // In host memory one shard, which leaves the rest to other cores.
  const std::size_t enoughBytes = group.memory().isHost() ? 1 : kCopiedTogetherBytes;
  std::vector<std::uint32_t> shards;
  std::uint32_t shard = 0;
  for (std::size_t numBytes = 0; numBytes < enoughBytes && replica.control().copies().take(shard);) {
    shards.push_back(shard);
    numBytes += group.partBytes(shard);
  }
  if (shards.empty()) return false;
  replica.copy(group, shards, memoryOf(group).stagings[core]);
  for (const std::uint32_t each : shards) {
    count(group, each);
    finishForAll(group, newestEntry(group, each));
  }
  return true;
}

bool Proxy::advanceComputes() {
  bool progressed = false;
  for (const MemoryInUse& each : memories_) progressed |= each.compute->advance();
  return progressed;
}

/// Time until the next event for which no doorbell rings.
std::optional<MonotonicNs> Proxy::untilNext() const noexcept {
  for (const MemoryInUse& each : memories_) {
    if (each.compute->isBusy()) return 0;
  }
  if ((rings_ && rings_->isBusy()) || (collectives_ && collectives_->isBusy())) return 0;
  return links_.untilNext();
}

/// Reduces a shard to which other nodes contribute, or whose result they send. Called from sync cores and
/// from the thread of the node links.
void Proxy::reduceForNodes(TensorGroup& group, const RingEntry& entry, ShardArrays arrays) {
  if (group.memory().isHost()) {
    {
      const TimelineSpan span([&](TimelineEvent& event) {
        describe(event, EventKind::kReduce, group, entry, group.shape(entry.shard));
      });
      reduceArrays(group, entry.shard, arrays);
    }
    return arrays.finish();
  }
  ShardTask task{&group, entry};
  task.arrays = std::make_shared<const ShardArrays>(std::move(arrays));
  const std::lock_guard<std::recursive_mutex> lock(nodeTasksMutex_);
  nodeTasks_.push_back(std::move(task));
  if (areCoresStopped_) return syncCores_->finish([this] { finishNodeTasks(); });
  doorbells_[config_.device].ring();
}

/// Does the tasks that no sync core will do any more. @pre nodeTasksMutex_ is locked.
void Proxy::finishNodeTasks() {
  for (const ShardTask& task : std::exchange(nodeTasks_, {})) {
    ShardCompute& compute = computeOf(*task.group);
    compute.begin(task);
    compute.drain();
  }
}

/// @returns whether there were any tasks.
bool Proxy::beginNodeTasks() {
  std::vector<ShardTask> tasks;
  std::vector<NodeArrival> arrivals;
  {
    const std::lock_guard<std::recursive_mutex> lock(nodeTasksMutex_);
    tasks.swap(nodeTasks_);
    arrivals.swap(nodeArrivals_);
  }
  for (const ShardTask& task : tasks) computeOf(*task.group).begin(task);
  for (NodeArrival& each : arrivals)
    links_.at(each.due, [action = std::move(each.action)](MonotonicNs) { action(); });
  return !tasks.empty() || !arrivals.empty();
}

/// Finishes a shard whose mean over all nodes is in every slot. Called from sync cores and from the thread of
/// the node links.
void Proxy::takeMean(TensorGroup& group, const RingEntry& entry) {
  if (!group.isUpdate(entry.shard)) return concludeShard(group, entry);
  // From now on the shard looks as if workers had contributed the mean, and any sync core can take it. Flags
  // of client 0 say that it is an update; a client that a memory device has stood in for does not have the
  // mean.
  constexpr std::uint8_t kByMean = kUpdate | kReduced;
  const bool isUsed = group.control().contributors(entry.shard).load(std::memory_order_relaxed) > 0;
  group.control().contribution(entry.shard, 0).flags = kByMean;
  const std::size_t first = group.firstContributor(entry.shard);
  group.control().contribution(entry.shard, first).flags =
      static_cast<std::uint8_t>(kByMean | (isUsed ? kPresent : 0));
  if (!pushReady(group.control(), {entry.shard, entry.step}) && group.memory().isHost())
    return beginShard(group, entry);
  for (std::size_t device = 0; device < config_.numDevices; ++device) doorbells_[device].ring();
}

void Proxy::count(const TensorGroup& group, std::uint32_t shard) noexcept {
  const bool isByMean = isUpdateByMean(group.control().contribution(shard, 0).flags);
  const auto algorithm = static_cast<std::size_t>(group.plan().shards[shard].algorithm);
  count(group, shard, group.shape(shard), isByMean ? kUpdateByMean : algorithm);
}

void Proxy::count(const TensorGroup& group, std::uint32_t shard, const ShardShape& shape,
                  std::size_t way) noexcept {
  const std::uint64_t numBytes = shape.numElements * itemBytes(shape.dtype);
  numShards_.fetch_add(1, std::memory_order_relaxed);
  numBytes_.fetch_add(numBytes, std::memory_order_relaxed);
  config_.metrics.add(Metric::kReducedShards, 1, way);
  // Of a table only some rows were reduced, which are not counted.
  if (!group.plan().isTable(group.plan().shards[shard]))
    config_.metrics.add(Metric::kReducedBytes, numBytes, way);
}

void Proxy::report(int client, std::string message) {
  const std::lock_guard<std::mutex> lock(eventsMutex_);
  events_.push_back({client, std::move(message)});
  notify();
}

void Proxy::notify() noexcept {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(eventFd_, &one, sizeof(one));
}

}  // namespace coarse
