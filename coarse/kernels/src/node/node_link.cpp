#include "coarse/node/node_link.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "coarse/node/tcp_transport.hpp"
#include "coarse/timeline/recorder.hpp"

namespace coarse {
namespace {

// How long a device that ends waits until the others have received its data.
constexpr std::chrono::milliseconds kGoodbyePatience{3000};

constexpr std::chrono::milliseconds kLongestWait{1000};

// Between checks whether the links' thread has ended connections.
constexpr std::chrono::microseconds kCutInterval{200};

bool carriesData(FrameKind kind) {
  return kind == FrameKind::kPartial || kind == FrameKind::kResult || kind == FrameKind::kHanded;
}

/// Whether the owner of the links handles a frame; other frames are events.
bool isOfShard(FrameKind kind) {
  return carriesData(kind) || kind == FrameKind::kAbsent || kind == FrameKind::kReport ||
         kind == FrameKind::kFetch;
}

/// The longest payload of a frame that is an event.
std::uint64_t mostBytes(FrameKind kind) {
  const bool hasText = kind == FrameKind::kAbort || kind == FrameKind::kLost || kind == FrameKind::kAgreement;
  return hasText ? kMostTextBytes : 0;
}

NodeEvent::Kind eventKindOf(FrameKind kind) {
  if (kind == FrameKind::kAbort) return NodeEvent::Kind::kAborted;
  if (kind == FrameKind::kAgreement) return NodeEvent::Kind::kAgreement;
  return kind == FrameKind::kLost ? NodeEvent::Kind::kWorkerLost : NodeEvent::Kind::kLeft;
}

FrameHeader headerFrom(const std::byte* data) {
  FrameHeader header;
  std::memcpy(&header, data, sizeof header);
  return header;
}

Payload payloadOf(const FrameHeader& header, FramePayload payload) {
  if (header.payloadBytes == 0) return {{}, std::move(payload.keeper)};
  return {{{payload.data, header.payloadBytes}}, std::move(payload.keeper)};
}

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

/// Duplicates of descriptors. @throws std::system_error if one is invalid.
std::vector<int> duplicates(const std::vector<std::vector<int>>& fds) {
  std::vector<int> copies;
  for (const auto& ofNode : fds) {
    for (const int fd : ofNode) {
      const int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, 3);
      if (copy < 0) {
        const int error = errno;
        for (const int each : copies) ::close(each);
        throw std::system_error(error, std::generic_category(), "a socket to another node");
      }
      copies.push_back(copy);
    }
  }
  return copies;
}

}  // namespace

NodeEvent::Kind nodeEventKind(LinkEvent::Kind kind) noexcept {
  switch (kind) {
    case LinkEvent::Kind::kSilent:
      return NodeEvent::Kind::kSilent;
    case LinkEvent::Kind::kAnswering:
      return NodeEvent::Kind::kAnswering;
    case LinkEvent::Kind::kInterrupted:
      return NodeEvent::Kind::kInterrupted;
    case LinkEvent::Kind::kEnded:
      return NodeEvent::Kind::kEnded;
    case LinkEvent::Kind::kLost:
      break;
  }
  return NodeEvent::Kind::kLost;
}

/// Used by the link's thread, but node and number never change.
struct NodeLinks::Link {
  std::size_t node = 0;
  std::uint32_t number = 0;   // among those to this node
  std::int64_t openedNs = 0;  // as the header had arrived
  std::string text;           // of an abort or a loss
  bool hasEnded = false;
};

NodeLinks::NodeLinks(std::size_t node, const std::vector<std::vector<int>>& fds, Receiver receiver,
                     ProcessMetrics metrics, LinkOptions options)
    : receiver_(std::move(receiver)) {
  for (std::size_t other = 0; other < fds.size(); ++other) {
    if (fds[other].empty() != (other == node))
      throw std::invalid_argument("a memory device needs connections to every other node");
    firstLink_.push_back(links_.size());
    for (std::size_t i = 0; i < fds[other].size(); ++i) {
      Link link;
      link.node = other;
      link.number = static_cast<std::uint32_t>(i);
      links_.push_back(std::move(link));
    }
  }
  firstLink_.push_back(links_.size());
  FrameHandler& handler = *this;
  transport_ = std::make_unique<TcpTransport>(duplicates(fds), handler, sizeof(FrameHeader), options,
                                              std::move(metrics));
}

NodeLinks::~NodeLinks() { stop(); }

void NodeLinks::start() {
  thread_ = std::thread([this] { run(); });
}

void NodeLinks::stop() noexcept {
  if (!thread_.joinable()) return;
  isStopping_.store(true);
  transport_->wake();
  thread_.join();
}

void NodeLinks::run() {
  nameThread("node links");
  while (!isStopping_.load()) transport_->progress(kLongestWait);
  transport_->finish(kGoodbyePatience);
}

std::size_t NodeLinks::linkOf(std::size_t node, std::size_t number) const {
  if (node + 1 >= firstLink_.size() || number >= firstLink_[node + 1] - firstLink_[node])
    throw std::invalid_argument("there is no connection " + std::to_string(number) + " to node " +
                                std::to_string(node));
  return firstLink_[node] + number;
}

// ---- sending ----

void NodeLinks::send(std::size_t node, const FrameHeader& header, FramePayload payload) {
  const std::size_t numLinks = firstLink_[node + 1] - firstLink_[node];
  transport_->send(firstLink_[node] + header.shard % numLinks, &header, sizeof header,
                   payloadOf(header, std::move(payload)));
}

void NodeLinks::sendToAll(FrameHeader header, const std::string& text) {
  auto copy = std::make_shared<std::string>(text.substr(0, kMostTextBytes));
  header.payloadBytes = copy->size();
  const FramePayload payload{reinterpret_cast<std::byte*>(copy->data()), copy};
  for (std::size_t link = 0; link < links_.size(); ++link)
    transport_->send(link, &header, sizeof header, payloadOf(header, payload));
}

void NodeLinks::abort(const std::string& text) {
  // Results that are no longer awaited must not delay the news.
  for (std::size_t link = 0; link < links_.size(); ++link) transport_->dropUnsent(link);
  FrameHeader header;
  header.kind = FrameKind::kAbort;
  sendToAll(header, text);
}

void NodeLinks::sendHome(std::size_t node, const FrameHeader& header, FramePayload payload) {
  transport_->send(firstLink_[node], &header, sizeof header, payloadOf(header, std::move(payload)));
}

void NodeLinks::sendHome(std::size_t node, FrameHeader header, const std::string& text) {
  auto copy = std::make_shared<std::string>(text.substr(0, kMostTextBytes));
  header.payloadBytes = copy->size();
  sendHome(node, header, FramePayload{reinterpret_cast<std::byte*>(copy->data()), copy});
}

void NodeLinks::cut(std::size_t node, const std::string& text) {
  FrameHeader header;
  header.kind = FrameKind::kAbort;
  auto copy = std::make_shared<std::string>(text.substr(0, kMostTextBytes));
  header.payloadBytes = copy->size();
  const FramePayload payload{reinterpret_cast<std::byte*>(copy->data()), copy};
  for (std::size_t link = firstLink_[node]; link < firstLink_[node + 1]; ++link) {
    transport_->dropUnsent(link);
    transport_->send(link, &header, sizeof header, payloadOf(header, payload));
    transport_->giveUp(link, "this node goes on without it");
  }
  const auto isGone = [&] {
    for (std::size_t link = firstLink_[node]; link < firstLink_[node + 1]; ++link) {
      if (!transport_->isGone(link)) return false;
    }
    return true;
  };
  while (!isGone() && !isStopping_.load()) std::this_thread::sleep_for(kCutInterval);
}

void NodeLinks::sent(std::size_t link, const std::byte* data, std::int64_t queuedNs) noexcept {
  note(EventKind::kNodeSend, links_[link].node, headerFrom(data), queuedNs);
}

void NodeLinks::resume(std::size_t node, std::size_t number, int fd) {
  transport_->resume(linkOf(node, number), fd);
}

void NodeLinks::interrupt(std::size_t node, std::size_t number) {
  transport_->interrupt(linkOf(node, number));
}

void NodeLinks::giveUp(std::size_t node, std::size_t number, const std::string& reason) {
  transport_->giveUp(linkOf(node, number), reason);
}

// ---- receiving ----

Payload NodeLinks::open(std::size_t link, const std::byte* data, std::size_t headerBytes) {
  if (headerBytes != sizeof(FrameHeader)) throw LinkError("it sent something that is no frame");
  Link& from = links_[link];
  const FrameHeader header = headerFrom(data);
  if (isOfShard(header.kind)) {
    from.openedNs = timelineNow();
    return payloadOf(header, receiver_.open(from.node, header));
  }
  const bool isKnown = header.kind == FrameKind::kLeft || header.kind == FrameKind::kAbort ||
                       header.kind == FrameKind::kLost || header.kind == FrameKind::kAgreement;
  if (!isKnown || header.payloadBytes > mostBytes(header.kind)) {
    throw LinkError("it sent a frame of kind " + std::to_string(static_cast<int>(header.kind)) + " with " +
                    std::to_string(header.payloadBytes) + " bytes");
  }
  from.text.resize(header.payloadBytes);
  return payloadOf(header, {reinterpret_cast<std::byte*>(from.text.data()), nullptr});
}

void NodeLinks::close(std::size_t link, const std::byte* data, const Payload& payload) {
  const Link& from = links_[link];
  const FrameHeader header = headerFrom(data);
  if (isOfShard(header.kind)) {
    note(EventKind::kNodeReceive, from.node, header, from.openedNs);
    receiver_.close(from.node, header, {nullptr, payload.keeper});
  } else {
    receiver_.event({eventKindOf(header.kind), from.node, header.shard, from.text, {}});
  }
}

void NodeLinks::event(LinkEvent event) {
  Link& link = links_[event.link];
  if (event.kind == LinkEvent::Kind::kEnded) return end(link);
  receiver_.event({nodeEventKind(event.kind), link.node, link.number, std::move(event.text), event.cause});
}

void NodeLinks::end(Link& link) {
  link.hasEnded = true;
  const bool isLast = std::all_of(links_.begin(), links_.end(),
                                  [&](const Link& each) { return each.node != link.node || each.hasEnded; });
  if (isLast) receiver_.event({NodeEvent::Kind::kEnded, link.node, 0, {}, {}});
}

}  // namespace coarse
