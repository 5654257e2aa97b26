#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "coarse/client/async_reducer.hpp"
#include "coarse/client/async_reducer_interface.h"
#include "coarse/client/client_rows.hpp"

namespace coarse {

/// Reduces rows of tables by name, as AsyncReducer does whole tensors. It works through an AsyncReducer:
/// workers sum their row counts, so that each can allocate memory for the result, and then push the rows.
///
/// A request for a name that is in progress waits for its turn. A failure in the reducer is a failure here
/// too. If one worker refuses rows, only that worker's request fails: the others wait for the rows.
///
/// Thread safety: any thread may call anything.
class AsyncRows {
 public:
  /// The rows of all workers by ascending number, without duplicates; valid during the call that receives
  /// them.
  struct Result {
    std::uint64_t count = 0;
    const std::uint64_t* numbers = nullptr;
    const std::byte* values = nullptr;
    const double* factors = nullptr;  // by which the receiver multiplies each row; null for 1
  };
  /// Called once for each reduce(): null and the result, or the failure.
  using Done = std::function<void(const char* failure, const Result& result)>;

  /// @param client, reducer the reducer's client; both outlive this.
  AsyncRows(Client& client, AsyncReducer& reducer);
  AsyncRows(const AsyncRows&) = delete;
  AsyncRows& operator=(const AsyncRows&) = delete;
  /// Closes the reducer, which has requests of this object in progress.
  ~AsyncRows() { reducer_.close(); }

  /// Names a registered table.
  /// @param counter a tensor of the same group that is not a table: one int64, reduced by sum.
  /// @param rowsFd this client's segment of rows; the caller closes it.
  /// @throws std::invalid_argument if the name is taken, or the tensors are not such tensors;
  /// std::system_error if rows can't be mapped.
  void add(const std::string& key, std::uint32_t group, std::uint32_t counter, std::uint32_t table,
           int rowsFd);
  /// Forgets a table, as AsyncReducer::remove() does a tensor, and unmaps its rows.
  bool remove(const std::string& key);
  /// Contributes `count` rows, in any order; rows with the same number are summed.
  /// @param numbers, values are read before this returns, unless the name is in progress: then they must stay
  /// valid until `done`.
  /// @param valueBytes of all values.
  /// @param done is called from any thread, perhaps before this returns.
  /// @param weights as for AsyncReducer::reduce().
  void reduce(std::string_view key, const std::int64_t* numbers, const void* values, std::uint64_t count,
              std::size_t valueBytes, Done done, Weights weights = {});
  /// The interface for separately built libraries; valid as long as this object.
  const CoarseAsyncRows& interface() const noexcept { return interface_; }

 private:
  struct Request {
    const std::int64_t* numbers = nullptr;
    const void* values = nullptr;
    std::uint64_t count = 0;
    Done done;
    Weights weights;
  };
  struct Table {
    std::string counterKey, rowsKey;
    std::uint32_t group = 0, tensor = 0;
    std::size_t numBytes = 0;
    std::unique_ptr<ClientRows> rows;
    std::int64_t numRows = 0;  // of this client, then of all
    Request request;           // in progress
    bool isUnderWay = false;   // guarded by mutex_, as the next member
    std::deque<Request> waiting;
  };

  Table* find(std::string_view key);
  void begin(Table& table);
  void push(Table& table);
  void finish(Table& table, const char* failure);
  std::vector<double> factorsOf(const Table& table, const Result& rows) const;

  Client& client_;
  AsyncReducer& reducer_;
  const CoarseAsyncRows interface_;
  std::mutex mutex_;  // guards the map of tables and their state
  std::unordered_map<std::string, Table> tables_;
};

}  // namespace coarse
