#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "coarse/client/async_reducer_interface.h"
#include "coarse/client/client.hpp"
#include "coarse/shared_memory/forks.hpp"
#include "coarse/shared_memory/waiting.hpp"

namespace coarse {

/// Reduces tensors by name, any number concurrently, for frameworks that call from many threads in their own
/// orders without waiting.
///
/// The caller's thread pushes a tensor, while it is in that core's cache. A thread of this class waits for
/// results, copies them out and reports them. A request for a name that is in progress waits for its turn.
///
/// The first failure of any kind is final: it ends all requests in progress and all later ones.
///
/// Thread safety: any thread may call anything. While this object exists, no one else may push or pull
/// tensors of the client.
/// client.
class AsyncReducer {
 public:
  /// Called once for each reduce() with null, or with the failure.
  using Done = std::function<void(const char* failure)>;
  /// Describes in words the end of a wait for a tensor of a group; called without locks.
  using Describe = std::function<std::string(WaitStatus, std::uint32_t group, std::uint32_t tensor)>;

  /// @param client must outlive this.
  /// @param timeoutSeconds longest time without any result while some are awaited.
  AsyncReducer(Client& client, double timeoutSeconds, Describe describe);
  AsyncReducer(const AsyncReducer&) = delete;
  AsyncReducer& operator=(const AsyncReducer&) = delete;
  ~AsyncReducer();

  /// Names a registered tensor. @throws std::invalid_argument if the name is taken.
  void add(const std::string& key, std::uint32_t group, std::uint32_t tensor, std::size_t numBytes);
  /// Forgets a tensor and frees its name. @returns whether it was removed; false while it is in progress.
  bool remove(const std::string& key);
  /// Contributes `source` and writes the result to `destination`, which may be the same.
  /// @param source, destination null if the tensor already lies, or stays, in shared memory.
  /// @param done is called from any thread, perhaps before this returns; both buffers must stay valid until
  /// then.
  /// @param flags of the descriptors: the work to be done with the tensor.
  /// @param weights if the result is a weighted sum, whose weights include those of clients that may have
  /// been lost since: Client::compensateForLost(). They must stay valid until `done`.
  void reduce(std::string_view key, const void* source, void* destination, std::size_t numBytes, Done done,
              std::uint8_t flags = kPresent, Weights weights = {});
  /// Waits, in the caller's thread, for other clients' changes to memory that all share. Such a change wakes
  /// no one and takes no longer than a copy.
  /// @param group, tensor named in the failure's description.
  /// @returns the failure, if any; empty once `isDone` returns true.
  std::string awaitOthers(std::uint32_t group, std::uint32_t tensor, const std::function<bool()>& isDone);
  /// Ends requests in progress with a failure, and ends the thread; returns when no caller is inside any
  /// more. Idempotent; a Done must not call it. No effect in a fork, which has no such thread.
  void close() noexcept;
  /// The interface for separately built libraries; valid until close().
  const CoarseAsyncReducer& interface() const noexcept { return interface_; }

 private:
  struct Request {
    const void* source = nullptr;
    void* destination = nullptr;
    Done done;
    std::uint8_t flags = kPresent;
    Weights weights;
  };
  struct Tensor {
    std::uint32_t group = 0;
    std::uint32_t index = 0;
    std::size_t numBytes = 0;
    bool isUnderWay = false;
    std::deque<Request> waiting;  // for their turn
  };
  struct UnderWay {
    Tensor* tensor = nullptr;
    ShardRange shards;
    Request request;
    bool isDone = false;
  };

  std::string take(std::string_view key, std::size_t numBytes, Request& request);
  std::string start(Tensor& tensor, Request& request);
  void refuseWaiting(Tensor& tensor, const char* reason);
  void run();
  bool collect();
  std::deque<UnderWay> takeDone();
  void finish(UnderWay&& finished);
  void putBack(std::deque<UnderWay> interrupted, WaitStatus status);
  void fail(WaitStatus status);
  void failAll(std::string reason);
  std::string describeOldest(WaitStatus status);
  std::string describe(WaitStatus status, std::uint32_t group, std::uint32_t tensor);
  std::string failure();

  Client& client_;
  const double timeoutSeconds_;
  const Describe describe_;
  CoarseAsyncReducer interface_;
  std::atomic<int> numSubmitting_ = 0;
  std::atomic<int> numInside_ = 0;  // callers, for whom close() waits

  // Guards the members below. A tensor is pushed and pulled without the mutex, by the thread that marked it
  // as in progress.
  std::mutex mutex_;
  std::condition_variable hasWork_;
  std::unordered_map<std::string, Tensor> tensors_;
  std::deque<UnderWay> underWay_;  // the oldest first
  WaitStatus pushStatus_ = WaitStatus::kDone;
  std::string failure_;
  bool isStopping_ = false;

  const Owner owner_;
  std::thread thread_;  // last: it needs all members above
};

}  // namespace coarse
