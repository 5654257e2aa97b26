/// Each observer notices a memory device without progress, after that much time of observation.
#include "coarse/recovery/heartbeat.hpp"

#include <gtest/gtest.h>

#include <memory>

#include "fixture.hpp"

namespace coarse::test::heartbeat_test {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kNumDevices = 3;
constexpr milliseconds kLimit{10000};
constexpr milliseconds kInterval{500};

class Heartbeats : public testing::Test {
 protected:
  void beat(std::size_t device) { doorbells_[device].beats.fetch_add(1); }
  void beatAllBut(std::size_t silent) {
    for (std::size_t device = 0; device < kNumDevices; ++device) {
      if (device != silent) beat(device);
    }
  }
  std::optional<std::size_t> lookAfter(milliseconds time) { return watch_.look(now_ += time); }
  /// How long `silent` can be silent, looked at regularly, until that is told.
  milliseconds timeUntilTold(std::size_t silent) {
    milliseconds time{0};
    while (time < 10 * kLimit) {
      beatAllBut(silent);
      time += kInterval;
      const auto told = lookAfter(kInterval);
      if (!told) continue;
      EXPECT_EQ(*told, silent);
      return time;
    }
    ADD_FAILURE() << "never told";
    return time;
  }

  std::unique_ptr<Doorbell[]> doorbells_{new Doorbell[kNumDevices]()};
  HeartbeatWatch watch_{doorbells_.get(), kNumDevices, kLimit};
  Clock::time_point now_{};
};

TEST_F(Heartbeats, ThatStopAreToldAtTheLimit) {
  for (std::size_t device = 0; device < kNumDevices; ++device) {
    beat(device);
    lookAfter(kInterval);
    EXPECT_EQ(timeUntilTold(device), kLimit);
  }
}

TEST_F(Heartbeats, ThatGoOnInTimeAreForgiven) {
  beat(1);
  for (int i = 0; i < 100; ++i) {
    if (i % 10 == 9) beat(1);  // ten looks are half the limit
    beatAllBut(1);
    EXPECT_FALSE(lookAfter(kInterval));
  }
  beat(1);
  lookAfter(kInterval);
  EXPECT_EQ(timeUntilTold(1), kLimit);
}

TEST_F(Heartbeats, AreNotExpectedOfADeviceThatHasNotStarted) {
  for (int i = 0; i < 100; ++i) {
    beatAllBut(2);
    EXPECT_FALSE(lookAfter(kInterval));
  }
}

TEST_F(Heartbeats, AreNotMissedWhileNobodyLooks) {
  for (std::size_t device = 0; device < kNumDevices; ++device) beat(device);
  lookAfter(kInterval);
  for (int i = 0; i < 5; ++i) EXPECT_FALSE(lookAfter(100 * kLimit)) << "the one who looks was away, not they";
}

TEST_F(Heartbeats, WithoutALimitAreNeverMissed) {
  HeartbeatWatch patient(doorbells_.get(), kNumDevices, milliseconds(0));
  beat(0);
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(patient.look(now_ += kInterval));
}

TEST(SyncCoreHeartbeats, GoOnWhetherThereIsWorkOrNot) {
  Cluster cluster({1, 2, 2});
  EXPECT_EQ(cluster.doorbell(0).beats.load(), 0u);
  cluster.start();
  for (const std::size_t device : {0, 1}) {
    for (int i = 0; i < 3; ++i) {
      const std::uint32_t before = cluster.doorbell(device).beats.load();
      EXPECT_TRUE(eventually([&] { return cluster.doorbell(device).beats.load() != before; }));
    }
  }
}

TEST(ClientHeartbeats, EndAWaitForADeviceThatStandsStill) {
  const Memory segment(ClientSegment::numBytes(2)), doorbells(2 * sizeof(Doorbell));
  reinterpret_cast<Doorbell*>(doorbells.data())[1].beats.store(7);
  ClientConfig config;
  config.numDevices = 2;
  config.heartbeatLimit = milliseconds(200);
  Client client(config, segment.fd, doorbells.fd, nullptr);
  const GroupPlan plan = makePlan(1, 1, {{100}});
  const Memory control(GroupControl::numBytes(1, 1)), slots(plan.slotBytes);
  client.addGroup(plan, 0, control.fd, slots.fd, {0});
  ASSERT_EQ(client.push(1, 0, kPresent, nullptr), WaitStatus::kDone);
  EXPECT_EQ(client.pull(1, 0, nullptr, kPatienceSeconds), WaitStatus::kDeviceSilent);
  EXPECT_EQ(client.lostDevice(), 1u);
}

}  // namespace
}  // namespace coarse::test::heartbeat_test
