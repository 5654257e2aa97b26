#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "coarse/collectives/collective.hpp"
#include "coarse/collectives/group_scratch.hpp"
#include "coarse/collectives/messages.hpp"
#include "coarse/collectives/node_bridge.hpp"

namespace coarse {

/// Collectives of ranks that share memory, or whose memory a NodeBridge keeps identical: in rounds through
/// the group's scratch (group_scratch.hpp).
///
/// A tensor of any size passes through the buffers in pieces that stay in a processor's cache. Each rank
/// copies its piece in, and reads the others' buffers straight into the result, so that every tensor crosses
/// main memory once. Over nodes, several pieces are on their way at a time (GroupScratch::mostAhead()).
class SharedCollectives final : public Collectives {
 public:
  /// @param scratch of the group, used by this object alone.
  /// @param links with several nodes, if this rank is its node's leader: as for NodeBridge.
  explicit SharedCollectives(std::unique_ptr<GroupScratch> scratch, std::vector<int> links = {},
                             LinkOptions linkOptions = {});

  /// Returns a pointer that does not delete the object in forks of this process, which lack its threads and
  /// cannot end them.
  static std::shared_ptr<Collectives> shared(std::unique_ptr<GroupScratch> scratch,
                                             std::vector<int> links = {}, LinkOptions linkOptions = {});

  void checkOwner() const override;
  void run(const Collective& call) override;
  void post(const Message& message) override;
  std::uint64_t sequence() const noexcept override { return sequence_.load(std::memory_order_relaxed); }
  std::string missingRanks() const override;
  void close() noexcept override;

  /// On a leader of several nodes; elsewhere null.
  NodeBridge* bridge() const noexcept { return bridge_.get(); }

 private:
  using Deadline = GroupScratch::Deadline;
  struct Running;
  struct Slices;

  void dispatch(Running& running);
  void compareHeaders(const Running& running) const;
  template <typename Write, typename Read>
  void round(Running& running, const Extent& extent, Write write, Read read);
  template <typename Write>
  void writeRound(const Running& running, const Extent& extent, Write write);
  template <typename Read>
  void readRound(Running& running, Read read);
  template <typename Write, typename Read>
  void inFlight(Running& running, std::size_t numRounds, std::size_t mostAhead, Write write, Read read);
  template <typename ExtentOf, typename Write, typename Read>
  void inPieces(Running& running, std::size_t numBytes, std::size_t mostBytes, ExtentOf extentOf, Write write,
                Read read);

  void broadcast(Running& running);
  void reduceDirectly(Running& running, bool isReceiver);
  void reduceInSlices(Running& running);
  void writeSlices(const Running& running, const Slices& piece, bool isGather);
  void reduceSlice(const Running& running, const Slices& piece);
  void gatherSlices(const Collective& call, const Slices& piece);
  void allGather(Running& running, bool isReceiver);
  void reduceScatter(Running& running);
  void scatter(Running& running);
  void allToAll(Running& running);
  std::uint64_t agreeOnSizes(Running& running);
  std::size_t areaBytes(const Collective& call) const noexcept;

  std::unique_ptr<GroupScratch> scratch_;
  Messages messages_;
  std::unique_ptr<NodeBridge> bridge_;  // of a leader, with several nodes
  std::size_t rank_;
  std::size_t numRanks_;
  pid_t owner_;
  std::atomic<std::uint64_t> sequence_{0};
  std::string broken_;  // the reason, if the group is broken
  std::vector<const void*> terms_;
};

/// A call in words: "all_reduce of float32 [3, 4], sum".
std::string describe(const CallHeader& header);

}  // namespace coarse
