#include "coarse/node/node_exchange.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "coarse/reduce/reduce.hpp"

namespace coarse {
namespace {

/// Nodes send sums to the owner; only the owner divides them into means.
ReduceOp partialOp(ReduceOp op) noexcept { return op == ReduceOp::kMean ? ReduceOp::kSum : op; }

std::string describe(const ShardShape& shape) {
  return std::to_string(shape.numElements) + " elements of dtype " +
         std::to_string(static_cast<int>(shape.dtype)) + " with op " +
         std::to_string(static_cast<int>(shape.op));
}

bool areEqual(const ShardShape& a, const ShardShape& b) noexcept {
  return a.numElements == b.numElements && a.dtype == b.dtype && a.op == b.op;
}

ShardShape shapeOf(const NodeContribution& contribution) noexcept {
  return {contribution.numElements, static_cast<DType>(contribution.dtype),
          static_cast<ReduceOp>(contribution.op)};
}

ShardShape shapeOf(const FrameHeader& header) noexcept {
  return {header.numElements, static_cast<DType>(header.dtype), static_cast<ReduceOp>(header.op)};
}

std::size_t numBytes(const ShardShape& shape) { return shape.numElements * itemBytes(shape.dtype); }

std::size_t sentBytes(const ShardShape& shape, Compression compression) {
  if (compression == Compression::kNone) return numBytes(shape);
  return compressedBytes(compression, shape.numElements);
}

/// Whether a shard of the plan can have the shape that a frame claims.
bool fits(const Shard& shard, const FrameHeader& header) {
  if (header.dtype >= kNumDTypes || header.op >= kNumReduceOps) return false;
  const ShardShape shape = shapeOf(header);
  if (shard.isDynamic) return numBytes(shape) <= shard.numElements;
  return areEqual(shape, {shard.numElements, shard.dtype, shard.op});
}

FrameHeader headerOf(FrameKind kind, const RingEntry& entry, const ShardShape& shape,
                     std::uint32_t numPresent, Compression compression) {
  FrameHeader header;
  header.kind = kind;
  header.group = entry.group;
  header.shard = entry.shard;
  header.step = entry.step;
  header.dtype = static_cast<std::uint8_t>(shape.dtype);
  header.op = static_cast<std::uint8_t>(shape.op);
  header.numElements = shape.numElements;
  header.numPresent = numPresent;
  header.compression = static_cast<std::uint8_t>(compression);
  header.payloadBytes = numPresent == 0 ? 0 : sentBytes(shape, compression);
  return header;
}

void record(NodeContribution& contribution, const FrameHeader& header) noexcept {
  contribution.numElements = header.numElements;
  contribution.numPresent = header.numPresent;
  contribution.numCounted = header.numCounted;
  contribution.settings = header.settings;
  contribution.dtype = header.dtype;
  contribution.op = header.op;
  contribution.arrivedAt = header.dueAt;
  contribution.step.store(header.step, std::memory_order_seq_cst);
}

/// One byte of an FNV-1a digest.
std::uint32_t mix(std::uint32_t digest, std::uint8_t byte) noexcept { return (digest ^ byte) * 16777619U; }

/// Digest of the settings by which this node's workers update a shard's parameter.
/// @pre all of them have pushed an update that is not complete, and therefore write no other settings.
std::uint32_t settingsDigest(const TensorGroup& group, std::uint32_t shard) noexcept {
  const UpdateSettings settings = group.settings(shard);
  std::array<std::uint8_t, offsetof(UpdateSettings, hasGradient)> bytes;
  std::memcpy(bytes.data(), &settings, bytes.size());
  std::uint32_t digest = 2166136261U;
  for (const std::uint8_t byte : bytes) digest = mix(digest, byte);
  return digest;
}

/// The digest on which nodes must agree: the settings of this update, or of the last one, and whether it is
/// an update.
std::uint32_t agreement(const TensorGroup& group, const NodeSegment& segment, std::uint32_t shard) noexcept {
  if (!group.plan().hasOptimizer) return 0;
  const std::uint32_t digest = group.isUpdate(shard)
                                   ? settingsDigest(group, shard)
                                   : segment.settings(shard).load(std::memory_order_relaxed);
  return mix(digest, group.control().contribution(shard, 0).flags & (kUpdate | kMeasure));
}

/// The header of a node's contribution to a step.
FrameHeader contributionHeader(const TensorGroup& group, const NodeSegment& segment, const RingEntry& entry) {
  FrameHeader header = headerOf(FrameKind::kPartial, entry, group.shape(entry.shard),
                                group.numPresent(entry.shard), segment.compression(entry.shard));
  header.numCounted = group.numCounted(entry.shard);
  header.settings = agreement(group, segment, entry.shard);
  return header;
}

/// Compares steps, which wrap around.
bool isAfter(std::uint32_t step, std::uint32_t other) noexcept {
  return static_cast<std::int32_t>(step - other) > 0;
}

/// Whether a step of a shard can be the next after `done` to which nodes contribute. A node does not report
/// the steps that it updates by itself, so with an optimizer it may be any later one.
bool canFollow(const TensorGroup& group, std::uint32_t step, std::uint32_t done) noexcept {
  return group.plan().hasOptimizer ? isAfter(step, done) : step == done + 1;
}

RingEntry entryOf(const FrameHeader& header) noexcept {
  return {header.group, header.shard, header.step, stampOf(header.dueAt)};
}

std::string nameOf(const FrameHeader& header) {
  return "step " + std::to_string(header.step) + " of shard " + std::to_string(header.shard) +
         " of tensor group " + std::to_string(header.group);
}

void decompressInPlace(const NodeSegment& segment, const FrameHeader& header, std::byte* payload) noexcept {
  const Compression compression = segment.compression(header.shard);
  if (compression == Compression::kNone || header.payloadBytes == 0) return;
  decompress(compression, payload, header.numElements, reinterpret_cast<float*>(payload));
}

void compressInPlace(const NodeSegment& segment, std::uint32_t shard, std::size_t numElements,
                     std::byte* partial) noexcept {
  const Compression compression = segment.compression(shard);
  if (compression == Compression::kNone || numElements == 0) return;
  compress(compression, reinterpret_cast<float*>(partial), numElements, partial, segment.residual(shard));
}

}  // namespace

NodeExchange::NodeExchange(std::size_t node, std::vector<std::vector<int>> ranks,
                           const std::vector<std::vector<int>>& fds, Reduce reduce, FinishShard finishShard,
                           Report report, std::function<void(NodeEvent)> onEvent, NodePacing pacing,
                           ProcessMetrics metrics, LinkOptions options, Compression compression,
                           bool mayLoseNodes)
    : index_{node, ranks.size()},
      compression_(compression),
      ranks_(std::move(ranks)),
      reduce_(std::move(reduce)),
      finishShard_(std::move(finishShard)),
      report_(std::move(report)),
      pacing_(std::move(pacing)),
      hasLeft_(new std::atomic<bool>[index_.numNodes]()),
      mayLoseNodes_(mayLoseNodes),
      onEvent_(onEvent),
      isGone_(new std::atomic<bool>[index_.numNodes]()),
      links_(node, fds,
             {[this](std::size_t from, const FrameHeader& header) { return open(from, header); },
              [this](std::size_t from, const FrameHeader& header, const FramePayload& payload) {
                close(from, header, payload);
              },
              [this, onEvent = std::move(onEvent)](NodeEvent event) { passOn(std::move(event), onEvent); }},
             std::move(metrics), options) {
  if (index_.numNodes > kMostNodes)
    throw std::invalid_argument("a job has at most " + std::to_string(kMostNodes) + " nodes");
  if (node >= index_.numNodes || fds.size() != index_.numNodes)
    throw std::invalid_argument(
        "node must be below the number of nodes, and each needs a list of connections");
  if (mayLoseNodes_ && (compression_ != Compression::kNone || pacing_.at))
    throw std::invalid_argument("no node may be lost where links are emulated or gradients compressed");
  allOwners_.push_back(std::make_unique<const NodeOwners>(index_.numNodes));
  owners_.store(allOwners_.back().get());
}

// ---- groups ----

void NodeExchange::addGroup(std::shared_ptr<TensorGroup> group, const Region& memory) {
  const std::uint32_t id = group->plan().id;
  NodeSegment segment(group->plan(), index_, memory, group->memory(), compression_, mayLoseNodes_);
  auto added = std::make_shared<Group>(Group{std::move(group), std::move(segment)});
  const std::lock_guard<std::mutex> lock(groupsMutex_);
  groups_[id] = std::move(added);
}

void NodeExchange::removeGroup(std::uint32_t group) {
  GroupPointer unused;  // unmapped after the lock is released
  const std::lock_guard<std::mutex> lock(groupsMutex_);
  const auto found = groups_.find(group);
  if (found == groups_.end()) return;
  unused = std::move(found->second);
  groups_.erase(found);
}

NodeExchange::GroupPointer NodeExchange::find(std::uint32_t group) {
  const std::lock_guard<std::mutex> lock(groupsMutex_);
  const auto found = groups_.find(group);
  return found == groups_.end() ? nullptr : found->second;
}

std::vector<NodeExchange::GroupPointer> NodeExchange::allGroups() {
  const std::lock_guard<std::mutex> lock(groupsMutex_);
  std::vector<GroupPointer> groups;
  for (const auto& [id, group] : groups_) groups.push_back(group);
  return groups;
}

// ---- contributions ----

void NodeExchange::contribute(const TensorGroup& tensors, const RingEntry& entry) {
  const GroupPointer group = find(tensors.plan().id);
  if (group == nullptr || park(entry)) return;
  if (!owns(entry.shard)) {
    sendPartial(group, entry);
    return;
  }
  recordOwn(group, entry, false);
  arrive(group, entry);
}

/// Records the contribution of this node to a shard that it owns. `isReduced` as in NodeContribution.
void NodeExchange::recordOwn(const GroupPointer& group, const RingEntry& entry, bool isReduced) {
  const TensorGroup& tensors = *group->tensors;
  FrameHeader header = contributionHeader(tensors, group->segment, entry);
  header.dueAt = timeOfEvent(entry);
  for (const std::uint32_t rank : newlyAbsent(*group, entry.shard))
    tensors.control().absentSince(rank).store(entry.step, std::memory_order_relaxed);
  NodeContribution& own = group->segment.contribution(entry.shard, index_.node);
  own.isReduced = isReduced ? 1 : 0;
  record(own, header);
}

void NodeExchange::reduce(const TensorGroup& tensors, const RingEntry& entry) {
  if (const GroupPointer group = find(tensors.plan().id); group != nullptr) reduceOwned(group, entry);
}

/// The emulated time at which an entry is processed; 0 for real links.
MonotonicNs NodeExchange::timeOfEvent(const RingEntry& entry) const noexcept {
  return pacing_.at ? timeOf(entry.completedAt, monotonicNow()) : 0;
}

/// @param header dueAt is the time at which the frame is sent.
void NodeExchange::send(std::size_t node, const GroupPointer& group, FrameHeader header, std::byte* payload) {
  if (pacing_.arrivalOf) header.dueAt = pacing_.arrivalOf(*group->tensors, node, header, header.dueAt);
  links_.send(node, header, {payload, group});
}

void NodeExchange::recordSettings(const TensorGroup& tensors, std::uint32_t shard) {
  const GroupPointer group = find(tensors.plan().id);
  if (group == nullptr) return;
  // relaxed: the next contribution to the shard comes after this update.
  group->segment.settings(shard).store(settingsDigest(tensors, shard), std::memory_order_relaxed);
}

/// Reduces a shard, if it has inputs.
void NodeExchange::run(const GroupPointer& group, const RingEntry& entry, ShardArrays arrays) {
  TensorGroup& tensors = *group->tensors;
  const bool isEmpty = arrays.inputs.empty();
  if (isEmpty && arrays.isMeasured) tensors.control().measure(entry.shard) = {0, kNobody, 0};
  if (isEmpty || (arrays.outputs.empty() && !arrays.isMeasured)) return arrays.finish();
  reduce_(tensors, entry, std::move(arrays));
}

/// Reduces the contributions of this node's workers, and sends the result: from its stage, or else from the
/// slot of the first worker with a contribution, which belongs to the memory devices until the result is
/// there.
void NodeExchange::sendPartial(const GroupPointer& group, const RingEntry& entry) {
  const TensorGroup& tensors = *group->tensors;
  const NodeSegment& segment = group->segment;
  const Shard& shard = tensors.plan().shards[entry.shard];
  ShardArrays arrays;
  arrays.op = partialOp(tensors.shape(entry.shard).op);
  std::byte* const stage = segment.stage(entry.shard);
  if (stage != nullptr) arrays.outputs = {segment.reached(stage)};
  for (std::size_t client = 0; client < tensors.plan().numClients; ++client) {
    if (tensors.isPresent(entry.shard, client)) arrays.inputs.push_back(tensors.slot(client, shard));
  }
  std::byte* const partial = partialOf(*group, entry.shard);
  if (stage == nullptr && arrays.inputs.size() > 1) arrays.outputs = {partial};
  const std::size_t numSent = arrays.inputs.empty() ? 0 : tensors.shape(entry.shard).numElements;
  arrays.finish = [this, group, entry, numSent, partial] {
    compressInPlace(group->segment, entry.shard, numSent, partial);
    sendContribution(group, entry);
  };
  run(group, entry, std::move(arrays));
}

/// Where this node's contribution to a shard of another one lies; null if nobody has contributed.
std::byte* NodeExchange::partialOf(const Group& group, std::uint32_t shard) const noexcept {
  const TensorGroup& tensors = *group.tensors;
  std::byte* partial = group.segment.stage(shard);
  for (std::size_t client = 0; client < tensors.plan().numClients && partial == nullptr; ++client) {
    if (tensors.isPresent(shard, client)) partial = tensors.slot(client, tensors.plan().shards[shard]);
  }
  return partial;
}

/// Sends this node's contribution, which lies in its place, to the owner. From now on the result may come.
void NodeExchange::sendContribution(const GroupPointer& group, const RingEntry& entry) {
  FrameHeader header = contributionHeader(*group->tensors, group->segment, entry);
  header.dueAt = timeOfEvent(entry);
  const std::size_t owner = ownerOf(entry.shard);
  const std::vector<std::uint32_t> absent = newlyAbsent(*group, entry.shard);
  std::byte* const partial = partialOf(*group, entry.shard);
  // release: the receiver of the result, at any device, sees that it is the result, and all earlier reads are
  // done.
  group->segment.round(entry.shard).store(entry.step, std::memory_order_release);
  for (const std::uint32_t rank : absent) sendAbsence(owner, group, entry, rank);
  send(owner, group, header, partial);
}

/// Workers of this node for which a memory device stands in at this shard, if it is shard 0 and the other
/// nodes have not been told. @pre all clients have contributed.
std::vector<std::uint32_t> NodeExchange::newlyAbsent(const Group& group, std::uint32_t shard) const {
  const TensorGroup& tensors = *group.tensors;
  std::vector<std::uint32_t> ranks;
  if (shard != 0 || tensors.plan().numRanks == 0) return ranks;
  for (std::size_t client = 0; client < tensors.plan().numClients; ++client) {
    const auto rank = static_cast<std::uint32_t>(ranks_[index_.node][client]);
    // relaxed: stored for an earlier step, or not at all.
    const bool isKnown = tensors.control().absentSince(rank).load(std::memory_order_relaxed) != 0;
    if (!isKnown && tensors.isStandIn(shard, client)) ranks.push_back(rank);
  }
  return ranks;
}

/// Says that a worker is absent from this step of shard 0 on. The partial or result of the step, which
/// follows over the same connection, comes after it.
void NodeExchange::sendAbsence(std::size_t node, const GroupPointer& group, const RingEntry& entry,
                               std::uint32_t rank) {
  FrameHeader header;
  header.kind = FrameKind::kAbsent;
  header.group = entry.group;
  header.shard = entry.shard;
  header.step = entry.step;
  header.numElements = rank;
  send(node, group, header, nullptr);
}

/// @pre the contribution was recorded.
void NodeExchange::arrive(const GroupPointer& group, const RingEntry& entry) {
  // seq_cst throughout: whoever is last, of those that record contributions or note that a node is gone, sees
  // all that came before; workerLeftNode() sees this contribution, or we see that a worker left.
  if (begins(*group, entry.shard)) {
    beginOwned(group, entry);
  } else if (lacksOneThatLeft(*group, entry.shard)) {
    report_({});
  }
}

/// Whether all nodes that live have contributed to the next step of an owned shard, and nobody else was told
/// so.
bool NodeExchange::begins(const Group& group, std::uint32_t shard) noexcept {
  const NodeSegment& segment = group.segment;
  std::uint32_t ours = 0;
  for (std::uint32_t done = segment.round(shard).load(std::memory_order_seq_cst);;) {
    ours = segment.contribution(shard, index_.node).step.load(std::memory_order_seq_cst);
    for (std::size_t node = 0; node < index_.numNodes; ++node) {
      const std::uint32_t step = segment.contribution(shard, node).step.load(std::memory_order_seq_cst);
      if (!isAfter(step, done) && (node == index_.node || isLive(node))) return false;
    }
    // If another thread has finished the step meanwhile, some contributions may be to the next one.
    const std::uint32_t stillDone = segment.round(shard).load(std::memory_order_seq_cst);
    if (stillDone == done) break;
    done = stillDone;
  }
  std::uint32_t last = segment.begun(shard).load(std::memory_order_seq_cst);
  return isAfter(ours, last) && segment.begun(shard).compare_exchange_strong(last, ours);
}

/// Whether a node has contributed to the step of an owned shard that is reduced. @pre all that live have.
bool NodeExchange::counts(const Group& group, std::uint32_t shard, std::size_t node) const noexcept {
  const NodeSegment& segment = group.segment;
  return isLive(node) || segment.contribution(shard, node).step.load(std::memory_order_acquire) ==
                             segment.contribution(shard, index_.node).step.load(std::memory_order_acquire);
}

/// Notes, with shard 0, that the workers of lost nodes are absent from this step on.
void NodeExchange::noteAbsentNodes(const Group& group, const RingEntry& entry) const noexcept {
  const TensorGroup& tensors = *group.tensors;
  if (entry.shard != 0 || tensors.plan().numRanks == 0) return;
  for (std::size_t node = 0; node < index_.numNodes; ++node) {
    if (counts(group, entry.shard, node)) continue;
    for (const int rank : ranks_[node]) {
      auto& since = tensors.control().absentSince(static_cast<std::size_t>(rank));
      if (since.load(std::memory_order_relaxed) == 0) since.store(entry.step, std::memory_order_relaxed);
    }
  }
}

// ---- the owner ----

/// All nodes that live have contributed to a shard.
void NodeExchange::beginOwned(const GroupPointer& group, RingEntry entry) {
  noteAbsentNodes(*group, entry);
  if (!pacing_.gathered) return reduceOwned(group, entry);
  MonotonicNs latest = 0;  // a contribution that this process noticed last may have arrived earlier
  for (std::size_t node = 0; node < index_.numNodes; ++node)
    latest = std::max(latest, group->segment.contribution(entry.shard, node).arrivedAt);
  entry.completedAt = stampOf(latest);
  pacing_.gathered(*group->tensors, entry, total(*group, entry.shard, &NodeContribution::numPresent));
}

void NodeExchange::reduceOwned(const GroupPointer& group, const RingEntry& entry) {
  if (std::string difference = disagreement(*group, entry.shard); !difference.empty()) {
    report_(std::move(difference));
    return;
  }
  const TensorGroup& tensors = *group->tensors;
  const NodeSegment& segment = group->segment;
  const Shard& shard = tensors.plan().shards[entry.shard];
  const bool isCompressed = segment.compression(entry.shard) != Compression::kNone &&
                            total(*group, entry.shard, &NodeContribution::numPresent) > 0;
  ShardArrays arrays;
  const auto add = [&](std::byte* array, bool isPresent) {
    arrays.outputs.push_back(array);
    if (isPresent) arrays.inputs.push_back(array);
  };
  // In the order of the nodes, so that results do not depend on arrival order. Each partial is one term; the
  // contributions of this node's workers are separate terms, which saves a pass over them.
  for (std::size_t node = 0; node < index_.numNodes; ++node) {
    if (node != index_.node) {
      if (counts(*group, entry.shard, node))
        add(segment.reached(segment.place(entry.shard, node)),
            segment.contribution(entry.shard, node).numPresent > 0);
      continue;
    }
    const bool isReduced = segment.contribution(entry.shard, node).isReduced != 0;
    const std::byte* const reduced = isReduced ? partialOf(*group, entry.shard) : nullptr;
    for (std::size_t client = 0; client < tensors.plan().numClients; ++client) {
      std::byte* const slot = tensors.slot(client, shard);
      // A worker that has left may still write to its slot.
      if (!tensors.isStandIn(entry.shard, client))
        add(slot, tensors.isPresent(entry.shard, client) && (!isReduced || slot == reduced));
    }
  }
  arrays.op = tensors.shape(entry.shard).op;
  arrays.divisor = std::max(total(*group, entry.shard, &NodeContribution::numCounted), 1U);
  arrays.isMeasured = !isCompressed && tensors.isMeasured(entry.shard);
  if (isCompressed) arrays.outputs = {reachedResult(*group, entry.shard)};
  arrays.finish = [this, group, entry, isCompressed] {
    isCompressed ? compressMean(group, entry) : noteResult(group, entry);
  };
  run(group, entry, std::move(arrays));
}

/// Compresses the mean of an owned shard to the places from which it is sent. All workers of all nodes get
/// what the compressed form stands for.
void NodeExchange::compressMean(const GroupPointer& group, const RingEntry& entry) {
  const NodeSegment& segment = group->segment;
  const Compression compression = segment.compression(entry.shard);
  const std::size_t numElements = group->tensors->shape(entry.shard).numElements;
  auto* const mean = reinterpret_cast<float*>(resultOf(*group, entry.shard));
  std::byte* const first = segment.place(entry.shard, index_.node == 0 ? 1 : 0);
  compress(compression, mean, numElements, first, segment.residual(entry.shard));
  for (std::size_t node = 0; node < index_.numNodes; ++node) {
    std::byte* const place = node == index_.node ? first : segment.place(entry.shard, node);
    if (place != first) std::memcpy(place, first, compressedBytes(compression, numElements));
  }
  announce(group, entry);
  giveToClients(group, entry, reachedResult(*group, entry.shard),
                [this, group, entry] { finishShard_(*group->tensors, entry); });
}

/// The result of an owned shard is in place for all nodes.
void NodeExchange::noteResult(const GroupPointer& group, const RingEntry& entry) {
  announce(group, entry);
  finishShard_(*group->tensors, entry);
}

/// Sends the result of an owned shard, which lies in the places, to the other nodes.
void NodeExchange::announce(const GroupPointer& group, const RingEntry& entry) {
  TensorGroup& tensors = *group->tensors;
  const std::uint32_t numPresent = total(*group, entry.shard, &NodeContribution::numPresent);
  tensors.control().contributors(entry.shard).store(numPresent, std::memory_order_relaxed);
  // release: the next contributions, which another device may take, come after this step.
  group->segment.round(entry.shard).store(entry.step, std::memory_order_release);
  sendResults(group, entry, tensors.shape(entry.shard), numPresent);
}

void NodeExchange::sendResults(const GroupPointer& group, const RingEntry& entry, const ShardShape& shape,
                               std::uint32_t numPresent) {
  FrameHeader header =
      headerOf(FrameKind::kResult, entry, shape, numPresent, group->segment.compression(entry.shard));
  header.dueAt = timeOfEvent(entry);
  for (std::size_t node = 0; node < index_.numNodes; ++node) {
    if (node == index_.node || !isLive(node)) continue;
    for (const std::uint32_t rank : absentFrom(*group, entry)) sendAbsence(node, group, entry, rank);
    send(node, group, header, group->segment.place(entry.shard, node));
  }
}

/// Workers of any node for which memory devices stand in from this step of an owned shard on, if it is shard
/// 0.
/// @pre all nodes have contributed to the step.
std::vector<std::uint32_t> NodeExchange::absentFrom(const Group& group, const RingEntry& entry) const {
  const TensorGroup& tensors = *group.tensors;
  std::vector<std::uint32_t> ranks;
  const std::size_t numRanks = entry.shard == 0 ? tensors.plan().numRanks : 0;
  for (std::uint32_t rank = 0; rank < numRanks; ++rank) {
    // relaxed: stored before the contributions to this step arrived.
    if (tensors.control().absentSince(rank).load(std::memory_order_relaxed) == entry.step)
      ranks.push_back(rank);
  }
  return ranks;
}

std::uint32_t NodeExchange::total(const Group& group, std::uint32_t shard,
                                  std::uint32_t NodeContribution::* count) const noexcept {
  std::uint32_t sum = 0;
  for (std::size_t node = 0; node < index_.numNodes; ++node)
    sum += counts(group, shard, node) ? group.segment.contribution(shard, node).*count : 0;
  return sum;
}

std::string NodeExchange::disagreement(const Group& group, std::uint32_t shard) const {
  const NodeContribution& ours = group.segment.contribution(shard, index_.node);
  const ShardShape own = shapeOf(ours);
  for (std::size_t node = 0; node < index_.numNodes; ++node) {
    if (!counts(group, shard, node)) continue;
    const NodeContribution& theirs = group.segment.contribution(shard, node);
    const std::uint32_t ahead =
        theirs.step.load(std::memory_order_acquire) - ours.step.load(std::memory_order_acquire);
    if (ahead != 0) {
      return workersOf(node) + " and " + workersOf(index_.node) + " are at different points of a step of " +
             group.tensors->describeTensor(shard) +
             ": some have updated a parameter more often than others. Call backward() and "
             "optimizer.step() equally often on every worker";
    }
    if (theirs.settings != ours.settings) {
      return group.tensors->describeTensor(shard) + ": " + workersOf(node) + " and " +
             workersOf(index_.node) +
             " disagree on the optimizer's settings. Every worker must run the same scheduler, load the same "
             "state, and write the same values to parameters";
    }
    const ShardShape other = shapeOf(theirs);
    if (areEqual(own, other)) continue;
    return "workers disagree on a buffer: " + workersOf(node) + " gave " + describe(other) + ", " +
           workersOf(index_.node) + " gave " + describe(own);
  }
  return {};
}

std::string NodeExchange::workersOf(std::size_t node) const {
  std::string names;
  for (const int rank : ranks_[node]) names += (names.empty() ? "worker(s) " : ", ") + std::to_string(rank);
  return names;
}

// ---- frames of other nodes ----

FramePayload NodeExchange::open(std::size_t node, const FrameHeader& header) {
  const bool isOfLoss = header.kind == FrameKind::kReport || header.kind == FrameKind::kFetch ||
                        header.kind == FrameKind::kHanded;
  if (isOfLoss && !mayLoseNodes_) throw LinkError("it has lost a node, without which nobody goes on");
  const GroupPointer group = find(header.group);
  if (header.kind == FrameKind::kReport && header.payloadBytes == 0) return {nullptr, group};
  if (group == nullptr)
    throw LinkError("it sent " + nameOf(header) + ", which this node has not registered or has closed");
  const GroupPlan& plan = group->tensors->plan();
  if (header.shard >= plan.shards.size())
    throw LinkError("it sent " + nameOf(header) + ", which has " + std::to_string(plan.shards.size()) +
                    " shards");
  if (header.kind == FrameKind::kAbsent) return openAbsence(group, node, header);
  if (header.kind == FrameKind::kFetch && header.payloadBytes == 0) return {nullptr, group};
  if (!fits(plan.shards[header.shard], header))
    throw LinkError("it sent " + nameOf(header) + " as " + describe(shapeOf(header)));
  const Compression compression = group->segment.compression(header.shard);
  if (header.compression != static_cast<std::uint8_t>(compression))
    throw LinkError("it sent " + nameOf(header) + " with compression " + std::to_string(header.compression) +
                    " instead of " + std::to_string(static_cast<int>(compression)));
  const std::size_t expected = header.numPresent == 0 ? 0 : sentBytes(shapeOf(header), compression);
  if (header.payloadBytes != expected)
    throw LinkError("it sent " + nameOf(header) + " with " + std::to_string(header.payloadBytes) +
                    " bytes instead of " + std::to_string(expected));
  if (header.kind == FrameKind::kHanded) return openHanded(group, header);
  return header.kind == FrameKind::kPartial ? openPartial(group, node, header)
                                            : openResult(group, node, header);
}

FramePayload NodeExchange::openPartial(const GroupPointer& group, std::size_t node,
                                       const FrameHeader& header) {
  if (!owns(header.shard))
    throw LinkError("it sent its part of " + nameOf(header) + ", which belongs to another node");
  const NodeSegment& segment = group->segment;
  if (!isDue(*group, node, header)) {
    const std::uint32_t last = segment.contribution(header.shard, node).step.load(std::memory_order_acquire);
    throw LinkError("it sent its part of " + nameOf(header) + " after that of step " + std::to_string(last));
  }
  return {segment.place(header.shard, node), group};
}

/// Whether a node's part of this step of an owned shard is the next one.
bool NodeExchange::isDue(const Group& group, std::size_t node, const FrameHeader& header) const noexcept {
  const NodeSegment& segment = group.segment;
  const std::uint32_t last = segment.contribution(header.shard, node).step.load(std::memory_order_acquire);
  const std::uint32_t done = segment.round(header.shard).load(std::memory_order_acquire);
  return canFollow(*group.tensors, header.step, done) && !isAfter(last, done);
}

/// Whether this node waits for the result of this step, and `node` owns the shard.
bool NodeExchange::isAwaited(const Group& group, std::size_t node, const FrameHeader& header) const noexcept {
  const std::uint32_t contributed = group.segment.round(header.shard).load(std::memory_order_acquire);
  const std::uint32_t received = group.segment.result(header.shard).load(std::memory_order_acquire);
  return ownerOf(header.shard) == node && contributed == header.step && received != header.step;
}

FramePayload NodeExchange::openResult(const GroupPointer& group, std::size_t node,
                                      const FrameHeader& header) {
  if (!isAwaited(*group, node, header) || !areEqual(shapeOf(header), group->tensors->shape(header.shard)))
    throw LinkError("it sent a result of " + nameOf(header) + ", for which nobody waits");
  return {resultOf(*group, header.shard), group};
}

/// A node tells the owner of shard 0 of its own workers, and the owner tells all nodes of all workers.
FramePayload NodeExchange::openAbsence(const GroupPointer& group, std::size_t node,
                                       const FrameHeader& header) {
  const TensorGroup& tensors = *group->tensors;
  const std::uint32_t rank = header.numElements;
  const std::vector<int>& own = ranks_[node];
  const auto isNew = [&] {
    const std::uint32_t since = tensors.control().absentSince(rank).load(std::memory_order_relaxed);
    return since == 0 || (mayLoseNodes_ && since == header.step);  // a former owner may have said it
  };
  const auto isOfSender = [&] {
    return std::find(own.begin(), own.end(), static_cast<int>(rank)) != own.end();
  };
  const bool isPossible = header.shard == 0 && header.payloadBytes == 0 && rank < tensors.plan().numRanks &&
                          isNew() &&
                          (owns(0) ? isFetched(header) || (isDue(*group, node, header) && isOfSender())
                                   : isAwaited(*group, node, header));
  if (!isPossible)
    throw LinkError("it said that worker " + std::to_string(rank) + " is absent from " + nameOf(header) +
                    ", which cannot be");
  return {nullptr, group};
}

void NodeExchange::close(std::size_t node, const FrameHeader& header, const FramePayload& payload) {
  const auto group = std::const_pointer_cast<Group>(std::static_pointer_cast<const Group>(payload.keeper));
  if (!pacing_.at) return take(group, node, header);
  latestDue_ = std::max(latestDue_, header.dueAt);
  pacing_.at(header.dueAt, [this, group, node, header] { take(group, node, header); });
}

/// A node has ended when its last frame has been taken, not when it has come.
void NodeExchange::passOn(NodeEvent event, const std::function<void(NodeEvent)>& onEvent) const {
  if (!pacing_.at || event.kind != NodeEvent::Kind::kEnded) return onEvent(std::move(event));
  pacing_.at(latestDue_, [event = std::move(event), onEvent] { onEvent(event); });
}

void NodeExchange::take(const GroupPointer& group, std::size_t node, const FrameHeader& header) {
  if (header.kind == FrameKind::kPartial) {
    takePartial(group, node, header);
  } else if (header.kind == FrameKind::kReport) {
    takeReport(node, header);
  } else if (header.kind == FrameKind::kFetch) {
    takeFetch(group, node, header);
  } else if (header.kind == FrameKind::kHanded) {
    takeHanded(group, header);
  } else if (header.kind == FrameKind::kAbsent) {
    // relaxed: the partial or result that follows publishes it. Workers take a later step than theirs for
    // none.
    group->tensors->control().absentSince(header.numElements).store(header.step, std::memory_order_relaxed);
  } else {
    takeResult(group, header);
  }
}

void NodeExchange::takePartial(const GroupPointer& group, std::size_t node, const FrameHeader& header) {
  decompressInPlace(group->segment, header, group->segment.place(header.shard, node));
  record(group->segment.contribution(header.shard, node), header);
  arrive(group, entryOf(header));
}

void NodeExchange::takeResult(const GroupPointer& group, const FrameHeader& header) {
  decompressInPlace(group->segment, header, resultOf(*group, header.shard));
  if (mayLoseNodes_) record(group->segment.contribution(header.shard, ownerOf(header.shard)), header);
  takeHeldResult(group, header, reachedResult(*group, header.shard));
}

/// Gives the result of a shard of another node, which lies at `held`, to the clients.
void NodeExchange::takeHeldResult(const GroupPointer& group, const FrameHeader& header, std::byte* held) {
  const auto finish = [this, group, header] {
    TensorGroup& done = *group->tensors;
    done.control().contributors(header.shard).store(header.numPresent, std::memory_order_relaxed);
    group->segment.result(header.shard).store(header.step, std::memory_order_release);
    finishShard_(done, entryOf(header));
  };
  if (header.payloadBytes > 0) return giveToClients(group, entryOf(header), held, finish);
  ShardArrays nothing;
  nothing.isMeasured = group->tensors->isMeasured(header.shard);
  nothing.finish = finish;
  run(group, entryOf(header), std::move(nothing));
}

/// Copies a result, which lies at `result` for the processor that computes, to the slots of all clients that
/// take part.
void NodeExchange::giveToClients(const GroupPointer& group, const RingEntry& entry, std::byte* result,
                                 std::function<void()> finish) {
  const TensorGroup& tensors = *group->tensors;
  ShardArrays arrays;
  arrays.inputs = {result};
  for (std::size_t client = 0; client < tensors.plan().numClients; ++client) {
    // A worker that has left may still write to its slot.
    std::byte* const slot = tensors.slot(client, tensors.plan().shards[entry.shard]);
    if (slot != result && !tensors.isStandIn(entry.shard, client)) arrays.outputs.push_back(slot);
  }
  arrays.isMeasured = tensors.isMeasured(entry.shard);
  arrays.finish = std::move(finish);
  run(group, entry, std::move(arrays));
}

/// Whether the host reads or writes the result of a shard in the slot of the first client that has
/// contributed.
bool NodeExchange::isResultInSlot(const Group& group, std::uint32_t shard) const noexcept {
  return group.segment.stage(shard) == nullptr && (!mayLoseNodes_ || owns(shard));
}

/// Where the host reads or writes the result of a shard: its stage, a slot, or the place of the node that
/// sends it.
std::byte* NodeExchange::resultOf(const Group& group, std::uint32_t shard) const noexcept {
  const TensorGroup& tensors = *group.tensors;
  if (isResultInSlot(group, shard))
    return tensors.slot(tensors.firstContributor(shard), tensors.plan().shards[shard]);
  std::byte* const stage = group.segment.stage(shard);
  return stage != nullptr ? stage : group.segment.place(shard, ownerOf(shard));
}

/// The address of resultOf() for the processor that computes where the tensors lie.
std::byte* NodeExchange::reachedResult(const Group& group, std::uint32_t shard) const noexcept {
  std::byte* const result = resultOf(group, shard);
  return isResultInSlot(group, shard) ? result : group.segment.reached(result);
}

// ---- leaving ----

void NodeExchange::workerLost(std::uint32_t rank, const std::string& text) {
  FrameHeader header;
  header.kind = FrameKind::kLost;
  header.shard = rank;
  links_.sendToAll(header, text);
}

void NodeExchange::workerLeft(std::uint32_t rank) {
  FrameHeader header;
  header.kind = FrameKind::kLeft;
  header.shard = rank;
  links_.sendToAll(header);
  workerLeftNode(index_.node);
}

void NodeExchange::workerLeftNode(std::size_t node) {
  hasLeft_[node].store(true, std::memory_order_seq_cst);
  for (const GroupPointer& group : allGroups()) {
    const std::size_t numShards = group->tensors->plan().shards.size();
    for (std::size_t shard = 0; shard < numShards; ++shard) {
      if (!owns(shard) || !lacksOneThatLeft(*group, static_cast<std::uint32_t>(shard))) continue;
      report_({});
      return;
    }
  }
}

/// Whether an owned shard has a step in progress that lacks the contribution of a node that a worker has
/// left.
bool NodeExchange::lacksOneThatLeft(const Group& group, std::uint32_t shard) const noexcept {
  const std::uint32_t done = group.segment.round(shard).load(std::memory_order_acquire);
  bool isBegun = false, isLacking = false;
  for (std::size_t node = 0; node < index_.numNodes; ++node) {
    const std::uint32_t step = group.segment.contribution(shard, node).step.load(std::memory_order_seq_cst);
    const bool hasContributed = isAfter(step, done);
    isBegun |= hasContributed;
    isLacking |= !hasContributed && isLive(node) && hasLeft_[node].load(std::memory_order_seq_cst);
  }
  return isBegun && isLacking;
}

void NodeExchange::nodeEnded(std::size_t node) {
  for (const GroupPointer& group : allGroups()) {
    const std::size_t numShards = group->tensors->plan().shards.size();
    for (std::size_t shard = 0; shard < numShards; ++shard) {
      if (ownerOf(shard) != node) continue;
      const std::uint32_t contributed = group->segment.round(shard).load(std::memory_order_acquire);
      if (contributed == group->segment.result(shard).load(std::memory_order_acquire)) continue;
      report_({});
      return;
    }
  }
}

}  // namespace coarse
