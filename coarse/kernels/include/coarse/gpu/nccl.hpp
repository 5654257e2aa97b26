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

/// NCCL, loaded when it is asked for; nothing here needs NCCL or CUDA to be built or imported.
///
/// What is given to streams is done in their order, without the host. All ranks of a communicator give it the
/// same operations in the same order, on whatever streams; an operation ends when all ranks have come to it,
/// so no stream may wait for what stands behind one on another rank.
namespace coarse::nccl {

/// NCCL is missing, or a call of it failed: which, NCCL's name and text of the error, what to do.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Version {
  int major;
  int minor;
  int patch;
};

/// Names a communicator that is to be made: one process asks a Library for it, and sends it to all ranks.
class UniqueId {
 public:
  static constexpr std::size_t kNumBytes = sizeof(UniqueIdBytes::bytes);

  explicit UniqueId(const UniqueIdBytes& id) : id_(id) {}
  /// @throws std::invalid_argument unless these are kNumBytes.
  static UniqueId fromBytes(std::string_view bytes);

  std::string bytes() const { return std::string(id_.bytes, kNumBytes); }
  const UniqueIdBytes& id() const noexcept { return id_; }

 private:
  UniqueIdBytes id_;
};

/// One libnccl, which stays loaded to the end of the process. Any number of threads may use it.
class Library {
 public:
  /// @param path of the library, or a name that the dynamic linker finds.
  /// @throws Error that says what is missing: the library, one of its functions.
  explicit Library(const std::string& path = "libnccl.so.2");

  const Api& api() const noexcept { return api_; }
  const std::string& path() const noexcept { return path_; }
  const Version& version() const noexcept { return version_; }
  /// A new one at each call. Until all ranks have joined, the process that has asked must live: NCCL lets the
  /// ranks meet in a thread of that process.
  UniqueId makeUniqueId() const;
  /// @throws Error unless `result` is kSuccess.
  /// @param call the function's name, and on whose behalf it was called.
  void check(Result result, const std::string& call) const;

 private:
  std::string path_;
  Api api_;
  Version version_{};
};

using SharedLibrary = std::shared_ptr<const Library>;

/// One rank's end of a communicator, and so one GPU.
///
/// Thread safety: one caller at a time, except check() and abort(), which any thread may call at any time.
class Communicator {
 public:
  /// Joins. Blocks until all ranks have, however long they take: nothing but the end of the process ends this
  /// wait, so let ranks join only when all of them are there.
  /// @param rank one of 0 to numRanks - 1, each once, and each with a GPU of its own: NCCL before 2.30, and
  /// later ones without NCCL_MULTI_RANK_GPU_ENABLE=1, refuse two ranks on one GPU.
  /// @throws std::invalid_argument unless 0 <= rank < numRanks; Error if NCCL refuses or fails.
  Communicator(SharedLibrary library, const UniqueId& id, int rank, int numRanks,
               cuda::SharedContext context);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  /// Aborts. @pre the operations of all ranks are done, or nobody needs their results: a peer may still be
  /// reading what this rank has for it when this rank's own streams are through.
  ~Communicator();

  const SharedLibrary& library() const noexcept { return library_; }
  int rank() const noexcept { return rank_; }
  int numRanks() const noexcept { return numRanks_; }
  const cuda::SharedContext& context() const noexcept { return context_; }

  /// Gives `stream` a sum, maximum or mean of the ranks' arrays, the same bits for all ranks. It is not
  /// reduce(): NCCL divides what a mean is of before it adds, and adds in an order of its own, which depends
  /// on version, machine and `count`, rounds 16-bit types at each addition, and its maximum is a number where
  /// an input is NaN and another is not. Returns when the stream has it; a first call may wait for the other
  /// ranks' first, to connect.
  /// @param send, receive in the GPU's memory, of `count` elements; may be the same, and must not otherwise
  /// overlap.
  /// @throws std::invalid_argument for a mean of other types than float32 and float64, which NCCL truncates
  /// or rounds twice; Error if NCCL fails, or after abort().
  void allReduce(const void* send, void* receive, std::size_t count, DType dtype, ReduceOp op,
                 cuda::StreamHandle stream);
  /// @throws Error if something has failed since, or this was aborted. Operations can hang instead, without
  /// an error: where a peer is alive and does not come, or has died and nothing was connected to it.
  void check() const;
  /// Ends what is under way, whose results are then arbitrary, and whatever waits for a peer; other ranks are
  /// told nothing. A call on another thread ends with an Error. Again: nothing.
  void abort() noexcept;
  /// Waits for a call's end where NCCL does it in the background (NCCL_COMM_BLOCKING=0).
  /// @param result what the call has returned. @throws Error if it fails, or after abort().
  void settle(Result result, const char* call) const;

 private:
  std::string described(const char* call) const;
  /// Of the last call, and the operations before it: kInProgress, or how they ended.
  Result asyncState() const;
  /// @pre mutex_ is held. @throws Error once this was aborted.
  CommHandle usableHandle() const;

  SharedLibrary library_;
  int rank_;
  int numRanks_;
  cuda::SharedContext context_;
  mutable std::mutex mutex_;
  CommHandle handle_ = nullptr;  // guarded by mutex_; nullptr once it was aborted
};

/// Holds the operations that this thread gives a communicator until end(), and gives them to NCCL as one,
/// which takes fewer launches.
class GroupScope {
 public:
  /// @param communicator must outlive this.
  explicit GroupScope(const Communicator& communicator);
  GroupScope(const GroupScope&) = delete;
  GroupScope& operator=(const GroupScope&) = delete;
  /// Ends the group if end() has not: NCCL has no way to take back what was given.
  ~GroupScope();

  /// Gives the operations to their streams. @throws Error if one of them fails.
  void end();

 private:
  const Communicator& communicator_;
  const Api& api_;
  bool isOpen_ = false;
};

}  // namespace coarse::nccl
