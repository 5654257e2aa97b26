/// The part of Client by which workers reduce tensors themselves from each other's slots: dual
/// synchronisation.
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "coarse/client/client.hpp"
#include "coarse/reduce/copy.hpp"
#include "coarse/reduce/reduce.hpp"

namespace coarse {

void Client::addPeers(std::uint32_t groupId, const std::vector<Region>& slots) {
  Group& group = find(groupId);
  if (slots.size() != group.plan.numClients)
    throw std::invalid_argument("workers that reduce themselves need the slots of every worker");
  for (const Region& region : slots)
    group.peers.push_back(mapShared(region, group.plan.clientBytes(), Mapping::Access::kReadOnly, "slots"));
}

template <typename Visit>
void Client::forEachShard(const Group& group, const std::vector<std::uint32_t>& shards, Visit visit) {
  if (group.peers.empty()) throw std::invalid_argument("workers can't see each other's slots of this group");
  for (const std::uint32_t index : shards) {
    if (index >= group.plan.shards.size())
      throw std::invalid_argument("shard " + std::to_string(index) + " of a group of " +
                                  std::to_string(group.plan.shards.size()));
    visit(group.plan.shards[index]);
  }
}

void Client::reducePieces(std::uint32_t groupId, const std::vector<std::uint32_t>& shards) {
  Group& group = find(groupId);
  const TimelineSpan span(
      [&](TimelineEvent& event) { describePieces(event, EventKind::kDirectReduce, group, shards); });
  const std::size_t numClients = group.plan.numClients;
  std::vector<const void*> inputs(numClients);
  forEachShard(group, shards, [&](const Shard& shard) {
    const ShardPiece piece = pieceOf(shard.numElements, group.client, numClients);
    const std::size_t offset = piece.begin * itemBytes(shard.dtype);
    for (std::size_t client = 0; client < numClients; ++client)
      inputs[client] = slotOf(group, client, shard) + offset;
    void* output = group.slots->data() + shard.offset + offset;
    reduce(shard.dtype, shard.op, inputs.data(), numClients, &output, 1, piece.end - piece.begin,
           static_cast<std::uint32_t>(numClients));
  });
}

void Client::copyPieces(std::uint32_t groupId, const std::vector<std::uint32_t>& shards) {
  Group& group = find(groupId);
  const TimelineSpan span(
      [&](TimelineEvent& event) { describePieces(event, EventKind::kDirectCopy, group, shards); });
  const std::size_t numClients = group.plan.numClients;
  forEachShard(group, shards, [&](const Shard& shard) {
    for (std::size_t client = 0; client < numClients; ++client) {
      if (client == group.client) continue;
      const ShardPiece piece = pieceOf(shard.numElements, client, numClients);
      const std::size_t offset = piece.begin * itemBytes(shard.dtype);
      copyBytes(group.slots->data() + shard.offset + offset, slotOf(group, client, shard) + offset,
                (piece.end - piece.begin) * itemBytes(shard.dtype));
    }
  });
}

void Client::describePieces(TimelineEvent& event, EventKind kind, const Group& group,
                            const std::vector<std::uint32_t>& shards) const noexcept {
  for (const std::uint32_t shard : shards) {
    if (shard < group.plan.shards.size()) describe(event, kind, group, {shard, shard + 1, 0});
  }
  if (!shards.empty()) event.index = shards.front();
}

const std::byte* Client::slotOf(const Group& group, std::size_t client, const Shard& shard) noexcept {
  const Mapping& slots = client == group.client ? *group.slots : group.peers[client];
  return slots.data() + shard.offset;
}

}  // namespace coarse
