#include "coarse/client/client.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "coarse/reduce/copy.hpp"
#include "coarse/shared_memory/waiting.hpp"

namespace coarse {
namespace {

// A sleeping wait checks its deadline, its peers and the interpreter's signals this often.
constexpr std::chrono::milliseconds kHealthInterval{100};

// Shards that are awaited together before they are copied out.
constexpr std::uint32_t kShardsPerCopy = 4;

// Shards copied together to slots elsewhere, while the next ones are copied into the view.
constexpr std::uint32_t kShardsPerBring = 16;

std::uint64_t bytesOf(const Shard& shard) { return shard.numElements * itemBytes(shard.dtype); }

std::uint64_t endOf(const Shard& shard) { return shard.offset + bytesOf(shard); }

/// How a shard that is pushed with these flags is synchronised, as metrics number it.
std::size_t wayOf(Algorithm algorithm, std::uint8_t flags) {
  if (isUpdateByMean(flags)) return kUpdateByMean;
  return (flags & kDirectAllReduce) != 0 ? kByWorkers : static_cast<std::size_t>(algorithm);
}

/// Whether steps may be recognised by pushes of a group: gradients are floating-point numbers, and neither
/// buffers that pass through dynamic shards nor link probes.
bool canHaveSteps(const GroupPlan& plan) {
  return std::any_of(plan.shards.begin(), plan.shards.end(), [](const Shard& shard) {
    const bool isFloat =
        shard.dtype != DType::kInt32 && shard.dtype != DType::kInt64 && shard.dtype != DType::kUInt8;
    return isFloat && !shard.isDynamic && shard.algorithm != Algorithm::kProbe;
  });
}

}  // namespace

Client::Client(ClientConfig config, int segmentFd, int doorbellsFd, std::function<void()> interrupt)
    : config_(std::move(config)),
      segmentMapping_(mapSealed(segmentFd, ClientSegment::numBytes(config_.numDevices),
                                Mapping::Access::kReadWrite, "client segment")),
      segment_(segmentMapping_.data()),
      doorbellMapping_(mapSealed(doorbellsFd, config_.numDevices * sizeof(Doorbell),
                                 Mapping::Access::kReadWrite, "doorbells")),
      doorbells_(reinterpret_cast<Doorbell*>(doorbellMapping_.data())),
      epoch_(config_.isNewcomer ? kNoEpoch : std::uint8_t{0}),
      heartbeats_(doorbells_, config_.numDevices, config_.heartbeatLimit),
      interrupt_(std::move(interrupt)),
      heldBackBytes_(config_.numDevices, 0),
      pid_(::getpid()) {
  for (std::size_t device = 0; device < config_.numDevices; ++device)
    producers_.emplace_back(segment_.queue(device));
  if (config_.epochsFd < 0) return;
  epochsMapping_ = mapSealed(config_.epochsFd, sizeof(EpochTable), Mapping::Access::kReadOnly, "epochs");
  epochs_ = reinterpret_cast<const EpochTable*>(epochsMapping_.data());
}

std::shared_ptr<Mapping> Client::addGroup(GroupPlan plan, std::size_t client, int controlFd,
                                          const Region& slotMemory, std::vector<std::uint16_t> routes) {
  auto slots = std::make_shared<Mapping>(
      mapShared(slotMemory, plan.clientBytes(), Mapping::Access::kReadWrite, "slots"));
  addGroup(std::move(plan), client, controlFd, slots, nullptr, std::move(routes));
  return slots;
}

void Client::addGroup(GroupPlan plan, std::size_t client, int controlFd, std::shared_ptr<Mapping> view,
                      std::shared_ptr<SlotCopies> copies, std::vector<std::uint16_t> routes) {
  plan.validate();
  checkRoutes(plan, routes);
  if (copies != nullptr && !plan.shards.empty() && plan.shards[0].isDynamic)
    throw std::invalid_argument("buffers that are not registered need slots which the worker sees");
  auto group = std::make_unique<Group>();
  group->client = client;
  const std::size_t controlBytes = GroupControl::numBytes(plan.shards.size(), plan.numClients, plan.numRanks);
  group->controlMapping = mapSealed(controlFd, controlBytes, Mapping::Access::kReadOnly, "group control");
  group->control =
      GroupControl(group->controlMapping.data(), plan.shards.size(), plan.numClients, plan.numRanks);
  group->slots = std::move(view);
  group->copies = std::move(copies);
  for (std::uint32_t shard = 0; shard < plan.shards.size(); ++shard) {
    const std::uint32_t tensor = plan.shards[shard].tensor;
    if (tensor >= group->tensors.size()) group->tensors.resize(tensor + 1, ClientTensor{shard, 0, 0, false});
    ++group->tensors[tensor].numShards;
    group->numBytes += bytesOf(plan.shards[shard]);
  }
  group->routes = std::move(routes);
  group->directAllReduceFlags.assign(plan.shards.size(), 0);
  group->relays.assign(plan.shards.size(), 0);
  group->joinedAfter.assign(plan.numClients, 0);
  group->plan = std::move(plan);
  const std::uint32_t id = group->plan.id;
  const std::lock_guard lock(groupsMutex_);
  groups_[id] = std::move(group);
  chooseStepGroup();
}

void Client::removeGroup(std::uint32_t group) {
  const std::lock_guard lock(groupsMutex_);
  groups_.erase(group);
  chooseStepGroup();
}

/// @pre groupsMutex_ is locked.
void Client::chooseStepGroup() {
  const Group* largest = nullptr;
  for (const auto& [id, group] : groups_) {
    if (!canHaveSteps(group->plan)) continue;
    if (largest == nullptr || group->numBytes > largest->numBytes) largest = group.get();
  }
  stepGroup_.store(largest, std::memory_order_relaxed);
}

/// Times a step from the first tensor that its first push brought to that tensor's next push. An update by
/// the mean belongs to the step of that mean.
void Client::noteStep(Group& group, std::uint32_t tensor, std::uint8_t flags) noexcept {
  if (&group != stepGroup_.load(std::memory_order_relaxed) || isUpdateByMean(flags)) return;
  std::int64_t first = -1;
  if (!group.firstPushed.compare_exchange_strong(first, tensor) && first != tensor) return;
  const MonotonicNs now = monotonicNow();
  if (group.stepBegan != 0)
    config_.metrics.observe(Metric::kStepSeconds, std::chrono::nanoseconds(now - group.stepBegan));
  group.stepBegan = now;
}

void Client::countPush(const Group& group, std::uint32_t shard, std::uint8_t flags,
                       std::size_t numBytes) const noexcept {
  const std::size_t way = wayOf(group.plan.shards[shard].algorithm, flags);
  const std::size_t series = group.routes[shard] * kNumWays + way;
  config_.metrics.add(Metric::kPushedShards, 1, series);
  // Of a table only some rows travel, which are not counted.
  if ((flags & kPresent) != 0 && way != kUpdateByMean && !group.plan.isTable(group.plan.shards[shard]))
    config_.metrics.add(Metric::kPushedBytes, numBytes, series);
}

void Client::setRoutes(std::uint32_t groupId, std::vector<std::uint16_t> routes) {
  Group& group = find(groupId);
  checkRoutes(group.plan, routes);
  const std::lock_guard lock(postMutex_);
  group.routes = std::move(routes);
}

void Client::setDirectAllReduceFlags(std::uint32_t groupId, std::vector<std::uint8_t> flags,
                                     std::vector<std::uint8_t> relays) {
  Group& group = find(groupId);
  const std::size_t numShards = group.plan.shards.size();
  if (relays.empty()) relays.assign(numShards, 0);
  if (flags.size() != numShards || relays.size() != numShards)
    throw std::invalid_argument("every shard needs its flags and its relay");
  for (const std::uint8_t each : flags) {
    if ((each & ~kDirectAllReduceFlags) != 0)
      throw std::invalid_argument("flags that are not of direct all-reduce");
  }
  for (const std::uint8_t each : relays) {
    if (each >= kNumRelays) throw std::invalid_argument("there is no such relay");
  }
  const std::lock_guard lock(postMutex_);
  group.directAllReduceFlags = std::move(flags);
  group.relays = std::move(relays);
}

void Client::checkRoutes(const GroupPlan& plan, const std::vector<std::uint16_t>& routes) const {
  if (routes.size() != plan.shards.size()) throw std::invalid_argument("every shard needs a route");
  for (const std::uint16_t device : routes) {
    if (device >= config_.numDevices)
      throw std::invalid_argument("a route leads to a memory device that does not exist");
  }
}

void Client::giveUpView(std::uint32_t groupId) {
  Group& group = find(groupId);
  group.copies = nullptr;
  group.slots = nullptr;
}

WaitStatus Client::push(std::uint32_t groupId, std::uint32_t tensorIndex, std::uint8_t flags,
                        const void* source) {
  if (isForked()) return WaitStatus::kForked;
  Group& group = find(groupId);
  ClientTensor& tensor = tensorOf(group, tensorIndex);
  if (tensor.isPending)
    throw std::logic_error("the tensor was pushed again before its last result was pulled");
  noteStep(group, tensorIndex, flags);
  const ShardRange shards = beginPush(groupId, tensorIndex);
  const TimelineSpan span(
      [&](TimelineEvent& event) { describeTensor(event, EventKind::kPush, group, tensorIndex); });
  const bool isElsewhere = group.copies != nullptr;
  if (isElsewhere && (flags & kPresent) != 0) bringTensor(group, tensor, source);
  const std::uint64_t tensorOffset = group.plan.shards[tensor.firstShard].offset;
  for (std::uint32_t i = shards.first; i < shards.last; ++i) {
    const Shard& shard = group.plan.shards[i];
    if (source != nullptr && !isElsewhere) {
      if (group.plan.isTable(shard)) throw std::invalid_argument("a table has no slot to copy to");
      copyBytes(group.slots->data() + shard.offset,
                static_cast<const std::byte*>(source) + (shard.offset - tensorOffset),
                shard.numElements * itemBytes(shard.dtype));
    }
    const std::lock_guard lock(postMutex_);
    const WaitStatus status = postShard(group, i, shards.step, flags, &Client::health);
    if (status != WaitStatus::kDone) return status;
  }
  return WaitStatus::kDone;
}

ShardRange Client::beginPush(std::uint32_t groupId, std::uint32_t tensorIndex) {
  ClientTensor& tensor = tensorOf(find(groupId), tensorIndex);
  tensor.isPending = true;
  ++tensor.step;
  return {tensor.firstShard, tensor.firstShard + tensor.numShards, tensor.step};
}

WaitStatus Client::post(std::uint32_t groupId, const ShardRange& shards, std::uint8_t flags) {
  Group& group = find(groupId);
  const std::uint32_t tensor = group.plan.shards[shards.first].tensor;
  if (group.tensors[tensor].firstShard == shards.first) noteStep(group, tensor, flags);
  const TimelineSpan span(
      [&](TimelineEvent& event) { describeTensor(event, EventKind::kPush, group, tensor); });
  const std::lock_guard lock(postMutex_);
  for (std::uint32_t i = shards.first; i < shards.last; ++i) {
    const WaitStatus status = postShard(group, i, shards.step, flags, &Client::checkPeers);
    if (status != WaitStatus::kDone) return status;
  }
  ringHeldBack();
  return WaitStatus::kDone;
}

bool Client::areDone(std::uint32_t groupId, const ShardRange& shards) const {
  const Group& group = find(groupId);
  for (std::uint32_t i = shards.first; i < shards.last; ++i) {
    if (group.control.done(group.client, i).load(std::memory_order_acquire) != shards.step) return false;
  }
  return true;
}

ShardRange Client::shardsOf(std::uint32_t groupId, std::uint32_t tensorIndex) {
  const ClientTensor& tensor = tensorOf(find(groupId), tensorIndex);
  return {tensor.firstShard, tensor.firstShard + tensor.numShards, tensor.step};
}

WaitStatus Client::waitUntil(const std::function<bool()>& isDone, double timeoutSeconds) {
  if (isForked()) return WaitStatus::kForked;
  const std::uint32_t completed = segment_.inbox().completed.load(std::memory_order_seq_cst);
  return wait(isDone, completed + 1, WaitCause::kBackground, timeoutSeconds);
}

WaitStatus Client::postShard(const Group& group, std::uint32_t shard, std::uint32_t step, std::uint8_t flags,
                             Health health) {
  Descriptor descriptor;
  descriptor.group = group.plan.id;
  descriptor.shard = shard;
  descriptor.step = step;
  descriptor.flags = static_cast<std::uint8_t>(flags | group.directAllReduceFlags[shard]);
  descriptor.op = group.relays[shard];
  descriptor.slotOwner = ownEpoch();
  const std::size_t numBytes = bytesOf(group.plan.shards[shard]);
  countPush(group, shard, descriptor.flags, numBytes);
  return postDescriptor(group.routes[shard], descriptor, numBytes, health);
}

/// Copies a whole tensor to slots that lie elsewhere before notifying devices of any shard: starting and
/// awaiting a copy per shard would cost more than the overlap gains.
void Client::bringTensor(Group& group, const ClientTensor& tensor, const void* source) {
  const std::lock_guard lock(group.copiesMutex);
  const std::uint32_t end = tensor.firstShard + tensor.numShards;
  const std::uint64_t tensorOffset = group.plan.shards[tensor.firstShard].offset;
  for (std::uint32_t first = tensor.firstShard; first < end; first += kShardsPerBring) {
    const std::uint32_t last = std::min(first + kShardsPerBring, end);
    const std::uint64_t offset = group.plan.shards[first].offset;
    const std::size_t numBytes = endOf(group.plan.shards[last - 1]) - offset;
    if (source != nullptr) {
      copyBytes(group.slots->data() + offset, static_cast<const std::byte*>(source) + (offset - tensorOffset),
                numBytes);
    }
    group.copies->stage(offset, numBytes);
  }
  group.copies->synchronize();
}

WaitStatus Client::postDescriptor(std::uint16_t device, Descriptor descriptor, std::size_t numBytes,
                                  Health health) {
  if (config_.isEmulated) descriptor.sentAt = stampOf(monotonicNow());
  WaitTimer timer(config_.metrics, WaitCause::kQueue);
  while (!producers_[device].push(descriptor)) {
    // The queue is full: the device is behind. It needs the processor, and we need to notice if it has died.
    timer.begin();
    doorbells_[device].ring();
    heldBackBytes_[device] = 0;
    YieldingSpin spin(kHealthInterval);
    while (spin.yield()) {
      if (producers_[device].push(descriptor)) return WaitStatus::kDone;
    }
    if (const WaitStatus status = (this->*health)(); status != WaitStatus::kDone) return status;
  }
  heldBackBytes_[device] += numBytes + 1;
  if (heldBackBytes_[device] >= config_.bytesPerRing) {
    heldBackBytes_[device] = 0;
    doorbells_[device].ring();
  }
  return WaitStatus::kDone;
}

void Client::flush() noexcept {
  const std::lock_guard lock(postMutex_);
  ringHeldBack();
}

void Client::ringHeldBack() noexcept {
  for (std::size_t device = 0; device < config_.numDevices; ++device) {
    if (std::exchange(heldBackBytes_[device], 0) > 0) doorbells_[device].ring();
  }
}

WaitStatus Client::pull(std::uint32_t groupId, std::uint32_t tensorIndex, void* destination,
                        double timeoutSeconds) {
  if (isForked()) return WaitStatus::kForked;
  flush();
  Group& group = find(groupId);
  ClientTensor& tensor = tensorOf(group, tensorIndex);
  const TimelineSpan span(
      [&](TimelineEvent& event) { describeTensor(event, EventKind::kPull, group, tensorIndex); });
  const std::uint32_t end = tensor.firstShard + tensor.numShards;
  // A copy starts as soon as a few shards are complete; without a copy there is nothing to do before all are
  // complete.
  const bool isCopied = destination != nullptr || group.copies != nullptr;
  const std::uint32_t batch = isCopied ? kShardsPerCopy : tensor.numShards;
  for (std::uint32_t first = tensor.firstShard; first < end; first += batch) {
    const std::uint32_t last = std::min(first + batch, end);
    const WaitStatus status = waitForShards(group, first, last, WaitCause::kResults, timeoutSeconds);
    if (status != WaitStatus::kDone) return status;
    if (group.copies != nullptr) fetchShards(group, first, last);
    if (destination != nullptr) copyOut(group, first, last, tensor, static_cast<std::byte*>(destination));
  }
  tensor.isPending = false;
  return WaitStatus::kDone;
}

void Client::copyOut(const Group& group, std::uint32_t first, std::uint32_t last, const ClientTensor& tensor,
                     std::byte* destination) noexcept {
  const std::uint64_t tensorOffset = group.plan.shards[tensor.firstShard].offset;
  for (std::uint32_t i = first; i < last; ++i) {
    const Shard& shard = group.plan.shards[i];
    copyBytes(destination + (shard.offset - tensorOffset), group.slots->data() + shard.offset,
              shard.numElements * itemBytes(shard.dtype));
  }
}

WaitStatus Client::pullAll(std::uint32_t groupId, double timeoutSeconds) {
  if (isForked()) return WaitStatus::kForked;
  flush();
  Group& group = find(groupId);
  const TimelineSpan span(
      [&](TimelineEvent& event) { describeTensor(event, EventKind::kPull, group, kEveryTensor); });
  const auto numShards = static_cast<std::uint32_t>(group.plan.shards.size());
  const WaitStatus status = waitForShards(group, 0, numShards, WaitCause::kResults, timeoutSeconds);
  if (status != WaitStatus::kDone) return status;
  if (group.copies != nullptr) fetchPending(group);
  for (ClientTensor& tensor : group.tensors) tensor.isPending = false;
  return WaitStatus::kDone;
}

/// Copies results of these shards to this client's view; shards without a contribution stay unchanged.
void Client::fetchShards(Group& group, std::uint32_t first, std::uint32_t last) {
  const std::lock_guard lock(group.copiesMutex);
  beginFetch(group, first, last);
  group.copies->synchronize();
}

void Client::fetchPending(Group& group) {
  const std::lock_guard lock(group.copiesMutex);
  for (const ClientTensor& tensor : group.tensors) {
    if (tensor.isPending) beginFetch(group, tensor.firstShard, tensor.firstShard + tensor.numShards);
  }
  group.copies->synchronize();
}

/// Begins a copy for each run of shards with contributions. @pre copiesMutex is locked.
void Client::beginFetch(const Group& group, std::uint32_t first, std::uint32_t last) {
  const auto isEmpty = [&](std::uint32_t shard) {
    return group.control.contributors(shard).load(std::memory_order_relaxed) == 0;
  };
  while (first < last) {
    std::uint32_t end = first;
    while (end < last && !isEmpty(end)) ++end;
    if (end > first) {
      const std::uint64_t offset = group.plan.shards[first].offset;
      group.copies->fetch(offset, endOf(group.plan.shards[end - 1]) - offset);
    }
    first = end + 1;
  }
}

bool Client::isShardDone(const Group& group, std::uint32_t shard) noexcept {
  const ClientTensor& tensor = group.tensors[group.plan.shards[shard].tensor];
  return group.control.done(group.client, shard).load(std::memory_order_acquire) == tensor.step;
}

std::uint32_t Client::contributors(std::uint32_t groupId, std::uint32_t tensor) const {
  const Group& group = find(groupId);
  return contributorsOf(group, group.tensors.at(tensor));
}

/// The fewest of any shard: a client that was lost may have contributed to some shards only.
std::uint32_t Client::contributorsOf(const Group& group, const ClientTensor& tensor) noexcept {
  std::uint32_t fewest = group.control.contributors(tensor.firstShard).load(std::memory_order_relaxed);
  for (std::uint32_t i = 1; i < tensor.numShards; ++i)
    fewest =
        std::min(fewest, group.control.contributors(tensor.firstShard + i).load(std::memory_order_relaxed));
  return fewest;
}

std::vector<std::size_t> Client::missingClients(std::uint32_t groupId, std::uint32_t tensorIndex) const {
  const Group& group = find(groupId);
  const ClientTensor& tensor = group.tensors.at(tensorIndex);
  std::vector<std::size_t> missing;
  for (std::size_t client = 0; client < group.plan.numClients; ++client) {
    const std::uint32_t last = tensor.firstShard + tensor.numShards - 1;
    if (group.control.contribution(last, client).step.load(std::memory_order_acquire) < tensor.step) {
      missing.push_back(client);
    }
  }
  return missing;
}

std::vector<std::size_t> Client::clientsAhead(std::uint32_t groupId, std::uint32_t tensorIndex) const {
  const Group& group = find(groupId);
  const ClientTensor& tensor = group.tensors.at(tensorIndex);
  const std::uint32_t last = tensor.firstShard + tensor.numShards - 1;
  std::vector<std::size_t> ahead;
  for (std::size_t client = 0; client < group.plan.numClients; ++client) {
    if (group.control.contribution(last, client).step.load(std::memory_order_acquire) > tensor.step)
      ahead.push_back(client);
  }
  return ahead;
}

std::vector<std::size_t> Client::standIns(std::uint32_t groupId) const {
  const Group& group = find(groupId);
  const std::uint32_t step = group.tensors[group.plan.shards[0].tensor].step;
  std::vector<std::size_t> clients;
  for (std::size_t client = 0; client < group.plan.numClients; ++client) {
    const bool isAbsent = hasStandIn(group, 0, client, step);
    const std::uint32_t last = group.control.contribution(0, client).step.load(std::memory_order_acquire);
    if (isAbsent && last > group.joinedAfter[client]) clients.push_back(client);
  }
  return clients;
}

std::vector<std::size_t> Client::absentRanks(std::uint32_t groupId) const {
  const Group& group = find(groupId);
  const std::uint32_t step = group.tensors[group.plan.shards[0].tensor].step;
  std::vector<std::size_t> ranks;
  for (std::size_t rank = 0; rank < group.plan.numRanks; ++rank) {
    // relaxed: stored before the flags of that step. A later one may be there, for a step under way.
    const std::uint32_t since = group.control.absentSince(rank).load(std::memory_order_relaxed);
    if (since != 0 && since <= step) ranks.push_back(rank);
  }
  return ranks;
}

std::uint8_t Client::ownEpoch() const {
  const std::uint8_t epoch = epoch_.load(std::memory_order_relaxed);
  if (epoch == kNoEpoch)
    throw std::logic_error("this worker takes part in the training only from its first forward on");
  return epoch;
}

std::uint32_t Client::newestEpoch() const noexcept {
  return epochs_ == nullptr ? 0 : epochs_->newest.load(std::memory_order_acquire);
}

std::uint8_t Client::memberSince(std::size_t client) const noexcept {
  return epochs_ == nullptr ? 0 : epochs_->memberSince[client].load(std::memory_order_acquire);
}

std::vector<std::size_t> Client::newcomersOf(std::uint32_t epoch) const {
  std::vector<std::size_t> clients;
  if (epochs_ == nullptr) return clients;
  const auto& bits = epochs_->newcomers.at(epoch);
  for (std::size_t client = 0; client < kMostPlaces; ++client) {
    if ((bits[client / 64].load(std::memory_order_relaxed) >> client % 64 & 1) != 0)
      clients.push_back(client);
  }
  return clients;
}

void Client::enterEpoch(std::uint8_t epoch, const std::vector<std::size_t>& newcomers) {
  const std::lock_guard lock(groupsMutex_);
  for (auto& [id, group] : groups_) {
    const std::uint32_t step = group->tensors[group->plan.shards[0].tensor].step;
    for (const std::size_t client : newcomers) group->joinedAfter.at(client) = step;
  }
  epoch_.store(epoch, std::memory_order_relaxed);
}

std::vector<std::uint32_t> Client::steps(std::uint32_t groupId) const {
  std::vector<std::uint32_t> steps;
  for (const ClientTensor& tensor : find(groupId).tensors) steps.push_back(tensor.step);
  return steps;
}

void Client::setSteps(std::uint32_t groupId, const std::vector<std::uint32_t>& steps) {
  Group& group = find(groupId);
  if (steps.size() != group.tensors.size()) throw std::invalid_argument("every tensor needs its step");
  for (std::size_t i = 0; i < steps.size(); ++i) group.tensors[i].step = steps[i];
}

bool Client::areStepsDone(std::uint32_t groupId) const {
  const Group& group = find(groupId);
  for (std::uint32_t shard = 0; shard < group.plan.shards.size(); ++shard) {
    if (!isShardDone(group, shard)) return false;
  }
  return true;
}

std::pair<std::uint32_t, std::vector<std::uint32_t>> Client::updates(std::uint32_t groupId) const {
  const Group& group = find(groupId);
  std::pair<std::uint32_t, std::vector<std::uint32_t>> updates;
  for (const ClientTensor& tensor : group.tensors) {
    const UpdateRecord& record = group.control.update(tensor.firstShard);
    updates.first = std::max(updates.first, record.step.load(std::memory_order_acquire));
    updates.second.push_back(record.updateNumber.load(std::memory_order_relaxed));
  }
  return updates;
}

std::vector<std::uint32_t> Client::allContributors(std::uint32_t groupId) const {
  const Group& group = find(groupId);
  std::vector<std::uint32_t> contributors;
  contributors.reserve(group.tensors.size());
  for (const ClientTensor& tensor : group.tensors) contributors.push_back(contributorsOf(group, tensor));
  return contributors;
}

std::vector<GradientMeasure> Client::measures(std::uint32_t groupId) const {
  const Group& group = find(groupId);
  std::vector<GradientMeasure> measures;
  measures.reserve(group.tensors.size());
  for (const ClientTensor& tensor : group.tensors) {
    GradientMeasure sum{0, kNobody, 0};
    for (std::uint32_t i = tensor.firstShard; i < tensor.firstShard + tensor.numShards; ++i) {
      const GradientMeasure& shard = group.control.measure(i);
      sum.sumOfSquares += shard.sumOfSquares;
      if (sum.nonFiniteOf == kNobody) sum.nonFiniteOf = shard.nonFiniteOf;
    }
    measures.push_back(sum);
  }
  return measures;
}

bool Client::isLate(std::uint32_t groupId, std::uint32_t tensorIndex) const {
  const Group& group = find(groupId);
  const ClientTensor& tensor = group.tensors.at(tensorIndex);
  for (std::uint32_t shard = tensor.firstShard; shard < tensor.firstShard + tensor.numShards; ++shard) {
    if (!isShardDone(group, shard)) return true;
  }
  return false;
}

WaitStatus Client::probe(std::uint32_t groupId, const std::vector<ClientProbe>& probes, double timeoutSeconds,
                         std::vector<double>& seconds) {
  if (isForked()) return WaitStatus::kForked;
  Group& group = find(groupId);
  const MonotonicNs begin = monotonicNow();
  for (const ClientProbe& probe : probes) {
    ClientTensor& tensor = tensorOf(group, probe.tensor);
    if (tensor.numShards != 1 || isLate(groupId, probe.tensor) || probe.device >= config_.numDevices)
      throw std::invalid_argument("a probe takes a tensor of one shard that is not under way, and a device");
    Descriptor descriptor;
    descriptor.group = groupId;
    descriptor.shard = tensor.firstShard;
    descriptor.step = ++tensor.step;
    probe.request.writeTo(descriptor);
    config_.metrics.add(Metric::kPushedShards, 1,
                        probe.device * kNumWays + static_cast<std::size_t>(Algorithm::kProbe));
    // A ring between two posts could cost the processor, and delay the second post.
    const std::lock_guard lock(postMutex_);
    if (const WaitStatus status = postDescriptor(probe.device, descriptor, 0); status != WaitStatus::kDone)
      return status;
  }
  flush();
  seconds.assign(probes.size(), 0);
  std::size_t numDone = 0;
  const auto noteDone = [&] {
    const std::size_t before = numDone;
    const MonotonicNs now = monotonicNow();
    for (std::size_t i = 0; i < probes.size(); ++i) {
      if (seconds[i] > 0 || isLate(groupId, probes[i].tensor)) continue;
      seconds[i] = static_cast<double>(std::max<MonotonicNs>(1, now - begin)) / 1e9;
      ++numDone;
    }
    return numDone > before;
  };
  while (numDone < probes.size()) {
    const std::uint32_t completed = segment_.inbox().completed.load(std::memory_order_seq_cst);
    const WaitStatus status = wait(noteDone, completed + 1, WaitCause::kProbe, timeoutSeconds);
    if (status != WaitStatus::kDone) return status;
  }
  return WaitStatus::kDone;
}

WaitStatus Client::waitForShards(const Group& group, std::uint32_t first, std::uint32_t last, WaitCause cause,
                                 double timeoutSeconds) {
  const std::uint32_t completed = segment_.inbox().completed.load(std::memory_order_seq_cst);
  std::uint32_t shard = first;
  const auto areDone = [&] {
    while (shard < last && isShardDone(group, shard)) ++shard;
    return shard == last;
  };
  // Every unfinished shard needs its own completion, so an earlier wake-up would be useless.
  std::uint32_t numUnfinished = 0;
  for (std::uint32_t i = first; i < last; ++i) numUnfinished += isShardDone(group, i) ? 0 : 1;
  if (areDone()) return WaitStatus::kDone;  // else `shard` is the first unfinished one
  const TimelineSpan span([&](TimelineEvent& event) {
    const std::uint32_t step = group.tensors[group.plan.shards[shard].tensor].step;
    describe(event, EventKind::kWait, group, {shard, shard + 1, step});
    for (std::size_t client = 0; client < std::min<std::size_t>(group.plan.numClients, 64); ++client) {
      if (group.control.contribution(shard, client).step.load(std::memory_order_acquire) < step)
        event.detail |= std::uint64_t{1} << client;
    }
  });
  return wait(areDone, completed + numUnfinished, cause, timeoutSeconds);
}

template <typename IsDone>
WaitStatus Client::wait(IsDone isDone, std::uint32_t wakeAt, WaitCause cause, double timeoutSeconds) {
  if (isDone()) return WaitStatus::kDone;
  WaitTimer timer(config_.metrics, cause);
  timer.begin();
  Inbox& inbox = segment_.inbox();
  YieldingSpin spin(config_.spinBudget);
  do {
    if (isDone()) return WaitStatus::kDone;
  } while (spin.yield());

  Patience patience(timeoutSeconds);
  const auto began = Clock::now();
  auto nextHealthCheck = began + kHealthInterval;
  double nextNotice = warnAfterSeconds_;
  WaitStatus status = WaitStatus::kDone;
  inbox.wakeAt.store(wakeAt, std::memory_order_relaxed);
  inbox.sleeping.store(1, std::memory_order_seq_cst);
  while (true) {
    const std::uint32_t seen = inbox.completed.load(std::memory_order_seq_cst);
    if (isDone()) break;
    if (static_cast<std::int32_t>(seen - wakeAt) >= 0)
      inbox.wakeAt.store(seen + 1, std::memory_order_seq_cst);
    if (inbox.completed.load(std::memory_order_seq_cst) != seen) continue;
    if (inbox.aborted.load(std::memory_order_acquire) == 0) futexWait(inbox.completed, seen, kHealthInterval);
    const auto now = Clock::now();
    if (inbox.aborted.load(std::memory_order_acquire) == 0 && now < nextHealthCheck) continue;
    nextHealthCheck = now + kHealthInterval;
    if (isDone()) break;
    if (status = health(); status != WaitStatus::kDone) break;
    const double waited = std::chrono::duration<double>(now - began).count();
    if (onLate_ && waited >= nextNotice) {
      nextNotice *= 2;
      onLate_(waited);
    }
    if (patience.isOver()) {
      status = WaitStatus::kTimedOut;
      break;
    }
  }
  inbox.sleeping.store(0, std::memory_order_relaxed);
  return status;
}

WaitStatus Client::health() {
  if (interrupt_) interrupt_();
  return checkPeers();
}

WaitStatus Client::checkPeers() {
  if (segment_.inbox().aborted.load(std::memory_order_acquire) != 0) return WaitStatus::kAborted;
  for (std::size_t device = 0; device < config_.watchFds.size(); ++device) {
    pollfd watched{config_.watchFds[device], POLLIN, 0};
    if (::poll(&watched, 1, 0) > 0 && (watched.revents & (POLLHUP | POLLERR | POLLNVAL)) != 0) {
      lostDevice_ = device;
      return WaitStatus::kDeviceLost;
    }
  }
  const std::lock_guard lock(peersMutex_);
  if (const auto silent = heartbeats_.look()) {
    lostDevice_ = *silent;
    return WaitStatus::kDeviceSilent;
  }
  return WaitStatus::kDone;
}

bool Client::isForked() const noexcept { return ::getpid() != pid_; }

void Client::describe(TimelineEvent& event, EventKind kind, const Group& group,
                      const ShardRange& shards) const noexcept {
  event.kind = kind;
  event.session = timelineSession_;
  event.group = group.plan.id;
  event.index = shards.first;
  event.step = shards.step;
  for (std::uint32_t i = shards.first; i < shards.last; ++i)
    event.numBytes += group.plan.shards[i].numElements * itemBytes(group.plan.shards[i].dtype);
}

void Client::describeTensor(TimelineEvent& event, EventKind kind, const Group& group,
                            std::uint32_t index) const noexcept {
  const auto numShards = static_cast<std::uint32_t>(group.plan.shards.size());
  if (index == kEveryTensor) {
    describe(event, kind, group, {0, numShards, 0});
  } else {
    const ClientTensor& tensor = group.tensors[index];
    describe(event, kind, group, {tensor.firstShard, tensor.firstShard + tensor.numShards, tensor.step});
  }
  event.index = index;
}

Client::Group& Client::find(std::uint32_t group) {
  const std::lock_guard lock(groupsMutex_);
  const auto found = groups_.find(group);
  if (found == groups_.end())
    throw std::invalid_argument("tensor group " + std::to_string(group) + " is closed");
  return *found->second;
}

const Client::Group& Client::find(std::uint32_t group) const {
  return const_cast<Client*>(this)->find(group);
}

ClientTensor& Client::tensorOf(Group& group, std::uint32_t tensor) {
  if (tensor >= group.tensors.size()) {
    throw std::invalid_argument("tensor " + std::to_string(tensor) + " of a group of " +
                                std::to_string(group.tensors.size()));
  }
  return group.tensors[tensor];
}

}  // namespace coarse
