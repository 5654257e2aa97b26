#include "coarse/node/node_link.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "coarse/node/node_socket.hpp"
#include "coarse/timeline/recorder.hpp"

namespace coarse {
namespace {

// How long a device that ends waits until the others have received its data.
constexpr std::chrono::milliseconds kGoodbyePatience{3000};

// Interval between checks for machines that have vanished.
constexpr std::chrono::milliseconds kLookInterval{1000};

// Bytes received from one connection before the next connection's turn.
constexpr std::size_t kBytesPerTurn = 4 << 20;

// Frames passed to the kernel in one call, a header and a payload each.
constexpr std::size_t kFramesPerCall = 16;

constexpr int kEventsPerCall = 64;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

void setOptions(int fd) {
  setNodeSocketOptions(fd);
  if (::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK) != 0) fail("a socket to another node");
}

/// Passes frames to the kernel. A separate function, because the thread sanitizer must be informed (see
/// tests/native/shared_view.cpp) that payloads are written again only after the other node has reacted to
/// them.
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

bool carriesData(FrameKind kind) { return kind == FrameKind::kPartial || kind == FrameKind::kResult; }

/// Records a frame in the timeline, which ends now.
void note(EventKind kind, std::size_t node, const FrameHeader& header, std::int64_t startNs) noexcept {
  Recorder* const timeline = recorder();
  if (timeline == nullptr || !carriesData(header.kind)) return;
  TimelineEvent event;
  event.kind = kind;
  event.startNs = startNs;
  event.durationNs = timelineNow() - startNs;
  event.numBytes = header.payloadBytes;
  event.detail = node;
  event.group = header.group;
  event.index = header.shard;
  event.step = header.step;
  timeline->record(event);
}

}  // namespace

struct NodeLinks::Frame {
  FrameHeader header;
  FramePayload payload;
  std::size_t numSent = 0;  // header and payload together
  std::int64_t queuedNs = timelineNow();

  std::size_t numBytes() const { return sizeof(header) + header.payloadBytes; }
};

struct NodeLinks::Connection {
  std::size_t node = 0;
  int fd = -1;
  std::atomic<bool> isGone{false};  // no more traffic

  // Used by the link's thread:
  bool hasSaidBye = false;
  FrameHeader header;
  std::size_t numReceived = 0;  // of header and payload
  FramePayload payload;
  std::int64_t openedNs = 0;  // as the header had arrived
  std::string text;           // of an abort

  std::mutex mutex;  // guards the members below
  std::deque<Frame> queue;
  bool wantsWrites = false;
  bool isClosing = false;   // accepts no more frames
  bool isShutDown = false;  // everything was sent
};

NodeLinks::NodeLinks(std::size_t node, const std::vector<std::vector<int>>& fds, Receiver receiver,
                     ProcessMetrics metrics)
    : node_(node), receiver_(std::move(receiver)), metrics_(std::move(metrics)), connections_(fds.size()) {
  for (std::size_t other = 0; other < fds.size(); ++other) {
    if (fds[other].empty() != (other == node))
      throw std::invalid_argument("a memory device needs connections to every other node");
  }
  epollFd_ = ::epoll_create1(EPOLL_CLOEXEC);
  wakeFd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (epollFd_ < 0 || wakeFd_ < 0) fail("epoll");
  epoll_event wakeEvent{};
  wakeEvent.events = EPOLLIN;
  if (::epoll_ctl(epollFd_, EPOLL_CTL_ADD, wakeFd_, &wakeEvent) != 0) fail("epoll");
  for (std::size_t other = 0; other < fds.size(); ++other) {
    for (const int fd : fds[other]) {
      auto connection = std::make_unique<Connection>();
      connection->node = other;
      connection->fd = ::fcntl(fd, F_DUPFD_CLOEXEC, 3);
      if (connection->fd < 0) fail("a socket to another node");
      setOptions(connection->fd);
      epoll_event event{};
      event.events = EPOLLIN;
      event.data.ptr = connection.get();
      if (::epoll_ctl(epollFd_, EPOLL_CTL_ADD, connection->fd, &event) != 0) fail("epoll");
      connections_[other].push_back(std::move(connection));
    }
  }
}

NodeLinks::~NodeLinks() {
  stop();
  for (const auto& ofNode : connections_) {
    for (const auto& connection : ofNode) ::close(connection->fd);
  }
  ::close(wakeFd_);
  ::close(epollFd_);
}

void NodeLinks::start() {
  thread_ = std::thread([this] { run(); });
}

void NodeLinks::stop() noexcept {
  if (!thread_.joinable()) return;
  isStopping_.store(true);
  wake();
  thread_.join();
}

void NodeLinks::wake() noexcept {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wakeFd_, &one, sizeof(one));
}

// ---- the thread ----

void NodeLinks::run() {
  nameThread("node links");
  auto nextLook = std::chrono::steady_clock::now() + kLookInterval;
  while (!isStopping_.load()) {
    waitForEvents(static_cast<int>(kLookInterval.count()));
    if (std::chrono::steady_clock::now() < nextLook) continue;
    loseUnreachable();
    nextLook = std::chrono::steady_clock::now() + kLookInterval;
  }
  sayGoodbye();
  const auto deadline = std::chrono::steady_clock::now() + kGoodbyePatience;
  while (!isEveryoneGone()) {
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left <= left.zero()) break;
    const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(left).count() + 1;
    waitForEvents(static_cast<int>(milliseconds));
  }
}

/// @returns false if nothing arrived.
bool NodeLinks::waitForEvents(int timeoutMilliseconds) {
  std::array<epoll_event, kEventsPerCall> events;
  const int count = ::epoll_wait(epollFd_, events.data(), kEventsPerCall, timeoutMilliseconds);
  for (int i = 0; i < count; ++i) {
    auto* connection = static_cast<Connection*>(events[static_cast<std::size_t>(i)].data.ptr);
    if (connection == nullptr) {
      std::uint64_t ignored = 0;
      [[maybe_unused]] const auto got = ::read(wakeFd_, &ignored, sizeof(ignored));
      continue;
    }
    const std::uint32_t what = events[static_cast<std::size_t>(i)].events;
    if ((what & EPOLLOUT) != 0) {
      const std::lock_guard<std::mutex> lock(connection->mutex);
      flush(*connection);
    }
    if ((what & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) receive(*connection);
  }
  return count > 0;
}

void NodeLinks::sayGoodbye() {
  FrameHeader bye;
  bye.kind = FrameKind::kBye;
  sendToAll(bye);
  for (const auto& ofNode : connections_) {
    for (const auto& connection : ofNode) {
      const std::lock_guard<std::mutex> lock(connection->mutex);
      connection->isClosing = true;
      flush(*connection);
    }
  }
}

bool NodeLinks::isEveryoneGone() {
  for (const auto& ofNode : connections_) {
    for (const auto& connection : ofNode) {
      if (!connection->isGone.load()) return false;
    }
  }
  return true;
}

// ---- sending ----

void NodeLinks::send(std::size_t node, FrameHeader header, FramePayload payload) {
  const auto& ofNode = connections_[node];
  enqueue(*ofNode[header.shard % ofNode.size()], {header, std::move(payload)});
}

void NodeLinks::sendToAll(FrameHeader header) {
  for (const auto& ofNode : connections_) {
    for (const auto& connection : ofNode) enqueue(*connection, {header, {}});
  }
}

void NodeLinks::abort(const std::string& text) {
  auto copy = std::make_shared<std::string>(text.substr(0, kMostAbortBytes));
  FrameHeader header;
  header.kind = FrameKind::kAbort;
  header.payloadBytes = copy->size();
  for (const auto& ofNode : connections_) {
    for (const auto& connection : ofNode) {
      {
        // Results that are no longer awaited must not delay the news; a begun frame must be completed.
        const std::lock_guard<std::mutex> lock(connection->mutex);
        auto& queue = connection->queue;
        const bool hasBegun = !queue.empty() && queue.front().numSent > 0;
        queue.erase(queue.begin() + (hasBegun ? 1 : 0), queue.end());
      }
      enqueue(*connection, {header, {reinterpret_cast<std::byte*>(copy->data()), copy}});
    }
  }
}

void NodeLinks::enqueue(Connection& connection, Frame frame) {
  frame.header.magic = kFrameMagic;
  const std::lock_guard<std::mutex> lock(connection.mutex);
  if (connection.isClosing || connection.isGone.load()) return;
  connection.queue.push_back(std::move(frame));
  if (!connection.wantsWrites) flush(connection);
}

/// @pre the connection's lock is held.
void NodeLinks::flush(Connection& connection) {
  while (!connection.queue.empty() && sendSome(connection)) {
  }
  if (!connection.queue.empty()) {
    wantWrites(connection, true);
    return;
  }
  wantWrites(connection, false);
  if (connection.isClosing && !connection.isShutDown) {
    connection.isShutDown = true;
    ::shutdown(connection.fd, SHUT_WR);
  }
}

/// @returns false if the socket accepts no more now. @pre the connection's lock is held.
bool NodeLinks::sendSome(Connection& connection) {
  std::array<iovec, 2 * kFramesPerCall> pieces;
  std::size_t numPieces = 0;
  const auto add = [&](const void* data, std::size_t numBytes, std::size_t numSent) {
    if (numSent >= numBytes) return;
    pieces[numPieces++] = {static_cast<std::byte*>(const_cast<void*>(data)) + numSent, numBytes - numSent};
  };
  for (std::size_t i = 0; i < std::min(kFramesPerCall, connection.queue.size()); ++i) {
    const Frame& frame = connection.queue[i];
    constexpr std::size_t kHeaderBytes = sizeof(FrameHeader);
    add(&frame.header, kHeaderBytes, frame.numSent);
    add(frame.payload.data, frame.header.payloadBytes, frame.numSent - std::min(frame.numSent, kHeaderBytes));
  }
  const ssize_t numSent = sendPieces(connection.fd, pieces.data(), numPieces);
  if (numSent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
  if (numSent < 0) {
    // The receiving code reports the reason; queued frames can't be sent any more.
    connection.queue.clear();
    connection.isClosing = connection.isShutDown = true;
    return true;
  }
  auto left = static_cast<std::size_t>(numSent);
  metrics_.add(Metric::kNodeSentBytes, left);
  while (left > 0) {
    Frame& frame = connection.queue.front();
    const std::size_t part = std::min(left, frame.numBytes() - frame.numSent);
    frame.numSent += part;
    left -= part;
    if (frame.numSent < frame.numBytes()) continue;
    note(EventKind::kNodeSend, connection.node, frame.header, frame.queuedNs);
    connection.queue.pop_front();
  }
  return true;
}

/// @pre the connection's lock is held.
void NodeLinks::wantWrites(Connection& connection, bool wanted) {
  if (connection.wantsWrites == wanted || connection.isGone.load()) return;
  connection.wantsWrites = wanted;
  epoll_event event{};
  event.events = EPOLLIN | (wanted ? EPOLLOUT : 0U);
  event.data.ptr = &connection;
  ::epoll_ctl(epollFd_, EPOLL_CTL_MOD, connection.fd, &event);
}

// ---- receiving ----

void NodeLinks::receive(Connection& connection) {
  try {
    for (std::size_t i = 0; i < kBytesPerTurn && !connection.isGone.load();) {
      const std::size_t before = connection.numReceived;
      if (!receiveSome(connection)) return;
      i += connection.numReceived > before ? connection.numReceived - before : sizeof(FrameHeader);
    }
  } catch (const LinkError& error) {
    lose(connection, error.what());
  } catch (const std::system_error& error) {
    lose(connection, error.what());
  }
}

/// @returns false if nothing more can be received now.
bool NodeLinks::receiveSome(Connection& connection) {
  constexpr std::size_t kHeaderBytes = sizeof(FrameHeader);
  const bool isHeader = connection.numReceived < kHeaderBytes;
  std::byte* target = isHeader ? reinterpret_cast<std::byte*>(&connection.header) + connection.numReceived
                               : connection.payload.data + (connection.numReceived - kHeaderBytes);
  const std::size_t wanted =
      (isHeader ? kHeaderBytes : kHeaderBytes + connection.header.payloadBytes) - connection.numReceived;
  ssize_t got = 0;
  do {
    got = ::recv(connection.fd, target, wanted, MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
  if (got < 0) fail("the connection broke");
  if (got == 0) {
    endOfStream(connection);
    return false;
  }
  connection.numReceived += static_cast<std::size_t>(got);
  metrics_.add(Metric::kNodeReceivedBytes, static_cast<std::size_t>(got));
  if (isHeader && connection.numReceived == kHeaderBytes) open(connection);
  if (connection.numReceived >= kHeaderBytes &&
      connection.numReceived == kHeaderBytes + connection.header.payloadBytes) {
    close(connection);
    connection.numReceived = 0;
    connection.payload = {};
  }
  return true;
}

/// A header has arrived: finds the payload's destination.
void NodeLinks::open(Connection& connection) {
  const FrameHeader& header = connection.header;
  if (header.magic != kFrameMagic) throw LinkError("it sent something that is no frame");
  if (connection.hasSaidBye) throw LinkError("it sent a frame after its goodbye");
  if (carriesData(header.kind)) {
    connection.openedNs = timelineNow();
    connection.payload = receiver_.open(connection.node, header);
    return;
  }
  const bool isKnown =
      header.kind == FrameKind::kLeft || header.kind == FrameKind::kAbort || header.kind == FrameKind::kBye;
  if (!isKnown || header.payloadBytes > (header.kind == FrameKind::kAbort ? kMostAbortBytes : 0)) {
    throw LinkError("it sent a frame of kind " + std::to_string(static_cast<int>(header.kind)) + " with " +
                    std::to_string(header.payloadBytes) + " bytes");
  }
  connection.text.resize(header.payloadBytes);
  connection.payload.data = reinterpret_cast<std::byte*>(connection.text.data());
}

/// The frame is complete.
void NodeLinks::close(Connection& connection) {
  const FrameHeader& header = connection.header;
  if (carriesData(header.kind)) {
    note(EventKind::kNodeReceive, connection.node, header, connection.openedNs);
    receiver_.close(connection.node, header, connection.payload);
  } else if (header.kind == FrameKind::kLeft) {
    receiver_.event({NodeEvent::Kind::kLeft, connection.node, header.shard, {}});
  } else if (header.kind == FrameKind::kAbort) {
    receiver_.event({NodeEvent::Kind::kAborted, connection.node, 0, connection.text});
  } else {
    connection.hasSaidBye = true;
  }
}

void NodeLinks::endOfStream(Connection& connection) {
  if (!connection.hasSaidBye) throw LinkError("the connection was closed from the other end");
  disconnect(connection);
  const auto& ofNode = connections_[connection.node];
  const bool isLast = std::all_of(ofNode.begin(), ofNode.end(),
                                  [](const auto& each) { return each->isGone && each->hasSaidBye; });
  if (isLast) receiver_.event({NodeEvent::Kind::kEnded, connection.node, 0, {}});
}

void NodeLinks::lose(Connection& connection, const std::string& reason) {
  disconnect(connection);
  receiver_.event({NodeEvent::Kind::kLost, connection.node, 0, reason});
}

void NodeLinks::loseUnreachable() {
  for (const auto& ofNode : connections_) {
    for (const auto& connection : ofNode) {
      if (!connection->isGone.load() && isUnreachable(connection->fd)) {
        lose(*connection, "its machine answers nothing any more");
      }
    }
  }
}

/// Ends both directions; the descriptor is closed only with the object, so that its number is not reused.
void NodeLinks::disconnect(Connection& connection) {
  const std::lock_guard<std::mutex> lock(connection.mutex);
  connection.isGone.store(true);
  connection.queue.clear();
  ::epoll_ctl(epollFd_, EPOLL_CTL_DEL, connection.fd, nullptr);
  ::shutdown(connection.fd, SHUT_RDWR);
}

}  // namespace coarse
