#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>

#include "coarse/gpu/cuda_driver.hpp"
#include "coarse/gpu/nccl_api.hpp"
#include "coarse/reduce/dtype.hpp"
#include "coarse/reduce/reduce.hpp"

/// NCCL, loaded at its first use; nothing here needs NCCL or CUDA at build or import time.
///
/// Streams execute their operations in order, without the host. All ranks of a communicator give it the same
/// operations in the same order, on any streams. An operation ends when all ranks have reached it, so no
/// stream may wait for work that stands behind one on another rank.
namespace coarse::nccl {

/// NCCL is missing, or one of its calls failed. The message gives the call, NCCL's name and text of the
/// error, and a remedy.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Version {
  int major;
  int minor;
  int patch;
};

/// Names a future communicator: one process gets it from a Library, and sends it to all ranks.
class UniqueId {
 public:
  static constexpr std::size_t kNumBytes = sizeof(UniqueIdBytes::bytes);

  explicit UniqueId(const UniqueIdBytes& id) : id_(id) {}
  /// @throws std::invalid_argument unless there are kNumBytes.
  static UniqueId fromBytes(std::string_view bytes);

  std::string bytes() const { return std::string(id_.bytes, kNumBytes); }
  const UniqueIdBytes& id() const noexcept { return id_; }

 private:
  UniqueIdBytes id_;
};

/// One libnccl, which stays loaded until the process ends. Any number of threads may use it.
class Library {
 public:
  /// @param path of the library, or a name that the dynamic linker finds.
  /// @throws Error that names the missing part: the library, one of its functions.
  explicit Library(const std::string& path = "libnccl.so.2");

  const Api& api() const noexcept { return api_; }
  const std::string& path() const noexcept { return path_; }
  const Version& version() const noexcept { return version_; }
  /// Returns a new id at each call. The calling process must live until all ranks have joined: NCCL lets the
  /// ranks meet in a thread of that process.
  UniqueId makeUniqueId() const;
  /// @throws Error unless `result` is kSuccess.
  /// @param call the function's name, and for which object it was called.
  void check(Result result, const std::string& call) const;

 private:
  std::string path_;
  Api api_;
  Version version_{};
};

using SharedLibrary = std::shared_ptr<const Library>;

/// One rank's end of a communicator, with one GPU.
///
/// Thread safety: one caller at a time, except check() and abort(), which any thread may call at any time.
class Communicator {
 public:
  /// Joins. Blocks until all ranks have joined, for any time: only the end of the process ends this wait, so
  /// let ranks join only when all of them are ready.
  /// @param rank one of 0 to numRanks - 1, each once, and each with its own GPU: NCCL before 2.30, and later
  /// versions without NCCL_MULTI_RANK_GPU_ENABLE=1, refuse two ranks on one GPU.
  /// @throws std::invalid_argument unless 0 <= rank < numRanks; Error if NCCL refuses or fails.
  Communicator(SharedLibrary library, const UniqueId& id, int rank, int numRanks,
               cuda::SharedContext context);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  /// Aborts. @pre the operations of all ranks are done, or their results are not needed: a peer may still be
  /// reading this rank's data when this rank's own streams are done.
  ~Communicator();

  const SharedLibrary& library() const noexcept { return library_; }
  int rank() const noexcept { return rank_; }
  int numRanks() const noexcept { return numRanks_; }
  const cuda::SharedContext& context() const noexcept { return context_; }

  /// Gives `stream` a sum, maximum or mean of the ranks' arrays, the same bits for all ranks. The result
  /// differs from reduce(): NCCL divides the terms of a mean before it adds. Its order of addition depends on
  /// version, machine and `count`. It rounds 16-bit types at each addition. Its maximum is a number if one
  /// input is NaN and another is not. Returns when the stream has the operation; a first call may wait for
  /// the other ranks' first, to connect.
  /// @param send, receive in the GPU's memory, of `count` elements; may be the same, and must not otherwise
  /// overlap.
  /// @throws std::invalid_argument for a mean of other types than float32 and float64, which NCCL truncates
  /// or rounds twice; Error if NCCL fails, or after abort().
  void allReduce(const void* send, void* receive, std::size_t count, DType dtype, ReduceOp op,
                 cuda::StreamHandle stream);
  /// @throws Error if an operation has failed since, or this was aborted. Operations can also hang without an
  /// error: if a peer is alive and does not reach them, or has died without any connection to it.
  void check() const;
  /// Ends operations in progress, whose results are then arbitrary, and all waits for peers; other ranks are
  /// not notified. A call on another thread ends with an Error. Idempotent.
  void abort() noexcept;
  /// Waits for a call's end if NCCL runs it in the background (NCCL_COMM_BLOCKING=0).
  /// @param result the call's return value. @throws Error if it fails, or after abort().
  void settle(Result result, const char* call) const;

 private:
  std::string described(const char* call) const;
  /// The state of the last call, and the operations before it: kInProgress, or their result.
  Result asyncState() const;
  /// @pre mutex_ is held. @throws Error after abort().
  CommHandle usableHandle() const;

  SharedLibrary library_;
  int rank_;
  int numRanks_;
  cuda::SharedContext context_;
  mutable std::mutex mutex_;
  CommHandle handle_ = nullptr;  // guarded by mutex_; nullptr after abort()
};

/// Collects the operations that this thread gives a communicator until end(), and gives them to NCCL as one,
/// which takes fewer launches.
class GroupScope {
 public:
  /// @param communicator must outlive this.
  explicit GroupScope(const Communicator& communicator);
  GroupScope(const GroupScope&) = delete;
  GroupScope& operator=(const GroupScope&) = delete;
  /// Ends the group if end() has not: NCCL cannot revoke operations.
  ~GroupScope();

  /// Gives the operations to their streams. @throws Error if one of them fails.
  void end();

 private:
  const Communicator& communicator_;
  const Api& api_;
  bool isOpen_ = false;
};

}  // namespace coarse::nccl
