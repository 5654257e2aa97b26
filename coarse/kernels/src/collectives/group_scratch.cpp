#include "coarse/collectives/group_scratch.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <new>
#include <stdexcept>
#include <utility>

namespace coarse {
namespace {

// Ranks reach a collective within tens of microseconds of each other, unless one computes meanwhile.
constexpr std::chrono::microseconds kSpin{100};
// Longest time until a dead rank, or close(), is noticed.
constexpr std::chrono::milliseconds kLongestSleep{20};

std::size_t boardAndBufferBytes(std::size_t numRanks, std::size_t bufferBytes, std::size_t numBuffers) {
  return numRanks * (sizeof(RankBoard) + numBuffers * bufferBytes);
}

}  // namespace

std::pair<std::size_t, std::size_t> Extent::rangeOf(std::size_t rank) const noexcept {
  if (areaBytes == 0) {
    return {0, only < 0 || only == static_cast<std::int32_t>(rank) ? numBytes : 0};
  }
  const std::size_t begin = std::min<std::size_t>(numBytes, rank * areaBytes);
  return {begin, std::min<std::size_t>(numBytes, begin + pieceBytes)};
}

std::size_t groupScratchBytes(std::size_t numRanks, std::size_t bufferBytes, std::size_t numBuffers) {
  return boardAndBufferBytes(numRanks, bufferBytes, numBuffers) + MessageArea::numBytes(numRanks);
}

Liveness::~Liveness() {
  for (int pidfd : pidfds_) {
    if (pidfd >= 0) ::close(pidfd);
  }
}

bool Liveness::isGone(std::size_t rank) const noexcept {
  if (rank >= pidfds_.size() || pidfds_[rank] < 0) return false;
  pollfd watched{pidfds_[rank], POLLIN, 0};
  return ::poll(&watched, 1, 0) > 0;
}

GroupScratch::GroupScratch(int sealedFd, std::size_t rank, std::size_t numRanks, std::size_t bufferBytes,
                           Liveness liveness, Placement placement, std::size_t numBuffers)
    : rank_(rank),
      numRanks_(numRanks),
      bufferBytes_(bufferBytes),
      numBuffers_(numBuffers),
      liveness_(std::move(liveness)),
      placement_(std::move(placement)),
      messageArea_(nullptr, numRanks) {
  if (rank >= numRanks || bufferBytes == 0 || bufferBytes % alignof(RankBoard) != 0) {
    throw std::invalid_argument(
        "a group's scratch memory needs 0 <= rank < ranks and buffers of whole lines");
  }
  if (numBuffers == 0 || numBuffers % 2 != 0 || numBuffers > kMostBuffers) {
    throw std::invalid_argument("a group's scratch memory needs 2, 4, ... or 32 buffers for each rank");
  }
  memory_ = mapSealed(sealedFd, groupScratchBytes(numRanks, bufferBytes, numBuffers),
                      Mapping::Access::kReadWrite, "a group's scratch memory");
  messageArea_ =
      MessageArea(memory_.data() + boardAndBufferBytes(numRanks, bufferBytes, numBuffers), numRanks);
}

RankBoard& GroupScratch::board(std::size_t rank) const noexcept {
  return reinterpret_cast<RankBoard*>(memory_.data())[rank];
}

std::byte* GroupScratch::bufferOf(std::size_t rank, std::uint32_t round) const noexcept {
  return memory_.data() + numRanks_ * sizeof(RankBoard) +
         (numBuffers_ * rank + round % numBuffers_) * bufferBytes_;
}

bool GroupScratch::hasPublished(std::size_t rank, std::uint32_t round) const noexcept {
  // acquire: the rank's writes into its buffer are read next.
  return static_cast<std::int32_t>(board(rank).round.load(std::memory_order_acquire) - round) >= 0;
}

std::byte* GroupScratch::begin(const Extent& extent) noexcept {
  ++written_;
  extentOf(rank_, written_) = extent;
  return bufferOf(rank_, written_);
}

void GroupScratch::publish() noexcept {
  RankBoard& own = board(rank_);
  // seq_cst, paired with the load of sleepers: either this sees the sleeper, or the sleeper sees the round.
  own.round.store(written_, std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_seq_cst) != 0) futexWake(own.round, INT_MAX);
  if (placement_.numNodes() > 1) messageArea_.bridgeBell().ring();
}

void GroupScratch::meet(Deadline deadline) {
  read_.fetch_add(1, std::memory_order_relaxed);
  for (std::size_t distance = 1; distance < numRanks_; ++distance) {
    await((rank_ + distance) % numRanks_, deadline);
  }
}

void GroupScratch::await(std::size_t rank, Deadline deadline) {
  YieldingSpin spin(kSpin);
  while (!hasPublished(rank, read_)) {
    if (isClosed_.load(std::memory_order_relaxed)) throw std::runtime_error("the group was closed");
    if (spin.yield()) continue;
    sleep(rank, deadline);
    if (!hasPublished(rank, read_)) check(rank, deadline);
  }
}

void GroupScratch::sleep(std::size_t rank, Deadline deadline) {
  RankBoard& awaited = board(rank);
  const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - clock_.now());
  const auto limit = std::clamp(left, std::chrono::nanoseconds(0), std::chrono::nanoseconds(kLongestSleep));
  awaited.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const std::uint32_t seen = awaited.round.load(std::memory_order_seq_cst);
  if (static_cast<std::int32_t>(seen - read_) < 0) futexWait(awaited.round, seen, limit);
  awaited.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void GroupScratch::check(std::size_t rank, Deadline deadline) {
  const std::string loss = lossOf(rank);
  if (hasPublished(rank, read_)) return;  // published before it was lost
  if (!loss.empty()) throw std::runtime_error(loss);
  if (clock_.now() < deadline) return;
  std::string late;
  for (std::size_t other : missing()) late += (late.empty() ? "" : ", ") + std::to_string(other);
  throw std::runtime_error("Timed out waiting for rank(s) " + late);
}

std::string GroupScratch::lossOf(std::size_t rank) const {
  const std::string who = "rank " + std::to_string(rank);
  switch (board(rank).departure.load(std::memory_order_acquire)) {
    case Departure::kLeft:
      return who + " has left the group (destroy_process_group, or an error there)";
    case Departure::kDied:
      return who + " died";
    case Departure::kUnreachable:
      return who + " cannot be reached any more: the connection to its node ended";
    case Departure::kNone:
      break;
  }
  if (isHere(rank)) return liveness_.isGone(rank) ? who + " died" : "";
  // Data of other nodes arrives through the leader of this one.
  const std::size_t leader = placement_.leaderOf(rank_);
  const std::string loss = leader == rank_ ? "" : lossOf(leader);
  return loss.empty() ? "" : who + " cannot be reached any more: " + loss;
}

void GroupScratch::leave() noexcept {
  isClosed_.store(true, std::memory_order_relaxed);
  board(rank_).departure.store(Departure::kLeft, std::memory_order_release);
  futexWake(board(rank_).round, INT_MAX);
  messageArea_.bridgeBell().ring();
}

std::vector<std::size_t> GroupScratch::missing() const {
  const std::uint32_t round = read_.load(std::memory_order_relaxed);
  std::vector<std::size_t> ranks;
  for (std::size_t rank = 0; rank < numRanks_; ++rank) {
    if (!hasPublished(rank, round)) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace coarse
