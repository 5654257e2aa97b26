/// SharedCollectives: ranks are threads with mappings of their own; values are exact, so that sums are sets
/// of ranks.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <future>
#include <numeric>
#include <thread>
#include <vector>

#include "coarse/collectives/shared_collectives.hpp"
#include "tcp_connection.hpp"

namespace coarse::test::collectives_test {
namespace {

constexpr std::size_t kBufferBytes = 4096;  // small, so that tensors take many rounds
constexpr std::chrono::seconds kLimit{60};
using Floats = std::vector<float>;

/// Of each rank; over nodes, so that several rounds are on their way.
std::size_t numBuffers(std::size_t numNodes) { return numNodes == 1 ? 2 : 8; }

/// A group whose ranks are threads, spread over nodes in turns; sockets are between nodes.
class Group {
 public:
  explicit Group(std::size_t numRanks, std::size_t numNodes = 1) {
    std::vector<int> memories;
    std::vector<std::uint32_t> nodes;
    for (std::size_t rank = 0; rank < numRanks; ++rank) {
      nodes.push_back(static_cast<std::uint32_t>(rank % numNodes));
    }
    std::vector<std::vector<int>> links(numNodes, std::vector<int>(numNodes, -1));
    for (std::size_t node = 0; node < numNodes; ++node) {
      memories.push_back(createSealedMemory("collectives-test",
                                            groupScratchBytes(numRanks, kBufferBytes, numBuffers(numNodes))));
      for (std::size_t other = 0; other < node; ++other) {
        int ends[2];
        EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
        links[node][other] = ends[0];
        links[other][node] = ends[1];
      }
    }
    for (std::size_t rank = 0; rank < numRanks; ++rank) {
      const std::size_t node = rank % numNodes;
      auto scratch = std::make_unique<GroupScratch>(memories[node], rank, numRanks, kBufferBytes,
                                                    Liveness({}), Placement(nodes), numBuffers(numNodes));
      const bool isLeader = numNodes > 1 && rank == node;
      ranks_.push_back(std::make_unique<SharedCollectives>(std::move(scratch),
                                                           isLeader ? links[node] : std::vector<int>{}));
    }
    for (int fd : memories) ::close(fd);
  }

  /// Every rank closes for itself, as processes do: a leader that closes waits for the others of its links.
  ~Group() {
    run([](std::size_t, SharedCollectives& collectives) { collectives.close(); });
  }

  /// Runs `body(rank, collectives)` in all ranks at once.
  template <typename Body>
  void run(Body body) {
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      threads.emplace_back([this, rank, &body] { body(rank, *ranks_[rank]); });
    }
    for (std::thread& thread : threads) thread.join();
  }

  std::size_t size() const { return ranks_.size(); }

 private:
  std::vector<std::unique_ptr<SharedCollectives>> ranks_;
};

Collective callOf(CollectiveKind kind, std::size_t numElements, Combine combine = Combine::kNone,
                  int root = -1) {
  Collective call;
  call.header.kind = kind;
  call.header.combine = combine;
  call.header.root = root;
  call.header.pieceBytes = numElements * sizeof(float);
  call.header.numDims = 1;
  call.header.dims[0] = static_cast<std::int64_t>(numElements);
  std::strcpy(call.header.dtype, "float32");
  call.element = ElementType::kFloat32;
  call.elementBytes = sizeof(float);
  call.timeout = kLimit;
  return call;
}

/// Element i of a rank: distinct, and exact in sums.
float valueOf(std::size_t rank, std::size_t i) { return static_cast<float>((i % 64) * 1024 + (1U << rank)); }

Floats valuesOf(std::size_t rank, std::size_t numElements) {
  Floats values(numElements);
  for (std::size_t i = 0; i < numElements; ++i) values[i] = valueOf(rank, i);
  return values;
}

Floats sumOf(std::size_t numRanks, std::size_t numElements) {
  Floats sums(numElements, 0.0F);
  for (std::size_t rank = 0; rank < numRanks; ++rank) {
    for (std::size_t i = 0; i < numElements; ++i) sums[i] += valueOf(rank, i);
  }
  return sums;
}

struct Size {
  std::size_t numRanks, numNodes;
};

void PrintTo(const Size& size, std::ostream* out) {
  *out << size.numRanks << " ranks on " << size.numNodes << " nodes";
}

class Collectives : public testing::TestWithParam<std::tuple<Size, std::size_t>> {
 protected:
  const std::size_t numRanks_ = std::get<0>(GetParam()).numRanks;
  const std::size_t numNodes_ = std::get<0>(GetParam()).numNodes;
  const std::size_t numElements_ = std::get<1>(GetParam());
};

// Two and three ranks reduce directly, five in slices; lengths around one buffer, and of many.
INSTANTIATE_TEST_SUITE_P(RanksAndLengths, Collectives,
                         testing::Combine(testing::Values(Size{1, 1}, Size{2, 1}, Size{3, 1}, Size{5, 1},
                                                          Size{2, 2}, Size{3, 2}, Size{5, 3}),
                                          testing::Values(0, 1, 1023, 1025, 20001)));

TEST_P(Collectives, AllReduceAddsUpInPlaceTimeAndAgain) {
  Group group(numRanks_, numNodes_);
  group.run([&](std::size_t rank, SharedCollectives& collectives) {
    for (int i = 0; i < 3; ++i) {
      Floats values = valuesOf(rank, numElements_);
      void* memory = values.data();
      Collective call = callOf(CollectiveKind::kAllReduce, numElements_, Combine::kSum);
      call.inputs = &memory;
      call.outputs = &memory;
      collectives.run(call);
      EXPECT_EQ(values, sumOf(numRanks_, numElements_));
    }
  });
}

TEST_P(Collectives, AllGatherAndReduceScatterAreInverse) {
  Group group(numRanks_, numNodes_);
  group.run([&](std::size_t rank, SharedCollectives& collectives) {
    const Floats own = valuesOf(rank, numElements_);
    std::vector<Floats> all(numRanks_, Floats(numElements_));
    const void* input = own.data();
    std::vector<void*> outputs;
    std::vector<const void*> pieces;
    for (Floats& one : all) {
      outputs.push_back(one.data());
      pieces.push_back(one.data());
    }
    Collective gather = callOf(CollectiveKind::kAllGather, numElements_);
    gather.inputs = &input;
    gather.outputs = outputs.data();
    collectives.run(gather);
    for (std::size_t other = 0; other < numRanks_; ++other)
      EXPECT_EQ(all[other], valuesOf(other, numElements_));

    Floats result(numElements_);
    void* output = result.data();
    Collective scatter = callOf(CollectiveKind::kReduceScatter, numElements_, Combine::kMean);
    scatter.inputs = pieces.data();
    scatter.outputs = &output;
    collectives.run(scatter);
    EXPECT_EQ(result, own);  // the mean of as many equal ones
  });
}

TEST_P(Collectives, BroadcastAndScatterComeFromTheRoot) {
  Group group(numRanks_, numNodes_);
  const auto root = static_cast<int>(numRanks_ - 1);
  group.run([&](std::size_t rank, SharedCollectives& collectives) {
    Floats values = valuesOf(rank, numElements_);
    void* memory = values.data();
    Collective broadcast = callOf(CollectiveKind::kBroadcast, numElements_, Combine::kNone, root);
    broadcast.inputs = &memory;
    broadcast.outputs = &memory;
    collectives.run(broadcast);
    EXPECT_EQ(values, valuesOf(numRanks_ - 1, numElements_));

    std::vector<Floats> all;
    std::vector<const void*> pieces;
    for (std::size_t other = 0; other < numRanks_; ++other) {
      all.push_back(valuesOf(other, numElements_));
      pieces.push_back(all.back().data());
    }
    Collective scatter = callOf(CollectiveKind::kScatter, numElements_, Combine::kNone, root);
    scatter.inputs = pieces.data();
    scatter.outputs = &memory;
    collectives.run(scatter);
    EXPECT_EQ(values, valuesOf(rank, numElements_));
  });
}

TEST_P(Collectives, AllToAllTakesSizesThatDiffer) {
  Group group(numRanks_, numNodes_);
  group.run([&](std::size_t rank, SharedCollectives& collectives) {
    const auto count = [&](std::size_t from, std::size_t to) { return numElements_ / (from + 1) + to; };
    std::vector<Floats> sent, received;
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    std::vector<std::uint64_t> inputBytes, outputBytes;
    for (std::size_t other = 0; other < numRanks_; ++other) {
      sent.push_back(valuesOf(rank, count(rank, other)));
      received.emplace_back(count(other, rank));
      inputBytes.push_back(sent.back().size() * sizeof(float));
      outputBytes.push_back(received.back().size() * sizeof(float));
    }
    for (Floats& one : sent) inputs.push_back(one.data());
    for (Floats& one : received) outputs.push_back(one.data());
    Collective call = callOf(CollectiveKind::kAllToAll, 0);
    call.inputs = inputs.data();
    call.outputs = outputs.data();
    call.inputBytes = inputBytes.data();
    call.outputBytes = outputBytes.data();
    collectives.run(call);
    for (std::size_t other = 0; other < numRanks_; ++other) {
      EXPECT_EQ(received[other], valuesOf(other, count(other, rank)));
    }
  });
}

std::string errorOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

class CollectiveErrors : public testing::TestWithParam<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(Nodes, CollectiveErrors, testing::Values(1, 2));

TEST_P(CollectiveErrors, AllRanksHearOfAMismatchAndGoOn) {
  Group group(3, GetParam());
  group.run([&](std::size_t rank, SharedCollectives& collectives) {
    Floats values(100, 1.0F);
    void* memory = values.data();
    Collective wrong = callOf(CollectiveKind::kAllReduce, rank == 2 ? 50 : 100, Combine::kSum);
    wrong.inputs = &memory;
    wrong.outputs = &memory;
    const std::string error = errorOf([&] { collectives.run(wrong); });
    EXPECT_NE(error.find("rank 2 at 1, all_reduce of float32 [50], sum"), std::string::npos) << error;
    EXPECT_EQ(values, Floats(100, 1.0F));
    Collective right = callOf(CollectiveKind::kAllReduce, 100, Combine::kSum);
    right.inputs = &memory;
    right.outputs = &memory;
    collectives.run(right);
    EXPECT_EQ(values, Floats(100, 3.0F));
  });
}

TEST_P(CollectiveErrors, WhoWaitsForARankThatLeftIsTold) {
  Group group(2, GetParam());
  group.run([&](std::size_t rank, SharedCollectives& collectives) {
    if (rank == 1) return collectives.close();
    const std::string error = errorOf([&] { collectives.run(callOf(CollectiveKind::kBarrier, 0)); });
    EXPECT_NE(error.find("rank 1 has left the group"), std::string::npos) << error;
    EXPECT_NE(errorOf([&] { collectives.run(callOf(CollectiveKind::kBarrier, 0)); }).find("broken since"),
              std::string::npos);
  });
}

TEST_P(CollectiveErrors, CloseEndsAWait) {
  Group group(2, GetParam());
  group.run([&](std::size_t rank, SharedCollectives& collectives) {
    if (rank == 1) return;
    std::thread closing([&] { collectives.close(); });
    EXPECT_NE(errorOf([&] { collectives.run(callOf(CollectiveKind::kBarrier, 0)); }), "");
    closing.join();
  });
}

/// Waits until another process has written a byte.
void awaitByte(int fd) {
  char byte;
  ASSERT_EQ(::read(fd, &byte, 1), 1);
}

/// One of two ranks in a fork: says that it has joined, and ends with 0 after a barrier. Rank 1 waits for a
/// byte before the barrier.
pid_t startRank(std::size_t rank, int memory, int joined, int mayGoOn, std::chrono::milliseconds timeout) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  const std::string error = errorOf([&] {
    SharedCollectives collectives(
        std::make_unique<GroupScratch>(memory, rank, 2, kBufferBytes, Liveness({}), Placement({0, 0})), {});
    char byte = 'x';
    if (::write(joined, &byte, 1) != 1 || (rank == 1 && ::read(mayGoOn, &byte, 1) != 1))
      throw std::runtime_error("the test has ended");
    Collective call = callOf(CollectiveKind::kBarrier, 0);
    call.timeout = timeout;
    collectives.run(call);
  });
  ::_exit(error.empty() ? 0 : 1);
}

TEST(StoppedRanks, GoOnAfterALongerTimeThanACollectiveMayTake) {
  const int memory = createSealedMemory("collectives-test", groupScratchBytes(2, kBufferBytes));
  int joined[2], mayGoOn[2];
  ASSERT_EQ(::pipe(joined), 0);
  ASSERT_EQ(::pipe(mayGoOn), 0);
  constexpr std::chrono::milliseconds kTimeout{2000};
  std::vector<pid_t> ranks;
  for (std::size_t rank = 0; rank < 2; ++rank)
    ranks.push_back(startRank(rank, memory, joined[1], mayGoOn[0], kTimeout));
  awaitByte(joined[0]);
  awaitByte(joined[0]);
  for (const pid_t rank : ranks) ::kill(rank, SIGSTOP);
  std::this_thread::sleep_for(1.5 * kTimeout);
  for (const pid_t rank : ranks) ::kill(rank, SIGCONT);
  ASSERT_EQ(::write(mayGoOn[1], "x", 1), 1);
  for (const pid_t rank : ranks) {
    int status = -1;
    ASSERT_EQ(::waitpid(rank, &status, 0), rank);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
  for (const int fd : {memory, joined[0], joined[1], mayGoOn[0], mayGoOn[1]}) ::close(fd);
}

/// The number of rounds that a rank has published, once that is as large as expected.
std::uint32_t awaitRounds(const GroupScratch& scratch, std::size_t rank, std::uint32_t expected) {
  const auto end = std::chrono::steady_clock::now() + kLimit;
  while (scratch.board(rank).round.load() < expected && std::chrono::steady_clock::now() < end)
    std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // in which it could publish more
  return scratch.board(rank).round.load();
}

TEST(Rounds, AreWrittenAheadOfThoseThatAreRead) {
  constexpr std::size_t kNumBuffers = 8;
  const int fd = createSealedMemory("collectives-test", groupScratchBytes(2, kBufferBytes, kNumBuffers));
  const auto scratchOf = [&](std::size_t rank) {
    return std::make_unique<GroupScratch>(fd, rank, 2, kBufferBytes, Liveness({}), Placement({0, 0}),
                                          kNumBuffers);
  };
  SharedCollectives collectives(scratchOf(0), {});
  const auto other = scratchOf(1);
  ::close(fd);
  Floats values(4 * kBufferBytes, 1.0F);  // 16 rounds
  void* memory = values.data();
  Collective call = callOf(CollectiveKind::kAllReduce, values.size(), Combine::kSum);
  call.inputs = &memory;
  call.outputs = &memory;
  std::thread rank(
      [&] { EXPECT_NE(errorOf([&] { collectives.run(call); }).find("rank 1 has left"), std::string::npos); });
  EXPECT_EQ(awaitRounds(*other, 0, 1), 1);  // whether the calls agree is not known yet
  other->begin({});
  other->setHeader(other->headerOf(0, 1));
  other->publish();
  EXPECT_EQ(awaitRounds(*other, 0, 1 + kNumBuffers / 2), 1 + kNumBuffers / 2);
  other->leave();
  rank.join();
}

/// What comes over a link that no other node speaks as it should, ends that node for this group.
TEST(Bridges, EndAConnectionOnWhichNonsenseComes) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const int memory = createSealedMemory("collectives-test", groupScratchBytes(2, kBufferBytes));
  auto scratch = std::make_unique<GroupScratch>(memory, 0, 2, kBufferBytes, Liveness({}), Placement({0, 1}));
  SharedCollectives collectives(std::move(scratch), {-1, ends[0]});
  ::close(memory);
  const std::string nonsense(64, 'x');
  ASSERT_EQ(::send(ends[1], nonsense.data(), nonsense.size(), MSG_NOSIGNAL), 64);
  const std::string error = errorOf([&] { collectives.run(callOf(CollectiveKind::kBarrier, 0)); });
  EXPECT_NE(error.find("rank 1 cannot be reached any more"), std::string::npos) << error;
  ::close(ends[1]);
}

/// Collectives of two nodes, between which the connection is replaced again and again.
TEST(Bridges, GoOnOverOtherConnections) {
  constexpr int kNumCalls = 300;
  constexpr std::size_t kNumElements = 20001;
  std::vector<std::unique_ptr<SharedCollectives>> ranks;
  const auto first = tcpConnection();
  for (std::size_t rank = 0; rank < 2; ++rank) {
    const int memory = createSealedMemory("collectives-test", groupScratchBytes(2, kBufferBytes));
    auto scratch =
        std::make_unique<GroupScratch>(memory, rank, 2, kBufferBytes, Liveness({}), Placement({0, 1}));
    ::close(memory);
    const std::vector<int> links =
        rank == 0 ? std::vector<int>{-1, first[0]} : std::vector<int>{first[1], -1};
    ranks.push_back(
        std::make_unique<SharedCollectives>(std::move(scratch), links, LinkOptions{kLimit, true}));
  }
  std::atomic<int> numDone{0};
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      for (int i = 0; i < kNumCalls; ++i) {
        Floats values = valuesOf(rank, kNumElements);
        void* memory = values.data();
        Collective call = callOf(CollectiveKind::kAllReduce, kNumElements, Combine::kSum);
        call.inputs = &memory;
        call.outputs = &memory;
        ASSERT_EQ(errorOf([&] { ranks[rank]->run(call); }), "");
        ASSERT_EQ(values, sumOf(2, kNumElements));
      }
      ++numDone;
    });
  }
  while (numDone.load() < 2) {
    const auto next = tcpConnection();
    ranks[0]->bridge()->resume(1, next[0]);
    ranks[1]->bridge()->resume(0, next[1]);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  for (std::thread& thread : threads) thread.join();
  std::thread closing([&] { ranks[0]->close(); });
  ranks[1]->close();
  closing.join();
  for (const auto& rank : ranks) {
    for (const NodeEvent& event : rank->bridge()->takeEvents()) {
      EXPECT_NE(event.kind, NodeEvent::Kind::kLost) << event.text;
    }
  }
}

/// Posts a message; its error and peer come in the future.
std::future<std::pair<std::string, int>> post(SharedCollectives& collectives, bool isSend, int peer, int tag,
                                              Floats& values, std::chrono::milliseconds timeout = kLimit) {
  auto promise = std::make_shared<std::promise<std::pair<std::string, int>>>();
  Message message;
  message.isSend = isSend;
  message.peer = peer;
  message.tag = tag;
  message.data = values.data();
  message.numBytes = values.size() * sizeof(float);
  std::strcpy(message.dtype, "float32");
  message.timeout = timeout;
  message.done = [promise](const std::string& error, int from) { promise->set_value({error, from}); };
  collectives.post(message);
  return promise->get_future();
}

class MessagesBetweenRanks : public testing::TestWithParam<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(Nodes, MessagesBetweenRanks, testing::Values(1, 2));

TEST_P(MessagesBetweenRanks, AreMatchedByTagInAnyOrderWhateverTheirSize) {
  Group group(3, GetParam());
  constexpr std::size_t kSizes[] = {3, 100000, 0, 500};  // of more than a ring, too
  group.run([&](std::size_t rank, SharedCollectives& collectives) {
    const auto next = static_cast<int>((rank + 1) % 3), previous = static_cast<int>((rank + 2) % 3);
    std::vector<Floats> sent, received;
    for (std::size_t size : kSizes) {
      sent.push_back(valuesOf(rank, size));
      received.emplace_back(size);
    }
    std::vector<std::future<std::pair<std::string, int>>> done;
    for (int tag : {0, 1, 2, 3}) done.push_back(post(collectives, true, next, tag, sent[tag]));
    for (int tag : {1, 3, 0, 2})
      done.push_back(post(collectives, false, tag == 3 ? -1 : previous, tag, received[tag]));
    for (auto& one : done) EXPECT_EQ(one.get().first, "");
    for (int tag : {0, 1, 2, 3}) {
      EXPECT_EQ(received[tag], valuesOf(static_cast<std::size_t>(previous), kSizes[tag])) << tag;
    }
  });
}

/// A rank whose messages are written by hand, and so may stop in their middle, like a process.
class RankThatStops {
 public:
  explicit RankThatStops(int fd) : scratch_(fd, 1, 2, kBufferBytes, Liveness({}), Placement({0, 0})) {}

  void write(const void* data, std::size_t numBytes) {
    const MessageArea& area = scratch_.messageArea();
    std::memcpy(area.ring(1, 0) + written_, data, numBytes);
    written_ += numBytes;
    ASSERT_LE(written_, area.ringBytes());
    area.channel(1, 0).written.store(written_);
    scratch_.bellOf(0).ring();
  }

  void writeHeader(std::uint64_t numBytes, std::int32_t tag) {
    write(&numBytes, sizeof numBytes);
    write(&tag, sizeof tag);
    const char rest[4 + kDTypeNameBytes] = {0, 0, 0, 0, 'f', 'l', 'o', 'a', 't', '3', '2'};
    write(rest, sizeof rest);
  }

 private:
  GroupScratch scratch_;
  std::size_t written_ = 0;
};

TEST(Messages, OfWhichPartHadComeWhenTheirReceiveEndedAreWholeForTheNextOne) {
  const int fd = createSealedMemory("collectives-test", groupScratchBytes(2, kBufferBytes));
  SharedCollectives receiver(
      std::make_unique<GroupScratch>(fd, 0, 2, kBufferBytes, Liveness({}), Placement({0, 0})), {});
  RankThatStops sender(fd);
  ::close(fd);
  const Floats sent = valuesOf(1, 100);
  const std::size_t numBytes = sent.size() * sizeof(float);
  Floats first(100, 0.0F), second(100, 0.0F);
  auto late = post(receiver, false, 1, 7, first, std::chrono::milliseconds(50));
  sender.writeHeader(numBytes, 7);
  sender.write(sent.data(), 200);
  EXPECT_NE(late.get().first.find("Timed out"), std::string::npos);
  EXPECT_EQ(Floats(first.begin(), first.begin() + 50), Floats(sent.begin(), sent.begin() + 50));
  auto next = post(receiver, false, 1, 7, second);
  sender.write(reinterpret_cast<const std::byte*>(sent.data()) + 200, numBytes - 200);
  EXPECT_EQ(next.get().first, "");
  EXPECT_EQ(second, sent);
  receiver.close();
}

TEST_P(MessagesBetweenRanks, ToAndFromNobodyAreRefused) {
  Group group(2, GetParam());
  group.run([&](std::size_t, SharedCollectives& collectives) {
    Floats data(3);
    for (int peer : {-2, -1, 2}) EXPECT_THROW(post(collectives, true, peer, 0, data), std::invalid_argument);
    for (int peer : {-2, 2}) EXPECT_THROW(post(collectives, false, peer, 0, data), std::invalid_argument);
  });
}

TEST_P(MessagesBetweenRanks, OfAnotherSizeAreRefusedAndTheNextOneComes) {
  Group group(2, GetParam());
  group.run([&](std::size_t rank, SharedCollectives& collectives) {
    Floats first = valuesOf(0, 100), second = valuesOf(0, 200);
    if (rank == 0) {
      auto one = post(collectives, true, 1, 0, first), two = post(collectives, true, 1, 0, second);
      EXPECT_EQ(one.get().first + two.get().first, "");
      return;
    }
    Floats wrong(50, -1.0F), right(200);
    EXPECT_NE(post(collectives, false, 0, 0, wrong).get().first.find("sent 400 bytes"), std::string::npos);
    EXPECT_EQ(post(collectives, false, 0, 0, right).get().second, 0);
    EXPECT_EQ(right, second);
    EXPECT_EQ(wrong, Floats(50, -1.0F));
  });
}

}  // namespace
}  // namespace coarse::test::collectives_test
