#include "coarse/proxy.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "coarse/reduce.hpp"
#include "coarse/shard_queue.hpp"
#include "coarse/waiting.hpp"

namespace coarse {
namespace {

// Sleeping sync cores look around this often even without a ring, so that no lost wake-up can hang a session.
constexpr std::chrono::milliseconds kLongestSleep{100};

// Emulated links: a sleep is not exact enough for less than this, and takes up to this to end.
constexpr std::chrono::microseconds kShortestSleep{200};
constexpr std::chrono::microseconds kWakeUpTime{100};

// Descriptors taken from one client before the next client's turn.
constexpr int kDescriptorsPerTurn = 64;

constexpr std::size_t kMostClients = 256;
constexpr std::size_t kMostDevices = 256;  // a contribution names its own in one byte

std::string describe(const ShardShape& shape) {
  return std::to_string(shape.numElements) + " elements of dtype " +
         std::to_string(static_cast<int>(shape.dtype)) + " with op " +
         std::to_string(static_cast<int>(shape.op));
}

/// Whether a worker's settings name a rule, and one for which there is state.
bool canRun(const UpdateSettings& settings, const GroupPlan& plan) noexcept {
  const auto rule = static_cast<std::uint32_t>(settings.rule);
  return rule != 0 && rule < kNumUpdateRules && numStates(settings.rule) <= plan.numStates;
}

/// What two workers' settings of one tensor differ in, with both values; empty if they are alike.
std::string firstDifference(const UpdateSettings& one, const UpdateSettings& other) {
  const auto differ = [](const char* name, auto first, auto second) {
    // Bits, so that NaN is like NaN.
    if (std::memcmp(&first, &second, sizeof(first)) == 0) return std::string();
    std::ostringstream text;
    text << name << " " << first << " and " << second;
    return text.str();
  };
  const std::string differences[] = {
      differ("rule", static_cast<std::uint32_t>(one.rule), static_cast<std::uint32_t>(other.rule)),
      differ("number of the update", one.updateNumber, other.updateNumber),
      differ("step size", one.stepSize, other.stepSize),
      differ("weight decay", one.gradientDecay, other.gradientDecay),
      differ("parameter scale", one.parameterScale, other.parameterScale),
      differ("sign of the gradient", one.gradientSign, other.gradientSign),
      differ("decay of the first state", one.firstDecay, other.firstDecay),
      differ("weight of the gradient in the first state", one.firstWeight, other.firstWeight),
      differ("momentum", one.momentum, other.momentum),
      differ("decay of the second state", one.secondDecay, other.secondDecay),
      differ("weight of the gradient in the second state", one.secondWeight, other.secondWeight),
      differ("bias correction", one.secondScale, other.secondScale),
      differ("epsilon", one.epsilon, other.epsilon),
  };
  for (const std::string& difference : differences) {
    if (!difference.empty()) return difference;
  }
  return {};
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

Proxy::Proxy(ProxyConfig config, int doorbellsFd, int ringLogsFd, const std::vector<int>& ringFds,
             int eventFd)
    : config_(std::move(config)), clients_(config_.numClients), eventFd_(eventFd) {
  config_.validate();
  constexpr auto kWritable = Mapping::Access::kReadWrite;
  doorbellMapping_ = mapSealed(doorbellsFd, config_.numDevices * sizeof(Doorbell), kWritable, "doorbells");
  doorbells_ = reinterpret_cast<Doorbell*>(doorbellMapping_.data());
  if (!ringFds.empty()) openRings(ringLogsFd, ringFds);
  openLinks();
}

void Proxy::openLinks() {
  if (config_.linkTableFd >= 0) {
    links_ =
        DeviceLinks(std::make_unique<Pacer>(config_.linkTableFd), config_.numClients, config_.numDevices);
  }
  prober_ = std::make_unique<Prober>(config_.device, config_.numDevices, links_,
                                     [this](const RingEntry& entry, std::size_t client) {
                                       TensorGroup* group = findGroup(entry.group);
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
      peers, links_, [this](std::uint32_t group) { return findGroup(group); },
      [this](TensorGroup& group, const RingEntry& entry, std::size_t client) {
        if (client == 0) count(group.shape(entry.shard));
        finishShard(group, entry, client);
      });
  ownPath_ = std::make_unique<OwnPath>(
      links_, [this](std::uint32_t group) { return findGroup(group); },
      [this](TensorGroup& group, const RingEntry& entry) { reduceShard(group, entry); });
}

void Proxy::openRings(int ringLogsFd, const std::vector<int>& ringFds) {
  if (ringFds.size() != config_.numDevices)
    throw std::invalid_argument("a proxy needs the ring memory of every device");
  constexpr auto kWritable = Mapping::Access::kReadWrite;
  ringLogMapping_ = mapSealed(ringLogsFd, sizeof(RingLogs), kWritable, "ring logs");
  ringLogs_ = reinterpret_cast<RingLogs*>(ringLogMapping_.data());
  for (const int fd : ringFds) {
    ringMappings_.push_back(mapSealed(fd, sizeof(RingSegment), kWritable, "ring buffers"));
    ringSegments_.push_back(reinterpret_cast<RingSegment*>(ringMappings_.back().data()));
  }
  const std::size_t p = config_.numDevices;
  for (std::size_t ring = 0; ring < kNumRings; ++ring) {
    const bool isForward = ring % 2 == 0;
    const std::size_t after = (config_.device + 1) % p;
    const std::size_t before = (config_.device + p - 1) % p;
    RingLinks links;
    links.log = &(*ringLogs_)[ring];
    links.own = &(*ringSegments_[config_.device])[ring];
    links.next = &(*ringSegments_[isForward ? after : before])[ring];
    links.nextDoorbell = &doorbells_[isForward ? after : before];
    links.previousDoorbell = &doorbells_[isForward ? before : after];
    links.position = isForward ? config_.device : (p - config_.device) % p;
    links.numDevices = p;
    ringCores_.push_back(std::make_unique<RingCore>(
        links, config_.localClients, [this](std::uint32_t group) { return findGroup(group); },
        [this](TensorGroup& group, const RingEntry& entry, const ShardShape& shape) {
          count(shape);
          for (const std::size_t client : config_.localClients) finishShard(group, entry, client);
        }));
  }
}

Proxy::~Proxy() { stop(); }

void Proxy::joinNodes(std::size_t node, std::vector<std::vector<int>> ranks,
                      const std::vector<std::vector<int>>& fds) {
  config_.ranks = ranks.at(node);
  config_.validate();
  nodeExchange_ = std::make_unique<NodeExchange>(
      node, std::move(ranks), fds,
      [this](TensorGroup& group, const RingEntry& entry, const ShardShape& shape) {
        count(shape);
        for (std::size_t client = 0; client < config_.numClients; ++client) finishShard(group, entry, client);
      },
      [this](std::string message) { report(-1, std::move(message)); },
      [this](NodeEvent event) {
        const std::lock_guard<std::mutex> lock(controlMutex_);
        nodeEvents_.push_back(std::move(event));
        notify();
      });
}

void Proxy::addClient(std::size_t client, int segmentFd) {
  auto added = std::make_unique<Client>();
  added->mapping = mapSealed(segmentFd, ClientSegment::numBytes(config_.numDevices),
                             Mapping::Access::kReadWrite, "client segment");
  added->segment = ClientSegment(added->mapping.data());
  added->queue = DescriptorConsumer(added->segment.queue(config_.device));
  clients_.at(client) = std::move(added);
}

void Proxy::start() {
  for (const auto& client : clients_) {
    if (client == nullptr) throw std::logic_error("a proxy can't start before all its clients are known");
  }
  for (std::size_t core = 0; core < config_.numSyncCores; ++core) {
    threads_.emplace_back([this, core] { runSyncCore(core); });
  }
  if (nodeExchange_) nodeExchange_->start();
}

void Proxy::stop() noexcept {
  isStopping_.store(true, std::memory_order_seq_cst);
  doorbells_[config_.device].ring();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  if (nodeExchange_) nodeExchange_->stop();
}

template <typename Change>
void Proxy::whilePaused(Change change) {
  std::unique_lock<std::mutex> lock(controlMutex_);
  isPausing_.store(true, std::memory_order_seq_cst);
  doorbells_[config_.device].ring();
  controlChanged_.wait(lock, [this] { return numParked_ == threads_.size(); });
  change();
  isPausing_.store(false, std::memory_order_seq_cst);
  controlChanged_.notify_all();
}

void Proxy::parkWhilePaused() {
  std::unique_lock<std::mutex> lock(controlMutex_);
  ++numParked_;
  controlChanged_.notify_all();
  controlChanged_.wait(lock, [this] { return !isPausing_.load(std::memory_order_relaxed); });
  --numParked_;
}

void Proxy::addGroup(GroupPlan plan, int controlFd, const std::vector<int>& slotFds, bool initialise,
                     int nodeSegmentFd, OptimizerFds optimizerFds) {
  const std::uint32_t id = plan.id;
  if (plan.numClients != config_.numClients)
    throw std::invalid_argument("a tensor group belongs to all clients");
  if (std::string reason = unsupported(plan); !reason.empty()) throw std::invalid_argument(reason);
  if (findGroup(id) != nullptr)
    throw std::invalid_argument("tensor group " + std::to_string(id) + " is there already");
  auto group = std::make_shared<TensorGroup>(std::move(plan), controlFd, slotFds, optimizerFds);
  if (initialise) group->control().initialise();
  if (nodeExchange_) nodeExchange_->addGroup(group, nodeSegmentFd);
  whilePaused([&] {
    groupList_.push_back(group.get());
    groups_.emplace(id, std::move(group));
  });
}

/// @returns why this session cannot synchronise such a group; empty if it can.
std::string Proxy::unsupported(const GroupPlan& plan) const {
  for (const Shard& shard : plan.shards) {
    const Algorithm algorithm = shard.algorithm;
    if (algorithm == Algorithm::kProbe) continue;
    if (plan.hasOptimizer && nodeExchange_ != nullptr)
      return "optimizers run in the memory devices of one node only; this session has several";
    if (plan.hasOptimizer && algorithm != Algorithm::kDirect && algorithm != Algorithm::kGather)
      return "optimizers run in coherent memory only; choose the algorithm auto, direct or gather";
    if (nodeExchange_ != nullptr && (algorithm == Algorithm::kRing || algorithm == Algorithm::kExchange))
      return "rings and exchanges do not lead to other nodes; choose another algorithm when the session "
             "starts";
    if (algorithm == Algorithm::kRing && ringCores_.empty() && config_.numDevices > 1)
      return "this session has no rings; choose the ring algorithm when it starts";
    if (algorithm == Algorithm::kExchange && deviceExchange_ == nullptr)
      return "this session has no exchange; choose the exchange algorithm when it starts";
    if (algorithm != Algorithm::kExchange && links_.isPaced())
      return "an emulated session synchronises by exchange only: other algorithms pass over its links";
  }
  return {};
}

void Proxy::removeGroup(std::uint32_t id) {
  if (nodeExchange_) nodeExchange_->removeGroup(id);
  std::vector<std::shared_ptr<TensorGroup>> unused;  // unmapped after the sync cores run again
  whilePaused([&] {
    const auto found = groups_.find(id);
    if (found == groups_.end()) return;
    groupList_.erase(std::find(groupList_.begin(), groupList_.end(), found->second.get()));
    retiredGroups_.push_back(std::move(found->second));
    groups_.erase(found);
    // Clients have their results when their own devices are done with a shard; another device may still have
    // its last step around the ring before it.
    const auto isInUse = [this](const std::shared_ptr<TensorGroup>& group) {
      return std::any_of(ringCores_.begin(), ringCores_.end(),
                         [&](const auto& ringCore) { return ringCore->isWorkingOn(*group); });
    };
    const auto firstUnused = std::partition(retiredGroups_.begin(), retiredGroups_.end(), isInUse);
    std::move(firstUnused, retiredGroups_.end(), std::back_inserter(unused));
    retiredGroups_.erase(firstUnused, retiredGroups_.end());
  });
}

void Proxy::abortClient(std::size_t client) noexcept { clients_[client]->segment.inbox().abort(); }

void Proxy::clientLeft(std::size_t client) {
  numLeft_.fetch_add(1, std::memory_order_seq_cst);
  if (hasUnfinishedShard()) report(static_cast<int>(client), "");
  if (nodeExchange_) nodeExchange_->workerLeft(static_cast<std::uint32_t>(config_.ranks[client]));
}

void Proxy::workerLeftNode(std::size_t node) {
  numLeft_.fetch_add(1, std::memory_order_seq_cst);
  if (hasUnfinishedShard()) report(-1, "");
  if (nodeExchange_) nodeExchange_->workerLeftNode(node);
}

void Proxy::nodeEnded(std::size_t node) {
  if (nodeExchange_) nodeExchange_->nodeEnded(node);
}

void Proxy::abortNodes(const std::string& text) {
  if (nodeExchange_) nodeExchange_->abort(text);
}

bool Proxy::hasUnfinishedShard() const noexcept {
  for (const TensorGroup* group : groupList_) {
    for (std::size_t shard = 0; shard < group->plan().shards.size(); ++shard) {
      // seq_cst pairs with accept(), as there.
      if (group->control().arrivals(shard).load(std::memory_order_seq_cst) != 0) return true;
    }
  }
  return false;
}

std::uint32_t Proxy::lastStep(std::size_t client) const noexcept {
  std::uint32_t last = 0;
  for (const TensorGroup* group : groupList_) {
    for (std::size_t shard = 0; shard < group->plan().shards.size(); ++shard) {
      if (group->plan().shards[shard].isDynamic) continue;  // buffers have steps of their own
      last =
          std::max(last, group->control().contribution(shard, client).step.load(std::memory_order_acquire));
    }
  }
  return last;
}

std::vector<ProxyEvent> Proxy::takeEvents() {
  const std::lock_guard<std::mutex> lock(controlMutex_);
  return std::exchange(events_, {});
}

std::vector<NodeEvent> Proxy::takeNodeEvents() {
  const std::lock_guard<std::mutex> lock(controlMutex_);
  return std::exchange(nodeEvents_, {});
}

ProxyStatistics Proxy::statistics() const noexcept {
  return {numShards_.load(std::memory_order_relaxed), numBytes_.load(std::memory_order_relaxed)};
}

// ---- sync cores ----

void Proxy::runSyncCore(std::size_t core) {
  const bool servesQueues = core == 0;
  if (links_.isPaced()) makeSleepsExact();
  YieldingSpin spin(std::chrono::microseconds(config_.spinMicroseconds));
  while (!isStopping_.load(std::memory_order_acquire)) {
    if (isPausing_.load(std::memory_order_acquire)) parkWhilePaused();
    // Read before looking for work: a ring in between changes it, and sleep() returns at once.
    const std::uint32_t seenRings = doorbells_[config_.device].rings.load(std::memory_order_seq_cst);
    bool progressed = servesQueues && drainQueues();
    if (servesQueues) wakeOthers();
    progressed |= reduceReadyShard();
    progressed |= advanceRings(core);
    if (servesQueues) progressed |= links_.runDue();
    if (servesQueues && deviceExchange_ != nullptr) progressed |= deviceExchange_->advance();
    if (progressed) {
      spin.reset();
    } else if (!spin.yield()) {
      sleep(core, seenRings);
      spin.reset();
    }
  }
}

void Proxy::sleep(std::size_t core, std::uint32_t seenRings) noexcept {
  std::chrono::nanoseconds longest = kLongestSleep;
  if (const auto untilArrival = core == 0 ? links_.untilNext() : std::nullopt) {
    const std::chrono::nanoseconds wait(*untilArrival);
    if (wait < kShortestSleep) return;  // the caller spins on
    longest = std::min(longest, wait - kWakeUpTime);
  }
  Doorbell& doorbell = doorbells_[config_.device];
  doorbell.sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (!isStopping_.load() && !isPausing_.load()) futexWait(doorbell.rings, seenRings, longest);
  doorbell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

bool Proxy::advanceRings(std::size_t core) {
  bool progressed = false;
  for (std::size_t ring = core; ring < ringCores_.size(); ring += config_.numSyncCores) {
    progressed |= ringCores_[ring]->advance();
  }
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

// ---- descriptors ----

/// Hands over the next descriptor of a client whose contribution is here. @returns false if there is none.
bool Proxy::take(std::size_t client, Descriptor& descriptor) {
  Client& from = *clients_[client];
  if (!links_.isPaced()) return from.queue.pop(descriptor);
  for (int i = 0; i < kDescriptorsPerTurn && from.queue.pop(descriptor); ++i)
    holdUntilArrival(client, descriptor);
  if (from.arrived.empty()) return false;
  descriptor = from.arrived.front();
  from.arrived.pop_front();
  return true;
}

void Proxy::holdUntilArrival(std::size_t client, const Descriptor& descriptor) {
  if (isProbe(descriptor)) {
    clients_[client]->arrived.push_back(descriptor);  // the probe itself says what takes time
    return;
  }
  const MonotonicNs sentAt = timeOf(descriptor.sentAt, monotonicNow());
  const bool staysWithWorker = (descriptor.flags & kOwnPath) != 0;
  const MonotonicNs due =
      staysWithWorker
          ? sentAt
          : links_.reserve(links_.endpointOfClient(client), links_.endpointOfDevice(config_.device),
                           contributedBytes(descriptor), sentAt, descriptor.shard);
  links_.at(due, [this, client, arrived = descriptor](MonotonicNs arrivedAt) mutable {
    arrived.sentAt = stampOf(arrivedAt);  // from here on it is this device that sends
    clients_[client]->arrived.push_back(arrived);
  });
}

bool Proxy::isProbe(const Descriptor& descriptor) const noexcept {
  const TensorGroup* group = findGroup(descriptor.group);
  return group != nullptr && descriptor.shard < group->plan().shards.size() &&
         group->plan().shards[descriptor.shard].algorithm == Algorithm::kProbe;
}

/// What comes over the link with a descriptor, which is not checked yet.
std::size_t Proxy::contributedBytes(const Descriptor& descriptor) const noexcept {
  const TensorGroup* group = findGroup(descriptor.group);
  if ((descriptor.flags & kPresent) == 0 || group == nullptr ||
      descriptor.shard >= group->plan().shards.size())
    return 0;
  const Shard& shard = group->plan().shards[descriptor.shard];
  if (!shard.isDynamic) return shard.numElements * itemBytes(shard.dtype);
  if (descriptor.dtype >= kNumDTypes) return 0;
  return std::min<std::size_t>(shard.numElements,
                               descriptor.numElements * itemBytes(static_cast<DType>(descriptor.dtype)));
}

bool Proxy::drainQueues() {
  if (config_.scheduling == Scheduling::kFcfs) return drainFirstComeFirstServe();
  bool progressed = false;
  Descriptor descriptor;
  for (std::size_t client = 0; client < clients_.size(); ++client) {
    for (int i = 0; i < kDescriptorsPerTurn && take(client, descriptor); ++i) {
      accept(client, descriptor);
      progressed = true;
    }
  }
  return progressed;
}

bool Proxy::drainFirstComeFirstServe() {
  bool progressed = false;
  if (blocker_ && isBlockerDone()) {
    blocker_.reset();
    progressed = true;
  }
  for (std::size_t client = 0; client < clients_.size(); ++client) {
    std::optional<Descriptor>& head = clients_[client]->head;
    Descriptor descriptor;
    if (!head && take(client, descriptor)) head = descriptor;
    if (!head) continue;
    if (blocker_ && (head->group != blocker_->group || head->shard != blocker_->shard)) continue;
    descriptor = *std::exchange(head, std::nullopt);
    if (accept(client, descriptor))
      blocker_ = RingEntry{descriptor.group, descriptor.shard, descriptor.step, 0};
    progressed = true;
  }
  return progressed;
}

bool Proxy::isBlockerDone() const noexcept {
  const TensorGroup* group = findGroup(blocker_->group);
  if (group == nullptr) return true;  // removed meanwhile
  const std::size_t client = config_.localClients.empty() ? 0 : config_.localClients.front();
  const auto& done = group->control().done(client, blocker_->shard);
  return done.load(std::memory_order_acquire) == blocker_->step;
}

/// @returns whether a contribution was recorded.
bool Proxy::accept(std::size_t client, const Descriptor& descriptor) {
  if (clients_[client]->isEvicted) return false;
  TensorGroup* group = findGroup(descriptor.group);
  if (std::string reason = rejection(client, descriptor, group); !reason.empty()) {
    clients_[client]->isEvicted = true;
    report(static_cast<int>(client), "sent a descriptor that cannot be: " + reason);
    return false;
  }
  if (isProbe(descriptor)) {
    prober_->serve(*group, client, descriptor);
    return false;
  }
  record(*group, client, descriptor);
  // seq_cst pairs with clientLeft(): either it sees this arrival, or we see that somebody left.
  if (numLeft_.load(std::memory_order_seq_cst) > 0) report(static_cast<int>(client), "");
  return true;
}

std::string Proxy::rejection(std::size_t client, const Descriptor& descriptor,
                             const TensorGroup* group) const {
  if (group == nullptr) return "tensor group " + std::to_string(descriptor.group) + " is not registered";
  if (descriptor.shard >= group->plan().shards.size()) {
    return "shard " + std::to_string(descriptor.shard) + " of " + std::to_string(group->plan().shards.size());
  }
  const std::uint32_t done = group->control().done(client, descriptor.shard).load(std::memory_order_relaxed);
  const std::uint32_t pushed =
      group->control().contribution(descriptor.shard, client).step.load(std::memory_order_relaxed);
  if (descriptor.step != done + 1 || pushed == descriptor.step) {
    return "step " + std::to_string(descriptor.step) + " of shard " + std::to_string(descriptor.shard) +
           " although step " + std::to_string(std::max(done, pushed)) + " was its last";
  }
  const Shard& shard = group->plan().shards[descriptor.shard];
  if ((descriptor.flags & kOwnPath) != 0 && shard.algorithm != Algorithm::kExchange)
    return "shard " + std::to_string(descriptor.shard) + " has no path among the workers";
  if ((descriptor.flags & kUpdate) != 0 && !group->plan().hasOptimizer)
    return "an update in a group without an optimizer";
  if (shard.algorithm == Algorithm::kProbe) return prober_->rejection(*group, descriptor);
  if (!shard.isDynamic) return {};
  if (descriptor.dtype >= kNumDTypes || descriptor.op >= kNumReduceOps) return "unknown dtype or op";
  const std::size_t numBytes = descriptor.numElements * itemBytes(static_cast<DType>(descriptor.dtype));
  if (numBytes > shard.numElements) return std::to_string(numBytes) + " bytes in a slot of fewer";
  return {};
}

void Proxy::record(TensorGroup& group, std::size_t client, const Descriptor& descriptor) {
  Contribution& contribution = group.control().contribution(descriptor.shard, client);
  contribution.numElements = descriptor.numElements;
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

void Proxy::complete(TensorGroup& group, const RingEntry& entry) {
  const GroupControl& control = group.control();
  control.arrivals(entry.shard).store(0, std::memory_order_relaxed);
  const std::uint32_t numPresent = group.numPresent(entry.shard);
  control.contributors(entry.shard).store(numPresent, std::memory_order_relaxed);
  if (std::string difference = disagreement(group, entry.shard); !difference.empty()) {
    report(-1, std::move(difference));
    return;
  }
  const Algorithm algorithm = group.plan().shards[entry.shard].algorithm;
  if (algorithm == Algorithm::kExchange && group.isOnOwnPath(entry.shard)) {
    ownPath_->start(group, entry);
  } else if (algorithm == Algorithm::kExchange) {
    deviceExchange_->distribute(group, entry);
  } else if (algorithm == Algorithm::kGather || numPresent == 0) {
    reduceShard(group, entry);
  } else if (algorithm == Algorithm::kRing && config_.numDevices > 1) {
    appendToRing((*ringLogs_)[entry.shard % kNumRings], entry);
    hasPushedRing_ = true;
  } else {
    pushReady(control, {entry.shard, entry.step});
    ++numPushedReady_;
  }
}

std::string Proxy::disagreement(const TensorGroup& group, std::uint32_t shard) const {
  const std::uint8_t path = group.pathFlags(shard);
  for (std::size_t client = 1; client < config_.numClients; ++client) {
    if ((group.control().contribution(shard, client).flags & kPathFlags) == path) continue;
    return "workers disagree on whether or how they reduce shard " + std::to_string(shard) +
           " themselves: workers 0 and " + std::to_string(client) + " do not agree";
  }
  if (group.plan().hasOptimizer) return updateDisagreement(group, shard);
  if (!group.plan().shards[shard].isDynamic) return {};
  const ShardShape expected = group.shape(shard);
  for (std::size_t client = 0; client < config_.numClients; ++client) {
    const Contribution& other = group.control().contribution(shard, client);
    const ShardShape shape{other.numElements, static_cast<DType>(other.dtype),
                           static_cast<ReduceOp>(other.op)};
    if (shape.numElements == expected.numElements && shape.dtype == expected.dtype && shape.op == expected.op)
      continue;
    return "workers disagree on a buffer: worker " + nameOf(client) + " gave " + describe(shape) +
           ", another one " + describe(expected);
  }
  return {};
}

std::string Proxy::updateDisagreement(const TensorGroup& group, std::uint32_t shard) const {
  constexpr std::uint8_t kKindOfUpdate = kUpdate | kReduced;
  const std::uint8_t expectedKind = group.control().contribution(shard, 0).flags & kKindOfUpdate;
  const UpdateSettings expected = group.settings(shard, 0);
  const auto tensor = [&] { return "tensor " + std::to_string(group.plan().shards[shard].tensor) + ": "; };
  for (std::size_t client = 1; client < config_.numClients; ++client) {
    const auto whom = [&] { return tensor() + "workers " + nameOf(0) + " and " + nameOf(client) + " "; };
    if ((group.control().contribution(shard, client).flags & kKindOfUpdate) != expectedKind) {
      return whom() +
             "are at different points of a step: one averages a gradient, the other one updates the "
             "parameter. Call backward() and optimizer.step() equally often on every worker";
    }
    const UpdateSettings other = group.settings(shard, client);
    if (expectedKind == 0 || std::memcmp(&expected, &other, sizeof(expected)) == 0) continue;
    return whom() + "disagree on the optimizer's settings: " + firstDifference(expected, other) +
           ". Every worker must run the same scheduler and load the same state";
  }
  if (expectedKind != 0 && !canRun(expected, group.plan()))
    return tensor() + "no update rule, or one that keeps more state than was registered";
  return {};
}

// ---- reduction ----

bool Proxy::reduceReadyShard() {
  for (TensorGroup* group : groupList_) {
    ReadyShard ready;
    if (!popReady(group->control(), ready)) continue;
    reduceShard(*group, {group->plan().id, ready.shard, ready.step, 0});
    return true;
  }
  return false;
}

void Proxy::reduceShard(TensorGroup& group, const RingEntry& entry) {
  if (nodeExchange_) {
    nodeExchange_->contribute(group, entry);
    return;
  }
  if (group.plan().hasOptimizer && group.isUpdate(entry.shard)) return updateShard(group, entry);
  const Shard& shard = group.plan().shards[entry.shard];
  std::array<const void*, kMostClients> inputs;
  std::array<void*, kMostClients> outputs;
  std::size_t numInputs = 0;
  for (std::size_t client = 0; client < config_.numClients; ++client) {
    outputs[client] = group.slot(client, shard);
    if (group.isPresent(entry.shard, client)) inputs[numInputs++] = outputs[client];
  }
  const ShardShape shape = group.shape(entry.shard);
  if (numInputs > 0) {
    reduce(shape.dtype, shape.op, inputs.data(), numInputs, outputs.data(), config_.numClients,
           shape.numElements, group.divisor(entry.shard));
  }
  count(shape);
  for (std::size_t client = 0; client < config_.numClients; ++client) finishShard(group, entry, client);
}

void Proxy::updateShard(TensorGroup& group, const RingEntry& entry) noexcept {
  const Shard& shard = group.plan().shards[entry.shard];
  const bool isReduced = group.isReduced(entry.shard);
  std::array<const float*, kMostClients> gradients;
  std::size_t numGradients = 0;
  for (std::size_t client = 0; client < config_.numClients; ++client) {
    if (!group.isPresent(entry.shard, client) || (isReduced && numGradients == 1)) continue;
    gradients[numGradients++] = reinterpret_cast<const float*>(group.slot(client, shard));
  }
  // Looked at again: a client can have written to them since they were compared.
  const UpdateSettings settings = group.settings(entry.shard, 0);
  if (numGradients > 0 && canRun(settings, group.plan())) {
    std::array<float*, kMostStates> states;
    for (std::size_t i = 0; i < group.plan().numStates; ++i) states[i] = group.state(shard, i);
    update(settings, gradients.data(), numGradients, isReduced ? 1 : group.divisor(entry.shard),
           group.parameter(shard), states.data(), shard.numElements);
  }
  count(group.shape(entry.shard));
  for (std::size_t client = 0; client < config_.numClients; ++client) finishShard(group, entry, client);
}

void Proxy::finishShard(TensorGroup& group, const RingEntry& entry, std::size_t client) noexcept {
  // release: the result before the flag.
  group.control().done(client, entry.shard).store(entry.step, std::memory_order_release);
  clients_[client]->segment.inbox().completeOne();
}

void Proxy::count(const ShardShape& shape) noexcept {
  numShards_.fetch_add(1, std::memory_order_relaxed);
  numBytes_.fetch_add(shape.numElements * itemBytes(shape.dtype), std::memory_order_relaxed);
}

TensorGroup* Proxy::findGroup(std::uint32_t group) const noexcept {
  const auto found = groups_.find(group);
  return found == groups_.end() ? nullptr : found->second.get();
}

void Proxy::report(int client, std::string message) {
  const std::lock_guard<std::mutex> lock(controlMutex_);
  events_.push_back({client, std::move(message)});
  notify();
}

std::string Proxy::nameOf(std::size_t client) const {
  return std::to_string(config_.ranks.empty() ? static_cast<int>(client) : config_.ranks[client]);
}

void Proxy::notify() noexcept {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(eventFd_, &one, sizeof(one));
}

}  // namespace coarse
