/// What users of links between nodes rely on, whatever carries the frames. An implementation of Transport is
/// added to `kImplementations`, and must pass all of these tests.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bytes.hpp"
#include "coarse/node/tcp_transport.hpp"
#include "fixture.hpp"
#include "tcp_connection.hpp"

namespace coarse::test::transport_test {
namespace {

constexpr std::chrono::milliseconds kLimit{static_cast<int>(kPatienceSeconds * 1000)};
constexpr std::chrono::milliseconds kLongestWait{1000};
constexpr std::size_t kLargeBytes = 8 << 20;  // more than the buffers of a connection

struct Header {
  std::uint64_t number = 0;
  std::uint64_t payloadBytes = 0;
};

/// A longer header, as some frames have.
struct LongHeader {
  Header header;
  std::array<std::byte, 100> more{};
};

struct Implementation {
  const char* name;
  /// Makes one end of links over these connected sockets.
  std::function<std::unique_ptr<Transport>(const std::vector<int>& fds, FrameHandler&, LinkOptions)> make;
};

void PrintTo(const Implementation& implementation, std::ostream* out) { *out << implementation.name; }

const Implementation kImplementations[] = {
    {"tcp",
     [](const std::vector<int>& fds, FrameHandler& handler, LinkOptions options) {
       return std::make_unique<TcpTransport>(fds, handler, sizeof(Header), options);
     }},
};

/// The payload of a frame: bytes that tell its number.
Bytes payloadOf(std::uint64_t number, std::size_t numBytes) {
  Bytes bytes(numBytes);
  for (std::size_t i = 0; i < numBytes; ++i) bytes[i] = static_cast<std::byte>(number * 31 + i % 251);
  return bytes;
}

/// Memory in three pieces, as a receiver may name it and a sender may have it.
Payload inPieces(std::byte* data, std::size_t numBytes, std::shared_ptr<const void> keeper = nullptr) {
  const std::size_t third = numBytes / 3;
  return {{{data, third}, {data + third, third}, {data + 2 * third, numBytes - 2 * third}},
          std::move(keeper)};
}

struct Arrived {
  std::size_t link;
  std::uint64_t number;
  std::size_t headerBytes;
  Bytes payload;
};

/// One end of the links, with the thread that serves it; keeps what arrives.
class End : public FrameHandler {
 public:
  ~End() { stop(); }

  void start(std::unique_ptr<Transport> transport) {
    transport_ = std::move(transport);
    thread_ = std::thread([this] {
      while (!isStopping_.load()) transport_->progress(kLongestWait);
      if (finishes_.load()) transport_->finish(kLimit);
    });
  }
  /// Ends as a process does that has finished.
  void finish() {
    finishes_.store(true);
    stop();
  }
  /// Ends as a process does that is killed.
  void stop() {
    if (!thread_.joinable()) return;
    isStopping_.store(true);
    transport_->wake();
    thread_.join();
    transport_.reset();
  }
  Transport& transport() { return *transport_; }

  void send(std::uint64_t number, Payload payload, std::size_t link = 0) {
    const Header header{number, payload.numBytes()};
    transport_->send(link, &header, sizeof header, std::move(payload));
  }
  /// Sends a frame whose payload this call makes, which lives until it has arrived.
  std::weak_ptr<Bytes> sendNew(std::uint64_t number, std::size_t numBytes, std::size_t link = 0) {
    auto bytes = std::make_shared<Bytes>(payloadOf(number, numBytes));
    send(number, inPieces(bytes->data(), numBytes, bytes), link);
    return bytes;
  }

  std::vector<Arrived> arrived() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return arrived_;
  }
  std::size_t numArrived() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return arrived_.size();
  }
  std::vector<LinkEvent> events() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return events_;
  }
  std::size_t count(LinkEvent::Kind kind) {
    std::size_t sum = 0;
    for (const LinkEvent& event : events()) sum += event.kind == kind ? 1 : 0;
    return sum;
  }
  std::string textOf(LinkEvent::Kind kind) {
    for (const LinkEvent& event : events()) {
      if (event.kind == kind) return event.text;
    }
    return "";
  }
  void refuse(std::uint64_t number) { refused_.store(number); }

  Payload open(std::size_t, const std::byte* data, std::size_t headerBytes) override {
    Header header;
    std::memcpy(&header, data, sizeof header);
    if (header.number == refused_.load()) throw LinkError("the test refuses it");
    headerBytes_ = headerBytes;
    place_.assign(header.payloadBytes, std::byte{0});
    return inPieces(place_.data(), place_.size());
  }
  void close(std::size_t link, const std::byte* data, const Payload&) override {
    Header header;
    std::memcpy(&header, data, sizeof header);
    const std::lock_guard<std::mutex> lock(mutex_);
    arrived_.push_back({link, header.number, headerBytes_, std::exchange(place_, {})});
  }
  void sent(std::size_t, const std::byte*, std::int64_t) noexcept override { ++numSent; }
  void event(LinkEvent event) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    events_.push_back(std::move(event));
  }

  std::atomic<std::size_t> numSent{0};

 private:
  std::unique_ptr<Transport> transport_;
  std::atomic<bool> isStopping_{false}, finishes_{false};
  std::atomic<std::uint64_t> refused_{~std::uint64_t{0}};
  Bytes place_;  // of the frame that arrives; used by the thread, as the next one
  std::size_t headerBytes_ = 0;
  std::mutex mutex_;  // guards the members below
  std::vector<Arrived> arrived_;
  std::vector<LinkEvent> events_;
  std::thread thread_;
};

class Transports : public testing::TestWithParam<Implementation> {
 protected:
  /// Connects both ends by `numLinks` links.
  void connect(std::size_t numLinks = 1, LinkOptions options = {}) {
    make(numLinks, options);
    one_.start(std::move(made_[0]));
    other_.start(std::move(made_[1]));
  }
  void make(std::size_t numLinks, LinkOptions options) {
    std::array<std::vector<int>, 2> fds;
    for (std::size_t link = 0; link < numLinks; ++link) {
      const auto ends = tcpConnection();
      fds[0].push_back(ends[0]);
      fds[1].push_back(ends[1]);
      keepForBreaks(ends);
    }
    made_ = {GetParam().make(fds[0], one_, options), GetParam().make(fds[1], other_, options)};
  }
  /// Replaces the connection of link 0 at both ends.
  void resume() {
    const auto ends = tcpConnection();
    keepForBreaks(ends);
    one_.transport().resume(0, ends[0]);
    other_.transport().resume(0, ends[1]);
  }
  void keepForBreaks(const std::array<int, 2>& ends) {
    latest_ = {std::make_unique<Fd>(::dup(ends[0])), std::make_unique<Fd>(::dup(ends[1]))};
  }
  /// Breaks the latest connection, first seen at one end or at the other.
  void breakLatest(std::size_t end) { breakConnection(*latest_[end]); }
  void expectInOrder(const std::vector<Arrived>& arrived, std::uint64_t first = 0) {
    for (std::size_t i = 0; i < arrived.size(); ++i) {
      ASSERT_EQ(arrived[i].number, first + i);
      ASSERT_TRUE(arrived[i].payload == payloadOf(first + i, arrived[i].payload.size())) << "frame " << i;
    }
  }

  std::array<std::unique_ptr<Fd>, 2> latest_;
  End one_, other_;
  std::array<std::unique_ptr<Transport>, 2> made_;
};

INSTANTIATE_TEST_SUITE_P(Implementations, Transports, testing::ValuesIn(kImplementations),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(Transports, CarryFramesInTheirOrder) {
  connect();
  constexpr std::size_t kSizes[] = {0, 1, 2, 3, 1000, 100'003};
  for (std::uint64_t number = 0; number < 300; ++number) one_.sendNew(number, kSizes[number % 6]);
  ASSERT_TRUE(eventually([&] { return other_.numArrived() == 300; }));
  const std::vector<Arrived> arrived = other_.arrived();
  expectInOrder(arrived);
  for (std::size_t i = 0; i < 300; ++i) ASSERT_EQ(arrived[i].payload.size(), kSizes[i % 6]);
  EXPECT_EQ(one_.numSent, 300u);
  EXPECT_TRUE(other_.events().empty());
}

TEST_P(Transports, CarryHeadersOfSeveralLengths) {
  connect();
  for (std::uint64_t number = 0; number < 100; ++number) {
    const LongHeader header{{number, 0}, {}};
    one_.transport().send(0, &header, number % 2 == 0 ? sizeof header : sizeof header.header, {});
  }
  ASSERT_TRUE(eventually([&] { return other_.numArrived() == 100; }));
  for (const Arrived& frame : other_.arrived())
    ASSERT_EQ(frame.headerBytes, frame.number % 2 == 0 ? sizeof(LongHeader) : sizeof(Header));
}

TEST_P(Transports, CarryMoreThanBuffersHoldBothWaysAtOnce) {
  connect();
  together(2, [&](std::size_t end) {
    End& sender = end == 0 ? one_ : other_;
    for (std::uint64_t number = 0; number < 3; ++number) sender.sendNew(number, kLargeBytes);
  });
  for (End* end : {&one_, &other_}) {
    ASSERT_TRUE(eventually([&] { return end->numArrived() == 3; }));
    expectInOrder(end->arrived());
  }
}

TEST_P(Transports, SendForManyThreads) {
  connect(2);
  constexpr std::uint64_t kOfThread = 1000;
  together(4, [&](std::size_t thread) {
    for (std::uint64_t i = 0; i < 100; ++i)
      one_.sendNew(thread * kOfThread + i, thread * 3001 + i, thread % 2);
  });
  ASSERT_TRUE(eventually([&] { return other_.numArrived() == 400; }));
  std::array<std::uint64_t, 4> next{};
  for (const Arrived& frame : other_.arrived()) {
    const std::size_t thread = frame.number / kOfThread;
    ASSERT_EQ(frame.link, thread % 2);
    ASSERT_EQ(frame.number % kOfThread, next[thread]++);
    ASSERT_TRUE(frame.payload == payloadOf(frame.number, frame.payload.size()));
  }
}

TEST_P(Transports, ReleasePayloadsThatHaveArrived) {
  connect();
  const std::weak_ptr<Bytes> payload = one_.sendNew(0, kLargeBytes);
  ASSERT_TRUE(eventually([&] { return other_.numArrived() == 1; }));
  EXPECT_TRUE(eventually([&] { return payload.expired(); }));
}

TEST_P(Transports, EndALinkWhoseHeaderIsRefused) {
  connect(2);
  other_.refuse(1);
  one_.sendNew(0, 10);
  one_.sendNew(1, kLargeBytes);
  one_.sendNew(2, 10);
  ASSERT_TRUE(eventually([&] { return other_.count(LinkEvent::Kind::kLost) == 1; }));
  EXPECT_EQ(other_.textOf(LinkEvent::Kind::kLost), "the test refuses it");
  ASSERT_TRUE(eventually([&] { return one_.count(LinkEvent::Kind::kLost) == 1; }));
  EXPECT_EQ(other_.numArrived(), 1u);
  const std::weak_ptr<Bytes> dropped = one_.sendNew(3, 10);
  EXPECT_TRUE(dropped.expired());
  one_.sendNew(4, 10, 1);  // the other link goes on
  EXPECT_TRUE(eventually([&] { return other_.numArrived() == 2; }));
}

TEST_P(Transports, DeliverEverythingBeforeTheyFinish) {
  connect();
  for (std::uint64_t number = 0; number < 3; ++number) one_.sendNew(number, kLargeBytes);
  one_.finish();
  ASSERT_TRUE(eventually([&] { return other_.count(LinkEvent::Kind::kEnded) == 1; }));
  EXPECT_EQ(other_.numArrived(), 3u);
  expectInOrder(other_.arrived());
  EXPECT_EQ(other_.count(LinkEvent::Kind::kLost), 0u);
  const std::weak_ptr<Bytes> dropped = other_.sendNew(0, 10);
  EXPECT_TRUE(dropped.expired());
}

TEST_P(Transports, MayFinishAtOnce) {
  connect(3);
  together(2, [&](std::size_t end) {
    End& sender = end == 0 ? one_ : other_;
    for (std::size_t link = 0; link < 3; ++link) sender.sendNew(0, 100'000, link);
    sender.finish();
  });
  for (End* end : {&one_, &other_}) {
    EXPECT_LE(end->numArrived(), 3u);
    EXPECT_EQ(end->count(LinkEvent::Kind::kLost), 0u);
  }
}

TEST_P(Transports, LoseAPeerThatEndsWithoutFinishing) {
  connect();
  latest_ = {};  // its end closes the connection
  one_.stop();
  ASSERT_TRUE(eventually([&] { return other_.count(LinkEvent::Kind::kLost) == 1; }));
  EXPECT_EQ(other_.count(LinkEvent::Kind::kEnded), 0u);
}

TEST_P(Transports, DropFramesThatHaveNotBegun) {
  make(1, {});
  one_.start(std::move(made_[0]));
  one_.sendNew(0, kLargeBytes);
  std::vector<std::weak_ptr<Bytes>> dropped;
  for (std::uint64_t number = 10; number < 15; ++number) dropped.push_back(one_.sendNew(number, 1000));
  one_.transport().dropUnsent(0);
  one_.sendNew(1, 10);
  for (const auto& payload : dropped) EXPECT_TRUE(payload.expired());
  other_.start(std::move(made_[1]));
  ASSERT_TRUE(eventually([&] { return other_.numArrived() == 2; }));
  expectInOrder(other_.arrived());
}

// ---- connections that break ----

class BrokenConnections : public Transports {
 protected:
  BrokenConnections() {
    LinkOptions options;
    options.isResumable = true;
    connect(1, options);
  }
};

INSTANTIATE_TEST_SUITE_P(Implementations, BrokenConnections, testing::ValuesIn(kImplementations),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(BrokenConnections, AreReportedAndReplaced) {
  one_.sendNew(0, 10);
  ASSERT_TRUE(eventually([&] { return other_.numArrived() == 1; }));
  breakLatest(0);
  for (End* end : {&one_, &other_})
    ASSERT_TRUE(eventually([&] { return end->count(LinkEvent::Kind::kInterrupted) == 1; }));
  for (std::uint64_t number = 1; number < 4; ++number) one_.sendNew(number, kLargeBytes);
  resume();
  ASSERT_TRUE(eventually([&] { return other_.numArrived() == 4; }));
  expectInOrder(other_.arrived());
  for (End* end : {&one_, &other_}) {
    ASSERT_TRUE(eventually([&] { return end->count(LinkEvent::Kind::kAnswering) == 1; }));
    EXPECT_EQ(end->count(LinkEvent::Kind::kLost), 0u);
  }
}

TEST_P(BrokenConnections, AreReplacedBeforeTheyAreNoticed) {
  one_.sendNew(0, kLargeBytes);
  other_.sendNew(0, kLargeBytes);
  resume();
  for (End* end : {&one_, &other_}) {
    ASSERT_TRUE(eventually([&] { return end->numArrived() == 1; }));
    expectInOrder(end->arrived());
    EXPECT_EQ(end->count(LinkEvent::Kind::kLost), 0u);
  }
}

/// However often and wherever the connection breaks, every frame arrives once.
TEST_P(BrokenConnections, LoseNoFrameAndRepeatNone) {
  constexpr std::uint64_t kNumFrames = 400;
  std::thread breaking([&] {
    std::mt19937 random(7);
    while (one_.numArrived() < kNumFrames || other_.numArrived() < kNumFrames) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
      if (random() % 4 != 0) breakLatest(random() % 2);
      resume();
    }
  });
  together(2, [&](std::size_t end) {
    End& sender = end == 0 ? one_ : other_;
    for (std::uint64_t number = 0; number < kNumFrames; ++number) {
      sender.sendNew(number, number * 7919 % 300'000);
      if (number % 16 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  });
  for (End* end : {&one_, &other_})
    EXPECT_TRUE(eventually([&] { return end->numArrived() >= kNumFrames; })) << end->numArrived();
  breaking.join();
  for (End* end : {&one_, &other_}) {
    EXPECT_EQ(end->numArrived(), kNumFrames);
    expectInOrder(end->arrived());
    EXPECT_EQ(end->count(LinkEvent::Kind::kLost), 0u) << end->textOf(LinkEvent::Kind::kLost);
  }
}

TEST_P(BrokenConnections, EndAfterwardsInOrder) {
  one_.sendNew(0, kLargeBytes);
  resume();
  one_.sendNew(1, kLargeBytes);
  one_.finish();
  ASSERT_TRUE(eventually([&] { return other_.count(LinkEvent::Kind::kEnded) == 1; }));
  EXPECT_EQ(other_.numArrived(), 2u);
  EXPECT_EQ(other_.count(LinkEvent::Kind::kLost), 0u);
}

TEST_P(BrokenConnections, AreLostWhenTheyAreGivenUp) {
  breakLatest(0);
  ASSERT_TRUE(eventually([&] { return one_.count(LinkEvent::Kind::kInterrupted) == 1; }));
  one_.transport().giveUp(0, "nobody listens");
  ASSERT_TRUE(eventually([&] { return one_.count(LinkEvent::Kind::kLost) == 1; }));
  EXPECT_EQ(one_.textOf(LinkEvent::Kind::kLost), "nobody listens");
  const std::weak_ptr<Bytes> dropped = one_.sendNew(0, 10);
  EXPECT_TRUE(dropped.expired());
}

TEST_P(BrokenConnections, DoNotKeepAProcessThatHasEnded) {
  latest_ = {};  // its end closes the connection
  one_.stop();
  ASSERT_TRUE(eventually([&] { return other_.count(LinkEvent::Kind::kLost) == 1; }));
  EXPECT_EQ(other_.count(LinkEvent::Kind::kInterrupted), 0u);
}

class ImpatientLinks : public Transports {};

INSTANTIATE_TEST_SUITE_P(Implementations, ImpatientLinks, testing::ValuesIn(kImplementations),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(ImpatientLinks, AreLostUnlessTheirConnectionIsReplacedInTime) {
  connect(1, {std::chrono::milliseconds(500), true});
  breakLatest(0);
  for (End* end : {&one_, &other_}) {
    ASSERT_TRUE(eventually([&] { return end->count(LinkEvent::Kind::kLost) == 1; }));
    EXPECT_EQ(end->textOf(LinkEvent::Kind::kLost).rfind("it could not be connected with again within", 0),
              0u);
  }
}

/// Two ends that send one buffer back and forth, as nodes do: the answer comes to where the question lies.
class Answering final : public End {
 public:
  void start(std::unique_ptr<Transport> transport) { End::start(std::move(transport)); }
  Payload open(std::size_t, const std::byte*, std::size_t) override {
    return {{{values_.data(), values_.size() * sizeof(std::uint32_t)}}, nullptr};
  }
  void close(std::size_t, const std::byte*, const Payload&) override {
    for (const std::uint32_t value : values_) isTorn_ = isTorn_ || value != values_[0];
    for (std::uint32_t& value : values_) ++value;
    if (values_[0] < kNumRounds) ask();
    round_.store(values_[0]);
  }
  void ask() { send(0, {{{values_.data(), values_.size() * sizeof(std::uint32_t)}}, nullptr}); }
  std::uint32_t round() const { return round_.load(); }
  bool isTorn() const { return isTorn_; }

  static constexpr std::uint32_t kNumRounds = 300;

 private:
  std::vector<std::uint32_t> values_ = std::vector<std::uint32_t>(10'000, 0);
  std::atomic<std::uint32_t> round_{0};
  std::atomic<bool> isTorn_{false};
};

TEST_P(ImpatientLinks, MayBeAnsweredIntoTheBufferThatWasSent) {
  Answering one, other;
  const auto ends = tcpConnection();
  one.start(GetParam().make({ends[0]}, one, {kLimit, true}));
  other.start(GetParam().make({ends[1]}, other, {kLimit, true}));
  one.ask();
  std::mt19937 random(11);
  const auto isOver = [&] { return std::max(one.round(), other.round()) >= Answering::kNumRounds; };
  const Deadline deadline;
  while (!isOver() && !deadline.isOver()) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 10'000));
    const auto next = tcpConnection();
    one.transport().resume(0, next[0]);
    other.transport().resume(0, next[1]);
  }
  EXPECT_TRUE(isOver()) << one.round() << ", " << other.round();
  EXPECT_FALSE(one.isTorn() || other.isTorn());
  one.stop();
  other.stop();
}

}  // namespace
}  // namespace coarse::test::transport_test
