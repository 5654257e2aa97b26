/// Lost workers in a job of several nodes: memory devices of their node stand in for them, and the workers of
/// all nodes go on (docs/design/membership.md).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "coarse/node/node_owners.hpp"
#include "contributions.hpp"
#include "fixture.hpp"
#include "nodes.hpp"

namespace coarse::test::node_loss_test {
namespace {

constexpr std::uint32_t kGroup = 1;
constexpr std::uint32_t kElements[] = {40'000, 33};  // of a large and a small tensor
constexpr std::uint32_t kTensors[] = {0, 1};

using Ranks = std::vector<std::size_t>;

/// Nodes whose memory devices stand in for workers when the test says that these have ended.
class Job {
 public:
  Job(const std::vector<ClusterShape>& shapes, GroupPlan groupPlan)
      : nodes(shapes), plan(std::move(groupPlan)), all_(nodes.numWorkers()) {
    std::iota(all_.begin(), all_.end(), std::size_t{0});
    plan.numRanks = nodes.numWorkers();
    nodes.addGroup(plan);
  }
  const Ranks& all() const { return all_; }
  Ranks without(const Ranks& lost) const {
    Ranks others;
    std::copy_if(all_.begin(), all_.end(), std::back_inserter(others),
                 [&](std::size_t rank) { return std::find(lost.begin(), lost.end(), rank) == lost.end(); });
    return others;
  }
  void push(std::size_t rank, std::uint32_t tensor, std::uint32_t step) {
    const Bytes given = contribution(DType::kFloat32, kElements[tensor], rank, step);
    ASSERT_EQ(nodes.worker(rank).push(kGroup, tensor, kPresent, given.data()), WaitStatus::kDone);
    nodes.worker(rank).flush();
  }
  void pushAll(std::size_t rank, std::uint32_t step) {
    for (const std::uint32_t tensor : kTensors) push(rank, tensor, step);
  }
  void pull(std::size_t rank, std::uint32_t tensor) {
    ASSERT_EQ(nodes.worker(rank).pull(kGroup, tensor, nullptr, kPatienceSeconds), WaitStatus::kDone);
  }
  bool isResult(std::size_t rank, std::uint32_t tensor, std::uint32_t step, const Ranks& ranks) {
    const Bytes expected = result(DType::kFloat32, plan.shards[0].op, kElements[tensor], ranks, step,
                                  static_cast<std::uint32_t>(ranks.size()));
    return std::memcmp(slot(rank, tensor), expected.data(), expected.size()) == 0;
  }
  void pullResult(std::size_t rank, std::uint32_t tensor, std::uint32_t step, const Ranks& ranks) {
    pull(rank, tensor);
    EXPECT_TRUE(isResult(rank, tensor, step, ranks)) << "tensor " << tensor << " of worker " << rank;
    EXPECT_EQ(nodes.worker(rank).contributors(kGroup, tensor), ranks.size());
  }
  /// A step of these workers.
  void takeStep(const Ranks& ranks, std::uint32_t step) {
    for (const std::size_t rank : ranks) pushAll(rank, step);
    for (const std::size_t rank : ranks) {
      for (const std::uint32_t tensor : kTensors) pullResult(rank, tensor, step, ranks);
    }
  }
  std::byte* slot(std::size_t rank, std::uint32_t tensor) {
    const auto first = std::find_if(plan.shards.begin(), plan.shards.end(),
                                    [&](const Shard& shard) { return shard.tensor == tensor; });
    return nodes.clusterOf(rank).slots(planOf(rank), nodes.clientOf(rank)) + first->offset;
  }
  GroupPlan planOf(std::size_t rank) {
    GroupPlan ofNode = plan;
    ofNode.numClients = nodes.clusterOf(rank).shape().numClients;
    return ofNode;
  }
  void end(std::size_t rank) {
    for (Proxy* proxy : proxiesOf(rank)) proxy->clientEnded(nodes.clientOf(rank));
  }
  void awaitDrained(std::size_t rank) {
    for (Proxy* proxy : proxiesOf(rank)) {
      Ranks drained;
      ASSERT_TRUE(eventually([&] { return !(drained = proxy->takeDrained()).empty(); }));
      ASSERT_EQ(drained, Ranks{nodes.clientOf(rank)});
    }
  }
  void standIn(std::size_t rank) {
    for (Proxy* proxy : proxiesOf(rank)) proxy->standInFor(nodes.clientOf(rank));
  }
  void lose(std::size_t rank) {
    end(rank);
    awaitDrained(rank);
    standIn(rank);
  }
  void expectAbsent(const Ranks& survivors, const Ranks& absent) {
    for (const std::size_t rank : survivors)
      EXPECT_EQ(nodes.worker(rank).absentRanks(kGroup), absent) << "as worker " << rank << " sees it";
  }
  void expectNoEvents() {
    for (const std::size_t rank : all_) {
      for (Proxy* proxy : proxiesOf(rank)) {
        for (const ProxyEvent& event : proxy->takeEvents())
          ADD_FAILURE() << "of client " << event.client << ": " << event.message;
        for (const NodeEvent& event : proxy->takeNodeEvents()) ADD_FAILURE() << event.text;
      }
    }
  }

  Nodes nodes;
  GroupPlan plan;

 private:
  std::vector<Proxy*> proxiesOf(std::size_t rank) {
    Cluster& cluster = nodes.clusterOf(rank);
    std::vector<Proxy*> proxies;
    for (std::size_t device = 0; device < cluster.shape().numDevices; ++device)
      proxies.push_back(&cluster.proxy(device));
    return proxies;
  }

  Ranks all_;
};

/// Shards 0 to 2 are of the large tensor; each node owns some.
GroupPlan twoTensors(ReduceOp op = ReduceOp::kMean) {
  return makePlan(kGroup, 1,
                  {{kElements[0], DType::kFloat32, op, Algorithm::kDirect},
                   {kElements[1], DType::kFloat32, op, Algorithm::kGather}},
                  16'384);
}

struct NodesShape {
  const char* name;
  std::vector<ClusterShape> shapes;  // each node has a worker that can be lost
};

void PrintTo(const NodesShape& shape, std::ostream* out) { *out << shape.name; }

class NodesWithLosses : public testing::TestWithParam<NodesShape> {};

TEST_P(NodesWithLosses, GoOnWithoutAWorkerThatHasNotContributed) {
  const Ranks everybody = Job(GetParam().shapes, twoTensors()).all();
  for (const std::size_t lost : everybody) {
    for (const bool isEarly : {true, false}) {
      Job job(GetParam().shapes, twoTensors());
      job.nodes.start();
      const Ranks others = job.without({lost});
      job.takeStep(job.all(), 1);
      job.expectAbsent(job.all(), {});
      if (isEarly) job.lose(lost);
      for (const std::size_t rank : others) job.pushAll(rank, 2);
      if (!isEarly) job.lose(lost);
      for (const std::size_t rank : others) {
        for (const std::uint32_t tensor : kTensors) job.pullResult(rank, tensor, 2, others);
      }
      job.expectAbsent(others, {lost});
      job.takeStep(others, 3);
      job.expectAbsent(others, {lost});
      job.expectNoEvents();
    }
  }
}

TEST_P(NodesWithLosses, CountAWorkerWhereItHasContributed) {
  Job job(GetParam().shapes, twoTensors());
  const std::size_t lost = job.all().back();
  const Ranks others = job.without({lost});
  job.push(lost, 1, 1);  // no device takes it before it starts, and then the worker has ended
  job.end(lost);
  job.nodes.start();
  job.awaitDrained(lost);
  job.standIn(lost);
  for (const std::size_t rank : others) job.pushAll(rank, 1);
  for (const std::size_t rank : others) {
    job.pullResult(rank, 0, 1, others);
    job.pullResult(rank, 1, 1, job.all());
  }
  job.expectAbsent(others, {lost});
  job.expectNoEvents();
}

TEST_P(NodesWithLosses, NeitherReadNorWriteTheSlotsOfAWorkerThatHasLeft) {
  for (const std::size_t lost : {std::size_t{0}, Job(GetParam().shapes, twoTensors()).all().back()}) {
    Job job(GetParam().shapes, twoTensors());
    job.nodes.start();
    job.takeStep(job.all(), 1);
    job.lose(lost);  // as after a leave(): its process lives, and writes
    const Bytes scribble = contribution(DType::kFloat32, kElements[0], 7, 9);
    std::memcpy(job.slot(lost, 0), scribble.data(), scribble.size());
    for (std::uint32_t step = 2; step <= 3; ++step) job.takeStep(job.without({lost}), step);
    EXPECT_EQ(std::memcmp(job.slot(lost, 0), scribble.data(), scribble.size()), 0);
    job.expectNoEvents();
  }
}

TEST_P(NodesWithLosses, GoOnWithoutAWorkerOfEachNode) {
  Job job(GetParam().shapes, twoTensors());
  job.nodes.start();
  job.takeStep(job.all(), 1);
  Ranks lost;
  for (std::size_t rank = 0; rank < job.all().size(); ++rank) {
    if (job.nodes.clientOf(rank) != 0) continue;
    lost.push_back(rank);
    for (const std::size_t other : job.without(lost))
      job.pushAll(other, static_cast<std::uint32_t>(lost.size() + 1));
    job.lose(rank);
    for (const std::size_t other : job.without(lost)) {
      for (const std::uint32_t tensor : kTensors)
        job.pullResult(other, tensor, static_cast<std::uint32_t>(lost.size() + 1), job.without(lost));
    }
    job.expectAbsent(job.without(lost), lost);
  }
  job.expectNoEvents();
}

// Devices of all nodes stand in, while contributions arrive at all of them.
TEST_P(NodesWithLosses, HaveEqualResultsWheneverAWorkerEnds) {
  constexpr std::uint32_t kSteps = 30;
  std::mt19937 random(5);
  for (int round = 0; round < 6; ++round) {
    Job job(GetParam().shapes, twoTensors(round % 2 == 0 ? ReduceOp::kMean : ReduceOp::kSum));
    job.nodes.start();
    const std::size_t numRanks = job.all().size();
    const std::size_t lost = random() % numRanks;
    const std::uint32_t numPushed =
        random() % (2 * kSteps - 4);  // by the lost one, of the tensors of all steps
    const Ranks others = job.without({lost});
    const auto train = [&](std::size_t rank, std::uint32_t numPushes) {
      for (std::uint32_t step = 1, pushed = 0; step <= kSteps; ++step) {
        for (const std::uint32_t tensor : kTensors) {
          if (pushed++ == numPushes) return;
          job.push(rank, tensor, step);
        }
        for (const std::uint32_t tensor : kTensors) {
          job.pull(rank, tensor);
          const bool isWith = 2 * (step - 1) + tensor < numPushed;
          EXPECT_TRUE(job.isResult(rank, tensor, step, isWith ? job.all() : others))
              << "tensor " << tensor << " of step " << step << " of worker " << rank;
        }
        // Whether or not others have pushed the next step.
        if (rank != lost) job.expectAbsent({rank}, step <= (numPushed + 1) / 2 ? Ranks{} : Ranks{lost});
      }
    };
    std::thread ending([&] {
      train(lost, numPushed);
      job.lose(lost);
    });
    together(numRanks, [&](std::size_t rank) {
      if (rank != lost) train(rank, 2 * kSteps);
    });
    ending.join();
    job.expectNoEvents();
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, NodesWithLosses,
                         testing::Values(NodesShape{"TwoOfTwo", {{2, 2, 1}, {2, 2, 1}}},
                                         NodesShape{"Uneven", {{3, 2, 2}, {2, 1, 1}}},
                                         NodesShape{"ThreeOfTwo", {{2, 1, 1}, {2, 2, 1}, {2, 1, 2}}}),
                         [](const auto& info) { return std::string(info.param.name); });

/// Parameters of 64 on two nodes, of three workers and of two; worker r contributes 1 << r.
class NodesWithLossesAndOptimizer : public testing::Test {
 protected:
  NodesWithLossesAndOptimizer() {
    job_.nodes.start();
    for (const std::size_t rank : {0, 3}) std::fill_n(parameters(rank), kElements[0], 64.F);
  }
  static GroupPlan plan() {
    GroupPlan plan = makePlan(kGroup, 1, {{kElements[0], DType::kFloat32, ReduceOp::kMean}}, 16'384);
    plan.hasOptimizer = true;
    return plan;
  }
  float* parameters(std::size_t rank) {
    return reinterpret_cast<float*>(job_.nodes.clusterOf(rank).parameters(job_.planOf(rank)));
  }
  void set(std::size_t rank, std::uint32_t updateNumber) {
    UpdateSettings settings;
    settings.rule = UpdateRule::kSgd;
    settings.stepSize = 1;
    settings.updateNumber = updateNumber;
    job_.nodes.clusterOf(rank).settings(job_.planOf(rank), job_.nodes.clientOf(rank))[0] = settings;
  }
  void fill(std::size_t rank) {
    std::fill_n(reinterpret_cast<float*>(job_.slot(rank, 0)), kElements[0], static_cast<float>(1U << rank));
  }
  void synchronise(const Ranks& ranks, std::uint8_t flags) {
    for (const std::size_t rank : ranks) {
      ASSERT_EQ(job_.nodes.worker(rank).push(kGroup, 0, kPresent | flags, nullptr), WaitStatus::kDone);
      job_.nodes.worker(rank).flush();
    }
    for (const std::size_t rank : ranks) job_.pull(rank, 0);
  }
  void expectParameters(float value) {
    for (const std::size_t rank : {0, 3}) {
      EXPECT_EQ(parameters(rank)[0], value);
      EXPECT_EQ(std::count(parameters(rank), parameters(rank) + kElements[0], value), kElements[0]);
    }
  }
  Job job_{{{3, 2, 1}, {2, 1, 1}}, plan()};
};

TEST_F(NodesWithLossesAndOptimizer, UpdateByWhatSurvivorsHaveAndSay) {
  for (const std::size_t lost :
       {std::size_t{0}, std::size_t{3}}) {  // the first of each node, with settings of no step
    job_.lose(lost);
    const Ranks others = lost == 0 ? Ranks{1, 2, 3, 4} : Ranks{1, 2, 4};
    for (const std::size_t rank : others) set(rank, lost == 0 ? 1 : 2), fill(rank);
    synchronise(others, kUpdate);
    job_.expectAbsent(others, lost == 0 ? Ranks{0} : Ranks{0, 3});
    if (lost == 0) {
      expectParameters(64.F - 30.F / 4);
      // Three contributions: a mean of two of them and nothing of the third would show.
      std::fill_n(parameters(0), kElements[0], 64.F);
      std::fill_n(parameters(3), kElements[0], 64.F);
    }
  }
  EXPECT_FLOAT_EQ(parameters(0)[0], 64.F - 22.F / 3);
  expectParameters(parameters(0)[0]);
  job_.expectNoEvents();
}

TEST_F(NodesWithLossesAndOptimizer, LearnOfALossBetweenMeanAndUpdateAtTheNextMean) {
  Ranks members = job_.all();
  for (const std::size_t rank : members) fill(rank);
  synchronise(members, kMeasure);
  job_.lose(0);
  members = job_.without({0});
  for (const std::size_t rank : members) set(rank, 1);
  synchronise(members, kUpdate | kReduced);
  EXPECT_FLOAT_EQ(parameters(0)[0], 64.F - 31.F / 5);
  expectParameters(parameters(0)[0]);
  job_.expectAbsent(members, {});
  for (const std::size_t rank : members) fill(rank);
  synchronise(members, kMeasure);
  job_.expectAbsent(members, {0});
  for (const std::size_t rank : members) {
    EXPECT_EQ(reinterpret_cast<float*>(job_.slot(rank, 0))[kElements[0] - 1], 30.F / 4);
    set(rank, 2);
  }
  synchronise(members, kUpdate | kReduced);
  job_.expectAbsent(members, {0});
  expectParameters(parameters(0)[0]);
  job_.expectNoEvents();
}

/// Three nodes, of two workers and twice of one. The test leads them through the loss of a node, as home
/// devices do.
class NodesWithALostNode : public testing::TestWithParam<std::size_t> {
 protected:
  static ClusterShape shape(std::size_t numClients, std::size_t numDevices) {
    ClusterShape shape{numClients, numDevices, 1};
    shape.mayLoseNodes = true;
    return shape;
  }
  Ranks ranksOf(std::size_t node) const {
    const Ranks first{0, 2, 3, 4};
    Ranks ranks(first[node + 1] - first[node]);
    std::iota(ranks.begin(), ranks.end(), first[node]);
    return ranks;
  }
  std::vector<std::size_t> survivors() const {
    std::vector<std::size_t> nodes{0, 1, 2};
    nodes.erase(nodes.begin() + static_cast<std::ptrdiff_t>(GetParam()));
    return nodes;
  }
  Proxy& home(std::size_t node) { return job_.nodes.node(node).proxy(0); }
  void forEachDevice(std::size_t node, const std::function<void(Proxy&)>& action) {
    for (std::size_t device = 0; device < job_.nodes.node(node).shape().numDevices; ++device)
      action(job_.nodes.node(node).proxy(device));
  }
  /// Waits for an event of this kind; those of the connections to the lost node come in between.
  void await(std::size_t node, NodeEvent::Kind kind) {
    ASSERT_TRUE(eventually([&] {
      for (const NodeEvent& event : home(node).takeNodeEvents()) {
        if (event.kind == kind) return true;
      }
      return false;
    }));
  }
  void suspend() {
    for (const std::size_t node : survivors())
      forEachDevice(node, [&](Proxy& proxy) { proxy.suspendNode(GetParam(), "the test has lost it"); });
  }
  void goOn() {
    const std::vector<std::size_t> nodes = survivors();
    for (const std::size_t node : nodes) home(node).reportWithout(GetParam());
    for (const std::size_t node : nodes) {
      for (const std::size_t other : nodes) {
        if (other != node) home(node).tellNode(other, "reported");
      }
    }
    for (const std::size_t node : nodes) await(node, NodeEvent::Kind::kAgreement);
    for (const std::size_t node : nodes) home(node).settleWithout(GetParam());
    for (const std::size_t node : nodes) await(node, NodeEvent::Kind::kSettled);
    for (const std::size_t node : nodes)
      forEachDevice(node, [&](Proxy& proxy) { proxy.resumeWithout(GetParam()); });
  }
  void expectResults(std::uint32_t step) {
    for (const std::size_t rank : others_) {
      for (const std::uint32_t tensor : kTensors) job_.pullResult(rank, tensor, step, others_);
    }
  }
  Job job_{{shape(2, 2), shape(1, 1), shape(1, 2)}, twoTensors(ReduceOp::kSum)};
  Ranks others_ = job_.without(ranksOf(GetParam()));
};

TEST_P(NodesWithALostNode, GoOnWithWhatTheyHaveContributedBefore) {
  job_.nodes.start();
  job_.takeStep(job_.all(), 1);
  for (const std::size_t rank : others_) job_.pushAll(rank, 2);
  suspend();
  goOn();
  expectResults(2);
  job_.expectAbsent(others_, ranksOf(GetParam()));
  job_.takeStep(others_, 3);
}

TEST_P(NodesWithALostNode, GoOnWithWhatTheyContributeMeanwhile) {
  job_.nodes.start();
  job_.takeStep(job_.all(), 1);
  job_.push(others_.front(), 0, 2);
  suspend();
  job_.push(others_.front(), 1, 2);
  for (const std::size_t rank : others_) {
    if (rank != others_.front()) job_.pushAll(rank, 2);
  }
  goOn();
  expectResults(2);
  job_.takeStep(others_, 3);
}

INSTANTIATE_TEST_SUITE_P(Lost, NodesWithALostNode, testing::Values(0, 1, 2));

TEST(NodeOwnersTest, MoveOnlyTheShardsOfTheLostNode) {
  const NodeOwners all(4);
  const NodeOwners three = all.without(1), two = three.without(3);
  std::vector<int> numMoved(4);
  for (std::size_t shard = 0; shard < 48; ++shard) {
    EXPECT_EQ(all.ownerOf(shard), shard % 4);
    if (shard % 4 != 1) {
      EXPECT_EQ(three.ownerOf(shard), shard % 4);
    } else {
      ++numMoved[three.ownerOf(shard)];
    }
    if (three.ownerOf(shard) != 3) {
      EXPECT_EQ(two.ownerOf(shard), three.ownerOf(shard));
    }
    EXPECT_TRUE(two.isLive(two.ownerOf(shard)));
  }
  EXPECT_EQ(numMoved, (std::vector<int>{4, 0, 4, 4}));
  EXPECT_EQ(two.live(), (std::vector<std::size_t>{0, 2}));
}

TEST(LossOnAnotherNode, IsAnEvent) {
  Nodes nodes({{2, 2, 1}, {2, 1, 1}});
  nodes.start();
  nodes.node(1).proxy(0).loseWorker(1, "it died");
  for (const std::size_t device : {0, 1}) {
    const std::vector<NodeEvent> events = nodes.nodeEvents(0, device);
    ASSERT_EQ(events.size(), 1U);
    EXPECT_EQ(events[0].kind, NodeEvent::Kind::kWorkerLost);
    EXPECT_EQ(events[0].node, 1U);
    EXPECT_EQ(events[0].number, 3U);
    EXPECT_EQ(events[0].text, "it died");
  }
}

}  // namespace
}  // namespace coarse::test::node_loss_test
