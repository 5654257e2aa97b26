/// Registered counters with thresholds, as GPU-TN's triggered operations: every order in which clients'
/// pushes can arrive at the proxies fires each shard of each step exactly once, at its last arrival and not
/// before. tests/unit/test_arrival_counters.py has the interleavings within a proxy.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "fixture.hpp"

namespace coarse::test::arrival_order_test {
namespace {

struct Arrival {
  std::size_t client;
  std::uint32_t shard;
};

struct Job {
  std::size_t numClients;
  std::size_t numDevices;
  std::uint32_t numShards;
  std::uint32_t numSteps;
  Algorithm algorithm;
  std::size_t numOrders;  // in closed form, so that none is left out
};

/// Steps that each client has pushed of each shard, counted from the start of an order.
using Pushed = std::vector<std::vector<std::uint32_t>>;

std::uint32_t completedSteps(const Pushed& pushed, std::uint32_t shard) {
  std::uint32_t least = pushed[0][shard];
  for (const auto& client : pushed) least = std::min(least, client[shard]);
  return least;
}

/// Calls `use` with every order of arrivals: a client pushes the next step of a shard once it has the last
/// one's result.
void forEachOrder(const Job& job, const std::function<void(const std::vector<Arrival>&)>& use) {
  Pushed pushed(job.numClients, std::vector<std::uint32_t>(job.numShards, 0));
  std::vector<Arrival> order;
  const std::function<void()> extend = [&] {
    bool isWhole = true;
    for (std::size_t client = 0; client < job.numClients; ++client) {
      for (std::uint32_t shard = 0; shard < job.numShards; ++shard) {
        std::uint32_t& step = pushed[client][shard];
        if (step == job.numSteps) continue;
        isWhole = false;
        if (step != completedSteps(pushed, shard)) continue;
        ++step;
        order.push_back({client, shard});
        extend();
        order.pop_back();
        --step;
      }
    }
    if (isWhole) use(order);
  };
  extend();
}

class ArrivalOrders : public testing::TestWithParam<Job> {
 protected:
  ArrivalOrders() { cluster_.start().addGroup(plan_); }

  /// Steps go on from one order to the next, so that the counters are never made anew.
  void run(const std::vector<Arrival>& order) {
    Pushed pushed(job_.numClients, std::vector<std::uint32_t>(job_.numShards, 0));
    for (const auto& [client, shard] : order) {
      const std::uint32_t step = base_ + ++pushed[client][shard];
      Descriptor descriptor;
      descriptor.group = plan_.id;
      descriptor.shard = shard;
      descriptor.step = step;
      descriptor.flags = kPresent;
      cluster_.tell(client, client % job_.numDevices, descriptor);
      std::size_t numArrived = 0;
      for (const auto& other : pushed) numArrived += base_ + other[shard] == step;
      const bool isLast = numArrived == job_.numClients;
      ASSERT_TRUE(eventually([&] { return isLast ? isDone(shard, step) : arrivals(shard) == numArrived; }))
          << numArrived << " arrivals at step " << step << " of shard " << shard;
      numFired_ += isLast;
      ASSERT_EQ(isLast ? 0u : numArrived, arrivals(shard));
      ASSERT_EQ(numShardsReduced(), numFired_) << "fired early, twice or not at all";
      ASSERT_EQ(control().done(client, shard).load(), isLast ? step : step - 1) << "a result before its time";
    }
    base_ += job_.numSteps;
  }

 private:
  GroupControl control() const { return cluster_.control(plan_); }
  std::uint32_t arrivals(std::uint32_t shard) const { return control().arrivals(shard).load(); }
  bool isDone(std::uint32_t shard, std::uint32_t step) const {
    for (std::size_t client = 0; client < job_.numClients; ++client)
      if (control().done(client, shard).load() != step) return false;
    return true;
  }
  std::uint64_t numShardsReduced() {
    std::uint64_t total = 0;
    for (std::size_t device = 0; device < job_.numDevices; ++device)
      total += cluster_.proxy(device).statistics().numShards;
    return total;
  }

  const Job& job_ = GetParam();
  Cluster cluster_{{job_.numClients, job_.numDevices, 1}};
  const GroupPlan plan_ =
      makePlan(1, job_.numClients,
               std::vector<TensorSpec>(job_.numShards, {4, DType::kFloat32, ReduceOp::kSum, job_.algorithm}));
  std::uint32_t base_ = 0;
  std::uint64_t numFired_ = 0;
};

TEST_P(ArrivalOrders, FireEachStepExactlyOnceAtItsLastArrival) {
  std::size_t numOrders = 0;
  forEachOrder(GetParam(), [&](const std::vector<Arrival>& order) {
    ++numOrders;
    if (!HasFatalFailure()) run(order);
  });
  EXPECT_EQ(numOrders, GetParam().numOrders);
}

// Orders of s shards of k steps of c clients: (c!)^(k s) within the shards, times (s c k)! / ((c k)!)^s
// between.
INSTANTIATE_TEST_SUITE_P(
    All, ArrivalOrders,
    testing::Values(Job{1, 1, 2, 2, Algorithm::kGather, 6}, Job{2, 1, 2, 2, Algorithm::kGather, 1120},
                    Job{2, 2, 2, 2, Algorithm::kDirect, 1120}, Job{3, 3, 1, 3, Algorithm::kGather, 216},
                    Job{3, 2, 2, 1, Algorithm::kDirect, 720}, Job{4, 4, 1, 2, Algorithm::kDirect, 576}),
    [](const auto& info) {
      const Job& job = info.param;
      return std::to_string(job.numClients) + "clients_" + std::to_string(job.numDevices) + "devices_" +
             std::to_string(job.numShards) + "shards_" + std::to_string(job.numSteps) + "steps";
    });

}  // namespace
}  // namespace coarse::test::arrival_order_test
