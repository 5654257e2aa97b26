#include "coarse/client/client_rows.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <system_error>

#include "coarse/reduce/reduce.hpp"

namespace coarse {
namespace {

int duplicate(int fd) {
  const int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) throw std::system_error(errno, std::generic_category(), "a table's rows");
  return copy;
}

}  // namespace

ClientRows::ClientRows(int fd, std::size_t segmentBytes, const RowTable& table, DType dtype)
    : fd_(duplicate(fd)), table_(table), dtype_(dtype), places_(table.numRows, table.rowBytes) {
  try {
    mapping_ = mapSealed(fd, segmentBytes, Mapping::Access::kReadWrite, "rows");
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

ClientRows::~ClientRows() { ::close(fd_); }

std::uint64_t ClientRows::give(const std::int64_t* numbers, const void* values, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) {
    if (numbers[i] < 0 || static_cast<std::uint64_t>(numbers[i]) >= table_.numRows)
      throw std::invalid_argument("row " + std::to_string(numbers[i]) + " is none of the table's " +
                                  std::to_string(table_.numRows));
  }
  sortByNumber(numbers, count);
  std::uint64_t numDifferent = 0;
  for (std::uint64_t i = 0; i < count; ++i)
    numDifferent += i == 0 || numbers[order_[i]] != numbers[order_[i - 1]] ? 1 : 0;
  take(places_.given, numDifferent * sizeof(std::uint64_t), given_.numbers);
  take(places_.givenValues, numDifferent * table_.rowBytes, given_.values);
  const RowList list = buffer().given();
  const auto* const rows = static_cast<const std::byte*>(values);
  std::uint64_t place = 0;
  for (std::uint64_t i = 0; i < count; ++place) {
    const std::int64_t number = numbers[order_[i]];
    sameNumber_.clear();
    for (; i < count && numbers[order_[i]] == number; ++i)
      sameNumber_.push_back(rows + order_[i] * table_.rowBytes);
    void* const out = list.values + place * table_.rowBytes;
    reduce(dtype_, ReduceOp::kSum, sameNumber_.data(), sameNumber_.size(), &out, 1, table_.rowElements, 1);
    list.numbers[place] = static_cast<std::uint64_t>(number);
  }
  list.count->store(place, std::memory_order_relaxed);  // the push publishes it
  return place;
}

void ClientRows::expect(std::uint64_t mostRows) {
  const std::uint64_t most = std::min(mostRows, table_.numRows);
  take(places_.mean, most * sizeof(std::uint64_t), result_.numbers);
  take(places_.meanValues, most * table_.rowBytes, result_.values);
}

/// Allocates instead of only writing: without free memory a store would raise SIGBUS.
void ClientRows::take(std::size_t offset, std::size_t length, std::size_t& taken) const {
  if (length <= taken) return;
  int error = EINTR;
  while (error == EINTR)
    error = ::posix_fallocate(fd_, static_cast<off_t>(table_.offset + offset + taken),
                              static_cast<off_t>(length - taken));
  if (error != 0)
    throw std::system_error(error, std::generic_category(),
                            std::to_string(length - taken) + " bytes more of device memory for rows");
  taken = length;
}

void ClientRows::sortByNumber(const std::int64_t* numbers, std::uint64_t count) {
  order_.resize(count);
  std::iota(order_.begin(), order_.end(), std::uint64_t{0});
  // Rows of one number keep their order, so that sums have the same bits in every run.
  std::sort(order_.begin(), order_.end(), [numbers](std::uint64_t a, std::uint64_t b) {
    return numbers[a] != numbers[b] ? numbers[a] < numbers[b] : a < b;
  });
}

}  // namespace coarse
