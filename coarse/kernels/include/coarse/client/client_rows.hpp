#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "coarse/reduce/dtype.hpp"
#include "coarse/reduce/row_buffer.hpp"
#include "coarse/shared_memory/shared_memory.hpp"

namespace coarse {

/// One client's end of the rows of one table: its contribution, and the result of all clients.
///
/// Thread safety: one caller at a time; none between the push of the table and its result.
class ClientRows {
 public:
  /// @param fd the client's sparse segment of rows, sealed; the caller closes it.
  /// @param segmentBytes GroupPlan::rowsBytes().
  /// @throws std::system_error if it can't be mapped.
  ClientRows(int fd, std::size_t segmentBytes, const RowTable& table, DType dtype);
  ClientRows(const ClientRows&) = delete;
  ClientRows& operator=(const ClientRows&) = delete;
  ~ClientRows();

  std::size_t rowBytes() const noexcept { return table_.rowBytes; }

  /// Sets this client's next contribution. Rows may come in any order; rows with the same number are summed
  /// in that order.
  /// @param numbers, values of `count` rows, one after the other.
  /// @returns the number of distinct rows.
  /// @throws std::invalid_argument for a number outside the table, std::system_error (ENOSPC) if there is no
  /// memory for the rows; then nothing is contributed.
  std::uint64_t give(const std::int64_t* numbers, const void* values, std::uint64_t count);
  /// Allocates memory for a result of up to `mostRows` rows. @throws std::system_error (ENOSPC).
  void expect(std::uint64_t mostRows);
  /// The rows of all clients, after the table was pulled.
  RowList result() const noexcept { return buffer().mean(); }
  std::uint64_t resultCount() const noexcept { return result().size(table_.numRows); }

 private:
  struct Taken {
    std::size_t numbers = 0, values = 0;
  };

  RowBuffer buffer() const noexcept {
    return {mapping_.data() + table_.offset, table_.numRows, table_.rowBytes};
  }
  void take(std::size_t offset, std::size_t length, std::size_t& taken) const;
  void sortByNumber(const std::int64_t* numbers, std::uint64_t count);

  const int fd_;
  const RowTable table_;
  const DType dtype_;
  const RowBuffer::ArrayPlaces places_;
  Mapping mapping_;
  Taken given_, result_;                 // bytes of the arrays that have pages
  std::vector<std::uint64_t> order_;     // positions of rows by ascending number; keeps its memory
  std::vector<const void*> sameNumber_;  // likewise
};

}  // namespace coarse
