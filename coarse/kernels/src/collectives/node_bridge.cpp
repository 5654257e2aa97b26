#include "coarse/collectives/node_bridge.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "coarse/node/node_socket.hpp"

namespace coarse {
namespace {

using std::chrono::milliseconds;

constexpr std::uint32_t kMagic = 0x31425243;  // "CRB1"
// Longest time until a dead rank is noticed.
constexpr milliseconds kLongestSleep{20};
// Ranks publish round after round: the next one comes soon, or not for long.
constexpr std::chrono::microseconds kSpin{50};
// How long stop() waits until the other nodes have received the sent data.
constexpr milliseconds kGoodbyePatience{3000};
constexpr milliseconds kLook{100};
constexpr std::size_t kMostPieces = 64;  // passed to the kernel at once

/// An invalid frame or a broken connection: the connection is unusable.
class BridgeError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Passes pieces to the kernel, as many bytes as it accepts. As in node_link.cpp, a separate function for the
/// thread sanitizer, which sees its reads end later than the other node's answer begins.
[[gnu::noinline]] ssize_t sendPieces(int fd, iovec* pieces, std::size_t numPieces) {
  msghdr message{};
  message.msg_iov = pieces;
  message.msg_iovlen = numPieces;
  ssize_t numSent = 0;
  do {
    numSent = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (numSent < 0 && errno == EINTR);
  return numSent;
}

/// The first of `pieces`, from `first` on, that is not completely sent after `numBytes` more bytes; shortens
/// it.
std::size_t skipSent(std::vector<iovec>& pieces, std::size_t first, std::size_t numBytes) {
  while (first < pieces.size() && numBytes >= pieces[first].iov_len) numBytes -= pieces[first++].iov_len;
  if (first < pieces.size()) {
    pieces[first].iov_base = static_cast<std::byte*>(pieces[first].iov_base) + numBytes;
    pieces[first].iov_len -= numBytes;
  }
  return first;
}

/// Waits until `fd` is ready or `isOver`. @returns whether it is ready.
template <typename IsOver>
bool awaitReady(int fd, short events, IsOver isOver) {
  pollfd watched{fd, events, 0};
  while (::poll(&watched, 1, static_cast<int>(kLook.count())) <= 0) {
    if (isOver()) return false;
  }
  return true;
}

std::uint32_t narrow(std::size_t rank) { return static_cast<std::uint32_t>(rank); }

}  // namespace

enum class NodeBridge::Kind : std::uint8_t {
  kRound = 1,      // rank `a` has published round `value`; call header, extent, its data
  kBytes = 2,      // of the channel from rank `a` to rank `b`
  kTaken = 3,      // rank `b` has taken `value` bytes of that channel
  kDeparture = 4,  // of rank `a`: `value`
  kGoodbye = 5,    // nothing more comes
};

/// Starts every frame. A wire format: little-endian, as all supported processors.
struct NodeBridge::Frame {
  std::uint32_t magic = kMagic;
  Kind kind = Kind::kGoodbye;
  std::uint8_t reserved[3] = {};
  std::uint32_t a = 0;
  std::uint32_t b = 0;
  std::uint64_t value = 0;
  std::uint64_t payloadBytes = 0;
};

struct NodeBridge::Connection {
  std::size_t node = 0;
  int fd = -1;
  std::atomic<bool> isSending{true};
  bool isReceiving = true;                    // used by the receiving thread
  const std::atomic<std::int64_t>* giveUpAt;  // of the bridge

  Connection(std::size_t number, int socket, const std::atomic<std::int64_t>& giveUp)
      : node(number), fd(socket), giveUpAt(&giveUp) {
    setNodeSocketOptions(fd);
  }
  ~Connection() { ::close(fd); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  bool isGivenUp() const {
    const std::int64_t due = giveUpAt->load(std::memory_order_relaxed);
    return due != 0 && Clock::now().time_since_epoch().count() > due;
  }

  bool isHopeless() const { return isGivenUp() || isUnreachable(fd); }

  /// Sends a frame and its payload. Drops it if the node is gone: the receiving thread also notices, and
  /// reports it.
  void send(Frame frame, std::vector<iovec> pieces = {}) {
    for (const iovec& piece : pieces) frame.payloadBytes += piece.iov_len;
    pieces.insert(pieces.begin(), {&frame, sizeof frame});
    std::size_t first = 0;
    while (first < pieces.size() && isSending.load(std::memory_order_relaxed)) {
      const ssize_t count = sendPieces(fd, &pieces[first], std::min(kMostPieces, pieces.size() - first));
      if (count >= 0) {
        first = skipSent(pieces, first, static_cast<std::size_t>(count));
      } else if (errno != EAGAIN && errno != EWOULDBLOCK) {
        isSending.store(false, std::memory_order_relaxed);
      } else if (!awaitReady(fd, POLLOUT, [this] { return isHopeless(); })) {
        isSending.store(false, std::memory_order_relaxed);
      }
    }
  }

  /// @throws BridgeError if nothing more arrives.
  void receive(void* data, std::size_t numBytes) {
    auto* to = static_cast<std::byte*>(data);
    while (numBytes > 0) {
      const ssize_t count = ::recv(fd, to, numBytes, MSG_DONTWAIT);
      if (count == 0) throw BridgeError("it was closed");
      if (count > 0) {
        to += count;
        numBytes -= static_cast<std::size_t>(count);
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        if (!awaitReady(fd, POLLIN, [this] { return isHopeless(); })) throw BridgeError("given up");
      } else if (errno != EINTR) {
        throw BridgeError(std::strerror(errno));
      }
    }
  }
};

NodeBridge::NodeBridge(const GroupScratch& scratch, std::vector<int> fds)
    : scratch_(scratch),
      area_(scratch.messageArea()),
      numRanks_(scratch.numRanks()),
      sentRounds_(numRanks_, 0),
      toldDepartures_(numRanks_, Departure::kNone),
      sentBytes_(numRanks_ * numRanks_, 0),
      toldTaken_(numRanks_ * numRanks_, 0) {
  static_assert(sizeof(Frame) == 32);
  for (std::size_t node = 0; node < fds.size(); ++node) {
    connections_.push_back(fds[node] < 0 ? nullptr
                                         : std::make_unique<Connection>(node, fds[node], giveUpAt_));
  }
  const Placement& placement = scratch.placement();
  const std::size_t own = placement.nodeOf(scratch.rank());
  for (std::size_t node = 0; node < std::max(fds.size(), placement.numNodes()); ++node) {
    const bool isThere = node < fds.size() && fds[node] >= 0;
    if (node >= placement.numNodes() || isThere == (node == own)) {
      throw std::invalid_argument("a bridge needs a socket for each node but its own");
    }
  }
  for (std::size_t rank = 0; rank < numRanks_; ++rank) {
    (placement.nodeOf(rank) == own ? here_ : elsewhere_).push_back(rank);
  }
  receiver_ = std::thread([this] { serveIncoming(); });
  sender_ = std::thread([this] { serveOutgoing(); });
}

NodeBridge::~NodeBridge() { stop(); }

void NodeBridge::stop() noexcept {
  if (!sender_.joinable()) return;
  giveUpAt_.store((Clock::now() + kGoodbyePatience).time_since_epoch().count(), std::memory_order_relaxed);
  isStopping_.store(true, std::memory_order_seq_cst);
  area_.bridgeBell().ring();
  sender_.join();
  receiver_.join();
}

// ---- sending ----

void NodeBridge::serveOutgoing() {
  YieldingSpin spin(kSpin);
  for (;;) {
    const std::uint32_t seen = area_.bridgeBell().listen();
    const bool isEnding = isStopping_.load(std::memory_order_seq_cst);
    if (sendAll()) {
      spin.reset();
      continue;
    }
    if (isEnding) break;
    if (spin.yield()) continue;
    area_.bridgeBell().sleep(seen, kLongestSleep);
    reportDeaths();
  }
  sayGoodbye();
}

/// Sends all pending data. @returns whether there was any.
bool NodeBridge::sendAll() {
  // Read first, sent last: a rank's earlier writes are sent before its departure.
  std::vector<Departure> departures;
  for (std::size_t rank : here_) {
    departures.push_back(scratch_.board(rank).departure.load(std::memory_order_acquire));
  }
  bool isAny = false;
  for (std::size_t rank : here_) isAny = sendRounds(rank) || isAny;
  for (std::size_t rank : here_) {
    for (std::size_t other : elsewhere_) {
      isAny = sendBytes(rank, other) || isAny;
      isAny = sendTaken(other, rank) || isAny;
    }
  }
  for (std::size_t i = 0; i < here_.size(); ++i) {
    if (departures[i] == Departure::kNone || toldDepartures_[here_[i]] != Departure::kNone) continue;
    sendDeparture(here_[i], departures[i]);
    isAny = true;
  }
  return isAny;
}

bool NodeBridge::sendRounds(std::size_t rank) {
  // acquire: the rank's writes into its buffers are read next.
  const std::uint32_t published = scratch_.board(rank).round.load(std::memory_order_acquire);
  const bool isAny = sentRounds_[rank] != published;
  while (sentRounds_[rank] != published) sendRound(rank, ++sentRounds_[rank]);
  return isAny;
}

void NodeBridge::sendRound(std::size_t rank, std::uint32_t round) {
  RankBoard& board = scratch_.board(rank);
  CallHeader& header = board.headers[round % 2];
  Extent& extent = board.extents[round % 2];
  std::byte* data = scratch_.bufferOf(rank, round);
  for (const auto& connection : connections_) {
    if (!connection) continue;
    std::vector<iovec> pieces = {{&header, sizeof header}, {&extent, sizeof extent}};
    for (const auto& [begin, end] : rangesFor(connection->node, extent)) {
      pieces.push_back({data + begin, end - begin});
    }
    connection->send({kMagic, Kind::kRound, {}, narrow(rank), 0, round}, std::move(pieces));
  }
}

/// The ranges of a rank's buffer that the ranks of `node` read.
std::vector<std::pair<std::size_t, std::size_t>> NodeBridge::rangesFor(std::size_t node,
                                                                       const Extent& extent) const {
  std::vector<std::pair<std::size_t, std::size_t>> ranges;
  for (std::size_t rank = 0; rank < numRanks_; ++rank) {
    if (scratch_.placement().nodeOf(rank) != node) continue;
    const auto range = extent.rangeOf(rank);
    if (range.first == range.second) continue;
    ranges.push_back(range);
    if (extent.areaBytes == 0) break;  // the same for all
  }
  return ranges;
}

bool NodeBridge::sendBytes(std::size_t from, std::size_t to) {
  Channel& way = area_.channel(from, to);
  std::uint64_t& sent = sentBytes_[from * numRanks_ + to];
  const std::size_t count = way.written.load(std::memory_order_acquire) - sent;
  if (count == 0) return false;
  Connection& connection = *connections_[scratch_.placement().nodeOf(to)];
  const std::size_t offset = sent % area_.ringBytes();
  const std::size_t first = std::min(count, area_.ringBytes() - offset);
  connection.send({kMagic, Kind::kBytes, {}, narrow(from), narrow(to)},
                  {{area_.ring(from, to) + offset, first}, {area_.ring(from, to), count - first}});
  sent += count;
  return true;
}

bool NodeBridge::sendTaken(std::size_t from, std::size_t to) {
  // acquire: the taken bytes may be overwritten once the sender is notified.
  const std::uint64_t taken = area_.channel(from, to).taken.load(std::memory_order_acquire);
  std::uint64_t& told = toldTaken_[from * numRanks_ + to];
  if (taken == told) return false;
  Connection& connection = *connections_[scratch_.placement().nodeOf(from)];
  connection.send({kMagic, Kind::kTaken, {}, narrow(from), narrow(to), taken});
  told = taken;
  return true;
}

void NodeBridge::sendDeparture(std::size_t rank, Departure departure) {
  toldDepartures_[rank] = departure;
  for (const auto& connection : connections_) {
    if (!connection) continue;
    connection->send({kMagic, Kind::kDeparture, {}, narrow(rank), 0, static_cast<std::uint64_t>(departure)});
  }
}

void NodeBridge::reportDeaths() {
  for (std::size_t rank : here_) {
    if (toldDepartures_[rank] == Departure::kNone && scratch_.isGone(rank)) {
      sendAll();  // data published before the end
      sendDeparture(rank, Departure::kDied);
    }
  }
}

void NodeBridge::sayGoodbye() {
  for (const auto& connection : connections_) {
    if (!connection) continue;
    connection->send({kMagic, Kind::kGoodbye});
    // The other node answers by ending its stream, so that closing the socket loses nothing.
    ::shutdown(connection->fd, SHUT_WR);
  }
}

// ---- receiving ----

void NodeBridge::serveIncoming() {
  std::vector<pollfd> watched;
  for (;;) {
    watched.clear();
    bool isGivenUp = false;
    for (const auto& connection : connections_) {
      if (!connection || !connection->isReceiving) continue;
      watched.push_back({connection->fd, POLLIN, 0});
      isGivenUp = connection->isGivenUp();
    }
    if (watched.empty() || isGivenUp) return;
    if (::poll(watched.data(), watched.size(), static_cast<int>(kLook.count())) <= 0) {
      for (const auto& connection : connections_) {
        if (connection && connection->isReceiving && isUnreachable(connection->fd)) end(*connection);
      }
      continue;
    }
    for (const auto& connection : connections_) {
      if (!connection || !connection->isReceiving) continue;
      const bool isReady = std::any_of(watched.begin(), watched.end(), [&](const pollfd& one) {
        return one.fd == connection->fd && one.revents != 0;
      });
      if (!isReady) continue;
      try {
        receiveFrame(*connection);
      } catch (const BridgeError&) {
        end(*connection);
      }
    }
  }
}

void NodeBridge::receiveFrame(Connection& connection) {
  Frame frame;
  connection.receive(&frame, sizeof frame);
  if (frame.magic != kMagic) throw BridgeError("what came is no frame");
  switch (frame.kind) {
    case Kind::kRound:
      return receiveRound(connection, frame);
    case Kind::kBytes:
      return receiveBytes(connection, frame);
    case Kind::kTaken:
      return receiveTaken(connection, frame);
    case Kind::kDeparture:
      return receiveDeparture(connection, frame);
    case Kind::kGoodbye:
      return end(connection);
  }
  throw BridgeError("a frame of no kind that there is");
}

void NodeBridge::receiveRound(Connection& connection, const Frame& frame) {
  const std::size_t rank = rankThere(connection, frame.a);
  RankBoard& board = scratch_.board(rank);
  const auto round = static_cast<std::uint32_t>(frame.value);
  if (round != board.round.load(std::memory_order_relaxed) + 1) throw BridgeError("a round out of turn");
  Extent extent;
  connection.receive(&board.headers[round % 2], sizeof(CallHeader));
  connection.receive(&extent, sizeof extent);
  if (extent.numBytes > scratch_.bufferBytes()) throw BridgeError("more than a buffer takes");
  std::uint64_t left = frame.payloadBytes - sizeof(CallHeader) - sizeof extent;
  for (const auto& [begin, end] : rangesFor(scratch_.placement().nodeOf(scratch_.rank()), extent)) {
    connection.receive(scratch_.bufferOf(rank, round) + begin, end - begin);
    left -= end - begin;
  }
  if (left != 0) throw BridgeError("a round of another length than its extent");
  // seq_cst, paired with the load of sleepers: as in GroupScratch::meet().
  board.round.store(round, std::memory_order_seq_cst);
  if (board.sleepers.load(std::memory_order_seq_cst) != 0) futexWake(board.round, INT_MAX);
}

void NodeBridge::receiveBytes(Connection& connection, const Frame& frame) {
  const std::size_t from = rankThere(connection, frame.a), to = rankHere(frame.b);
  Channel& way = area_.channel(from, to);
  const std::uint64_t written = way.written.load(std::memory_order_relaxed);
  const std::uint64_t room = area_.ringBytes() - (written - way.taken.load(std::memory_order_acquire));
  if (frame.payloadBytes > room) throw BridgeError("more than a channel takes");
  const std::size_t offset = written % area_.ringBytes();
  const std::size_t first = std::min<std::size_t>(frame.payloadBytes, area_.ringBytes() - offset);
  connection.receive(area_.ring(from, to) + offset, first);
  connection.receive(area_.ring(from, to), frame.payloadBytes - first);
  way.written.store(written + frame.payloadBytes, std::memory_order_release);
  area_.bell(to).ring();
}

void NodeBridge::receiveTaken(const Connection& connection, const Frame& frame) {
  const std::size_t from = rankHere(frame.a), to = rankThere(connection, frame.b);
  Channel& way = area_.channel(from, to);
  const std::uint64_t taken = way.taken.load(std::memory_order_relaxed);
  // Rejects a count of taken bytes beyond the written ones: the sender would overrun the ring.
  if (frame.value - taken > way.written.load(std::memory_order_acquire) - taken) {
    throw BridgeError("more was taken than written");
  }
  way.taken.store(frame.value, std::memory_order_release);
  area_.bell(from).ring();
}

void NodeBridge::receiveDeparture(const Connection& connection, const Frame& frame) {
  if (frame.value != static_cast<std::uint64_t>(Departure::kLeft) &&
      frame.value != static_cast<std::uint64_t>(Departure::kDied)) {
    throw BridgeError("a departure of no kind that there is");
  }
  depart(rankThere(connection, frame.a), static_cast<Departure>(frame.value));
}

/// Ends all traffic with a node.
void NodeBridge::end(Connection& connection) {
  connection.isReceiving = false;
  connection.isSending.store(false, std::memory_order_relaxed);
  ::shutdown(connection.fd, SHUT_WR);
  for (std::size_t rank : elsewhere_) {
    if (scratch_.placement().nodeOf(rank) == connection.node) depart(rank, Departure::kUnreachable);
  }
}

void NodeBridge::depart(std::size_t rank, Departure departure) {
  RankBoard& board = scratch_.board(rank);
  if (board.departure.load(std::memory_order_relaxed) != Departure::kNone) return;
  board.departure.store(departure, std::memory_order_release);
  futexWake(board.round, INT_MAX);
  for (std::size_t own : here_) area_.bell(own).ring();
}

std::size_t NodeBridge::rankThere(const Connection& connection, std::uint64_t rank) const {
  if (rank >= numRanks_ || scratch_.placement().nodeOf(rank) != connection.node) {
    throw BridgeError("a rank that is of another node");
  }
  return rank;
}

std::size_t NodeBridge::rankHere(std::uint64_t rank) const {
  if (rank >= numRanks_ || !scratch_.isHere(rank)) throw BridgeError("a rank that is none of this node");
  return rank;
}

}  // namespace coarse
