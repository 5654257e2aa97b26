/// The threads of a memory device, apart from what they do.
#include "coarse/device/sync_cores.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

namespace coarse::test::sync_cores_test {
namespace {

TEST(SyncCores, GoOnAfterAChangeThatCouldNotBeMade) {
  Doorbell doorbell;
  std::atomic<int> numTurns{0};
  const auto work = [&](std::size_t) { return ++numTurns % 2 == 0; };
  SyncCoresConfig config;
  config.numCores = 2;
  SyncCores cores(
      config, doorbell, work, [](std::size_t) { return std::nullopt; }, [](const std::string&) {});
  cores.start();
  EXPECT_THROW(cores.whilePaused([] { throw std::runtime_error("a GPU has no memory left"); }),
               std::runtime_error);
  const int seen = numTurns;
  while (numTurns < seen + 10) std::this_thread::yield();
  cores.whilePaused([&] { numTurns = 0; });
  cores.stop();  // joins them
}

TEST(SyncCores, TellOnceOfWorkThatFailsAndThenLeaveTheRest) {
  Doorbell doorbell;
  std::atomic<int> numTold{0};
  const auto work = [](std::size_t) -> bool { throw std::runtime_error("a GPU fell off its bus"); };
  const auto fail = [&](const std::string& reason) {
    ++numTold;
    EXPECT_EQ(reason, "a GPU fell off its bus");
  };
  SyncCores cores({}, doorbell, work, [](std::size_t) { return std::nullopt; }, fail);
  cores.start();
  while (numTold == 0) std::this_thread::yield();
  cores.stop();
  cores.finish([] { FAIL() << "it would wait for a GPU that is lost"; });
  EXPECT_EQ(numTold, 1);
}

TEST(SyncCores, TellOfARestThatFails) {
  Doorbell doorbell;
  std::string told;
  SyncCores cores(
      {}, doorbell, [](std::size_t) { return false; }, [](std::size_t) { return std::nullopt; },
      [&](const std::string& reason) { told = reason; });
  cores.start();
  cores.stop();
  cores.finish([] { throw std::runtime_error("a GPU fell off its bus"); });
  EXPECT_EQ(told, "a GPU fell off its bus");
}

}  // namespace
}  // namespace coarse::test::sync_cores_test
