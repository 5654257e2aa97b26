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

/// Updates parameters by name in memory devices, with gradients that arrive as AsyncReducer's tensors do. For
/// frameworks whose parameters cannot lie in shared memory: each gets a copy of the updated parameter.
///
/// Thread safety: any thread may call anything.
class AsyncUpdates {
 public:
  /// The place of one parameter of a group with an optimizer, for this client.
  struct Place {
    std::uint32_t group = 0;
    std::uint32_t tensor = 0;
    std::size_t numBytes = 0;
    std::byte* parameter = nullptr;      // shared by the workers of the node
    UpdateSettings* settings = nullptr;  // this client's
    bool writes = false;  // whether this client's values win where clients differ; true for one client
    // For each client: how many results it has copied, in memory that all clients share. A differing value is
    // written when all clients have copied the last result. Null if no client writes.
    std::atomic<std::uint32_t>* copied = nullptr;
    std::size_t numClients = 0;
    std::size_t client = 0;
  };
  using Done = AsyncReducer::Done;

  /// @param reducer outlives this; the memory of a place must stay valid until the place is removed.
  explicit AsyncUpdates(AsyncReducer& reducer);
  AsyncUpdates(const AsyncUpdates&) = delete;
  AsyncUpdates& operator=(const AsyncUpdates&) = delete;
  /// Closes the reducer, which has requests of this object in progress.
  ~AsyncUpdates() { reducer_.close(); }

  /// Names a parameter. @throws std::invalid_argument if the name is taken.
  void add(const std::string& key, const Place& place);
  /// Forgets a parameter, as AsyncReducer::remove() does a tensor; its memory is not referred to any more.
  bool remove(const std::string& key);
  /// Contributes a gradient; the mean of all gradients updates the parameter.
  ///
  /// @param value this worker's value of the parameter. The update starts from the writer's value, so that
  /// assignments since the last update are not lost.
  /// @param updated receives the updated parameter; may be `value`.
  /// @param settings the same on every worker.
  /// @param done is called from any thread, perhaps before this returns; buffers must stay valid until then.
  void update(std::string_view key, const void* gradient, const void* value, void* updated,
              std::size_t numBytes, const UpdateSettings& settings, Done done);
  /// The interface for separately built libraries; valid as long as this object.
  const CoarseAsyncUpdates& interface() const noexcept { return interface_; }

 private:
  struct Parameter {
    Place place;
    std::uint32_t numUpdates = 0;  // that have ended; changed by the one in progress
    bool isUnderWay = false;
  };

  std::string begin(std::string_view key, std::size_t numBytes, Parameter*& parameter);
  std::string write(const Parameter& parameter, const void* value);
  void finish(Parameter& parameter, void* updated, const char* failure, const Done& done);

  AsyncReducer& reducer_;
  const CoarseAsyncUpdates interface_;
  std::mutex mutex_;  // guards the next member
  std::unordered_map<std::string, Parameter> parameters_;
};

}  // namespace coarse
