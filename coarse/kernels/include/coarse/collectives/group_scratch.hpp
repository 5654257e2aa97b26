#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "coarse/collectives/collective.hpp"
#include "coarse/collectives/placement.hpp"
#include "coarse/shared_memory/message_area.hpp"
#include "coarse/shared_memory/shared_memory.hpp"
#include "coarse/shared_memory/waiting.hpp"

namespace coarse {

/// The part of a rank's buffer that it has written in a round, and its readers: this is sent to another node.
/// Either one piece for all ranks or for one, or areas of the same size, one for each rank.
struct Extent {
  std::uint32_t numBytes = 0;    // from the start of the buffer
  std::uint32_t areaBytes = 0;   // distance of the ranks' areas; 0: one piece
  std::uint32_t pieceBytes = 0;  // at the start of each area
  std::int32_t only = -1;        // for one piece: the rank that reads it; -1: all

  /// The range that `rank` reads: [first, second).
  std::pair<std::size_t, std::size_t> rangeOf(std::size_t rank) const noexcept;
};
static_assert(sizeof(Extent) == 16);

/// Why a rank sends no more, if so.
enum class Departure : std::uint32_t {
  kNone = 0,
  kLeft = 1,         // it closed the group
  kDied = 2,         // reported by another node
  kUnreachable = 3,  // the connection to its node ended
};

/// Most buffers of a rank.
constexpr std::size_t kMostBuffers = 32;

/// One rank's progress, for the others. Only its rank writes it, except for `sleepers`; the bridge
/// (node_bridge.hpp) writes that of a rank of another node.
struct alignas(128) RankBoard {
  std::atomic<std::uint32_t> round{0};     // rounds published so far, modulo 2^32; a futex word
  std::atomic<std::uint32_t> sleepers{0};  // number of sleepers on `round`
  std::atomic<Departure> departure{Departure::kNone};
  std::uint32_t reserved = 0;
  // Of the last rounds, by the buffer that they use. A header is that of a call in its first round.
  CallHeader headers[kMostBuffers];
  Extent extents[kMostBuffers];
};
static_assert(sizeof(CallHeader) == 104);
static_assert(sizeof(RankBoard) == 3968);

/// Bytes of the scratch memory of `numRanks` ranks with `numBuffers` buffers of `bufferBytes` each, messages
/// included.
std::size_t groupScratchBytes(std::size_t numRanks, std::size_t bufferBytes, std::size_t numBuffers = 2);

/// Finds lost ranks without blocking.
class Liveness {
 public:
  /// @param pidfds by rank; -1 if not watched. This object closes them.
  explicit Liveness(std::vector<int> pidfds) : pidfds_(std::move(pidfds)) {}
  Liveness(Liveness&& other) noexcept : pidfds_(std::exchange(other.pidfds_, {})) {}
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;
  Liveness& operator=(Liveness&&) = delete;
  ~Liveness();

  bool isGone(std::size_t rank) const noexcept;

 private:
  std::vector<int> pidfds_;
};

/// Scratch memory shared by the ranks of a group, through which they work in *rounds*: each rank writes into
/// its own buffer, publishes, waits until all others have published the round, and reads their buffers.
///
/// A rank may write up to mostAhead() rounds before it reads the first of them, so that they are on the way
/// to other nodes together. It has twice as many buffers, used in turn, and may write without any further
/// wait: with a = mostAhead(), it writes round r after it has read round r - a, so every rank has published
/// round r - a, which it did after it had read round r - 2a, the last one of the same buffer.
///
/// Thread safety: one caller at a time; leave() and missing() from any thread.
class GroupScratch {
 public:
  using Deadline = Clock::time_point;  // by this object's clock

  /// @param numBuffers of each rank: even, and kMostBuffers at most.
  /// @throws std::invalid_argument if the memory does not fit `numRanks` ranks with such buffers.
  GroupScratch(int sealedFd, std::size_t rank, std::size_t numRanks, std::size_t bufferBytes,
               Liveness liveness, Placement placement = {}, std::size_t numBuffers = 2);

  std::size_t rank() const noexcept { return rank_; }
  std::size_t numRanks() const noexcept { return numRanks_; }
  std::size_t bufferBytes() const noexcept { return bufferBytes_; }
  /// Number of rounds that a rank may write before it reads the first of them.
  std::size_t mostAhead() const noexcept { return numBuffers_ / 2; }

  const Placement& placement() const noexcept { return placement_; }
  /// Whether `rank` shares this memory.
  bool isHere(std::size_t rank) const noexcept { return placement_.areTogether(rank, rank_); }

  /// The deadline of waits in rounds that begin now.
  Deadline deadlineIn(std::chrono::milliseconds limit) noexcept { return clock_.in(limit); }

  /// Begins to write the next round, of which other ranks read `extent`. @returns the buffer for it.
  std::byte* begin(const Extent& extent) noexcept;
  /// Sets the header of the call whose first round is being written.
  void setHeader(const CallHeader& header) noexcept { headerOf(rank_, written_) = header; }
  /// Ends the writing of this round.
  void publish() noexcept;

  /// Goes on to read the next round: waits until all other ranks have published it.
  /// @throws std::runtime_error that names the missing rank: late, gone or left.
  void meet(Deadline deadline);
  /// The data of `rank` in the round that is being read.
  const std::byte* buffer(std::size_t rank) const noexcept { return bufferOf(rank, read_); }
  const CallHeader& header(std::size_t rank) const noexcept { return headerOf(rank, read_); }

  /// Why `rank` will send nothing more; "" if it may.
  std::string lossOf(std::size_t rank) const;

  /// The memory of the channels of messages.hpp.
  const MessageArea& messageArea() const noexcept { return messageArea_; }
  /// The bell to ring after writing to `rank` or taking from it: its own, or that of the bridge to its node.
  Bell& bellOf(std::size_t rank) const noexcept {
    return isHere(rank) ? messageArea_.bell(rank) : messageArea_.bridgeBell();
  }

  /// Announces that this rank sends nothing more, and ends its meet(). Idempotent.
  void leave() noexcept;

  /// Ranks that have not published the round that this one waits for.
  std::vector<std::size_t> missing() const;

  // For the bridge to other nodes.
  RankBoard& board(std::size_t rank) const noexcept;
  std::byte* bufferOf(std::size_t rank, std::uint32_t round) const noexcept;
  CallHeader& headerOf(std::size_t rank, std::uint32_t round) const noexcept {
    return board(rank).headers[round % numBuffers_];
  }
  Extent& extentOf(std::size_t rank, std::uint32_t round) const noexcept {
    return board(rank).extents[round % numBuffers_];
  }
  bool isGone(std::size_t rank) const noexcept { return liveness_.isGone(rank); }

 private:
  bool hasPublished(std::size_t rank, std::uint32_t round) const noexcept;
  void await(std::size_t rank, Deadline deadline);
  void sleep(std::size_t rank, Deadline deadline);
  void check(std::size_t rank, Deadline deadline);

  Mapping memory_;
  std::size_t rank_;
  std::size_t numRanks_;
  std::size_t bufferBytes_;
  std::size_t numBuffers_;
  Liveness liveness_;
  Placement placement_;
  MessageArea messageArea_;
  std::uint32_t written_ = 0;           // the round written last
  std::atomic<std::uint32_t> read_{0};  // the round that is waited for, or read; missing() may look at it
  AttendedClock clock_;
  std::atomic<bool> isClosed_{false};
};

}  // namespace coarse
