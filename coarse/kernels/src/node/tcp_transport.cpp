#include "coarse/node/tcp_transport.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <system_error>
#include <utility>

#include "coarse/node/node_socket.hpp"
#include "coarse/shared_memory/durations.hpp"
#include "coarse/timeline/recorder.hpp"

namespace coarse {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Interval between checks for machines that give no answer, and of acknowledgements without other frames.
constexpr milliseconds kLookInterval{1000};

// A peer whose machine was silent for this long may have given up this link, so its end does not tell that
// its process has ended.
constexpr milliseconds kSuspectSilence{2000};

// Bytes received from one link before the next link's turn.
constexpr std::size_t kBytesPerTurn = 4 << 20;

// Passed to the kernel in one call.
constexpr std::size_t kFramesPerCall = 16;
constexpr std::size_t kPiecesPerCall = 64;

// Frames received before they are acknowledged without waiting for a frame in the other direction.
constexpr std::uint32_t kFramesPerAcknowledgement = 64;

constexpr int kEventsPerCall = 64;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

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

ssize_t receivePieces(int fd, iovec* pieces, std::size_t numPieces) {
  msghdr message{};
  message.msg_iov = pieces;
  message.msg_iovlen = numPieces;
  ssize_t numReceived = 0;
  do {
    numReceived = ::recvmsg(fd, &message, MSG_DONTWAIT);
  } while (numReceived < 0 && errno == EINTR);
  return numReceived;
}

bool wouldBlock() { return errno == EAGAIN || errno == EWOULDBLOCK; }

/// Closes a connection that is no longer used: nothing more is sent, whatever the kernel still holds.
void closeAbruptly(int fd) {
  const linger atOnce{1, 0};
  ::setsockopt(fd, SOL_SOCKET, SO_LINGER, &atOnce, sizeof atOnce);
  ::close(fd);
}

/// Pieces of memory for one call of the kernel.
class Pieces {
 public:
  /// The next bytes that are added were sent or received before.
  void skip(std::size_t numBytes) { skipped_ = numBytes; }
  /// Adds memory, unless there is no room for one more piece.
  void add(void* data, std::size_t numBytes) {
    const std::size_t before = std::min(skipped_, numBytes);
    skipped_ -= before;
    if (before < numBytes && !isFull())
      pieces_[count_++] = {static_cast<std::byte*>(data) + before, numBytes - before};
  }
  void add(const Payload& payload) {
    for (const iovec& piece : payload.pieces) add(piece.iov_base, piece.iov_len);
  }
  bool isFull() const { return count_ == kPiecesPerCall; }
  iovec* data() { return pieces_.data(); }
  std::size_t size() const { return count_; }

 private:
  std::array<iovec, kPiecesPerCall> pieces_;
  std::size_t count_ = 0;
  std::size_t skipped_ = 0;
};

/// A prefix and the header after it.
struct Head {
  TcpPrefix prefix;
  std::array<std::byte, kMostHeaderBytes> header;
};
static_assert(offsetof(Head, header) == sizeof(TcpPrefix));
static_assert(kMostHeaderBytes <= 255);

}  // namespace

struct TcpTransport::Frame {
  Head head;
  Payload payload;
  std::size_t numBytes = 0;  // head and payload together
  std::size_t numSent = 0;
  std::int64_t queuedNs = timelineNow();

  Frame(TcpFrameType type, std::size_t headerBytes) {
    head.prefix.magic = kTcpMagic;
    head.prefix.type = type;
    head.prefix.headerBytes = static_cast<std::uint8_t>(headerBytes);
    std::memset(head.header.data(), 0, headerBytes);
    numBytes = headBytes();
  }
  std::size_t headBytes() const { return sizeof(TcpPrefix) + head.prefix.headerBytes; }
  bool isNumbered() const { return head.prefix.type != TcpFrameType::kReceived; }
};

struct TcpTransport::Link {
  std::size_t number = 0;
  std::atomic<bool> isGone{false};         // no more traffic
  std::atomic<std::uint32_t> numTaken{0};  // frames received; written by progress()
  std::atomic<std::uint32_t> numTold{0};   // of them, those that the peer was told of

  // Used by progress() alone:
  Head head;
  std::size_t headBytes = 0;    // of the frame that arrives
  std::size_t numBytes = 0;     // of head and payload, once the head is complete
  std::size_t numReceived = 0;  // of these
  Payload place;
  bool hasSaidLast = false;
  bool isTroubled = false;  // silent or interrupted, which was reported
  bool isSuspect = false;   // silent for a while, as of the last look
  steady_clock::time_point troubledSince;

  std::mutex mutex;         // guards the members below; progress() alone writes the descriptor and isResuming
  int fd = -1;              // -1 after an interruption
  bool isResuming = false;  // the peer has not said yet what it has received: it gets no numbered frame
  std::deque<Frame> queue;  // first those that were passed on and not acknowledged
  std::size_t numPassed = 0;
  std::uint32_t numAcknowledged = 0;
  int sendError = 0;
  bool wantsWrites = false;
  bool isClosing = false;       // accepts no more frames
  bool isShutDown = false;      // everything was sent
  int orderedFd = -1;           // of resume(), until progress() adopts it
  bool isOrderedBreak = false;  // of interrupt()
  std::string orderedEnd;       // of giveUp()

  ~Link() {
    for (const int each : {fd, orderedFd}) {
      if (each >= 0) ::close(each);
    }
  }
  bool hasToSend() const {
    return fd >= 0 && sendError == 0 && numPassed < queue.size() &&
           !(isResuming && queue[numPassed].isNumbered());
  }
};

TcpTransport::TcpTransport(const std::vector<int>& fds, FrameHandler& handler, std::size_t headerBytes,
                           LinkOptions options, ProcessMetrics metrics)
    : handler_(handler),
      headerBytes_(headerBytes),
      options_(options),
      metrics_(std::move(metrics)),
      nextLook_(steady_clock::now() + kLookInterval) {
  for (const int fd : fds) {
    links_.push_back(std::make_unique<Link>());
    links_.back()->number = links_.size() - 1;
    links_.back()->fd = fd;
  }
  epollFd_ = ::epoll_create1(EPOLL_CLOEXEC);
  wakeFd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (epollFd_ < 0 || wakeFd_ < 0) fail("epoll");
  epoll_event wakeEvent{};
  wakeEvent.events = EPOLLIN;
  if (::epoll_ctl(epollFd_, EPOLL_CTL_ADD, wakeFd_, &wakeEvent) != 0) fail("epoll");
  for (const auto& link : links_) watch(*link);
}

TcpTransport::~TcpTransport() {
  links_.clear();
  ::close(wakeFd_);
  ::close(epollFd_);
}

void TcpTransport::wake() noexcept {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wakeFd_, &one, sizeof(one));
}

/// Prepares the link's connection, from which a frame comes next.
void TcpTransport::watch(Link& link) {
  setNodeSocketOptions(link.fd);
  if (::fcntl(link.fd, F_SETFL, ::fcntl(link.fd, F_GETFL) | O_NONBLOCK) != 0)
    fail("a socket to another node");
  link.headBytes = sizeof(TcpPrefix) + headerBytes_;
  link.numReceived = 0;
  link.place = {};
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = &link;
  if (::epoll_ctl(epollFd_, EPOLL_CTL_ADD, link.fd, &event) != 0) fail("epoll");
}

void TcpTransport::progress(milliseconds limit) {
  if (hasOrders_.exchange(false)) {
    for (const auto& link : links_) takeOrders(*link);
  }
  const auto untilLook = std::chrono::ceil<milliseconds>(nextLook_ - steady_clock::now());
  const auto wait = std::max(milliseconds{0}, std::min(limit, untilLook));
  std::array<epoll_event, kEventsPerCall> events;
  const int count = ::epoll_wait(epollFd_, events.data(), kEventsPerCall, static_cast<int>(wait.count()));
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    if (event.data.ptr == nullptr) {
      std::uint64_t ignored = 0;
      [[maybe_unused]] const auto got = ::read(wakeFd_, &ignored, sizeof(ignored));
      continue;
    }
    Link& link = *static_cast<Link*>(event.data.ptr);
    if ((event.events & EPOLLOUT) != 0) {
      const std::lock_guard<std::mutex> lock(link.mutex);
      flush(link);
    }
    if ((event.events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) receive(link);
  }
  if (steady_clock::now() >= nextLook_) lookAtAll();
}

void TcpTransport::finish(milliseconds limit) {
  for (const auto& link : links_) {
    const std::lock_guard<std::mutex> lock(link->mutex);
    if (link->isGone.load()) continue;
    link->queue.emplace_back(TcpFrameType::kLast, headerBytes_);
    link->isClosing = true;
    flush(*link);
  }
  const auto isGone = [](const auto& link) { return link->isGone.load(); };
  const auto deadline = steady_clock::now() + limit;
  while (!std::all_of(links_.begin(), links_.end(), isGone)) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
    if (left.count() <= 0) break;
    progress(left);
  }
}

// ---- sending ----

void TcpTransport::send(std::size_t link, const void* header, std::size_t headerBytes, Payload payload) {
  Frame frame(TcpFrameType::kData, headerBytes);
  std::memcpy(frame.head.header.data(), header, headerBytes);
  frame.numBytes += payload.numBytes();
  frame.payload = std::move(payload);
  enqueue(*links_[link], std::move(frame));
}

void TcpTransport::enqueue(Link& link, Frame frame) {
  const std::lock_guard<std::mutex> lock(link.mutex);
  if (link.isClosing || link.isGone.load()) return;
  link.queue.push_back(std::move(frame));
  if (!link.wantsWrites) flush(link);
}

void TcpTransport::dropUnsent(std::size_t link) {
  Link& from = *links_[link];
  const std::lock_guard<std::mutex> lock(from.mutex);
  auto first = from.queue.begin() + static_cast<std::ptrdiff_t>(from.numPassed);
  if (first != from.queue.end() && first->numSent > 0) ++first;  // a begun frame must be completed
  from.queue.erase(first, from.queue.end());
}

/// @pre the link's lock is held, as for all of these.
void TcpTransport::flush(Link& link) {
  if (link.isGone.load()) return;
  while (link.hasToSend() && sendSome(link)) {
  }
  wantWrites(link, link.hasToSend());
  const bool isDone =
      link.isClosing && link.numPassed == link.queue.size() && link.fd >= 0 && !link.isResuming;
  if (isDone && !link.isShutDown) {
    link.isShutDown = true;
    ::shutdown(link.fd, SHUT_WR);
  }
}

/// @returns false if the socket accepts no more now.
bool TcpTransport::sendSome(Link& link) {
  Pieces pieces;
  std::uint32_t number = link.numAcknowledged + static_cast<std::uint32_t>(link.numPassed);
  const std::size_t end = std::min(link.queue.size(), link.numPassed + kFramesPerCall);
  for (std::size_t i = link.numPassed; i < end && !pieces.isFull(); ++i) {
    Frame& frame = link.queue[i];
    if (link.isResuming && frame.isNumbered()) break;
    if (frame.numSent == 0) {
      const std::uint32_t numTaken = link.numTaken.load(std::memory_order_relaxed);
      frame.head.prefix.number = number;
      frame.head.prefix.numReceived = numTaken;
      link.numTold.store(numTaken, std::memory_order_relaxed);
    }
    if (frame.isNumbered()) ++number;
    pieces.skip(frame.numSent);
    pieces.add(&frame.head, frame.headBytes());
    pieces.add(frame.payload);
  }
  const ssize_t numSent = sendPieces(link.fd, pieces.data(), pieces.size());
  if (numSent < 0 && wouldBlock()) return false;
  if (numSent < 0) {
    link.sendError = errno;  // the receiving code notices too, and reports it
    return false;
  }
  noteSent(link, static_cast<std::size_t>(numSent));
  return true;
}

void TcpTransport::noteSent(Link& link, std::size_t numBytes) {
  metrics_.add(Metric::kNodeSentBytes, numBytes);
  while (numBytes > 0) {
    Frame& frame = link.queue[link.numPassed];
    const std::size_t part = std::min(numBytes, frame.numBytes - frame.numSent);
    frame.numSent += part;
    numBytes -= part;
    if (frame.numSent < frame.numBytes) return;
    if (frame.head.prefix.type == TcpFrameType::kData)
      handler_.sent(link.number, frame.head.header.data(), frame.queuedNs);
    if (frame.isNumbered()) {
      ++link.numPassed;
    } else {
      link.queue.erase(link.queue.begin() + static_cast<std::ptrdiff_t>(link.numPassed));
    }
  }
}

void TcpTransport::wantWrites(Link& link, bool wanted) {
  if (link.wantsWrites == wanted || link.fd < 0) return;
  link.wantsWrites = wanted;
  epoll_event event{};
  event.events = EPOLLIN | (wanted ? EPOLLOUT : 0U);
  event.data.ptr = &link;
  ::epoll_ctl(epollFd_, EPOLL_CTL_MOD, link.fd, &event);
}

/// Acknowledges before all frames that have not begun.
void TcpTransport::insertAcknowledgement(Link& link) {
  auto place = link.queue.begin() + static_cast<std::ptrdiff_t>(link.numPassed);
  if (place != link.queue.end() && place->numSent > 0) ++place;
  link.queue.emplace(place, TcpFrameType::kReceived, headerBytes_);
  flush(link);
}

/// Tells the peer what was received, if no other frame did.
void TcpTransport::acknowledge(Link& link) {
  const std::lock_guard<std::mutex> lock(link.mutex);
  const bool isDue = link.numTold.load() != link.numTaken.load();
  if (isDue && link.fd >= 0 && !link.isResuming && !link.wantsWrites && !link.isClosing)
    insertAcknowledgement(link);
}

/// Forgets frames that the peer has received.
void TcpTransport::takeAcknowledgement(Link& link, std::uint32_t numReceived) {
  const std::uint32_t numNew = numReceived - link.numAcknowledged;
  if (numNew == 0) return;
  std::vector<Frame> done;  // freed after the lock
  const std::lock_guard<std::mutex> lock(link.mutex);
  if (numNew > link.numPassed) throw LinkError("it acknowledged a frame that was not sent");
  const auto end = link.queue.begin() + static_cast<std::ptrdiff_t>(numNew);
  done.assign(std::make_move_iterator(link.queue.begin()), std::make_move_iterator(end));
  link.queue.erase(link.queue.begin(), end);
  link.numAcknowledged = numReceived;
  link.numPassed -= numNew;
}

// ---- receiving ----

void TcpTransport::receive(Link& link) {
  try {
    for (std::size_t i = 0; i < kBytesPerTurn && !link.isGone.load() && link.fd >= 0;) {
      const std::size_t before = link.numReceived;
      if (!receiveSome(link)) return;
      i += link.numReceived > before ? link.numReceived - before : sizeof(Head);
    }
  } catch (const LinkError& error) {
    lose(link, error.what(), LossCause::kInvalidFrame);
  }
}

/// @returns false if nothing more can be received now.
bool TcpTransport::receiveSome(Link& link) {
  const bool isHead = link.numReceived < link.headBytes;
  Pieces pieces;
  pieces.skip(isHead ? link.numReceived : link.numReceived - link.headBytes);
  if (isHead) {
    pieces.add(&link.head, link.headBytes);
  } else {
    pieces.add(link.place);
  }
  const ssize_t got = receivePieces(link.fd, pieces.data(), pieces.size());
  if (got < 0 && wouldBlock()) return false;
  if (got < 0) {
    breakOff(link, "the connection broke: " + std::string(std::strerror(errno)));
    return false;
  }
  if (got == 0) {
    endOfStream(link);
    return false;
  }
  link.numReceived += static_cast<std::size_t>(got);
  metrics_.add(Metric::kNodeReceivedBytes, static_cast<std::size_t>(got));
  if (isHead && link.numReceived == link.headBytes) openFrame(link);
  if (link.numReceived >= link.headBytes && link.numReceived == link.numBytes) closeFrame(link);
  return true;
}

/// The head has arrived, or as much of it as every frame has.
void TcpTransport::openFrame(Link& link) {
  const TcpPrefix& prefix = link.head.prefix;
  const bool isData = prefix.type == TcpFrameType::kData;
  const bool isNumbered = prefix.type != TcpFrameType::kReceived;
  if (prefix.magic != kTcpMagic || prefix.zero != 0 || prefix.type < TcpFrameType::kData ||
      prefix.type > TcpFrameType::kLast || prefix.headerBytes > kMostHeaderBytes ||
      (isData ? prefix.headerBytes < headerBytes_ : prefix.headerBytes != headerBytes_))
    throw LinkError("it sent something that is no frame");
  link.headBytes = sizeof(TcpPrefix) + prefix.headerBytes;
  link.numBytes = 0;
  if (link.numReceived < link.headBytes) return;
  if (isNumbered && link.hasSaidLast) throw LinkError("it sent a frame after its goodbye");
  if (isNumbered && (link.isResuming || prefix.number != link.numTaken.load()))
    throw LinkError("it sent frame " + std::to_string(prefix.number) + " when frame " +
                    std::to_string(link.numTaken.load()) + " was due");
  link.place = isData ? handler_.open(link.number, link.head.header.data(), prefix.headerBytes) : Payload{};
  link.numBytes = link.headBytes + link.place.numBytes();
}

void TcpTransport::closeFrame(Link& link) {
  const TcpPrefix& prefix = link.head.prefix;
  const Payload place = std::exchange(link.place, {});
  link.headBytes = sizeof(TcpPrefix) + headerBytes_;
  link.numReceived = 0;
  takeAcknowledgement(link, prefix.numReceived);
  if (prefix.type == TcpFrameType::kReceived) {
    if (link.isResuming) resend(link);
    return;
  }
  if (prefix.type == TcpFrameType::kData) handler_.close(link.number, link.head.header.data(), place);
  link.hasSaidLast = prefix.type == TcpFrameType::kLast;
  const std::uint32_t numTaken = link.numTaken.load() + 1;
  link.numTaken.store(numTaken);
  if (numTaken - link.numTold.load() >= kFramesPerAcknowledgement) acknowledge(link);
}

/// The peer has said on a new connection what it has received.
void TcpTransport::resend(Link& link) {
  {
    const std::lock_guard<std::mutex> lock(link.mutex);
    link.isResuming = false;
    link.numPassed = 0;
    for (Frame& frame : link.queue) frame.numSent = 0;
    flush(link);
  }
  if (!std::exchange(link.isTroubled, false)) return;
  handler_.event({LinkEvent::Kind::kAnswering, link.number, {}, {}});
}

/// The kernel of the peer ends a stream in order only when its process has closed the connection.
void TcpTransport::endOfStream(Link& link) {
  int error = 0;
  {
    const std::lock_guard<std::mutex> lock(link.mutex);
    error = link.sendError;
  }
  if (error != 0) return breakOff(link, "the connection broke: " + std::string(std::strerror(error)));
  if (link.hasSaidLast || link.isClosing) return end(link);
  lose(link, "the connection was closed from the other end",
       link.isSuspect ? LossCause::kUnknown : LossCause::kPeerEnded);
}

// ---- connections that break, and others in their place ----

void TcpTransport::lookAtAll() {
  for (const auto& link : links_) {
    if (!link->isGone.load()) look(*link);
  }
  nextLook_ = steady_clock::now() + kLookInterval;
}

void TcpTransport::look(Link& link) {
  if (link.fd < 0) {
    const auto waited = steady_clock::now() - link.troubledSince;
    if (waited > options_.patience)
      lose(link, "it could not be connected with again within " + inSeconds(waited), LossCause::kUnknown);
    return;
  }
  acknowledge(link);
  const milliseconds silence = silenceOf(link.fd);
  if (silence > options_.patience) {
    if (link.hasSaidLast) return end(link);
    return lose(link, "its machine has answered nothing for " + inSeconds(silence), LossCause::kUnknown);
  }
  if (!link.isResuming) link.isSuspect = silence > kSuspectSilence;
  const bool isTroubled = silence > kReportedSilence;
  if (isTroubled == link.isTroubled || link.isResuming) return;
  link.isTroubled = isTroubled;
  if (isTroubled) {
    link.troubledSince = steady_clock::now() - silence;
    handler_.event({LinkEvent::Kind::kSilent,
                    link.number,
                    "its machine has answered nothing for " + inSeconds(silence),
                    {}});
  } else {
    handler_.event({LinkEvent::Kind::kAnswering, link.number, {}, {}});
  }
}

void TcpTransport::resume(std::size_t link, int fd) {
  {
    const std::lock_guard<std::mutex> lock(links_[link]->mutex);
    const int before = std::exchange(links_[link]->orderedFd, fd);
    if (before >= 0) closeAbruptly(before);
  }
  hasOrders_.store(true);
  wake();
}

void TcpTransport::giveUp(std::size_t link, const std::string& reason) {
  {
    const std::lock_guard<std::mutex> lock(links_[link]->mutex);
    links_[link]->orderedEnd = reason;
  }
  hasOrders_.store(true);
  wake();
}

bool TcpTransport::isGone(std::size_t link) const noexcept { return links_[link]->isGone.load(); }

void TcpTransport::interrupt(std::size_t link) {
  {
    const std::lock_guard<std::mutex> lock(links_[link]->mutex);
    links_[link]->isOrderedBreak = true;
  }
  hasOrders_.store(true);
  wake();
}

/// Does what interrupt(), resume() and giveUp() have asked for.
void TcpTransport::takeOrders(Link& link) {
  bool isBreak = false;
  int fd = -1;
  std::string reason;
  {
    const std::lock_guard<std::mutex> lock(link.mutex);
    isBreak = std::exchange(link.isOrderedBreak, false);
    fd = std::exchange(link.orderedFd, -1);
    reason = std::exchange(link.orderedEnd, {});
  }
  try {
    if (isBreak && fd < 0 && link.fd >= 0 && !link.isGone.load()) breakOff(link, "it was silent");
    if (fd >= 0) adopt(link, fd);
  } catch (const std::system_error& error) {
    lose(link, error.what(), LossCause::kUnknown);
  }
  if (!reason.empty() && !link.isGone.load())
    lose(link, reason, link.isSuspect ? LossCause::kUnknown : LossCause::kPeerEnded);
}

void TcpTransport::adopt(Link& link, int fd) {
  if (link.isGone.load()) return closeAbruptly(fd);
  if (link.fd >= 0) disconnect(link);
  const std::lock_guard<std::mutex> lock(link.mutex);
  link.fd = fd;
  watch(link);
  link.isResuming = true;
  link.sendError = 0;
  link.isShutDown = false;
  const auto isAcknowledgement = [](const Frame& frame) { return !frame.isNumbered(); };
  link.queue.erase(std::remove_if(link.queue.begin(), link.queue.end(), isAcknowledgement), link.queue.end());
  if (link.numPassed < link.queue.size()) link.queue[link.numPassed].numSent = 0;
  insertAcknowledgement(link);
}

/// Closes the connection, in the place of which another one may come.
void TcpTransport::disconnect(Link& link) {
  const std::lock_guard<std::mutex> lock(link.mutex);
  ::epoll_ctl(epollFd_, EPOLL_CTL_DEL, link.fd, nullptr);
  closeAbruptly(std::exchange(link.fd, -1));
  link.wantsWrites = false;
}

void TcpTransport::breakOff(Link& link, const std::string& reason) {
  if (link.hasSaidLast || link.isClosing) return end(link);
  if (!options_.isResumable) return lose(link, reason, LossCause::kUnknown);
  disconnect(link);
  if (!std::exchange(link.isTroubled, true)) link.troubledSince = steady_clock::now();
  handler_.event({LinkEvent::Kind::kInterrupted, link.number, reason, {}});
}

/// Ends both directions.
void TcpTransport::end(Link& link) {
  std::deque<Frame> unsent;  // freed after the lock
  {
    const std::lock_guard<std::mutex> lock(link.mutex);
    link.isGone.store(true);
    unsent.swap(link.queue);
    link.numPassed = 0;
    if (link.fd >= 0) {
      ::epoll_ctl(epollFd_, EPOLL_CTL_DEL, link.fd, nullptr);
      ::shutdown(link.fd, SHUT_RDWR);
    }
  }
  if (!link.hasSaidLast) return;
  if (std::exchange(link.isTroubled, false))
    handler_.event({LinkEvent::Kind::kAnswering, link.number, {}, {}});
  handler_.event({LinkEvent::Kind::kEnded, link.number, {}, {}});
}

void TcpTransport::lose(Link& link, const std::string& reason, LossCause cause) {
  link.hasSaidLast = false;  // a loss is not an end
  end(link);
  handler_.event({LinkEvent::Kind::kLost, link.number, reason, cause});
}

}  // namespace coarse
