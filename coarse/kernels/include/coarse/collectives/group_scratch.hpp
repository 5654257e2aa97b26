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

/// One rank's progress, for the others. Only its rank writes it, except for `sleepers`; the bridge
/// (node_bridge.hpp) writes that of a rank of another node.
struct alignas(128) RankBoard {
  std::atomic<std::uint32_t> round{0};     // rounds published so far, modulo 2^32; a futex word
  std::atomic<std::uint32_t> sleepers{0};  // number of sleepers on `round`
  std::atomic<Departure> departure{Departure::kNone};
  std::uint32_t reserved = 0;
  CallHeader headers[2];  // of the calls that began in an even and in an odd round
  Extent extents[2];      // of the last even and odd round
};
static_assert(sizeof(CallHeader) == 104);
static_assert(sizeof(RankBoard) == 256);

/// Bytes of the scratch memory of `numRanks` ranks with buffers of `bufferBytes` each, messages included.
std::size_t groupScratchBytes(std::size_t numRanks, std::size_t bufferBytes);

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
/// Each rank has two buffers, used in turn. Round r may write buffer r % 2 without any further wait: to pass
/// round r - 1, every rank must have published it, and it did so after it had read round r - 2.
///
/// Thread safety: one caller at a time; leave() and missing() from any thread.
class GroupScratch {
 public:
  using Deadline = Clock::time_point;  // by this object's clock

  /// @throws std::invalid_argument if the memory does not fit `numRanks` ranks with such buffers.
  GroupScratch(int sealedFd, std::size_t rank, std::size_t numRanks, std::size_t bufferBytes,
               Liveness liveness, Placement placement = {});

  std::size_t rank() const noexcept { return rank_; }
  std::size_t numRanks() const noexcept { return numRanks_; }
  std::size_t bufferBytes() const noexcept { return bufferBytes_; }

  const Placement& placement() const noexcept { return placement_; }
  /// Whether `rank` shares this memory.
  bool isHere(std::size_t rank) const noexcept { return placement_.areTogether(rank, rank_); }

  /// The deadline of waits in rounds that begin now.
  Deadline deadlineIn(std::chrono::milliseconds limit) noexcept { return clock_.in(limit); }

  /// Begins the next round; the rank's own buffer may be written from now on.
  void begin() noexcept { ++round_; }
  std::byte* buffer(std::size_t rank) const noexcept { return bufferOf(rank, round_); }
  CallHeader& header(std::size_t rank) const noexcept { return board(rank).headers[round_ % 2]; }
  /// Sets the part of the buffer that this rank writes in this round.
  void setExtent(const Extent& extent) noexcept { board(rank_).extents[round_ % 2] = extent; }

  /// Ends the writing of this round, and waits until all other ranks have done the same.
  /// @throws std::runtime_error that names the missing rank: late, gone or left.
  void meet(Deadline deadline);

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

  /// Ranks that have not published the round that this one published last.
  std::vector<std::size_t> missing() const;

  // For the bridge to other nodes.
  RankBoard& board(std::size_t rank) const noexcept;
  std::byte* bufferOf(std::size_t rank, std::uint32_t round) const noexcept;
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
  Liveness liveness_;
  Placement placement_;
  MessageArea messageArea_;
  std::uint32_t round_ = 0;
  AttendedClock clock_;
  std::atomic<bool> isClosed_{false};
};

}  // namespace coarse
