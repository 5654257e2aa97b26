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

#include "coarse/client/async_reducer.hpp"
#include "coarse/client/async_reducer_interface.h"
#include "coarse/client/client_rows.hpp"

namespace coarse {

/// Reduces rows of tables by name, as AsyncReducer does whole tensors, through which it works: workers add up
/// how many rows they have, so that each can take the memory for the result, and then the rows are pushed.
///
/// A name that is asked for again before its result is there takes its turn. What fails in the reducer fails
/// here too. Rows that are refused on one worker fail there alone: the others wait for them.
///
/// Thread safety: any thread may call anything.
class AsyncRows {
 public:
  /// The rows of all workers by ascending number, none twice; valid during the call that is given them.
  struct Result {
    std::uint64_t count = 0;
    const std::uint64_t* numbers = nullptr;
    const std::byte* values = nullptr;
  };
  /// Told once for each reduce(): null and the result, or what failed.
  using Done = std::function<void(const char* failure, const Result& result)>;

  /// @param client, reducer the reducer's client; both outlive this.
  AsyncRows(Client& client, AsyncReducer& reducer);
  AsyncRows(const AsyncRows&) = delete;
  AsyncRows& operator=(const AsyncRows&) = delete;
  /// Closes the reducer, which knows of what is under way here.
  ~AsyncRows() { reducer_.close(); }

  /// Names a registered table.
  /// @param counter a whole tensor of the same group, one int64, a sum.
  /// @param rowsFd this client's segment of rows; stays the caller's.
  /// @throws std::invalid_argument if the name is taken, or the tensors are no such ones; std::system_error
  /// if rows can't be mapped.
  void add(const std::string& key, std::uint32_t group, std::uint32_t counter, std::uint32_t table,
           int rowsFd);
  /// Forgets a table, as AsyncReducer::remove() does a tensor, and unmaps its rows.
  bool remove(const std::string& key);
  /// Contributes `count` rows, in any order; those that come several times are added up.
  /// @param numbers, values are read before this returns, unless the name is under way: then they stay until
  /// `done`.
  /// @param valueBytes of all values.
  /// @param done is called from any thread, maybe before this returns.
  void reduce(std::string_view key, const std::int64_t* numbers, const void* values, std::uint64_t count,
              std::size_t valueBytes, Done done);
  /// What libraries that are built elsewhere call; valid as long as this.
  const CoarseAsyncRows& interface() const noexcept { return interface_; }

 private:
  struct Request {
    const std::int64_t* numbers = nullptr;
    const void* values = nullptr;
    std::uint64_t count = 0;
    Done done;
  };
  struct Table {
    std::string counterKey, rowsKey;
    std::size_t numBytes = 0;
    std::unique_ptr<ClientRows> rows;
    std::int64_t numRows = 0;  // of this client, then of all
    Request request;           // that is under way
    bool isUnderWay = false;   // this and what follows is guarded by mutex_
    std::deque<Request> waiting;
  };

  Table* find(std::string_view key);
  void begin(Table& table);
  void push(Table& table);
  void finish(Table& table, const char* failure);

  Client& client_;
  AsyncReducer& reducer_;
  const CoarseAsyncRows interface_;
  std::mutex mutex_;  // guards the table of tables, and what each says
  std::unordered_map<std::string, Table> tables_;
};

}  // namespace coarse
