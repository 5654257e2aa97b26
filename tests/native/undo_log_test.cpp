/// UndoLog: a step that not all shards have seen is one that none has.
#include "coarse/tensors/undo_log.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "bytes.hpp"
#include "coarse/recovery/recovery.hpp"
#include "coarse/tensors/shard_reducer.hpp"
#include "fixture.hpp"

namespace coarse::test::undo_log_test {
namespace {

using Numbers = std::vector<std::uint32_t>;

constexpr std::uint32_t kElements = 1'000;
constexpr std::uint32_t kShards = 3;

/// One worker, two tensors, momentum: each update takes 1 from parameters and adds 1 to states.
class Job {
 public:
  Job()
      : plan(makePlan(1, 1,
                      {{kElements, DType::kFloat32, ReduceOp::kMean, Algorithm::kDirect},
                       {kElements / 2, DType::kFloat32, ReduceOp::kMean, Algorithm::kGather}},
                      kElements / 2)) {
    plan.hasOptimizer = true;
    plan.numStates = 1;
    for (const std::size_t length :
         {GroupControl::numBytes(plan.shards.size(), 1), plan.clientBytes(), plan.settingsBytes(),
          plan.parameterBytes(), plan.keptBytes(), UndoLog::controlBytes(plan.shards.size()),
          plan.parameterBytes(), plan.keptBytes()})
      memories.emplace_back(length);
    OptimizerFds fds;
    fds.settings = {memories[2].fd};
    fds.parameters = memories[3].fd;
    fds.states = memories[4].fd;
    fds.undo = {memories[5].fd, memories[6].fd, memories[7].fd};
    group = std::make_unique<TensorGroup>(plan, memories[0].fd, std::vector<Region>{memories[1].fd}, fds);
    group->control().initialise();
    std::fill_n(reinterpret_cast<float*>(memories[1].data()), plan.slotBytes / sizeof(float), 1.F);
  }
  void update(std::uint32_t shard, std::uint32_t number, bool isPresent = true) {
    UpdateSettings& settings =
        reinterpret_cast<UpdateSettings*>(memories[2].data())[plan.shards[shard].tensor];
    settings = {};
    settings.rule = UpdateRule::kSgdMomentum;
    settings.stepSize = 1;
    settings.updateNumber = number;
    settings.firstDecay = 0;
    group->control().contribution(shard, 0).flags =
        static_cast<std::uint8_t>(kUpdate | (isPresent ? kPresent : 0));
    updateShard(*group, shard);
    noteUpdate(*group, shard);
  }
  void takeStep(std::uint32_t number) {
    for (std::uint32_t shard = 0; shard < kShards; ++shard) update(shard, number);
  }
  Bytes kept() const {
    Bytes all(memories[3].data(), memories[3].data() + plan.parameterBytes());
    all.insert(all.end(), memories[4].data(), memories[4].data() + plan.keptBytes());
    return all;
  }

  GroupPlan plan;
  std::vector<Memory> memories;
  std::unique_ptr<TensorGroup> group;
};

TEST(UndoLog, TakesBackAStepUnlessAllShardsHaveSeenIt) {
  for (std::uint32_t updated = 0; updated <= kShards; ++updated) {
    Job job;
    job.takeStep(1);
    job.takeStep(2);
    const Bytes before = job.kept();
    for (std::uint32_t shard = 0; shard < updated; ++shard) job.update(shard, 3);
    const GroupUpdates updates = finishUpdates(*job.group);
    const std::uint32_t step = updated == kShards ? 3 : 2;
    EXPECT_EQ(updates.problem, "");
    EXPECT_EQ(updates.step, step);
    EXPECT_EQ(updates.updateNumbers, (Numbers{step, step}));
    EXPECT_EQ(job.kept() == before, updated < kShards) << updated;
  }
}

TEST(UndoLog, KnowsShardsThatAStepHasNotChanged) {
  Job job;
  job.takeStep(1);
  const Bytes before = job.kept();
  job.update(0, 2, false);
  const GroupUpdates updates = finishUpdates(*job.group);
  EXPECT_EQ(updates.problem, "");
  EXPECT_EQ(updates.updateNumbers, (Numbers{1, 1}));
  EXPECT_EQ(job.kept(), before);
}

TEST(UndoLog, TakesBackTheFirstStep) {
  Job job;
  job.update(2, 1);
  EXPECT_EQ(finishUpdates(*job.group).step, 0U);
}

TEST(UndoLog, GoesBackOneStepOnly) {
  Job job;
  job.update(0, 1);
  job.update(0, 2);
  EXPECT_NE(finishUpdates(*job.group).problem.find("the log does not go so far"), std::string::npos);
}

}  // namespace
}  // namespace coarse::test::undo_log_test
