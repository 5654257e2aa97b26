/// The events of a process, as they lie in its file.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "coarse/shared_memory/shared_memory.hpp"
#include "coarse/timeline/recorder.hpp"

namespace coarse::test::timeline_test {
namespace {

constexpr std::size_t kCapacity = 64;

/// A recorder over memory as a new file has it.
struct Recording {
  explicit Recording(std::size_t capacity = kCapacity)
      : memory(Recorder::numBytes(capacity) / sizeof(std::uint64_t)),
        base(reinterpret_cast<std::byte*>(memory.data())),
        recorder(base, capacity) {}
  const TimelineHeader& header() const { return *reinterpret_cast<const TimelineHeader*>(base); }
  const TimelineCell& cell(std::size_t position) const {
    return reinterpret_cast<const TimelineCell*>(base + kTimelineHeaderBytes)[position];
  }

  std::vector<std::uint64_t> memory;
  std::byte* base;
  Recorder recorder;
};

TimelineEvent eventOf(std::uint32_t index) {
  TimelineEvent event;
  event.index = index;
  return event;
}

TEST(Timeline, KeepsTheNewestEvents) {
  Recording recording;
  for (std::uint32_t i = 0; i < kCapacity + 3; ++i) recording.recorder.record(eventOf(i));
  EXPECT_EQ(recording.header().next, kCapacity + 3);
  for (std::size_t i = 0; i < kCapacity; ++i) {
    const std::size_t position = i < 3 ? kCapacity + i : i;
    EXPECT_EQ(recording.cell(i).commit, position + 1);
    EXPECT_EQ(recording.cell(i).event.index, position);
  }
}

TEST(Timeline, GivesEachThreadALaneWithItsName) {
  Recording recording;
  constexpr std::uint32_t kPerThread = 8;
  std::vector<std::thread> threads;
  for (std::uint32_t i = 0; i < 4; ++i) {
    threads.emplace_back([&recording, i] {
      nameThread(("core " + std::to_string(i)).c_str());
      for (std::uint32_t k = 0; k < kPerThread; ++k) recording.recorder.record(eventOf(i));
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_EQ(recording.header().numLanes, 4U);
  std::set<std::uint32_t> threadIds;
  for (std::size_t i = 0; i < 4 * kPerThread; ++i) {
    const TimelineEvent& event = recording.cell(i).event;
    const TimelineLane& lane = recording.header().lanes[event.lane];
    EXPECT_EQ(lane.name, "core " + std::to_string(event.index));
    threadIds.insert(lane.threadId);
  }
  EXPECT_EQ(threadIds.size(), 4U);
}

TEST(Timeline, RefusesANumberOfEventsThatIsNoPowerOfTwo) {
  std::vector<std::uint64_t> memory(Recorder::numBytes(kCapacity) / sizeof(std::uint64_t));
  EXPECT_THROW(Recorder(reinterpret_cast<std::byte*>(memory.data()), kCapacity - 1), std::invalid_argument);
}

TEST(Timeline, RecordsSpansOnlyWhileItIsOpen) {
  int numDescribed = 0;
  const auto work = [&] { const TimelineSpan span([&](TimelineEvent&) { ++numDescribed; }); };
  work();
  EXPECT_EQ(numDescribed, 0);
  const int fd = createSealedMemory("timeline", Recorder::numBytes(kCapacity));
  const Mapping file = mapSealed(fd, Recorder::numBytes(kCapacity), Mapping::Access::kReadOnly, "timeline");
  openTimeline(fd, kCapacity);
  const std::int64_t before = timelineNow();
  work();
  closeTimeline();
  work();
  EXPECT_EQ(numDescribed, 1);
  const auto* header = reinterpret_cast<const TimelineHeader*>(file.data());
  EXPECT_EQ(header->magic, kTimelineMagic);
  EXPECT_EQ(header->next, 1U);
  const auto& cell = *reinterpret_cast<const TimelineCell*>(file.data() + kTimelineHeaderBytes);
  EXPECT_GE(cell.event.startNs, before);
  EXPECT_GE(cell.event.durationNs, 0);
  ::close(fd);
}

}  // namespace
}  // namespace coarse::test::timeline_test
