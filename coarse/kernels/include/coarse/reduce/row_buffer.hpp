#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "coarse/shared_memory/layout.hpp"

/// Gradients of tables, where most rows are zero: only the other rows are sent, with their numbers
/// (docs/design/rows.md).
namespace coarse {

/// A tensor whose contributions are rows.
struct RowTable {
  std::uint32_t rowElements = 0;  // 0 for a tensor that is not a table
  std::uint64_t numRows = 0;
  std::size_t rowBytes = 0;
  std::size_t offset = 0;  // of its RowBuffer in a client's segment of rows
};

/// Rows by ascending number, without duplicates: of a worker's contribution, or of a mean.
///
/// The worker that shares the memory can write anything to it at any time. Readers copy numbers out before
/// they check them, and stop at the first one that is out of order.
struct RowList {
  std::atomic<std::uint64_t>* count = nullptr;
  std::uint64_t* numbers = nullptr;
  std::byte* values = nullptr;

  /// Number of rows; never more than fit.
  std::uint64_t size(std::uint64_t capacity) const noexcept {
    const std::uint64_t claimed = count->load(std::memory_order_relaxed);
    return claimed < capacity ? claimed : capacity;
  }
  std::uint64_t number(std::uint64_t position) const noexcept {
    return __atomic_load_n(numbers + position, __ATOMIC_RELAXED);
  }
};

/// The places of one client's rows of one table, and of the mean of all clients' rows. Each array has room
/// for every row of the table, in sparse memory: the client allocates pages before it needs them.
class RowBuffer {
 public:
  RowBuffer(std::byte* base, std::uint64_t numRows, std::size_t rowBytes) noexcept
      : RowBuffer(ArrayPlaces(numRows, rowBytes), base) {}

  RowList given() const noexcept { return {header_, given_, givenValues_}; }
  RowList mean() const noexcept { return {header_ + 1, mean_, meanValues_}; }

  /// Offsets of the arrays behind the two counts, each on its own pages.
  struct ArrayPlaces {
    ArrayPlaces(std::uint64_t numRows, std::size_t rowBytes) noexcept;
    std::size_t given, givenValues, mean, meanValues, end;
  };

 private:
  RowBuffer(const ArrayPlaces& places, std::byte* base) noexcept
      : header_(reinterpret_cast<std::atomic<std::uint64_t>*>(base)),
        given_(reinterpret_cast<std::uint64_t*>(base + places.given)),
        givenValues_(base + places.givenValues),
        mean_(reinterpret_cast<std::uint64_t*>(base + places.mean)),
        meanValues_(base + places.meanValues) {}

  std::atomic<std::uint64_t>* header_;
  std::uint64_t* given_;
  std::byte* givenValues_;
  std::uint64_t* mean_;
  std::byte* meanValues_;
};

}  // namespace coarse
