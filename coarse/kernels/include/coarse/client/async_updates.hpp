#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "coarse/client/async_reducer.hpp"
#include "coarse/client/async_reducer_interface.h"
#include "coarse/reduce/update.hpp"

namespace coarse {

/// Has memory devices update parameters by name, with gradients that come as AsyncReducer's tensors do, for
/// frameworks whose parameters cannot lie in shared memory: each gets a copy of what was updated.
///
/// Thread safety: any thread may call anything.
class AsyncUpdates {
 public:
  /// Where one parameter of a group with an optimizer lies for this client.
  struct Place {
    std::uint32_t group = 0;
    std::uint32_t tensor = 0;
    std::size_t numBytes = 0;
    std::byte* parameter = nullptr;      // shared by the workers of the node
    UpdateSettings* settings = nullptr;  // this client's
    bool writes = false;  // whether this client's values are everybody's where they differ: one client's are
    // In memory that all clients share: of each of them how many results it has copied. A value that differs
    // is written when all have the last one. Null where no client writes.
    std::atomic<std::uint32_t>* copied = nullptr;
    std::size_t numClients = 0;
    std::size_t client = 0;
  };
  using Done = AsyncReducer::Done;

  /// @param reducer outlives this; the memory of a place stays until it is removed.
  explicit AsyncUpdates(AsyncReducer& reducer);
  AsyncUpdates(const AsyncUpdates&) = delete;
  AsyncUpdates& operator=(const AsyncUpdates&) = delete;
  /// Closes the reducer, which knows of what is under way here.
  ~AsyncUpdates() { reducer_.close(); }

  /// Names a parameter. @throws std::invalid_argument if the name is taken.
  void add(const std::string& key, const Place& place);
  /// Forgets a parameter, as AsyncReducer::remove() does a tensor; nothing refers to its memory any more.
  bool remove(const std::string& key);
  /// Contributes a gradient, by the mean of which the parameter is updated.
  ///
  /// @param value the parameter as this worker has it: the writer's is what is updated, so that what was
  /// assigned since the last update is not lost.
  /// @param updated is given the parameter afterwards; may be `value`.
  /// @param settings the same on every worker.
  /// @param done is called from any thread, maybe before this returns; buffers stay until then.
  void update(std::string_view key, const void* gradient, const void* value, void* updated,
              std::size_t numBytes, const UpdateSettings& settings, Done done);
  /// What libraries that are built elsewhere call; valid as long as this.
  const CoarseAsyncUpdates& interface() const noexcept { return interface_; }

 private:
  struct Parameter {
    Place place;
    std::uint32_t numUpdates = 0;  // that have ended; changed by the one that is under way
    bool isUnderWay = false;
  };

  std::string begin(std::string_view key, std::size_t numBytes, Parameter*& parameter);
  std::string write(const Parameter& parameter, const void* value);
  void finish(Parameter& parameter, void* updated, const char* failure, const Done& done);

  AsyncReducer& reducer_;
  const CoarseAsyncUpdates interface_;
  std::mutex mutex_;  // guards what follows
  std::unordered_map<std::string, Parameter> parameters_;
};

}  // namespace coarse
