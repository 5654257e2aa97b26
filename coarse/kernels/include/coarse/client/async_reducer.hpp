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

/// Reduces tensors by name, as many at once as there are, for frameworks that call from many threads in
/// orders of their own and do not wait.
///
/// A tensor is pushed in the caller's thread, while it is in that core's cache; a thread of this class waits
/// for results, copies them out and says so. A name that is asked for again before its result is there takes
/// its turn.
///
/// The first failure, of whatever, is everybody's: all that is under way ends with it, and so does what comes
/// later.
///
/// Thread safety: any thread may call anything. While it exists nobody else may push or pull tensors of the
/// client.
class AsyncReducer {
 public:
  /// Told once for each reduce(): null, or what failed.
  using Done = std::function<void(const char* failure)>;
  /// Says in words what a wait for a tensor of a group ended with; called without locks.
  using Describe = std::function<std::string(WaitStatus, std::uint32_t group, std::uint32_t tensor)>;

  /// @param client must outlive this.
  /// @param timeoutSeconds how long it may take until a result comes while some are awaited.
  AsyncReducer(Client& client, double timeoutSeconds, Describe describe);
  AsyncReducer(const AsyncReducer&) = delete;
  AsyncReducer& operator=(const AsyncReducer&) = delete;
  ~AsyncReducer();

  /// Names a registered tensor. @throws std::invalid_argument if the name is taken.
  void add(const std::string& key, std::uint32_t group, std::uint32_t tensor, std::size_t numBytes);
  /// Forgets a tensor, whose name is free then. @returns whether it is gone: not while it is under way.
  bool remove(const std::string& key);
  /// Contributes `source`, and has the result written to `destination`, which may be the same.
  /// @param source, destination null for what lies in shared memory already, or stays there.
  /// @param done is called from any thread, maybe before this returns; both buffers stay until then.
  /// @param flags of the descriptors: what becomes of the tensor.
  void reduce(std::string_view key, const void* source, void* destination, std::size_t numBytes, Done done,
              std::uint8_t flags = kPresent);
  /// Waits, in the caller's thread, for what other clients do to memory that all share, which wakes nobody
  /// and takes them no longer than a copy.
  /// @param group, tensor that it is about, for the failure's description.
  /// @returns what failed meanwhile; empty once `isDone` says so.
  std::string awaitOthers(std::uint32_t group, std::uint32_t tensor, const std::function<bool()>& isDone);
  /// Ends what is under way with a failure, and the thread; returns when no caller is inside any more.
  /// Idempotent; not to be called by a Done. Does nothing in a fork, which has no such thread.
  void close() noexcept;
  /// What libraries that are built elsewhere call; valid until close().
  const CoarseAsyncReducer& interface() const noexcept { return interface_; }

 private:
  struct Request {
    const void* source = nullptr;
    void* destination = nullptr;
    Done done;
    std::uint8_t flags = kPresent;
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

  // Guards what follows. A tensor is pushed and pulled without it, by whoever marked it as under way.
  std::mutex mutex_;
  std::condition_variable hasWork_;
  std::unordered_map<std::string, Tensor> tensors_;
  std::deque<UnderWay> underWay_;  // the oldest first
  WaitStatus pushStatus_ = WaitStatus::kDone;
  std::string failure_;
  bool isStopping_ = false;

  const Owner owner_;
  std::thread thread_;  // last: all else is there when it starts
};

}  // namespace coarse
