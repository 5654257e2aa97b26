/// Sealed memory: nobody can change its size under a mapping, and nothing unsealed is mapped.
#include "coarse/shared_memory/shared_memory.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <limits>
#include <system_error>
#include <utility>

#include "coarse/tensors/tensor_group.hpp"
#include "fixture.hpp"

namespace coarse::test::shared_memory_test {
namespace {

constexpr std::size_t kBytes = 3 * 4096;
constexpr auto kReadWrite = Mapping::Access::kReadWrite;
constexpr auto kReadOnly = Mapping::Access::kReadOnly;

std::size_t numOpenFiles() {
  DIR* directory = ::opendir("/proc/self/fd");
  std::size_t count = 0;
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}

/// Runs `function` and returns the error code of the std::system_error that it throws, 0 if none.
template <typename Function>
int errorOf(Function function, std::string* text = nullptr) {
  try {
    function();
  } catch (const std::system_error& error) {
    if (text != nullptr) *text = error.what();
    return error.code().value();
  }
  return 0;
}

/// While it lives, files of this process can't grow beyond a limit: memory that can't be had, without using
/// it up.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t numBytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{numBytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int);
};

TEST(SealedMemory, IsZeroAllocatedAndOfTheSizeAskedFor) {
  const Fd fd(createSealedMemory("test", kBytes));
  struct stat status{};
  ASSERT_EQ(::fstat(fd, &status), 0);
  EXPECT_EQ(static_cast<std::size_t>(status.st_size), kBytes);
  EXPECT_GE(static_cast<std::size_t>(status.st_blocks) * 512, kBytes)
      << "a later write could die with SIGBUS";
  EXPECT_EQ(sealedBytes(fd), kBytes);
  const Mapping mapping(fd, kBytes, kReadWrite);
  EXPECT_EQ(mapping.numBytes(), kBytes);
  for (std::size_t i = 0; i < kBytes; ++i) ASSERT_EQ(mapping.data()[i], std::byte{0});
}

TEST(SealedMemory, ClosesOnExec) {
  const Fd fd(createSealedMemory("test", kBytes));
  EXPECT_NE(::fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
  const Fd readOnly(reopenReadOnly(fd));
  EXPECT_NE(::fcntl(readOnly, F_GETFD) & FD_CLOEXEC, 0);
}

TEST(SealedMemory, NeitherShrinksNorGrowsNorTakesOtherSeals) {
  const Fd fd(createSealedMemory("test", kBytes));
  for (const std::size_t numBytes : {std::size_t{0}, kBytes - 1, kBytes + 1}) {
    EXPECT_EQ(::ftruncate(fd, static_cast<off_t>(numBytes)), -1) << numBytes;
    EXPECT_EQ(errno, EPERM) << numBytes;
  }
  EXPECT_EQ(::posix_fallocate(fd, 0, 2 * kBytes), EPERM);
  EXPECT_EQ(::fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(sealedBytes(fd), kBytes);
}

TEST(SealedMemory, IsOneMemoryForAllWhoMapIt) {
  const Fd fd(createSealedMemory("test", kBytes));
  const Mapping a(fd, kBytes, kReadWrite);
  const Fd copy(::dup(fd));
  const Mapping b(copy, kBytes, kReadWrite);
  a.data()[kBytes - 1] = std::byte{42};
  EXPECT_EQ(b.data()[kBytes - 1], std::byte{42});
}

TEST(SealedMemory, OutlivesItsDescriptor) {
  Fd fd(createSealedMemory("test", kBytes));
  const Mapping mapping(fd, kBytes, kReadWrite);
  fd.close();
  mapping.data()[7] = std::byte{7};
  EXPECT_EQ(mapping.data()[7], std::byte{7});
}

TEST(SealedMemory, ReopenedReadOnlyIsTheSameMemoryAndCannotBeWritten) {
  const Fd fd(createSealedMemory("test", kBytes));
  const Fd readOnly(reopenReadOnly(fd));
  EXPECT_EQ(sealedBytes(readOnly), kBytes);
  EXPECT_EQ(errorOf([&] { const Mapping mapping(readOnly, kBytes, kReadWrite); }), EACCES);
  EXPECT_EQ(::write(readOnly, "x", 1), -1);
  const Mapping writer(fd, kBytes, kReadWrite);
  const Mapping reader(readOnly, kBytes, kReadOnly);
  writer.data()[1] = std::byte{9};
  EXPECT_EQ(reader.data()[1], std::byte{9});
}

TEST(SealedMemory, MemoryThatCannotBeHadIsAnErrorThatSaysWhatForAndLeavesNothing) {
  const std::size_t before = numOpenFiles();
  std::string text;
  {
    const FileSizeLimit limit(kBytes);
    EXPECT_EQ(errorOf([] { createSealedMemory("slots of llama", kBytes + 1); }, &text), EFBIG);
  }
  EXPECT_NE(text.find("allocating 12289 bytes for slots of llama"), std::string::npos) << text;
  EXPECT_NE(errorOf([] {
              createSealedMemory("more than a file can have", std::numeric_limits<std::size_t>::max());
            }),
            0);
  EXPECT_EQ(numOpenFiles(), before);
}

TEST(SealedMemory, ReopeningNothingIsAnError) {
  EXPECT_EQ(errorOf([] { reopenReadOnly(-1); }), ENOENT);
}

TEST(SealedBytes, RefuseWhatCouldChangeItsSize) {
  const Fd unsealed(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(unsealed, kBytes), 0);
  EXPECT_THROW(sealedBytes(unsealed), std::invalid_argument);
  for (const int seals : {F_SEAL_SHRINK, F_SEAL_GROW}) {
    ASSERT_EQ(::fcntl(unsealed, F_ADD_SEALS, seals), 0);
    EXPECT_THROW(sealedBytes(unsealed), std::invalid_argument) << "without all the seals";
  }
  ASSERT_EQ(::fcntl(unsealed, F_ADD_SEALS, F_SEAL_SEAL), 0);
  EXPECT_EQ(sealedBytes(unsealed), kBytes);
}

TEST(SealedBytes, RefuseFilesPipesAndNothing) {
  const Fd file(::open("/dev/null", O_RDWR | O_CLOEXEC));
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const Fd in(ends[0]), out(ends[1]);
  for (const int fd : {static_cast<int>(file), static_cast<int>(in), -1})
    EXPECT_THROW(sealedBytes(fd), std::invalid_argument) << fd;
}

TEST(MapSealed, RefusesLessThanIsNeededAndSaysHowMuch) {
  const Fd fd(createSealedMemory("test", kBytes));
  EXPECT_EQ(mapSealed(fd, kBytes, kReadWrite, "slots").numBytes(), kBytes);
  EXPECT_EQ(mapSealed(fd, 1, kReadWrite, "slots").numBytes(), 1u);
  try {
    mapSealed(fd, kBytes + 1, kReadWrite, "slots");
    FAIL() << "mapped more than there is";
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "slots: needs 12289 bytes, the descriptor has 12288");
  }
}

/// A file stands for a device: both are mapped by extents, and neither has seals.
class DeviceFile : public ::testing::Test {
 protected:
  static constexpr std::size_t kUnit = 2 << 20;

  DeviceFile() { EXPECT_EQ(::ftruncate(file_, 4 * kUnit), 0); }

  const Fd file_{::memfd_create("device", MFD_CLOEXEC)};
};

TEST_F(DeviceFile, IsMappedFromItsOffsetOnInWholeUnits) {
  const Mapping all(Region(file_, 0, 4 * kUnit), 4 * kUnit, kReadWrite);
  const Mapping part = mapShared(Region(file_, kUnit, kUnit), 100, kReadWrite, "slots");
  EXPECT_EQ(part.numBytes(), 100u);
  part.data()[kUnit - 1] = std::byte{7};  // mapped, though it was not asked for
  EXPECT_EQ(all.data()[2 * kUnit - 1], std::byte{7});
}

TEST_F(DeviceFile, ThatIsTooSmallForAnExtentIsRefused) {
  EXPECT_THROW(mapShared(Region(file_, kUnit, kUnit), kUnit + 1, kReadWrite, "slots"), std::invalid_argument);
  EXPECT_THROW(mapShared(Region(file_, 3 * kUnit, 2 * kUnit), 1, kReadWrite, "slots"), std::invalid_argument);
  EXPECT_THROW(mapShared(Region(file_, 5 * kUnit, kUnit), 1, kReadWrite, "slots"), std::invalid_argument);
  EXPECT_THROW(Region(file_, 0, 0), std::invalid_argument);
}

TEST_F(DeviceFile, WithoutAnExtentIsTakenForSealedMemoryAndRefused) {
  EXPECT_THROW(mapShared(file_, 1, kReadWrite, "slots"), std::invalid_argument);
}

TEST(MapShared, RefusesAnExtentOfWhatIsNoDevice) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const Fd in(ends[0]), out(ends[1]);
  EXPECT_THROW(mapShared(Region(in, 0, 1), 1, kReadWrite, "slots"), std::invalid_argument);
}

TEST(Mapping, MovesItsMemory) {
  const Fd fd(createSealedMemory("test", kBytes));
  Mapping a(fd, kBytes, kReadWrite);
  std::byte* const address = a.data();
  Mapping b(std::move(a));
  EXPECT_EQ(b.data(), address);
  EXPECT_EQ(a.data(), nullptr);  // NOLINT: a moved-from mapping holds nothing
  Mapping c;
  c = std::move(b);
  EXPECT_EQ(c.data(), address);
  EXPECT_EQ(c.numBytes(), kBytes);
}

}  // namespace
}  // namespace coarse::test::shared_memory_test
