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

/// Keeps the scratch memory of a group alike on several nodes (docs/design/torch-backend.md): what ranks of
/// this node publish is sent to the others, and what comes from there is written where those ranks would have
/// written it. So collectives and messages are the same on one node and on many, to the last bit.
///
/// What is sent cannot be lost for want of room: a rank overwrites its buffer of a round only after all ranks
/// have published the one before, and a channel only after its bytes were taken, on whatever node. So the
/// receiving thread never waits for anybody, and no two nodes can wait for each other's sending.
///
/// Belongs to the leader of a node, and has a thread for each direction.
///
/// Thread safety: one thread; the object's own are ended by stop().
class NodeBridge {
 public:
  /// @param scratch of the group; outlives this.
  /// @param fds connected stream sockets by node, -1 to the own one. Closed by this object, also where this
  /// throws.
  /// @throws std::invalid_argument if there are not as many as nodes.
  NodeBridge(const GroupScratch& scratch, std::vector<int> fds);
  /// As stop().
  ~NodeBridge();
  NodeBridge(const NodeBridge&) = delete;
  NodeBridge& operator=(const NodeBridge&) = delete;

  /// Sends what was published, says goodbye, and waits until the others have it, but not for ever.
  /// Idempotent.
  void stop() noexcept;

 private:
  enum class Kind : std::uint8_t;
  struct Frame;
  struct Connection;

  // Of the sending thread.
  void serveOutgoing();
  bool sendAll();
  bool sendRounds(std::size_t rank);
  void sendRound(std::size_t rank, std::uint32_t round);
  bool sendBytes(std::size_t from, std::size_t to);
  bool sendTaken(std::size_t from, std::size_t to);
  void sendDeparture(std::size_t rank, Departure departure);
  void reportDeaths();
  void sayGoodbye();

  // Of the receiving thread.
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
  std::vector<std::unique_ptr<Connection>> connections_;  // by node; none to the own one
  std::vector<std::size_t> here_;                         // ranks of this node
  std::vector<std::size_t> elsewhere_;

  // Of the sending thread alone.
  std::vector<std::uint32_t> sentRounds_;  // by rank
  std::vector<Departure> toldDepartures_;  // by rank
  std::vector<std::uint64_t> sentBytes_;   // by channel: from * ranks + to
  std::vector<std::uint64_t> toldTaken_;   // by channel

  std::atomic<bool> isStopping_{false};
  std::atomic<std::int64_t> giveUpAt_{0};  // when the receiving thread ends in any case; 0: not yet
  std::thread sender_;
  std::thread receiver_;
};

}  // namespace coarse
