#include "coarse/collectives/messages.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace coarse {
namespace {

// Longest time until a dead rank or a passed deadline is noticed.
constexpr std::chrono::milliseconds kLongestSleep{20};
constexpr std::chrono::microseconds kSpin{50};

}  // namespace

struct Messages::Header {
  std::uint64_t numBytes = 0;
  std::int32_t tag = 0;
  std::uint32_t reserved = 0;
  char dtype[kDTypeNameBytes] = {};
};

/// A message that is being taken out of a channel.
struct Messages::Incoming {
  Header header;
  std::size_t headerBytes = 0;  // received so far
  std::size_t payloadBytes = 0;
  std::optional<Pending> receive;  // the matching receive, if one was posted when it began
  std::string misfit;              // why the receive can't get it
  std::vector<std::byte> aside;
};

/// A message that arrived before an awaited one.
struct Messages::Kept {
  std::size_t from = 0;
  Header header;
  std::vector<std::byte> payload;
};

Messages::Messages(const GroupScratch& scratch)
    : scratch_(scratch),
      rank_(scratch.rank()),
      numRanks_(scratch.numRanks()),
      area_(scratch.messageArea()),
      brokenSends_(numRanks_),
      sends_(numRanks_) {
  static_assert(sizeof(Header) == 32);
  for (std::size_t rank = 0; rank < numRanks_; ++rank) incoming_.push_back(std::make_unique<Incoming>());
}

Messages::~Messages() { close(); }

void Messages::post(const Message& message) {
  const bool isRank = message.peer >= 0 && static_cast<std::size_t>(message.peer) < numRanks_;
  if (!isRank && (message.isSend || message.peer != -1)) {
    throw std::invalid_argument(std::to_string(message.peer) + " is none of the " +
                                std::to_string(numRanks_) + " ranks");
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!isClosed_) {
      posted_.push_back(message);
      if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
    }
    if (!isClosed_) {
      area_.bell(rank_).ring();
      return;
    }
  }
  fail(message, "the group was closed");
}

void Messages::close() noexcept {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    isClosed_ = true;
  }
  std::lock_guard<std::mutex> lock(joining_);
  if (!thread_.joinable()) return;
  area_.bell(rank_).ring();
  thread_.join();
}

void Messages::fail(const Message& message, const std::string& why) const {
  message.done("rank " + std::to_string(rank_) + ", " + (message.isSend ? "send to" : "recv from") + " " +
                   (message.peer < 0 ? "any rank" : "rank " + std::to_string(message.peer)) + " with tag " +
                   std::to_string(message.tag) + ": " + why,
               message.peer);
}

void Messages::serve() {
  YieldingSpin spin(kSpin);
  for (;;) {
    const std::uint32_t seen = area_.bell(rank_).listen();
    if (!acceptPosts()) break;
    bool hasMoved = matchKept();
    for (std::size_t rank = 0; rank < numRanks_; ++rank) {
      hasMoved = advanceSends(rank) || hasMoved;
      hasMoved = advanceReceives(rank) || hasMoved;
    }
    if (hasMoved) {
      spin.reset();
      continue;
    }
    const bool isIdle = receives_.empty() &&
                        std::all_of(sends_.begin(), sends_.end(), [](const auto& q) { return q.empty(); });
    if (!isIdle && spin.yield()) continue;
    area_.bell(rank_).sleep(seen, kLongestSleep);
    dropLost();
  }
  for (auto& queue : sends_) {
    for (const Outgoing& outgoing : queue) fail(outgoing.message, "the group was closed");
  }
  for (const Message& receive : receives_) fail(receive, "the group was closed");
  for (auto& incoming : incoming_) {
    if (incoming->receive) fail(*incoming->receive, "the group was closed");
  }
}

bool Messages::acceptPosts() {
  std::vector<Message> posted;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    posted.swap(posted_);
    if (isClosed_) {
      for (Message& message : posted) receives_.push_back({std::move(message), {}});  // to be failed
      return false;
    }
  }
  for (Message& message : posted) {
    const auto peer = static_cast<std::size_t>(message.peer);
    if (message.isSend && !brokenSends_[peer].empty()) {
      fail(message, "an earlier message was left half sent: " + brokenSends_[peer]);
    } else if (message.isSend) {
      sends_[peer].push_back({{std::move(message), clock_.in(message.timeout)}});
    } else {
      receives_.push_back({std::move(message), clock_.in(message.timeout)});
    }
  }
  return true;
}

std::size_t Messages::put(std::size_t to, const void* data, std::size_t numBytes) {
  Channel& way = area_.channel(rank_, to);
  const std::uint64_t written = way.written.load(std::memory_order_relaxed);
  // acquire: the receiver has read the bytes that are overwritten now.
  const std::size_t room =
      area_.ringBytes() - static_cast<std::size_t>(written - way.taken.load(std::memory_order_acquire));
  const std::size_t offset = written % area_.ringBytes();
  const std::size_t count = std::min({numBytes, room, area_.ringBytes() - offset});
  if (count == 0) return 0;
  std::memcpy(area_.ring(rank_, to) + offset, data, count);
  way.written.store(written + count, std::memory_order_release);
  scratch_.bellOf(to).ring();
  return count;
}

std::size_t Messages::take(std::size_t from, void* data, std::size_t numBytes) {
  Channel& way = area_.channel(from, rank_);
  const std::uint64_t taken = way.taken.load(std::memory_order_relaxed);
  // acquire: the written bytes are read now. Ignores a counter that claims more than a ring holds.
  const std::size_t there =
      std::min<std::size_t>(way.written.load(std::memory_order_acquire) - taken, area_.ringBytes());
  const std::size_t offset = taken % area_.ringBytes();
  const std::size_t count = std::min({numBytes, there, area_.ringBytes() - offset});
  if (count == 0) return 0;
  std::memcpy(data, area_.ring(from, rank_) + offset, count);
  way.taken.store(taken + count, std::memory_order_release);
  scratch_.bellOf(from).ring();
  return count;
}

bool Messages::advanceSends(std::size_t to) {
  auto& queue = sends_[to];
  bool hasMoved = false;
  while (!queue.empty()) {
    Outgoing& outgoing = queue.front();
    const Message& message = outgoing.message;
    Header header;
    header.numBytes = message.numBytes;
    header.tag = message.tag;
    std::memcpy(header.dtype, message.dtype, sizeof header.dtype);
    while (outgoing.moved < sizeof header + message.numBytes) {
      const bool isHeader = outgoing.moved < sizeof header;
      const auto* data = isHeader
                             ? reinterpret_cast<const std::byte*>(&header) + outgoing.moved
                             : static_cast<const std::byte*>(message.data) + outgoing.moved - sizeof header;
      const std::size_t left = (isHeader ? sizeof header : sizeof header + message.numBytes) - outgoing.moved;
      const std::size_t count = put(to, data, left);
      if (count == 0) return hasMoved;
      outgoing.moved += count;
      hasMoved = true;
    }
    const Message sent = std::move(queue.front().message);
    queue.pop_front();
    sent.done("", sent.peer);
  }
  return hasMoved;
}

bool Messages::isAwaited(std::size_t from) const {
  return std::any_of(receives_.begin(), receives_.end(), [from](const Message& receive) {
    return receive.peer < 0 || receive.peer == static_cast<int>(from);
  });
}

std::list<Messages::Pending>::iterator Messages::findReceive(std::size_t from, const Header& header) {
  return std::find_if(receives_.begin(), receives_.end(), [&](const Message& receive) {
    return receive.tag == header.tag && (receive.peer < 0 || receive.peer == static_cast<int>(from));
  });
}

bool Messages::advanceReceives(std::size_t from) {
  Incoming& incoming = *incoming_[from];
  bool hasMoved = false;
  for (;;) {
    if (incoming.headerBytes == 0 && !isAwaited(from)) return hasMoved;
    while (incoming.headerBytes < sizeof(Header)) {
      auto* to = reinterpret_cast<std::byte*>(&incoming.header) + incoming.headerBytes;
      const std::size_t count = take(from, to, sizeof(Header) - incoming.headerBytes);
      if (count == 0) return hasMoved;
      incoming.headerBytes += count;
      hasMoved = true;
      if (incoming.headerBytes == sizeof(Header)) beginIncoming(from, incoming);
    }
    while (incoming.payloadBytes < incoming.header.numBytes) {
      const bool isAside = !incoming.receive || !incoming.misfit.empty();
      std::byte* to = isAside ? incoming.aside.data() : static_cast<std::byte*>(incoming.receive->data);
      const std::size_t count =
          take(from, to + incoming.payloadBytes, incoming.header.numBytes - incoming.payloadBytes);
      if (count == 0) return hasMoved;
      incoming.payloadBytes += count;
      hasMoved = true;
    }
    endIncoming(from, incoming);
  }
}

void Messages::beginIncoming(std::size_t from, Incoming& incoming) {
  const auto receive = findReceive(from, incoming.header);
  if (receive != receives_.end()) {
    incoming.receive = std::move(*receive);
    receives_.erase(receive);
    const auto name = [](const char* dtype) { return std::string(dtype, ::strnlen(dtype, kDTypeNameBytes)); };
    if (incoming.header.numBytes != incoming.receive->numBytes ||
        name(incoming.header.dtype) != name(incoming.receive->dtype)) {
      incoming.misfit = "rank " + std::to_string(from) + " sent " + std::to_string(incoming.header.numBytes) +
                        " bytes of " + name(incoming.header.dtype) + ", expected were " +
                        std::to_string(incoming.receive->numBytes) + " of " + name(incoming.receive->dtype);
    }
  }
  if (!incoming.receive || !incoming.misfit.empty()) incoming.aside.resize(incoming.header.numBytes);
}

void Messages::endIncoming(std::size_t from, Incoming& incoming) {
  Incoming ended = std::exchange(incoming, Incoming{});
  if (!ended.receive) {
    kept_.push_back({from, ended.header, std::move(ended.aside)});
    matchKept();
  } else if (!ended.misfit.empty()) {
    fail(*ended.receive, ended.misfit);
  } else {
    ended.receive->done("", static_cast<int>(from));
  }
}

bool Messages::matchKept() {
  bool hasMatched = false;
  for (auto kept = kept_.begin(); kept != kept_.end();) {
    const auto found = findReceive(kept->from, kept->header);
    if (found == receives_.end()) {
      ++kept;
      continue;
    }
    const Message receive = std::move(*found);
    receives_.erase(found);
    if (receive.numBytes != kept->header.numBytes ||
        std::memcmp(receive.dtype, kept->header.dtype, kDTypeNameBytes) != 0) {
      fail(receive, "rank " + std::to_string(kept->from) + " sent " + std::to_string(kept->header.numBytes) +
                        " bytes, expected were " + std::to_string(receive.numBytes) + ", or another dtype");
    } else {
      if (receive.numBytes != 0) std::memcpy(receive.data, kept->payload.data(), receive.numBytes);
      receive.done("", static_cast<int>(kept->from));
    }
    kept = kept_.erase(kept);
    hasMatched = true;
  }
  return hasMatched;
}

std::string Messages::lossOf(const Pending& message, Clock::time_point now) const {
  if (message.peer >= 0) {
    const auto peer = static_cast<std::size_t>(message.peer);
    const Channel& way = area_.channel(peer, rank_);
    const bool isMoreThere = !message.isSend && way.written.load(std::memory_order_acquire) !=
                                                    way.taken.load(std::memory_order_relaxed);
    const std::string loss = isMoreThere ? "" : scratch_.lossOf(peer);
    if (!loss.empty()) return loss;
  }
  return now < message.deadline ? "" : "Timed out waiting for it";
}

/// Detaches an incoming message from its receive: it belongs to no receive for now, but stays complete for
/// the next one.
void Messages::giveUp(Incoming& incoming, const std::string& why) {
  const Pending receive = std::move(*incoming.receive);
  incoming.receive.reset();
  if (incoming.misfit.empty()) {
    incoming.aside.resize(incoming.header.numBytes);
    if (incoming.payloadBytes != 0) std::memcpy(incoming.aside.data(), receive.data, incoming.payloadBytes);
  }
  incoming.misfit.clear();
  fail(receive, why);
}

void Messages::dropLost() {
  const Clock::time_point now = clock_.now();
  for (std::size_t to = 0; to < numRanks_; ++to) {
    auto& queue = sends_[to];
    while (!queue.empty()) {
      const std::string loss =
          brokenSends_[to].empty() ? lossOf(queue.front().message, now) : brokenSends_[to];
      if (loss.empty()) break;
      if (queue.front().moved > 0) brokenSends_[to] = loss;
      fail(queue.front().message, loss);
      queue.pop_front();
    }
  }
  for (auto receive = receives_.begin(); receive != receives_.end();) {
    const std::string loss = lossOf(*receive, now);
    if (!loss.empty()) fail(*receive, loss);
    receive = loss.empty() ? std::next(receive) : receives_.erase(receive);
  }
  for (auto& incoming : incoming_) {
    if (!incoming->receive) continue;
    const std::string loss = lossOf(*incoming->receive, now);
    if (!loss.empty()) giveUp(*incoming, loss);
  }
}

}  // namespace coarse
