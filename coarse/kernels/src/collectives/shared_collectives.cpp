#include "coarse/collectives/shared_collectives.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "coarse/collectives/combine.hpp"
#include "coarse/shared_memory/durations.hpp"
#include "coarse/shared_memory/forks.hpp"

namespace coarse {
namespace {

// Up to this many ranks, each rank reduces everything itself: one round per piece instead of two.
constexpr std::size_t kMostRanksDirect = 3;
// The same across nodes, where every sent byte counts.
constexpr std::size_t kMostRanksDirectAcross = 2;
// Pieces up to this size take as long as their round, whatever is done in it.
constexpr std::size_t kSmallBytes = 16 << 10;
// Areas of ranks within a buffer begin at whole cache lines.
constexpr std::size_t kAreaAlignment = 64;

const char* nameOf(CollectiveKind kind) {
  constexpr const char* kNames[] = {"barrier",        "broadcast", "all_reduce", "reduce",    "all_gather",
                                    "reduce_scatter", "gather",    "scatter",    "all_to_all"};
  const auto index = static_cast<std::size_t>(kind);
  return index < std::size(kNames) ? kNames[index] : "an unknown operation";
}

bool equal(const CallHeader& a, const CallHeader& b) {
  const bool sameDims = a.numDims == kDimsNotTold || b.numDims == kDimsNotTold ||
                        (a.numDims == b.numDims && std::equal(std::begin(a.dims), std::end(a.dims), b.dims));
  return a.sequence == b.sequence && a.pieceBytes == b.pieceBytes && a.root == b.root && a.kind == b.kind &&
         a.combine == b.combine && std::memcmp(a.dtype, b.dtype, sizeof a.dtype) == 0 && sameDims;
}

const std::byte* at(const void* memory, std::size_t offset) {
  return static_cast<const std::byte*>(memory) + offset;
}

/// `numBytes` for all ranks.
Extent forAll(std::size_t numBytes) { return {static_cast<std::uint32_t>(numBytes), 0, 0, -1}; }

/// `numBytes` for one rank.
Extent forOne(std::size_t numBytes, std::int32_t rank) {
  return {static_cast<std::uint32_t>(numBytes), 0, 0, rank};
}

/// Areas of `areaBytes` for each rank, up to `numBytes` in all; each rank reads `pieceBytes` of its area.
Extent forEach(std::size_t numBytes, std::size_t areaBytes, std::size_t pieceBytes) {
  return {static_cast<std::uint32_t>(numBytes), static_cast<std::uint32_t>(areaBytes),
          static_cast<std::uint32_t>(pieceBytes), -1};
}

std::byte* at(void* memory, std::size_t offset) { return static_cast<std::byte*>(memory) + offset; }

/// Number of pieces of a tensor; an empty one has one.
std::size_t numPieces(std::size_t numBytes, std::size_t mostBytes) {
  return std::max<std::size_t>(1, (numBytes + mostBytes - 1) / mostBytes);
}

/// A round of a reduction in slices.
struct SliceRound {
  std::size_t piece;
  bool isGather;  // of the slices that were reduced; else the whole piece is given out
};

/// The rounds of a reduction of `numPieces` pieces: gathering follows `lead` rounds or more after giving out.
std::vector<SliceRound> sliceRounds(std::size_t numPieces, std::size_t lead) {
  std::vector<SliceRound> rounds;
  for (std::size_t i = 0; i < numPieces + lead; ++i) {
    if (i >= lead) rounds.push_back({i - lead, true});
    if (i < numPieces) rounds.push_back({i, false});
  }
  return rounds;
}

void copyBytes(void* to, const void* from, std::size_t numBytes) {
  if (numBytes != 0 && to != from) std::memcpy(to, from, numBytes);
}

}  // namespace

std::string describe(const CallHeader& header) {
  std::string text = nameOf(header.kind);
  if (header.kind == CollectiveKind::kBarrier) return text;
  text += " of " + std::string(header.dtype, ::strnlen(header.dtype, sizeof header.dtype));
  if (header.numDims <= kMostDims) {
    text += " [";
    for (std::size_t i = 0; i < header.numDims; ++i)
      text += (i == 0 ? "" : ", ") + std::to_string(header.dims[i]);
    text += "]";
  } else if (header.kind != CollectiveKind::kAllToAll) {
    text += ", " + std::to_string(header.pieceBytes) + " bytes";
  }
  if (header.combine != Combine::kNone) text += std::string(", ") + coarse::nameOf(header.combine);
  if (header.root >= 0) text += ", root " + std::to_string(header.root);
  return text;
}

struct SharedCollectives::Running {
  const Collective& call;
  CallHeader header;
  Deadline deadline;
  bool isCompared = false;
};

SharedCollectives::SharedCollectives(std::unique_ptr<GroupScratch> scratch, std::vector<int> links,
                                     LinkOptions linkOptions)
    : scratch_(std::move(scratch)),
      messages_(*scratch_),
      bridge_(links.empty() ? nullptr
                            : std::make_unique<NodeBridge>(*scratch_, std::move(links), linkOptions)),
      rank_(scratch_->rank()),
      numRanks_(scratch_->numRanks()),
      owner_(::getpid()),
      terms_(numRanks_) {}

std::shared_ptr<Collectives> SharedCollectives::shared(std::unique_ptr<GroupScratch> scratch,
                                                       std::vector<int> links, LinkOptions linkOptions) {
  return {new SharedCollectives(std::move(scratch), std::move(links), linkOptions), LeakInForks()};
}

void SharedCollectives::checkOwner() const {
  if (::getpid() == owner_) return;
  throw std::runtime_error(
      "rank " + std::to_string(rank_) + ": the group was joined by process " + std::to_string(owner_) +
      " and is used in its fork " + std::to_string(::getpid()) +
      ". Load data there, and call collectives here; or start the process with the spawn "
      "method, and have it make a group of its own");
}

void SharedCollectives::post(const Message& message) {
  checkOwner();
  messages_.post(message);
}

void SharedCollectives::run(const Collective& call) {
  checkOwner();
  const auto started = std::chrono::steady_clock::now();
  Running running{call, call.header, scratch_->deadlineIn(call.timeout)};
  running.header.sequence = sequence_.fetch_add(1, std::memory_order_relaxed) + 1;
  const auto where = [&] {
    return "rank " + std::to_string(rank_) + ", sequence number " + std::to_string(running.header.sequence) +
           " (" + describe(running.header) + "): ";
  };
  if (!broken_.empty()) throw std::runtime_error(where() + "the group is broken since " + broken_);
  try {
    dispatch(running);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(where() + error.what());
  } catch (const std::runtime_error& error) {
    broken_ = where() + error.what();
    throw std::runtime_error(broken_ + " after " + inSeconds(std::chrono::steady_clock::now() - started));
  }
}

void SharedCollectives::dispatch(Running& running) {
  const bool isRoot = running.header.root == static_cast<std::int32_t>(rank_);
  const std::size_t mostDirect =
      scratch_->placement().numNodes() > 1 ? kMostRanksDirectAcross : kMostRanksDirect;
  switch (running.header.kind) {
    case CollectiveKind::kBarrier:
      return round(running, forAll(0), [](std::byte*) {}, [] {});
    case CollectiveKind::kBroadcast:
      return broadcast(running);
    case CollectiveKind::kAllReduce:
      if (numRanks_ <= mostDirect || running.header.pieceBytes <= kSmallBytes) {
        return reduceDirectly(running, true);
      }
      return reduceInSlices(running);
    case CollectiveKind::kReduce:
      return reduceDirectly(running, isRoot);
    case CollectiveKind::kAllGather:
      return allGather(running, true);
    case CollectiveKind::kReduceScatter:
      return reduceScatter(running);
    case CollectiveKind::kGather:
      return allGather(running, isRoot);
    case CollectiveKind::kScatter:
      return scatter(running);
    case CollectiveKind::kAllToAll:
      return allToAll(running);
  }
  throw std::invalid_argument("no such operation");
}

std::string SharedCollectives::missingRanks() const {
  std::string text;
  for (std::size_t rank : scratch_->missing()) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

void SharedCollectives::close() noexcept {
  if (::getpid() != owner_) return;
  scratch_->leave();
  messages_.close();
  if (bridge_) bridge_->stop();
}

void SharedCollectives::compareHeaders(const Running& running) const {
  // Every rank compares all with rank 0, so that either all of them throw here, or none does.
  const CallHeader first = scratch_->header(0);
  for (std::size_t rank = 1; rank < numRanks_; ++rank) {
    const CallHeader other = scratch_->header(rank);
    if (equal(first, other)) continue;
    throw std::invalid_argument(
        "ranks differ: rank 0 is at sequence number " + std::to_string(first.sequence) + ", " +
        describe(first) + "; rank " + std::to_string(rank) + " at " + std::to_string(other.sequence) + ", " +
        describe(other) +
        ". All ranks of a group must make the same calls in the same order, with the same "
        "shapes and dtypes");
  }
  static_cast<void>(running);
}

template <typename Write, typename Read>
void SharedCollectives::round(Running& running, const Extent& extent, Write write, Read read) {
  writeRound(running, extent, write);
  readRound(running, read);
}

template <typename Write>
void SharedCollectives::writeRound(const Running& running, const Extent& extent, Write write) {
  std::byte* const buffer = scratch_->begin(extent);
  if (!running.isCompared) scratch_->setHeader(running.header);
  write(buffer);
  scratch_->publish();
}

template <typename Read>
void SharedCollectives::readRound(Running& running, Read read) {
  scratch_->meet(running.deadline);
  if (!std::exchange(running.isCompared, true)) compareHeaders(running);
  read();
}

/// Runs rounds 0, 1, ... of a call, each by write(round), which writes it, and then read(round). Writes up to
/// `mostAhead` rounds before it reads the first of them, but the second one only after all ranks are known to
/// make the same call.
template <typename Write, typename Read>
void SharedCollectives::inFlight(Running& running, std::size_t numRounds, std::size_t mostAhead, Write write,
                                 Read read) {
  std::size_t numWritten = 0;
  for (std::size_t next = 0; next < numRounds; ++next) {
    const std::size_t ahead = running.isCompared ? mostAhead : 1;
    while (numWritten < std::min(numRounds, next + ahead)) write(numWritten++);
    readRound(running, [&] { read(next); });
  }
}

/// Runs rounds that process [0, numBytes) in pieces: write(buffer, offset, bytes), from which others read
/// extentOf(bytes); then read(offset, bytes). At least one round.
template <typename ExtentOf, typename Write, typename Read>
void SharedCollectives::inPieces(Running& running, std::size_t numBytes, std::size_t mostBytes,
                                 ExtentOf extentOf, Write write, Read read) {
  const auto bytesAt = [&](std::size_t offset) { return std::min(mostBytes, numBytes - offset); };
  inFlight(
      running, numPieces(numBytes, mostBytes), scratch_->mostAhead(),
      [&](std::size_t piece) {
        const std::size_t offset = piece * mostBytes, count = bytesAt(offset);
        writeRound(running, extentOf(count), [&](std::byte* buffer) { write(buffer, offset, count); });
      },
      [&](std::size_t piece) { read(piece * mostBytes, bytesAt(piece * mostBytes)); });
}

std::size_t SharedCollectives::areaBytes(const Collective& call) const noexcept {
  const std::size_t area = scratch_->bufferBytes() / numRanks_ / kAreaAlignment * kAreaAlignment;
  return std::max(area, kAreaAlignment) / call.elementBytes * call.elementBytes;
}

void SharedCollectives::broadcast(Running& running) {
  const auto root = static_cast<std::size_t>(running.header.root);
  const Collective& call = running.call;
  inPieces(
      running, running.header.pieceBytes, scratch_->bufferBytes(),
      [&](std::size_t count) { return forAll(rank_ == root ? count : 0); },
      [&](std::byte* buffer, std::size_t offset, std::size_t count) {
        if (rank_ == root) copyBytes(buffer, at(call.inputs[0], offset), count);
      },
      [&](std::size_t offset, std::size_t count) {
        if (rank_ != root) copyBytes(at(call.outputs[0], offset), scratch_->buffer(root), count);
      });
}

void SharedCollectives::reduceDirectly(Running& running, bool isReceiver) {
  const Collective& call = running.call;
  const std::size_t most = scratch_->bufferBytes() / call.elementBytes * call.elementBytes;
  const bool mustWrite = running.header.kind == CollectiveKind::kAllReduce || !isReceiver;
  inPieces(
      running, running.header.pieceBytes, most,
      [&](std::size_t count) { return forOne(mustWrite ? count : 0, running.header.root); },
      [&](std::byte* buffer, std::size_t offset, std::size_t count) {
        if (mustWrite) copyBytes(buffer, at(call.inputs[0], offset), count);
      },
      [&](std::size_t offset, std::size_t count) {
        if (!isReceiver) return;
        for (std::size_t rank = 0; rank < numRanks_; ++rank) {
          terms_[rank] = rank == rank_ ? at(call.inputs[0], offset) : scratch_->buffer(rank);
        }
        combine(call.element, running.header.combine, terms_.data(), numRanks_, at(call.outputs[0], offset),
                count / call.elementBytes);
      });
}

/// A piece of a tensor, of which each rank reduces a slice.
struct SharedCollectives::Slices {
  std::size_t offset;  // of the piece in the tensor
  std::size_t numBytes;
  std::size_t sliceBytes;

  std::size_t begin(std::size_t rank) const { return std::min(numBytes, rank * sliceBytes); }
  std::size_t bytes(std::size_t rank) const { return begin(rank + 1) - begin(rank); }
};

void SharedCollectives::reduceInSlices(Running& running) {
  const std::size_t most = areaBytes(running.call) * numRanks_;
  const std::size_t total = running.header.pieceBytes;
  const std::size_t count = numPieces(total, most);
  const std::size_t lead = std::min(scratch_->mostAhead(), count);
  const std::vector<SliceRound> rounds = sliceRounds(count, lead);
  const auto slicesOf = [&](std::size_t index) {
    const std::size_t offset = rounds[index].piece * most;
    return Slices{offset, std::min(most, total - offset), areaBytes(running.call)};
  };
  inFlight(
      running, rounds.size(), lead,
      [&](std::size_t index) { writeSlices(running, slicesOf(index), rounds[index].isGather); },
      [&](std::size_t index) {
        if (rounds[index].isGather) return gatherSlices(running.call, slicesOf(index));
        reduceSlice(running, slicesOf(index));
      });
}

void SharedCollectives::writeSlices(const Running& running, const Slices& piece, bool isGather) {
  const Collective& call = running.call;
  if (isGather) {
    const std::size_t own = piece.bytes(rank_);
    writeRound(running, forAll(own), [&](std::byte* buffer) {
      copyBytes(buffer, at(call.outputs[0], piece.offset + piece.begin(rank_)), own);
    });
  } else {
    writeRound(running, forEach(piece.numBytes, piece.sliceBytes, piece.sliceBytes), [&](std::byte* buffer) {
      copyBytes(buffer, at(call.inputs[0], piece.offset), piece.numBytes);
    });
  }
}

void SharedCollectives::reduceSlice(const Running& running, const Slices& piece) {
  const Collective& call = running.call;
  const std::size_t own = piece.begin(rank_);
  for (std::size_t rank = 0; rank < numRanks_; ++rank) {
    terms_[rank] = rank == rank_ ? at(call.inputs[0], piece.offset + own) : scratch_->buffer(rank) + own;
  }
  combine(call.element, running.header.combine, terms_.data(), numRanks_,
          at(call.outputs[0], piece.offset + own), piece.bytes(rank_) / call.elementBytes);
}

void SharedCollectives::gatherSlices(const Collective& call, const Slices& piece) {
  for (std::size_t rank = 0; rank < numRanks_; ++rank) {
    if (rank == rank_) continue;
    copyBytes(at(call.outputs[0], piece.offset + piece.begin(rank)), scratch_->buffer(rank),
              piece.bytes(rank));
  }
}

void SharedCollectives::allGather(Running& running, bool isReceiver) {
  const Collective& call = running.call;
  inPieces(
      running, running.header.pieceBytes, scratch_->bufferBytes(),
      [&](std::size_t count) { return forOne(count, running.header.root); },
      [&](std::byte* buffer, std::size_t offset, std::size_t count) {
        copyBytes(buffer, at(call.inputs[0], offset), count);
      },
      [&](std::size_t offset, std::size_t count) {
        for (std::size_t rank = 0; isReceiver && rank < numRanks_; ++rank) {
          const void* from = rank == rank_ ? at(call.inputs[0], offset) : scratch_->buffer(rank);
          copyBytes(at(call.outputs[rank], offset), from, count);
        }
      });
}

void SharedCollectives::reduceScatter(Running& running) {
  const Collective& call = running.call;
  const std::size_t area = areaBytes(call);
  inPieces(
      running, running.header.pieceBytes, area,
      [&](std::size_t count) { return forEach(area * numRanks_, area, count); },
      [&](std::byte* buffer, std::size_t offset, std::size_t count) {
        for (std::size_t rank = 0; rank < numRanks_; ++rank) {
          if (rank != rank_) copyBytes(buffer + rank * area, at(call.inputs[rank], offset), count);
        }
      },
      [&](std::size_t offset, std::size_t count) {
        for (std::size_t rank = 0; rank < numRanks_; ++rank) {
          terms_[rank] =
              rank == rank_ ? at(call.inputs[rank_], offset) : scratch_->buffer(rank) + rank_ * area;
        }
        combine(call.element, running.header.combine, terms_.data(), numRanks_, at(call.outputs[0], offset),
                count / call.elementBytes);
      });
}

void SharedCollectives::scatter(Running& running) {
  const auto root = static_cast<std::size_t>(running.header.root);
  const Collective& call = running.call;
  const std::size_t area = areaBytes(call);
  inPieces(
      running, running.header.pieceBytes, area,
      [&](std::size_t count) { return forEach(rank_ == root ? area * numRanks_ : 0, area, count); },
      [&](std::byte* buffer, std::size_t offset, std::size_t count) {
        for (std::size_t rank = 0; rank_ == root && rank < numRanks_; ++rank) {
          if (rank != root) copyBytes(buffer + rank * area, at(call.inputs[rank], offset), count);
        }
      },
      [&](std::size_t offset, std::size_t count) {
        const void* from =
            rank_ == root ? at(call.inputs[rank_], offset) : scratch_->buffer(root) + rank_ * area;
        copyBytes(at(call.outputs[0], offset), from, count);
      });
}

/// Exchanges all ranks' tables of sizes, on which the rounds of an all-to-all depend.
/// @return the largest size of any rank.
/// @throws std::invalid_argument on every rank, if one of them sends a size that the receiver does not
/// expect.
std::uint64_t SharedCollectives::agreeOnSizes(Running& running) {
  const Collective& call = running.call;
  if (numRanks_ * sizeof(std::uint64_t) > scratch_->bufferBytes()) {
    throw std::invalid_argument("too many ranks for an all_to_all");
  }
  std::uint64_t largest = 0;
  std::string wrong;
  round(
      running, forAll(numRanks_ * sizeof(std::uint64_t)),
      [&](std::byte* buffer) { copyBytes(buffer, call.inputBytes, numRanks_ * sizeof(std::uint64_t)); },
      [&] {
        for (std::size_t rank = 0; rank < numRanks_; ++rank) {
          std::vector<std::uint64_t> table(numRanks_);
          copyBytes(table.data(), scratch_->buffer(rank), numRanks_ * sizeof(std::uint64_t));
          largest = std::max(largest, *std::max_element(table.begin(), table.end()));
          if (table[rank_] != call.outputBytes[rank]) {
            wrong = "rank " + std::to_string(rank) + " sends " + std::to_string(table[rank_]) +
                    " bytes, expected are " + std::to_string(call.outputBytes[rank]);
          }
        }
      });
  // All ranks must agree on whether to continue.
  bool isWrong = false;
  round(
      running, forAll(1), [&](std::byte* buffer) { *buffer = std::byte{!wrong.empty()}; },
      [&] {
        for (std::size_t rank = 0; rank < numRanks_; ++rank) {
          const bool isComplaint = rank == rank_ ? !wrong.empty() : *scratch_->buffer(rank) != std::byte{0};
          if (isComplaint && wrong.empty()) wrong = "sizes do not fit, says rank " + std::to_string(rank);
          isWrong = isWrong || isComplaint;
        }
      });
  if (isWrong) throw std::invalid_argument(wrong);
  return largest;
}

void SharedCollectives::allToAll(Running& running) {
  const Collective& call = running.call;
  const std::uint64_t largest = agreeOnSizes(running);
  const std::size_t area = areaBytes(call);
  const auto piece = [](std::uint64_t whole, std::size_t offset, std::size_t count) {
    return offset < whole ? std::min<std::size_t>(count, whole - offset) : 0;
  };
  inPieces(
      running, largest, area, [&](std::size_t count) { return forEach(area * numRanks_, area, count); },
      [&](std::byte* buffer, std::size_t offset, std::size_t count) {
        for (std::size_t rank = 0; rank < numRanks_; ++rank) {
          if (rank != rank_) {
            copyBytes(buffer + rank * area, at(call.inputs[rank], offset),
                      piece(call.inputBytes[rank], offset, count));
          }
        }
      },
      [&](std::size_t offset, std::size_t count) {
        for (std::size_t rank = 0; rank < numRanks_; ++rank) {
          const void* from =
              rank == rank_ ? at(call.inputs[rank_], offset) : scratch_->buffer(rank) + rank_ * area;
          copyBytes(at(call.outputs[rank], offset), from, piece(call.outputBytes[rank], offset, count));
        }
      });
}

}  // namespace coarse
