#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "coarse/emulation/pacer.hpp"
#include "coarse/node/node_link.hpp"
#include "coarse/node/node_owners.hpp"
#include "coarse/node/node_segment.hpp"
#include "coarse/shared_memory/shard_queue.hpp"
#include "coarse/tensors/shard_compute.hpp"
#include "coarse/tensors/tensor_group.hpp"

namespace coarse {

inline constexpr std::size_t kMostNodes = 256;

/// The times of an emulated session of several nodes (docs/design/emulation.md); empty for real links. With
/// it, frames are taken, and shards reduced, by the thread that `at` chooses, and entries contain the time of
/// the event in `completedAt`.
struct NodePacing {
  /// Takes the links' time for a frame that is sent to a node at `sentAt`. @returns when it arrives.
  std::function<MonotonicNs(const TensorGroup&, std::size_t node, const FrameHeader&, MonotonicNs sentAt)>
      arrivalOf;
  /// Runs `action` at `due`.
  std::function<void(MonotonicNs due, std::function<void()> action)> at;
  /// All nodes have contributed to a shard, `numPresent` workers in total. Calls reduce(), now or later.
  std::function<void(TensorGroup&, const RingEntry&, std::uint32_t numPresent)> gathered;
};

/// Synchronises the shards of one node with those of the other nodes of the job (docs/design/nodes.md). Each
/// shard has an owner node. The other nodes send it the reduction of their own workers' contributions, and
/// receive the result. A result depends only on the contributions, never on their time of arrival; with
/// Compression::kInt8 on those of earlier steps, too.
///
/// If nodes may be lost, the others go on without one: each device calls suspend(), and when all of the node
/// have, the home device calls report(). When all nodes have done this, it calls settle(); when they have
/// settled, each device resume(), the home device first (docs/design/membership.md).
///
/// Thread safety: any sync core may call contribute() and recordSettings(); one control thread calls
/// addGroup() and the rest. The functions passed to it are called from sync cores and from the links' thread.
/// Locks: groupsMutex_, parkedMutex_ and takeoverMutex_ alone, and those of NodeLinks, never two.
class NodeExchange {
 public:
  /// Called when the result of a shard lies in the slots of all clients of this node.
  using FinishShard = std::function<void(TensorGroup&, const RingEntry&)>;
  /// Reduces a shard from and to these arrays, where the group's tensors lie, and then calls `finish`.
  using Reduce = std::function<void(TensorGroup&, const RingEntry&, ShardArrays)>;
  /// Called when a shard cannot complete: `message` gives the reason, or is empty if workers have left.
  using Report = std::function<void(std::string message)>;

  /// `ranks[n]` are the workers of node n; `fds` as for NodeLinks. `onEvent` is called from the links'
  /// thread. `compression` is that of gradients, and the same on all nodes. `mayLoseNodes` as
  /// NodeSegment::isWhole().
  /// @throws std::invalid_argument if they do not match.
  NodeExchange(std::size_t node, std::vector<std::vector<int>> ranks,
               const std::vector<std::vector<int>>& fds, Reduce reduce, FinishShard finishShard,
               Report report, std::function<void(NodeEvent)> onEvent, NodePacing pacing = {},
               ProcessMetrics metrics = {}, LinkOptions options = {},
               Compression compression = Compression::kNone, bool mayLoseNodes = false);

  std::size_t numNodes() const noexcept { return index_.numNodes; }
  void start() { links_.start(); }
  /// Ends the exchange once the other nodes have the results that they wait for. Idempotent.
  void stop() noexcept { links_.stop(); }

  /// @throws std::invalid_argument if the segment is unsealed or too small.
  void addGroup(std::shared_ptr<TensorGroup> group, const Region& memory);
  /// Frames in transit keep the group's memory mapped until they are sent.
  void removeGroup(std::uint32_t group);

  /// Takes a shard to which all clients of this node have contributed.
  void contribute(const TensorGroup& group, const RingEntry& entry);
  /// Reduces an owned shard to which all nodes have contributed. @pre NodePacing::gathered was called for it.
  void reduce(const TensorGroup& group, const RingEntry& entry);
  /// Must be called before a shard's parameter is updated by a mean that nodes have computed before.
  void recordSettings(const TensorGroup& group, std::uint32_t shard);

  /// A worker of this node is lost, and the others go on; `text` describes the loss.
  void workerLost(std::uint32_t rank, const std::string& text);
  /// A worker of this node, whose rank is `rank`, will push no more.
  void workerLeft(std::uint32_t rank);
  /// The same for another node; shards that lack its contribution will never complete.
  void workerLeftNode(std::size_t node);
  /// All devices of `node` have ended, so its missing results will not arrive.
  void nodeEnded(std::size_t node);
  /// From now on contributions to shards of `node`, which is lost, wait until resume(), and these shards have
  /// other owners. @pre no frame of it is handled any more (NodeLinks::cut()); no sync core works.
  void suspend(std::size_t node);
  /// Tells the new owners how far this node is with these shards. @pre all devices of this node have called
  /// suspend().
  void report(std::size_t node);
  /// Gives results that some nodes have to those that lack them. An event tells when that is done for the
  /// shards whose owner this node has become. @pre all nodes have called report(), and their frames have
  /// arrived.
  void settle(std::size_t node);
  /// Goes on without `node`, whose contributions are absent from now on. @pre all nodes have settled; no sync
  /// core of this device works. The home device calls it before the others.
  void resume(std::size_t node, bool isHome);
  /// The connections to other nodes, to replace those that broke.
  NodeLinks& links() noexcept { return links_; }
  /// Notifies all other nodes that the session is over.
  void abort(const std::string& text) { links_.abort(text); }

 private:
  struct Group {
    std::shared_ptr<TensorGroup> tensors;
    NodeSegment segment;
  };
  using GroupPointer = std::shared_ptr<Group>;

  /// How far a node is with a shard: the last steps to which it contributed, and whose result it has.
  struct Position {
    std::size_t node;
    std::uint32_t round;
    std::uint32_t result;
  };
  /// Of a shard whose result another node was asked for.
  struct Fetch {
    std::uint32_t step;
    std::vector<std::size_t> waiting;  // the nodes that lack it
  };
  using ShardName = std::pair<std::uint32_t, std::uint32_t>;  // group and shard

  GroupPointer find(std::uint32_t group);
  std::vector<GroupPointer> allGroups();

  MonotonicNs timeOfEvent(const RingEntry& entry) const noexcept;
  void send(std::size_t node, const GroupPointer& group, FrameHeader header, std::byte* payload);
  void run(const GroupPointer& group, const RingEntry& entry, ShardArrays arrays);
  void sendPartial(const GroupPointer& group, const RingEntry& entry);
  void sendContribution(const GroupPointer& group, const RingEntry& entry);
  std::byte* partialOf(const Group& group, std::uint32_t shard) const noexcept;
  void recordOwn(const GroupPointer& group, const RingEntry& entry, bool isReduced);
  std::vector<std::uint32_t> newlyAbsent(const Group& group, std::uint32_t shard) const;
  std::vector<std::uint32_t> absentFrom(const Group& group, const RingEntry& entry) const;
  void sendAbsence(std::size_t node, const GroupPointer& group, const RingEntry& entry, std::uint32_t rank);
  void arrive(const GroupPointer& group, const RingEntry& entry);
  bool begins(const Group& group, std::uint32_t shard) noexcept;
  bool isLive(std::size_t node) const noexcept { return !isGone_[node].load(std::memory_order_seq_cst); }
  bool counts(const Group& group, std::uint32_t shard, std::size_t node) const noexcept;
  std::size_t ownerOf(std::size_t shard) const noexcept { return owners_.load()->ownerOf(shard); }
  bool owns(std::size_t shard) const noexcept { return ownerOf(shard) == index_.node; }
  void noteAbsentNodes(const Group& group, const RingEntry& entry) const noexcept;
  void beginOwned(const GroupPointer& group, RingEntry entry);
  void reduceOwned(const GroupPointer& group, const RingEntry& entry);
  void compressMean(const GroupPointer& group, const RingEntry& entry);
  void noteResult(const GroupPointer& group, const RingEntry& entry);
  void announce(const GroupPointer& group, const RingEntry& entry);
  std::uint32_t total(const Group& group, std::uint32_t shard,
                      std::uint32_t NodeContribution::* count) const noexcept;
  std::string disagreement(const Group& group, std::uint32_t shard) const;
  void sendResults(const GroupPointer& group, const RingEntry& entry, const ShardShape& shape,
                   std::uint32_t numPresent);
  bool lacksOneThatLeft(const Group& group, std::uint32_t shard) const noexcept;
  bool isDue(const Group& group, std::size_t node, const FrameHeader& header) const noexcept;
  bool isAwaited(const Group& group, std::size_t node, const FrameHeader& header) const noexcept;

  FramePayload open(std::size_t node, const FrameHeader& header);
  FramePayload openPartial(const GroupPointer& group, std::size_t node, const FrameHeader& header);
  FramePayload openResult(const GroupPointer& group, std::size_t node, const FrameHeader& header);
  FramePayload openAbsence(const GroupPointer& group, std::size_t node, const FrameHeader& header);
  void close(std::size_t node, const FrameHeader& header, const FramePayload& payload);
  void passOn(NodeEvent event, const std::function<void(NodeEvent)>& onEvent) const;
  void take(const GroupPointer& group, std::size_t node, const FrameHeader& header);
  void takePartial(const GroupPointer& group, std::size_t node, const FrameHeader& header);
  void takeResult(const GroupPointer& group, const FrameHeader& header);
  void takeHeldResult(const GroupPointer& group, const FrameHeader& header, std::byte* held);
  void giveToClients(const GroupPointer& group, const RingEntry& entry, std::byte* result,
                     std::function<void()> finish);
  std::byte* resultOf(const Group& group, std::uint32_t shard) const noexcept;
  std::byte* reachedResult(const Group& group, std::uint32_t shard) const noexcept;
  bool isResultInSlot(const Group& group, std::uint32_t shard) const noexcept;

  // After the loss of a node.
  bool park(const RingEntry& entry);
  bool moves(std::uint32_t shard) const noexcept;
  void forEachMoved(const std::function<void(const GroupPointer&, std::uint32_t shard)>& visit);
  void settleShard(const GroupPointer& group, std::uint32_t shard, std::vector<Position> positions);
  void distribute(const GroupPointer& group, std::uint32_t shard, std::size_t from,
                  const std::vector<std::size_t>& waiting);
  void becomeOwner(const GroupPointer& group, std::uint32_t shard);
  std::size_t holderOf(const Group& group, std::uint32_t shard, std::uint32_t step) const noexcept;
  FramePayload openHanded(const GroupPointer& group, const FrameHeader& header);
  void takeReport(std::size_t node, const FrameHeader& header);
  void takeFetch(const GroupPointer& group, std::size_t node, const FrameHeader& header);
  void takeHanded(const GroupPointer& group, const FrameHeader& header);
  bool isFetched(const FrameHeader& header);
  std::string workersOf(std::size_t node) const;

  NodeIndex index_;
  Compression compression_;  // of gradients
  std::vector<std::vector<int>> ranks_;
  Reduce reduce_;
  FinishShard finishShard_;
  Report report_;
  NodePacing pacing_;
  MonotonicNs latestDue_ = 0;  // of the frames that have come; used by the links' thread
  std::mutex groupsMutex_;     // guards groups_
  std::unordered_map<std::uint32_t, GroupPointer> groups_;
  std::unique_ptr<std::atomic<bool>[]> hasLeft_;  // by node: whether a worker of it has left
  bool mayLoseNodes_;
  std::function<void(NodeEvent)> onEvent_;
  std::unique_ptr<std::atomic<bool>[]> isGone_;  // by node: whether the others go on without it
  std::vector<std::unique_ptr<const NodeOwners>> allOwners_;
  std::atomic<const NodeOwners*> owners_;
  std::atomic<const NodeOwners*> former_{nullptr};  // the owners before, from suspend() to resume()
  std::atomic<std::size_t> lost_{0};                // the node that is lost in between
  std::mutex parkedMutex_;                          // guards parked_
  std::vector<RingEntry> parked_;                   // contributions that wait for resume()
  std::mutex takeoverMutex_;                        // guards the next three
  std::vector<std::pair<ShardName, Position>> reports_;
  std::map<ShardName, Fetch> fetches_;
  bool isSettling_ = false;
  NodeLinks links_;  // last: its thread ends before the other members
};

}  // namespace coarse
