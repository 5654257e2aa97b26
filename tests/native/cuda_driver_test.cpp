/// Without CUDA, errors name the missing part and a remedy; with it, all memory is freed again. The driver is
/// the stand-in of cuda_stand_in.cpp.
#include "coarse/gpu/cuda_driver.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "coarse/gpu/cuda_peers.hpp"
#include "coarse/gpu/cuda_unused_memory.hpp"
#include "fixture.hpp"

extern "C" {
void standInCapture(coarse::cuda::StreamHandle stream, bool isCapturing);
std::size_t standInWaits();
}

namespace coarse::cuda::cuda_driver_test {
namespace {

using test::Fd;

void expectSays(const std::string& message, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << message << " says nothing of " << part;
}

template <typename Call>
std::string messageOf(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(CudaDriver, ThatIsNotInstalledIsNamedWithTheRemedy) {
  expectSays(messageOf([] { Driver("libcoarse_no_driver.so.1"); }),
             {"no CUDA driver", "libcoarse_no_driver.so.1", "Install"});
}

TEST(CudaDriver, WithoutAFunctionIsTooOld) {
  expectSays(messageOf([] { Driver("libm.so.6"); }), {"libm.so.6", "cuInit", "12.0", "update"});
}

TEST(CudaDriver, IsNotCalledInAFork) {
  const Context context(0);
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string message = messageOf([&] { context.synchronize(); });
    ::_exit(message.find("fork") != std::string::npos ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(CudaDriver, DevicesThatAreNotThereAreNamed) {
  ASSERT_EQ(unavailableReason(), "");
  EXPECT_EQ(numDevices(), 1);
  expectSays(messageOf([] { Context(7); }),
             {"cuDeviceGet", "cuda:7", "1 CUDA device", "CUDA_VISIBLE_DEVICES"});
}

TEST(CudaDriver, KernelsThatItDoesNotTakeAreNamedWithDeviceAndDriver) {
  const Context context(0);
  expectSays(messageOf([&] { loadModule(context, "no machine code"); }),
             {"cuModuleLoadData", "not for stand-in", "driver of CUDA 13.0"});
  expectSays(messageOf([&] { findKernel(context, nullptr, "reduce"); }),
             {"cuModuleGetFunction", "no kernel reduce"});
}

TEST(CudaDriver, UuidIsWrittenAsNvidiaSmiDoes) {
  EXPECT_EQ(deviceUuid(0), "GPU-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfeff");
}

TEST(CudaDriver, BusIdIsWrittenAsSysfsDoes) { EXPECT_EQ(deviceBusId(0), "0000:17:00.0"); }

TEST(CudaHostRegistration, EndsWithTheObject) {
  const auto context = std::make_shared<Context>(0);
  test::Memory memory(4096);
  for (int i = 0; i < 2; ++i) {
    const HostRegistration registration(context, memory.data(), 4096);
    EXPECT_EQ(registration.deviceAddress(), reinterpret_cast<DeviceAddress>(memory.data()));
    expectSays(messageOf([&] { HostRegistration(context, memory.data(), 4096); }),
               {"cuMemHostRegister", "somebody else"});
  }
}

TEST(CudaDeviceMemory, IsSeenByWhoeverHasItsDescriptor) {
  const auto context = std::make_shared<Context>(0);
  auto memory = std::make_unique<DeviceMemory>(DeviceMemory::allocate(context, 3 << 20));
  EXPECT_EQ(memory->numBytes(), std::size_t{4} << 20);
  const Fd fd(memory->exportFd());
  EXPECT_EQ(::fcntl(fd, F_GETFD), FD_CLOEXEC);
  const DeviceMemory imported = DeviceMemory::import(context, {fd, 0, memory->numBytes()});
  ASSERT_NE(imported.address(), memory->address());
  auto* written = reinterpret_cast<char*>(memory->address());
  const auto* seen = reinterpret_cast<const char*>(imported.address());
  std::strcpy(written + (4 << 20) - 8, "written");
  EXPECT_STREQ(seen + (4 << 20) - 8, "written");
  memory.reset();
  EXPECT_STREQ(seen + (4 << 20) - 8, "written") << "after its exporter";
}

TEST(CudaDeviceMemory, ThatIsSmallerThanToldIsRefused) {
  const auto context = std::make_shared<Context>(0);
  const DeviceMemory memory = DeviceMemory::allocate(context, 2 << 20);
  const Fd fd(memory.exportFd());
  expectSays(messageOf([&] { DeviceMemory::import(context, {fd, 0, 4 << 20}); }), {"cuMemMap", "4 MiB"});
  EXPECT_NO_THROW(DeviceMemory::import(context, {fd, 0, 2 << 20}));
}

TEST(CudaDeviceMemory, ThatThereIsTooLittleOfSaysHowMuchThereIs) {
  const auto context = std::make_shared<Context>(0);
  EXPECT_THROW(DeviceMemory::allocate(context, std::size_t{4} << 30), OutOfMemoryError);
  expectSays(messageOf([&] { DeviceMemory::allocate(context, std::size_t{4} << 30); }),
             {"cuMemCreate", "needs 4096 MiB", "has 1024 MiB of 2048 MiB free"});
}

TEST(CudaUnusedMemory, IsUnmappedBehindWhatItsDeviceWasGiven) {
  const auto context = std::make_shared<Context>(0);
  const ContextScope scope(*context);
  Stream stream(context), other(context);
  test::Memory memory(4096);
  const auto word = reinterpret_cast<DeviceAddress>(memory.data());
  auto used = std::make_unique<DeviceMemory>(DeviceMemory::allocate(context, 2 << 20));
  stream.waitValue(word, 1);
  stream.fill(used->address(), 7, 2 << 20);
  leaveUnused(std::move(used));
  EXPECT_EQ(numUnused(), 1U);
  std::atomic<bool> isUnmapped{false};
  std::thread unmapping([&] {
    unmapUnused();
    isUnmapped = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(isUnmapped);
  other.writeValue(word, 1);
  unmapping.join();
  EXPECT_EQ(numUnused(), 0U);
}

TEST(CudaUnusedMemory, IsLeftWithoutWaitingAndStaysMappedWhileAStreamIsCaptured) {
  const auto context = std::make_shared<Context>(0);
  const ContextScope scope(*context);
  const Stream captured(context);
  standInCapture(captured.handle(), true);
  const std::size_t numWaits = standInWaits();
  leaveUnused(std::make_unique<DeviceMemory>(DeviceMemory::allocate(context, 2 << 20)));
  EXPECT_EQ(standInWaits(), numWaits);
  unmapUnused();
  EXPECT_EQ(numUnused(), 1U);
  standInCapture(captured.handle(), false);
  unmapUnused();
  EXPECT_EQ(numUnused(), 0U);
}

// The process caches which pairs reach each other, so no other test uses these.
TEST(CudaPeers, AreTriedNotOnlyAsked) {
  const test::Variable numGpus("STAND_IN_GPUS", "8"), apart("STAND_IN_GPUS_ARE_APART", "5:6"),
      loses("STAND_IN_LOSES", "5:7");
  EXPECT_EQ(peerObstacle(5, 5), "");
  EXPECT_EQ(peerObstacle(5, 4), "");
  EXPECT_EQ(peerObstacle(7, 5), "");
  expectSays(peerObstacle(5, 6), {"cuDeviceCanAccessPeer"});
  ASSERT_TRUE(canAccessPeer(5, 7));
  expectSays(peerObstacle(5, 7), {"cuda:5 to cuda:7", "arrive wrong", "NCCL_P2P_DISABLE"});
  EXPECT_EQ(takePeerWarnings(), std::vector<std::string>{peerObstacle(5, 7)});
  EXPECT_TRUE(takePeerWarnings().empty());
  const DeviceMemory memory = DeviceMemory::allocate(std::make_shared<Context>(7), 1);
  const Fd fd(memory.exportFd());
  const Region region{fd, 0, memory.numBytes(), deviceUuid(7)};
  expectSays(messageOf([&] { DeviceMemory::import(std::make_shared<Context>(5), region); }),
             {"cuda:5 cannot reach the memory of cuda:7", "arrive wrong"});
}

TEST(CudaPeers, ThatAreNotSeenAreTriedOnMemoryOfTheirs) {
  const test::Variable numGpus("STAND_IN_GPUS", "8");
  const auto exported = [](int device) {
    return DeviceMemory::allocate(std::make_shared<Context>(device), 1);
  };
  const DeviceMemory good = exported(3), lost = exported(4);
  const Fd goodFd(good.exportFd()), lostFd(lost.exportFd());
  Region region{lostFd, 0, lost.numBytes(), deviceUuid(4)};
  region.rest = {{goodFd, 0, good.numBytes(), deviceUuid(3)}};
  Region rest{goodFd, 0, good.numBytes(), deviceUuid(3)};
  auto* const kept = reinterpret_cast<char*>(good.address());
  std::strcpy(kept, "kept");
  const test::Variable seen("CUDA_VISIBLE_DEVICES", "2"), loses("STAND_IN_LOSES", "2:4");
  const auto user = std::make_shared<Context>(0);
  EXPECT_NO_THROW(requireKeptCopies(DeviceMemory::import(user, rest), rest));
  EXPECT_STREQ(kept, "kept");
  {
    const DeviceMemory memory = DeviceMemory::import(user, region);
    expectSays(messageOf([&] { requireKeptCopies(memory, region); }),
               {"copies from cuda:0 to GPU-f4", "arrive wrong", "NCCL_P2P_DISABLE"});
  }
  expectSays(messageOf([&] { DeviceMemory::import(user, region); }),
             {"cuda:0 cannot reach the memory of GPU-f4", "arrive wrong"});
  EXPECT_EQ(takePeerWarnings().size(), 1U);
  EXPECT_NO_THROW(DeviceMemory::import(user, rest));
}

TEST(CudaStream, DoesWhatItIsGivenInOrder) {
  const auto context = std::make_shared<Context>(0);
  const ContextScope scope(*context);
  Stream stream(context), other(context);
  test::Memory memory(4096);
  const auto word = reinterpret_cast<DeviceAddress>(memory.data());
  char text[8] = "before", copied[8] = "";
  stream.waitValue(word, 5);
  stream.copyToHost(copied, reinterpret_cast<DeviceAddress>(text), sizeof(text));
  EXPECT_FALSE(stream.isIdle());
  std::strcpy(text, "after");
  other.writeValue(word, 6);
  stream.synchronize();
  EXPECT_TRUE(stream.isIdle());
  EXPECT_STREQ(copied, "after");
}

}  // namespace
}  // namespace coarse::cuda::cuda_driver_test
