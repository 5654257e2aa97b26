#include "coarse/tensors/row_reducer.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "coarse/reduce/reduce.hpp"
#include "coarse/tensors/shard_reducer.hpp"

namespace coarse {
namespace {

constexpr std::size_t kPageBytes = 4096;
constexpr std::uint64_t kNoRow = std::numeric_limits<std::uint64_t>::max();

/// Rows [begin, end) of a table: those of one shard.
struct RowRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

/// The present contributions to a shard of a table, in the order of the clients.
struct RowContributions {
  RowContributions(const TensorGroup& group, std::uint32_t shardIndex, bool areReduced) noexcept
      : table(group.table(shardIndex)) {
    for (std::size_t client = 0; client < group.plan().numClients; ++client) {
      if (!group.isPresent(shardIndex, client) || (areReduced && numLists == 1)) continue;
      const RowBuffer buffer = group.rows(client, table);
      clients[numLists] = client;
      lists[numLists++] = areReduced ? buffer.mean() : buffer.given();
    }
  }

  const RowTable& table;
  std::array<RowList, kMostClients> lists;
  std::array<std::size_t, kMostClients> clients;
  std::size_t numLists = 0;
};

/// Visits the rows of a range that some contribution has, by ascending number.
class RowMerge {
 public:
  RowMerge(const RowContributions& all, RowRange range) noexcept : all_(all), range_(range) {
    for (std::size_t k = 0; k < all.numLists; ++k) {
      sizes_[k] = all.lists[k].size(all.table.numRows);
      positions_[k] = firstFrom(all.lists[k], sizes_[k], range.begin);
      heads_[k] = headOf(k, range.begin);
    }
  }

  /// Moves to the next row. @returns false if there is none.
  bool next() noexcept {
    row_ = kNoRow;
    for (std::size_t k = 0; k < all_.numLists; ++k) row_ = std::min(row_, heads_[k]);
    if (row_ == kNoRow) return false;
    numValues_ = 0;
    for (std::size_t k = 0; k < all_.numLists; ++k) {
      if (heads_[k] != row_) continue;
      values_[numValues_] = all_.lists[k].values + positions_[k] * all_.table.rowBytes;
      clients_[numValues_++] = all_.clients[k];
      ++positions_[k];
      heads_[k] = headOf(k, row_ + 1);
    }
    return true;
  }

  std::uint64_t row() const noexcept { return row_; }
  const void* const* values() const noexcept { return values_.data(); }
  std::size_t numValues() const noexcept { return numValues_; }
  std::size_t client(std::size_t value) const noexcept { return clients_[value]; }

 private:
  static std::uint64_t firstFrom(const RowList& list, std::uint64_t size, std::uint64_t row) noexcept {
    std::uint64_t low = 0, high = size;
    while (low < high) {
      const std::uint64_t middle = low + (high - low) / 2;
      if (list.number(middle) < row)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }

  /// The next row of a list, at least `least`; kNoRow at the list's end, or if it is out of order.
  std::uint64_t headOf(std::size_t k, std::uint64_t least) const noexcept {
    if (positions_[k] >= sizes_[k]) return kNoRow;
    const std::uint64_t row = all_.lists[k].number(positions_[k]);
    return row >= least && row < range_.end ? row : kNoRow;
  }

  const RowContributions& all_;
  RowRange range_;
  std::array<std::uint64_t, kMostClients> sizes_, positions_, heads_;
  std::array<const void*, kMostClients> values_;
  std::array<std::size_t, kMostClients> clients_;
  std::size_t numValues_ = 0;
  std::uint64_t row_ = 0;
};

RowRange rangeOf(const TensorGroup& group, std::uint32_t shardIndex) noexcept {
  const std::uint64_t begin = group.firstElement(shardIndex) / group.table(shardIndex).rowElements;
  return {begin, begin + group.plan().shards[shardIndex].numElements / group.table(shardIndex).rowElements};
}

std::uint64_t countRows(const RowContributions& all, RowRange range) noexcept {
  RowMerge merge(all, range);
  std::uint64_t count = 0;
  while (merge.next()) ++count;
  return count;
}

/// @pre the values are those of `merge`'s current row, and have not been overwritten.
std::int32_t firstNonFinite(const RowMerge& merge, DType dtype, std::size_t numElements) noexcept {
  for (std::size_t k = 0; k < merge.numValues(); ++k) {
    if (!std::isfinite(sumOfSquares(dtype, merge.values()[k], numElements)))
      return static_cast<std::int32_t>(merge.client(k));
  }
  return kEverybody;
}

}  // namespace

RowBuffer::ArrayPlaces::ArrayPlaces(std::uint64_t numRows, std::size_t rowBytes) noexcept {
  const std::size_t numbers = roundUp(numRows * sizeof(std::uint64_t), kPageBytes);
  const std::size_t values = roundUp(numRows * rowBytes, kPageBytes);
  given = kPageBytes;
  givenValues = given + numbers;
  mean = givenValues + values;
  meanValues = mean + numbers;
  end = meanValues + values;
}

void reduceRows(TensorGroup& group, std::uint32_t shardIndex, GradientMeasure* measure) noexcept {
  const Shard& shard = group.plan().shards[shardIndex];
  const RowContributions all(group, shardIndex, false);
  if (all.numLists == 0) return;
  const RowTable& table = all.table;
  const RowRange range = rangeOf(group, shardIndex);
  std::array<RowList, kMostClients> results;
  std::size_t numResults = 0;
  for (std::size_t client = 0; client < group.plan().numClients; ++client) {
    if (!group.isAbsent(shardIndex, client)) results[numResults++] = group.rows(client, table).mean();
  }
  // Other threads reduce other shards of the table at the same time.
  std::uint64_t place = countRows(all, {0, range.begin});
  const std::uint32_t divisor = group.divisor(shardIndex);
  std::array<void*, kMostClients> outputs;
  RowMerge merge(all, range);
  for (; merge.next() && place < table.numRows; ++place) {
    for (std::size_t i = 0; i < numResults; ++i) {
      results[i].numbers[place] = merge.row();
      outputs[i] = results[i].values + place * table.rowBytes;
    }
    reduce(shard.dtype, shard.op, merge.values(), merge.numValues(), outputs.data(), numResults,
           table.rowElements, divisor);
    if (measure == nullptr) continue;
    const double squares = sumOfSquares(shard.dtype, outputs[0], table.rowElements);
    measure->sumOfSquares += squares;
    if (!std::isfinite(squares) && measure->nonFiniteOf == kNobody)
      measure->nonFiniteOf = firstNonFinite(merge, shard.dtype, table.rowElements);
  }
  if (range.end < table.numRows) return;
  for (std::size_t i = 0; i < numResults; ++i) results[i].count->store(place, std::memory_order_relaxed);
}

void updateRows(TensorGroup& group, std::uint32_t shardIndex, const UpdateSettings& settings) noexcept {
  const Shard& shard = group.plan().shards[shardIndex];
  const bool isReduced = group.isReduced(shardIndex);
  const RowContributions all(group, shardIndex, isReduced);
  const RowRange range = rangeOf(group, shardIndex);
  const std::size_t numStates = group.plan().numStates;
  const std::uint32_t divisor = isReduced ? 1 : group.divisor(shardIndex);
  RowMerge merge(all, range);
  bool isKept = false;
  while (merge.next()) {
    // Snapshots keep no versions of unchanged shards.
    if (!isKept) group.keepBefore(shardIndex);
    isKept = true;
    const std::size_t row = merge.row() - range.begin;
    const std::size_t element = row * all.table.rowElements;
    std::array<float*, kMostStates> states;
    for (std::size_t i = 0; i < numStates; ++i) states[i] = group.state(shard, i) + element;
    UpdateArrays arrays;
    arrays.gradients = merge.values();
    arrays.numGradients = merge.numValues();
    arrays.parameter = group.parameter(shard) + row * all.table.rowBytes;
    if (group.plan().hasMaster(shard)) arrays.master = group.master(shard) + element;
    arrays.states = states.data();
    arrays.numElements = all.table.rowElements;
    update(settings, shard.dtype, arrays, divisor);
  }
}

}  // namespace coarse
