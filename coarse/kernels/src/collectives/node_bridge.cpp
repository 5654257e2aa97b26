#include "coarse/collectives/node_bridge.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "coarse/node/tcp_transport.hpp"

namespace coarse {
namespace {

using std::chrono::milliseconds;

// Longest time until a dead rank is noticed.
constexpr milliseconds kLongestSleep{20};
// Ranks publish round after round: the next one comes soon, or not for long.
constexpr std::chrono::microseconds kSpin{50};
// How long stop() waits until the other nodes have received the sent data.
constexpr milliseconds kGoodbyePatience{3000};
constexpr milliseconds kLongestWait{1000};

std::uint32_t narrow(std::size_t rank) { return static_cast<std::uint32_t>(rank); }

template <typename Value>
Value readAt(const std::byte* data, std::size_t offset = 0) {
  Value value;
  std::memcpy(&value, data + offset, sizeof value);
  return value;
}

}  // namespace

enum class NodeBridge::Kind : std::uint8_t {
  kRound = 1,      // rank `a` has published round `value`; RoundHeader, its data
  kBytes = 2,      // of the channel from rank `a` to rank `b`
  kTaken = 3,      // rank `b` has taken `value` bytes of that channel
  kDeparture = 4,  // of rank `a`: `value`
};

/// Starts the header of every frame. A wire format: little-endian, as all supported processors.
struct NodeBridge::Header {
  Kind kind = Kind::kRound;
  std::uint8_t reserved[3] = {};
  std::uint32_t a = 0;
  std::uint32_t b = 0;
  std::uint32_t zero = 0;
  std::uint64_t value = 0;
  std::uint64_t payloadBytes = 0;
};

struct NodeBridge::RoundHeader {
  Header header;
  CallHeader call;
  Extent extent;
};

NodeBridge::NodeBridge(const GroupScratch& scratch, const std::vector<int>& fds, LinkOptions options)
    : scratch_(scratch),
      area_(scratch.messageArea()),
      numRanks_(scratch.numRanks()),
      linkTo_(fds.size(), 0),
      sentRounds_(numRanks_, 0),
      toldDepartures_(numRanks_, Departure::kNone),
      sentBytes_(numRanks_ * numRanks_, 0),
      toldTaken_(numRanks_ * numRanks_, 0),
      eventFd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  static_assert(sizeof(Header) == 32);
  static_assert(sizeof(RoundHeader) == 152 && sizeof(RoundHeader) <= kMostHeaderBytes);
  std::vector<int> links;
  for (std::size_t node = 0; node < fds.size(); ++node) {
    if (fds[node] < 0) continue;
    linkTo_[node] = links.size();
    links.push_back(fds[node]);
    nodeOf_.push_back(node);
  }
  FrameHandler& handler = *this;
  transport_ = std::make_unique<TcpTransport>(links, handler, sizeof(Header), options);
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

NodeBridge::~NodeBridge() {
  stop();
  ::close(eventFd_);
}

void NodeBridge::stop() noexcept {
  if (!sender_.joinable()) return;
  isStopping_.store(true, std::memory_order_seq_cst);
  area_.bridgeBell().ring();
  sender_.join();
  isFinishing_.store(true, std::memory_order_seq_cst);
  transport_->wake();
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
    if (isEnding) return;
    if (spin.yield()) continue;
    area_.bridgeBell().sleep(seen, kLongestSleep);
    reportDeaths();
  }
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

void NodeBridge::sendTo(std::size_t node, const Header& header, Payload payload) {
  transport_->send(linkTo_[node], &header, sizeof header, std::move(payload));
}

bool NodeBridge::sendRounds(std::size_t rank) {
  // acquire: the rank's writes into its buffers are read next.
  const std::uint32_t published = scratch_.board(rank).round.load(std::memory_order_acquire);
  const bool isAny = sentRounds_[rank] != published;
  while (sentRounds_[rank] != published) sendRound(rank, ++sentRounds_[rank]);
  return isAny;
}

void NodeBridge::sendRound(std::size_t rank, std::uint32_t round) {
  std::byte* const data = scratch_.bufferOf(rank, round);
  RoundHeader header{{Kind::kRound, {}, narrow(rank), 0, 0, round, 0},
                     scratch_.headerOf(rank, round),
                     scratch_.extentOf(rank, round)};
  for (std::size_t link = 0; link < nodeOf_.size(); ++link) {
    Payload payload;
    for (const auto& [begin, end] : rangesFor(nodeOf_[link], header.extent)) {
      payload.pieces.push_back({data + begin, end - begin});
    }
    header.header.payloadBytes = payload.numBytes();
    transport_->send(link, &header, sizeof header, std::move(payload));
  }
}

/// The ranges of a rank's buffer that the ranks of `node` read.
NodeBridge::Ranges NodeBridge::rangesFor(std::size_t node, const Extent& extent) const {
  Ranges ranges;
  for (std::size_t rank = 0; rank < numRanks_; ++rank) {
    if (scratch_.placement().nodeOf(rank) != node) continue;
    const auto range = extent.rangeOf(rank);
    if (range.first == range.second) continue;
    ranges.push_back(range);
    if (extent.areaBytes == 0) break;  // the same for all
  }
  return ranges;
}

/// `numBytes` of a channel's ring, from its byte number `begin` on.
Payload NodeBridge::ringPieces(std::size_t from, std::size_t to, std::uint64_t begin,
                               std::size_t numBytes) const {
  std::byte* const ring = area_.ring(from, to);
  const std::size_t offset = begin % area_.ringBytes();
  const std::size_t first = std::min(numBytes, area_.ringBytes() - offset);
  return {{{ring + offset, first}, {ring, numBytes - first}}, nullptr};
}

bool NodeBridge::sendBytes(std::size_t from, std::size_t to) {
  Channel& way = area_.channel(from, to);
  std::uint64_t& sent = sentBytes_[from * numRanks_ + to];
  const std::size_t count = way.written.load(std::memory_order_acquire) - sent;
  if (count == 0) return false;
  sendTo(scratch_.placement().nodeOf(to), {Kind::kBytes, {}, narrow(from), narrow(to), 0, 0, count},
         ringPieces(from, to, sent, count));
  sent += count;
  return true;
}

bool NodeBridge::sendTaken(std::size_t from, std::size_t to) {
  // acquire: the taken bytes may be overwritten once the sender is notified.
  const std::uint64_t taken = area_.channel(from, to).taken.load(std::memory_order_acquire);
  std::uint64_t& told = toldTaken_[from * numRanks_ + to];
  if (taken == told) return false;
  sendTo(scratch_.placement().nodeOf(from), {Kind::kTaken, {}, narrow(from), narrow(to), 0, taken, 0});
  told = taken;
  return true;
}

void NodeBridge::sendDeparture(std::size_t rank, Departure departure) {
  toldDepartures_[rank] = departure;
  for (const std::size_t node : nodeOf_)
    sendTo(node, {Kind::kDeparture, {}, narrow(rank), 0, 0, static_cast<std::uint64_t>(departure), 0});
}

void NodeBridge::reportDeaths() {
  for (std::size_t rank : here_) {
    if (toldDepartures_[rank] == Departure::kNone && scratch_.isGone(rank)) {
      sendAll();  // data published before the end
      sendDeparture(rank, Departure::kDied);
    }
  }
}

// ---- receiving ----

void NodeBridge::serveIncoming() {
  while (!isFinishing_.load(std::memory_order_seq_cst)) transport_->progress(kLongestWait);
  transport_->finish(kGoodbyePatience);
  isOver_.store(true);
  notify();
}

Payload NodeBridge::open(std::size_t link, const std::byte* data, std::size_t headerBytes) {
  const auto header = readAt<Header>(data);
  const bool isRound = header.kind == Kind::kRound;
  if (headerBytes != (isRound ? sizeof(RoundHeader) : sizeof(Header)))
    throw LinkError("a header of another length than those of its kind");
  checkSides(nodeOf_[link], header);
  if (isRound) return openRound(header, readAt<RoundHeader>(data).extent);
  if (header.kind == Kind::kBytes) return openBytes(header);
  if (header.payloadBytes != 0) throw LinkError("a payload where none belongs");
  return {};
}

/// Checks that a frame speaks of the ranks of the node that sent it, and if of others, then of this node's.
void NodeBridge::checkSides(std::size_t node, const Header& header) const {
  const auto isThere = [&](std::size_t rank) {
    return rank < numRanks_ && scratch_.placement().nodeOf(rank) == node;
  };
  const auto isHere = [&](std::size_t rank) { return rank < numRanks_ && scratch_.isHere(rank); };
  const bool isLeave = header.value == static_cast<std::uint64_t>(Departure::kLeft) ||
                       header.value == static_cast<std::uint64_t>(Departure::kDied);
  switch (header.kind) {
    case Kind::kRound:
      if (isThere(header.a)) return;
      break;
    case Kind::kBytes:
      if (isThere(header.a) && isHere(header.b)) return;
      break;
    case Kind::kTaken:
      if (isHere(header.a) && isThere(header.b)) return;
      break;
    case Kind::kDeparture:
      if (isThere(header.a) && isLeave) return;
      break;
    default:
      throw LinkError("a frame of no kind that there is");
  }
  throw LinkError("a frame about ranks that are not its own");
}

Payload NodeBridge::openRound(const Header& header, const Extent& extent) const {
  const auto round = static_cast<std::uint32_t>(header.value);
  if (round != scratch_.board(header.a).round.load(std::memory_order_relaxed) + 1)
    throw LinkError("a round out of turn");
  if (extent.numBytes > scratch_.bufferBytes()) throw LinkError("more than a buffer takes");
  Payload payload;
  for (const auto& [begin, end] : rangesFor(scratch_.placement().nodeOf(scratch_.rank()), extent))
    payload.pieces.push_back({scratch_.bufferOf(header.a, round) + begin, end - begin});
  if (payload.numBytes() != header.payloadBytes) throw LinkError("a round of another length than its extent");
  return payload;
}

Payload NodeBridge::openBytes(const Header& header) const {
  const Channel& way = area_.channel(header.a, header.b);
  const std::uint64_t written = way.written.load(std::memory_order_relaxed);
  const std::uint64_t room = area_.ringBytes() - (written - way.taken.load(std::memory_order_acquire));
  if (header.payloadBytes > room) throw LinkError("more than a channel takes");
  return ringPieces(header.a, header.b, written, header.payloadBytes);
}

void NodeBridge::close(std::size_t, const std::byte* data, const Payload&) {
  const auto header = readAt<Header>(data);
  if (header.kind == Kind::kRound) {
    closeRound(header, readAt<RoundHeader>(data).call);
  } else if (header.kind == Kind::kBytes) {
    closeBytes(header);
  } else if (header.kind == Kind::kTaken) {
    closeTaken(header);
  } else {
    depart(header.a, static_cast<Departure>(header.value));
  }
}

void NodeBridge::closeRound(const Header& header, const CallHeader& call) {
  RankBoard& board = scratch_.board(header.a);
  const auto round = static_cast<std::uint32_t>(header.value);
  scratch_.headerOf(header.a, round) = call;
  // seq_cst, paired with the load of sleepers: as in GroupScratch::meet().
  board.round.store(round, std::memory_order_seq_cst);
  if (board.sleepers.load(std::memory_order_seq_cst) != 0) futexWake(board.round, INT_MAX);
}

void NodeBridge::closeBytes(const Header& header) {
  Channel& way = area_.channel(header.a, header.b);
  const std::uint64_t written = way.written.load(std::memory_order_relaxed);
  way.written.store(written + header.payloadBytes, std::memory_order_release);
  area_.bell(header.b).ring();
}

void NodeBridge::closeTaken(const Header& header) {
  Channel& way = area_.channel(header.a, header.b);
  const std::uint64_t taken = way.taken.load(std::memory_order_relaxed);
  // Rejects a count of taken bytes beyond the written ones: the sender would overrun the ring.
  if (header.value - taken > way.written.load(std::memory_order_acquire) - taken)
    throw LinkError("more was taken than written");
  way.taken.store(header.value, std::memory_order_release);
  area_.bell(header.a).ring();
}

/// With a link that ends, all ranks of its node become unreachable.
void NodeBridge::event(LinkEvent event) {
  const std::size_t node = nodeOf_[event.link];
  if (event.kind == LinkEvent::Kind::kEnded || event.kind == LinkEvent::Kind::kLost) {
    for (std::size_t rank : elsewhere_) {
      if (scratch_.placement().nodeOf(rank) == node) depart(rank, Departure::kUnreachable);
    }
  }
  {
    const std::lock_guard<std::mutex> lock(eventsMutex_);
    events_.push_back({nodeEventKind(event.kind), node, 0, std::move(event.text), event.cause});
  }
  notify();
}

void NodeBridge::notify() noexcept {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(eventFd_, &one, sizeof one);
}

std::vector<NodeEvent> NodeBridge::takeEvents() {
  std::uint64_t ignored = 0;
  [[maybe_unused]] const auto got = ::read(eventFd_, &ignored, sizeof ignored);
  const std::lock_guard<std::mutex> lock(eventsMutex_);
  return std::exchange(events_, {});
}

void NodeBridge::resume(std::size_t node, int fd) { transport_->resume(linkTo_.at(node), fd); }

void NodeBridge::interrupt(std::size_t node) { transport_->interrupt(linkTo_.at(node)); }

void NodeBridge::giveUp(std::size_t node, const std::string& reason) {
  transport_->giveUp(linkTo_.at(node), reason);
}

void NodeBridge::depart(std::size_t rank, Departure departure) {
  RankBoard& board = scratch_.board(rank);
  if (board.departure.load(std::memory_order_relaxed) != Departure::kNone) return;
  board.departure.store(departure, std::memory_order_release);
  futexWake(board.round, INT_MAX);
  for (std::size_t own : here_) area_.bell(own).ring();
}

}  // namespace coarse
