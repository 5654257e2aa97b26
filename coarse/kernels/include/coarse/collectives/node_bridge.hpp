#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "coarse/collectives/group_scratch.hpp"

namespace coarse {

/// Keeps the scratch memory of a group identical on several nodes (docs/design/torch-backend.md). It sends
/// the data that ranks of this node publish to the other nodes, and writes received data where the ranks of
/// other nodes would have written it. So collectives and messages are the same on one node and on many, to
/// the last bit.
///
/// Received data always has room: a rank overwrites its buffer of a round only after all ranks have published
/// the round before, and a channel only after its bytes were taken, on any node. So the receiving thread
/// never waits, and no two nodes can wait for each other's sending.
///
/// Belongs to the leader of a node, and has a thread for each direction.
///
/// Thread safety: one thread; stop() ends the object's own threads.
class NodeBridge {
 public:
  /// @param scratch of the group; outlives this.
  /// @param fds connected stream sockets by node, -1 for its own. This object closes them, even if it throws.
  /// @throws std::invalid_argument unless there is one per node.
  NodeBridge(const GroupScratch& scratch, std::vector<int> fds);
  /// As stop().
  ~NodeBridge();
  NodeBridge(const NodeBridge&) = delete;
  NodeBridge& operator=(const NodeBridge&) = delete;

  /// Sends the published data, says goodbye, and waits for a limited time until the others have received it.
  /// Idempotent.
  void stop() noexcept;

 private:
  enum class Kind : std::uint8_t;
  struct Frame;
  struct Connection;

  // Run by the sending thread.
  void serveOutgoing();
  bool sendAll();
  bool sendRounds(std::size_t rank);
  void sendRound(std::size_t rank, std::uint32_t round);
  bool sendBytes(std::size_t from, std::size_t to);
  bool sendTaken(std::size_t from, std::size_t to);
  void sendDeparture(std::size_t rank, Departure departure);
  void reportDeaths();
  void sayGoodbye();

  // Run by the receiving thread.
  void serveIncoming();
  void receiveFrame(Connection& connection);
  void receiveRound(Connection& connection, const Frame& frame);
  void receiveBytes(Connection& connection, const Frame& frame);
  void receiveTaken(const Connection& connection, const Frame& frame);
  void receiveDeparture(const Connection& connection, const Frame& frame);
  void end(Connection& connection);
  void depart(std::size_t rank, Departure departure);
  std::size_t rankThere(const Connection& connection, std::uint64_t rank) const;
  std::size_t rankHere(std::uint64_t rank) const;

  std::vector<std::pair<std::size_t, std::size_t>> rangesFor(std::size_t node, const Extent& extent) const;

  const GroupScratch& scratch_;
  const MessageArea& area_;
  const std::size_t numRanks_;
  std::vector<std::unique_ptr<Connection>> connections_;  // by node; null for the own one
  std::vector<std::size_t> here_;                         // ranks of this node
  std::vector<std::size_t> elsewhere_;

  // Used by the sending thread alone.
  std::vector<std::uint32_t> sentRounds_;  // by rank
  std::vector<Departure> toldDepartures_;  // by rank
  std::vector<std::uint64_t> sentBytes_;   // by channel: from * ranks + to
  std::vector<std::uint64_t> toldTaken_;   // by channel

  std::atomic<bool> isStopping_{false};
  std::atomic<std::int64_t> giveUpAt_{0};  // when the receiving thread ends in any case; 0: not set
  std::thread sender_;
  std::thread receiver_;
};

}  // namespace coarse
