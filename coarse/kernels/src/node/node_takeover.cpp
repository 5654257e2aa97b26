// The parts of NodeExchange by which nodes go on without a lost one (docs/design/membership.md).
#include <algorithm>
#include <cstring>
#include <utility>

#include "coarse/node/node_exchange.hpp"

namespace coarse {
namespace {

/// Compares steps, which wrap around.
bool isAfter(std::uint32_t step, std::uint32_t other) noexcept {
  return static_cast<std::int32_t>(step - other) > 0;
}

FrameHeader headerOf(FrameKind kind, std::uint32_t group, std::uint32_t shard, std::uint32_t step) {
  FrameHeader header;
  header.kind = kind;
  header.group = group;
  header.shard = shard;
  header.step = step;
  return header;
}

/// The header of a result that lies in the place to which `contribution` belongs.
FrameHeader headerOfResult(FrameKind kind, std::uint32_t group, std::uint32_t shard,
                           const NodeContribution& contribution) {
  FrameHeader header = headerOf(kind, group, shard, contribution.step.load(std::memory_order_acquire));
  header.dtype = contribution.dtype;
  header.op = contribution.op;
  header.numElements = contribution.numElements;
  header.numPresent = contribution.numPresent;
  header.numCounted = contribution.numCounted;
  if (header.numPresent > 0)
    header.payloadBytes = std::uint64_t{header.numElements} * itemBytes(static_cast<DType>(header.dtype));
  return header;
}

}  // namespace

// ---- contributions that wait ----

void NodeExchange::suspend(std::size_t node) {
  const NodeOwners* const before = owners_.load();
  allOwners_.push_back(std::make_unique<const NodeOwners>(before->without(node)));
  lost_.store(node);
  former_.store(before);
  owners_.store(allOwners_.back().get());
}

/// Whether a shard belonged to the node that is lost, between suspend() and resume().
bool NodeExchange::moves(std::uint32_t shard) const noexcept {
  const NodeOwners* const former = former_.load();
  return former != nullptr && former->ownerOf(shard) == lost_.load();
}

bool NodeExchange::park(const RingEntry& entry) {
  if (!moves(entry.shard)) return false;
  const std::lock_guard<std::mutex> lock(parkedMutex_);
  parked_.push_back(entry);
  return true;
}

void NodeExchange::forEachMoved(const std::function<void(const GroupPointer&, std::uint32_t)>& visit) {
  for (const GroupPointer& group : allGroups()) {
    const std::size_t numShards = group->tensors->plan().shards.size();
    for (std::uint32_t shard = 0; shard < numShards; ++shard) {
      if (moves(shard)) visit(group, shard);
    }
  }
}

// ---- what the nodes have ----

void NodeExchange::report(std::size_t node) {
  forEachMoved([&](const GroupPointer& group, std::uint32_t shard) {
    const GroupControl& control = group->tensors->control();
    const std::uint32_t id = group->tensors->plan().id;
    const std::uint32_t contributed = group->segment.round(shard).load(std::memory_order_acquire);
    const std::uint32_t received = group->segment.result(shard).load(std::memory_order_acquire);
    // Who is absent from a step without a result is said again, by the new owner.
    const std::size_t numRanks = shard == 0 && contributed != received ? group->tensors->plan().numRanks : 0;
    for (std::size_t rank = 0; rank < numRanks; ++rank) {
      std::uint32_t since = contributed;
      control.absentSince(rank).compare_exchange_strong(since, 0);
    }
    if (contributed == 0 || owns(shard)) return;
    FrameHeader header = headerOf(FrameKind::kReport, id, shard, contributed);
    header.numElements = received;
    header.numPresent = static_cast<std::uint32_t>(node);
    links_.sendHome(ownerOf(shard), header, FramePayload{});
  });
}

/// May come before this node has noticed the loss.
void NodeExchange::takeReport(std::size_t node, const FrameHeader& header) {
  const std::lock_guard<std::mutex> lock(takeoverMutex_);
  reports_.push_back({{header.group, header.shard}, {node, header.step, header.numElements}});
}

void NodeExchange::settle(std::size_t node) {
  std::map<ShardName, std::vector<Position>> positions;
  {
    const std::lock_guard<std::mutex> lock(takeoverMutex_);
    isSettling_ = true;
    for (const auto& [shard, position] : std::exchange(reports_, {})) positions[shard].push_back(position);
  }
  forEachMoved([&](const GroupPointer& group, std::uint32_t shard) {
    if (owns(shard)) settleShard(group, shard, std::move(positions[{group->tensors->plan().id, shard}]));
  });
  {
    const std::lock_guard<std::mutex> lock(takeoverMutex_);
    isSettling_ = false;
    if (!fetches_.empty()) return;
  }
  onEvent_({NodeEvent::Kind::kSettled, node, 0, {}, {}});
}

/// @param positions of the other nodes that have ever contributed to the shard.
void NodeExchange::settleShard(const GroupPointer& group, std::uint32_t shard,
                               std::vector<Position> positions) {
  positions.insert(positions.begin(),
                   {index_.node, group->segment.round(shard).load(std::memory_order_acquire),
                    group->segment.result(shard).load(std::memory_order_acquire)});
  std::uint32_t newest = 0;
  for (const Position& each : positions) newest = isAfter(each.result, newest) ? each.result : newest;
  std::vector<std::size_t> waiting;
  for (const Position& each : positions) {
    if (each.round == newest && each.result != newest) waiting.push_back(each.node);
  }
  if (waiting.empty()) return becomeOwner(group, shard);
  const auto holder = std::find_if(positions.begin(), positions.end(),
                                   [&](const Position& each) { return each.result == newest; });
  if (holder->node == index_.node) {
    distribute(group, shard, holderOf(*group, shard, newest), waiting);
    return becomeOwner(group, shard);
  }
  const std::uint32_t id = group->tensors->plan().id;
  {
    const std::lock_guard<std::mutex> lock(takeoverMutex_);
    fetches_[{id, shard}] = {newest, std::move(waiting)};
  }
  links_.sendHome(holder->node, headerOf(FrameKind::kFetch, id, shard, newest), FramePayload{});
}

/// The node in whose place the result of a step lies; all nodes if there is none.
std::size_t NodeExchange::holderOf(const Group& group, std::uint32_t shard,
                                   std::uint32_t step) const noexcept {
  std::size_t node = 0;
  while (node < index_.numNodes &&
         (node == index_.node ||
          group.segment.contribution(shard, node).step.load(std::memory_order_acquire) != step))
    ++node;
  return node;
}

// ---- results that others lack ----

void NodeExchange::takeFetch(const GroupPointer& group, std::size_t node, const FrameHeader& asked) {
  const TensorGroup& tensors = *group->tensors;
  const std::size_t holder = holderOf(*group, asked.shard, asked.step);
  if (holder == index_.numNodes)
    return report_("another node asked for a result that this one has not: step " +
                   std::to_string(asked.step) + " of " + tensors.describeTensor(asked.shard));
  const FrameHeader header = headerOfResult(FrameKind::kHanded, asked.group, asked.shard,
                                            group->segment.contribution(asked.shard, holder));
  for (const std::uint32_t rank : absentFrom(*group, {asked.group, asked.shard, asked.step, 0})) {
    FrameHeader absence = headerOf(FrameKind::kAbsent, asked.group, asked.shard, asked.step);
    absence.numElements = rank;
    links_.sendHome(node, absence, FramePayload{nullptr, group});
  }
  links_.sendHome(node, header, FramePayload{group->segment.place(asked.shard, holder), group});
}

bool NodeExchange::isFetched(const FrameHeader& header) {
  const std::lock_guard<std::mutex> lock(takeoverMutex_);
  const auto fetch = fetches_.find({header.group, header.shard});
  return fetch != fetches_.end() && fetch->second.step == header.step;
}

FramePayload NodeExchange::openHanded(const GroupPointer& group, const FrameHeader& header) {
  if (!isFetched(header)) throw LinkError("it sent a result that nobody has asked for");
  return {group->segment.place(header.shard, lost_.load()), group};
}

void NodeExchange::takeHanded(const GroupPointer& group, const FrameHeader& header) {
  const std::size_t place = lost_.load();
  NodeContribution& held = group->segment.contribution(header.shard, place);
  held.numElements = header.numElements;
  held.numPresent = header.numPresent;
  held.numCounted = header.numCounted;
  held.dtype = header.dtype;
  held.op = header.op;
  held.step.store(header.step);
  std::vector<std::size_t> waiting;
  {
    const std::lock_guard<std::mutex> lock(takeoverMutex_);
    waiting = fetches_.at({header.group, header.shard}).waiting;
  }
  distribute(group, header.shard, place, waiting);
  becomeOwner(group, header.shard);
  {
    const std::lock_guard<std::mutex> lock(takeoverMutex_);
    fetches_.erase({header.group, header.shard});
    if (isSettling_ || !fetches_.empty()) return;
  }
  onEvent_({NodeEvent::Kind::kSettled, place, 0, {}, {}});
}

/// Gives the result that lies in the place of node `from` to those that wait for it.
void NodeExchange::distribute(const GroupPointer& group, std::uint32_t shard, std::size_t from,
                              const std::vector<std::size_t>& waiting) {
  const NodeSegment& segment = group->segment;
  const FrameHeader header =
      headerOfResult(FrameKind::kResult, group->tensors->plan().id, shard, segment.contribution(shard, from));
  const RingEntry entry{header.group, shard, header.step, 0};
  for (const std::size_t node : waiting) {
    if (node == index_.node) {
      takeHeldResult(group, header, segment.place(shard, from));
      continue;
    }
    // Each node's next contribution comes to its own place, after it has this result.
    std::byte* const place = segment.place(shard, node);
    if (header.payloadBytes > 0 && place != segment.place(shard, from))
      std::memcpy(place, segment.place(shard, from), header.payloadBytes);
    for (const std::uint32_t rank : absentFrom(*group, entry)) {
      FrameHeader absence = headerOf(FrameKind::kAbsent, header.group, shard, header.step);
      absence.numElements = rank;
      links_.sendHome(node, absence, FramePayload{nullptr, group});
    }
    links_.sendHome(node, header, FramePayload{place, group});
  }
}

/// This node owns the shard. What it has contributed without getting a result is its contribution as owner.
void NodeExchange::becomeOwner(const GroupPointer& group, std::uint32_t shard) {
  const std::uint32_t contributed = group->segment.round(shard).load(std::memory_order_acquire);
  const std::uint32_t received = group->segment.result(shard).load(std::memory_order_acquire);
  if (contributed != received) recordOwn(group, {group->tensors->plan().id, shard, contributed, 0}, true);
  group->segment.round(shard).store(received, std::memory_order_seq_cst);
}

// ---- on without the lost node ----

void NodeExchange::resume(std::size_t node, bool isHome) {
  isGone_[node].store(true, std::memory_order_seq_cst);
  if (isHome) {
    forEachMoved([&](const GroupPointer& group, std::uint32_t shard) {
      const std::uint32_t contributed = group->segment.round(shard).load(std::memory_order_acquire);
      const std::uint32_t received = group->segment.result(shard).load(std::memory_order_acquire);
      if (!owns(shard) && contributed != received)
        sendContribution(group, {group->tensors->plan().id, shard, contributed, 0});
    });
  }
  former_.store(nullptr);
  for (const GroupPointer& group : allGroups()) {
    const std::size_t numShards = group->tensors->plan().shards.size();
    for (std::uint32_t shard = 0; shard < numShards; ++shard) {
      if (!owns(shard) || !begins(*group, shard)) continue;
      const std::uint32_t step =
          group->segment.contribution(shard, index_.node).step.load(std::memory_order_acquire);
      beginOwned(group, {group->tensors->plan().id, shard, step, 0});
    }
  }
  std::vector<RingEntry> parked;
  {
    const std::lock_guard<std::mutex> lock(parkedMutex_);
    parked.swap(parked_);
  }
  for (const RingEntry& entry : parked) {
    if (const GroupPointer group = find(entry.group); group != nullptr) contribute(*group->tensors, entry);
  }
}

}  // namespace coarse
