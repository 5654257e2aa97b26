/// The threads of a memory device, apart from what they do.
#include "coarse/sync_cores.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <stdexcept>
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

}  // namespace
}  // namespace coarse::test::sync_cores_test
