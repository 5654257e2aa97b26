#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "coarse/collectives/group_scratch.hpp"
#include "coarse/node/node_link.hpp"
#include "coarse/node/transport.hpp"

namespace coarse {

/// Keeps the scratch memory of a group identical on several nodes (docs/design/torch-backend.md). It sends
/// the data that ranks of this node publish to the other nodes, and writes received data where the ranks of
/// other nodes would have written it. So collectives and messages are the same on one node and on many, to
/// the last bit.
///
/// Received data always has room: a rank overwrites a buffer only after all ranks have read it, and a channel
/// only after its bytes were taken, on any node. So the receiving thread
/// never waits, and no two nodes can wait for each other's sending.
///
/// Belongs to the leader of a node, and has a thread that sends and one that receives.
///
/// Thread safety: one thread; stop() ends the object's own threads.
class NodeBridge final : private FrameHandler {
 public:
  /// @param scratch of the group; outlives this.
  /// @param fds connected stream sockets by node, -1 for its own. This object closes them, even if it throws.
  /// @throws std::invalid_argument unless there is one per node.
  NodeBridge(const GroupScratch& scratch, const std::vector<int>& fds, LinkOptions options = {});
  /// As stop(), unless that was called.
  ~NodeBridge();
  NodeBridge(const NodeBridge&) = delete;
  NodeBridge& operator=(const NodeBridge&) = delete;

  /// Events of connections since the last call: silent, broken, working again or lost. Any thread may call
  /// this and the three functions below, which replace broken connections.
  std::vector<NodeEvent> takeEvents();
  /// Readable when takeEvents() has something, and at the end; closed with the object.
  int eventFd() const noexcept { return eventFd_; }
  /// Whether stop() has ended the connections.
  bool isOver() const noexcept { return isOver_.load(); }
  void resume(std::size_t node, int fd);
  void interrupt(std::size_t node);
  void giveUp(std::size_t node, const std::string& reason);

  /// Sends the published data, says goodbye, and waits for a limited time until the others have received it.
  /// Idempotent.
  void stop() noexcept;

 private:
  enum class Kind : std::uint8_t;
  struct Header;
  struct RoundHeader;
  using Ranges = std::vector<std::pair<std::size_t, std::size_t>>;

  // Run by the sending thread.
  void serveOutgoing();
  bool sendAll();
  bool sendRounds(std::size_t rank);
  void sendRound(std::size_t rank, std::uint32_t round);
  bool sendBytes(std::size_t from, std::size_t to);
  bool sendTaken(std::size_t from, std::size_t to);
  void sendDeparture(std::size_t rank, Departure departure);
  void reportDeaths();
  void sendTo(std::size_t node, const Header& header, Payload payload = {});

  // Run by the receiving thread.
  void serveIncoming();
  Payload open(std::size_t link, const std::byte* data, std::size_t headerBytes) override;
  Payload openRound(const Header& header, const Extent& extent) const;
  Payload openBytes(const Header& header) const;
  void close(std::size_t link, const std::byte* data, const Payload& payload) override;
  void closeRound(const Header& header, const CallHeader& call);
  void closeBytes(const Header& header);
  void closeTaken(const Header& header);
  void sent(std::size_t, const std::byte*, std::int64_t) noexcept override {}
  void event(LinkEvent event) override;

  void notify() noexcept;
  void depart(std::size_t rank, Departure departure);
  void checkSides(std::size_t node, const Header& header) const;

  Ranges rangesFor(std::size_t node, const Extent& extent) const;
  Payload ringPieces(std::size_t from, std::size_t to, std::uint64_t begin, std::size_t numBytes) const;

  const GroupScratch& scratch_;
  const MessageArea& area_;
  const std::size_t numRanks_;
  std::vector<std::size_t> here_;  // ranks of this node
  std::vector<std::size_t> elsewhere_;
  std::vector<std::size_t> nodeOf_;  // by link
  std::vector<std::size_t> linkTo_;  // by node
  std::unique_ptr<Transport> transport_;

  // Used by the sending thread alone.
  std::vector<std::uint32_t> sentRounds_;  // by rank
  std::vector<Departure> toldDepartures_;  // by rank
  std::vector<std::uint64_t> sentBytes_;   // by channel: from * ranks + to
  std::vector<std::uint64_t> toldTaken_;   // by channel

  std::mutex eventsMutex_;  // guards events_
  std::vector<NodeEvent> events_;
  int eventFd_ = -1;

  std::atomic<bool> isStopping_{false};   // the sending thread ends when nothing is left to send
  std::atomic<bool> isFinishing_{false};  // then the receiving thread says goodbye
  std::atomic<bool> isOver_{false};
  std::thread sender_;
  std::thread receiver_;
};

}  // namespace coarse
