// A libnccl.so.2 without GPUs, for the libcuda of cuda_stand_in.cpp: the ranks, in one process or several,
// meet in a file that they share. As with NCCL, an operation is a part of its stream, which waits there for
// the other ranks until they come or the communicator is aborted; whatever the streams, a communicator's
// operations run in the order in which they were given. Sums are added in the order of the ranks, 16-bit
// types in float32; as with NCCL, numbers of a mean are divided before they are added.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "coarse/gpu/nccl_api.hpp"
#include "elements.cuh"

using namespace coarse::nccl;
using coarse::cuda::HostFunction;
using coarse::cuda::StreamHandle;

namespace {

constexpr int kMostRanks = 16;
constexpr std::size_t kChunkBytes = 32 << 10;
constexpr std::chrono::seconds kJoinLimit{60};

struct Description {
  std::uint64_t count;
  int type;
  int op;

  bool operator==(const Description& other) const {
    return count == other.count && type == other.type && op == other.op;
  }
};

/// What the ranks share: zeros at first. A rank writes what is its own, then counts its phase up; when all
/// ranks have reached a phase, what they wrote before it can be read, and what they read may be overwritten.
struct Meeting {
  struct Rank {
    std::atomic<std::uint32_t> isTaken;
    std::atomic<std::uint64_t> phase;
    int device;
    Description description;
    alignas(16) std::byte chunk[kChunkBytes];
  };
  std::atomic<int> numRanks;
  std::atomic<int> numJoined;
  Rank ranks[kMostRanks];
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

using SharedMeeting = std::shared_ptr<Meeting>;

thread_local char lastError[256] = "";

template <typename... Arguments>
Result failed(Result result, const char* format, Arguments... arguments) {
  std::snprintf(lastError, sizeof(lastError), format, arguments...);
  return result;
}

/// The meeting of this name: for all ranks of a process the same memory, so that sanitizers see what they do.
SharedMeeting meetingAt(const std::string& path) {
  static std::mutex mutex;
  static auto* const known = new std::map<std::string, std::weak_ptr<Meeting>>;
  const std::lock_guard lock(mutex);
  if (SharedMeeting meeting = (*known)[path].lock()) return meeting;
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return nullptr;
  void* mapped = MAP_FAILED;
  if (::ftruncate(fd, sizeof(Meeting)) == 0)
    mapped = ::mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  if (mapped == MAP_FAILED) return nullptr;
  const SharedMeeting meeting(static_cast<Meeting*>(mapped),
                              [](Meeting* unmapped) { ::munmap(unmapped, sizeof(Meeting)); });
  (*known)[path] = meeting;
  return meeting;
}

template <typename Condition>
void waitUntil(Condition condition) {
  for (int i = 0; !condition(); ++i) {
    if (i < 100) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

/// As NCCL has it: where one number is NaN, the other one.
struct Max {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return std::fmax(a, b);
    return std::max(a, b);
  }
};

template <typename Element, typename Op, bool isMean = false>
void reduceChunks(const Meeting& meeting, int numRanks, std::size_t count, void* result) {
  using Stored = typename Element::Stored;
  using Computed = decltype(Element::load(Stored{}));
  for (std::size_t i = 0; i < count; ++i) {
    const auto at = [&](int rank) -> Computed {
      const Computed value = Element::load(reinterpret_cast<const Stored*>(meeting.ranks[rank].chunk)[i]);
      return isMean ? value * (Computed(1) / numRanks) : value;
    };
    Computed sum = at(0);
    for (int rank = 1; rank < numRanks; ++rank) sum = Op::apply(sum, at(rank));
    static_cast<Stored*>(result)[i] = Element::store(sum);
  }
}

struct Kind {
  std::size_t itemBytes = 0;  // 0 if there is no such type
  void (*sum)(const Meeting&, int, std::size_t, void*) = nullptr;
  void (*max)(const Meeting&, int, std::size_t, void*) = nullptr;
  void (*mean)(const Meeting&, int, std::size_t, void*) = nullptr;

  auto of(int op) const { return op == kOpSum ? sum : op == kOpMax ? max : op == kOpAvg ? mean : nullptr; }
};

template <typename Element>
Kind kindOf() {
  return {sizeof(typename Element::Stored), reduceChunks<Element, coarse::cuda::Sum>,
          reduceChunks<Element, Max>, reduceChunks<Element, coarse::cuda::Sum, true>};
}

Kind kindOf(int type) {
  using coarse::cuda::Plain;
  switch (type) {
    case kTypeUInt8:
      return kindOf<Plain<std::uint8_t>>();
    case kTypeInt32:
      return kindOf<Plain<std::int32_t>>();
    case kTypeInt64:
      return kindOf<Plain<std::int64_t>>();
    case kTypeFloat16:
      return kindOf<coarse::cuda::Float16>();
    case kTypeFloat32:
      return kindOf<Plain<float>>();
    case kTypeFloat64:
      return kindOf<Plain<double>>();
    case kTypeBFloat16:
      return kindOf<coarse::cuda::BFloat16>();
    default:
      return {};
  }
}

struct Operation {
  const void* send;
  void* receive;
  Description description;
};

/// One rank's end. Outlives the handle while streams have operations of it.
class Rank {
 public:
  Rank(SharedMeeting meeting, int rank, int numRanks)
      : meeting_(std::move(meeting)), rank_(rank), numRanks_(numRanks) {}

  std::uint64_t takeNumber() { return numGiven_++; }
  /// The name of the next operation, with the rank in front.
  std::string nextName() const {
    return "operation" + std::to_string(rank_) + ":" + std::to_string(numGiven_ + 1);
  }
  void abort() { isAborted_ = true; }
  Result failure() const { return failure_; }

  /// In the stream's turn: does the operation that was given as this number.
  void run(std::uint64_t number, const Operation& operation) {
    waitUntil([&] { return numDone_ == number || isAborted_; });
    if (!isAborted_ && failure_ == kSuccess) reduce(operation);
    numDone_ = number + 1;
  }

 private:
  void reduce(const Operation& operation) {
    own().description = operation.description;
    if (!meet()) return;
    for (int rank = 0; rank < numRanks_; ++rank) {
      if (!(meeting_->ranks[rank].description == operation.description)) failure_ = kInvalidUsage;
    }
    if (!meet() || failure_ != kSuccess) return;
    const Kind kind = kindOf(operation.description.type);
    const auto reduceChunk = kind.of(operation.description.op);
    const std::size_t mostElements = kChunkBytes / kind.itemBytes;
    for (std::size_t begin = 0; begin < operation.description.count; begin += mostElements) {
      const std::size_t count = std::min<std::size_t>(mostElements, operation.description.count - begin);
      const std::size_t offset = begin * kind.itemBytes;
      std::memcpy(own().chunk, static_cast<const std::byte*>(operation.send) + offset,
                  count * kind.itemBytes);
      if (!meet()) return;
      reduceChunk(*meeting_, numRanks_, count, static_cast<std::byte*>(operation.receive) + offset);
      if (!meet()) return;
    }
  }
  /// @returns false if this rank was aborted meanwhile.
  bool meet() {
    const std::uint64_t phase = own().phase.fetch_add(1, std::memory_order_release) + 1;
    for (int rank = 0; rank < numRanks_; ++rank) {
      const auto& reached = meeting_->ranks[rank].phase;
      waitUntil([&] { return reached.load(std::memory_order_acquire) >= phase || isAborted_; });
    }
    return !isAborted_;
  }
  Meeting::Rank& own() { return meeting_->ranks[rank_]; }

  const SharedMeeting meeting_;
  const int rank_;
  const int numRanks_;
  std::uint64_t numGiven_ = 0;  // by the one thread that gives operations
  std::atomic<std::uint64_t> numDone_{0};
  std::atomic<bool> isAborted_{false};
  std::atomic<Result> failure_{kSuccess};
};

struct Given {
  std::shared_ptr<Rank> rank;
  std::uint64_t number;
  Operation operation;
};

/// What a thread has given since its ncclGroupStart.
struct Group {
  int depth = 0;
  CommHandle last = nullptr;
  std::vector<std::pair<StreamHandle, std::unique_ptr<Given>>> waiting;
};
thread_local Group group;

/// A function of the driver that the process has loaded; null if there is none.
void* findInDriver(const char* name) {
  static void* const driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return driver == nullptr ? nullptr : ::dlsym(driver, name);
}

template <typename... Arguments>
Result callDriver(const char* name, Arguments... arguments) {
  void* const function = findInDriver(name);
  if (function == nullptr) return failed(kUnhandledCudaError, "the driver has no %s", name);
  const int result = reinterpret_cast<int (*)(Arguments...)>(function)(arguments...);
  return result == 0 ? kSuccess : failed(kUnhandledCudaError, "%s: %d", name, result);
}

/// Where what the device has at an address is in this process, as the driver's stand-in has it.
void* placeOf(const void* address, std::size_t numBytes) {
  static auto* const find =
      reinterpret_cast<void* (*)(const void*, std::size_t)>(findInDriver("standInPlaceOf"));
  return find == nullptr ? const_cast<void*>(address) : find(address, numBytes);
}

Result give(StreamHandle stream, std::unique_ptr<Given> given) {
  given->number = given->rank->takeNumber();
  const HostFunction run = [](void* data) {
    const std::unique_ptr<Given> mine(static_cast<Given*>(data));
    mine->rank->run(mine->number, mine->operation);
  };
  void* const data = given.get();
  const Result result = callDriver("cuLaunchHostFunc", stream, run, data);
  if (result == kSuccess) given.release();  // the stream has it
  return result;
}

/// Whether calls return before they are done.
bool isInBackground() {
  const char* const text = std::getenv("NCCL_COMM_BLOCKING");
  return text != nullptr && std::strcmp(text, "0") == 0;
}

std::atomic<int> numCommunicators{0};

bool mayShareGpu() {
  const char* const text = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return text != nullptr && std::strcmp(text, "1") == 0;
}

/// STAND_IN_NCCL_FAILS=id, or rank1, or operation1:20 for the 20th of rank 1: who or what does.
bool shallFail(const std::string& what) {
  const char* const text = std::getenv("STAND_IN_NCCL_FAILS");
  return text != nullptr && text == what;
}

Result checkDevices(const Meeting& meeting, int numRanks) {
  for (int a = 0; a < numRanks && !mayShareGpu(); ++a) {
    for (int b = a + 1; b < numRanks; ++b) {
      if (meeting.ranks[a].device == meeting.ranks[b].device) {
        return failed(kInvalidUsage, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %d", a,
                      b, meeting.ranks[a].device);
      }
    }
  }
  return kSuccess;
}

}  // namespace

struct ncclComm {
  explicit ncclComm(std::shared_ptr<Rank> joined, Result result) : rank(std::move(joined)), failure(result) {
    ++numCommunicators;
  }
  ~ncclComm() { --numCommunicators; }

  std::shared_ptr<Rank> rank;  // null if it could not join
  Result failure;
  std::atomic<int> looksLeft{0};  // until the last call is said to be done
};

/// What a call in the background returns, whose result `result` is told later.
static Result later(CommHandle comm, Result result) {
  if (!isInBackground() || comm == nullptr || result != kSuccess) return result;
  comm->looksLeft = 3;
  return kInProgress;
}

/// Joins. @param comm gets the rank's end, if that has worked.
static Result join(CommHandle* comm, int numRanks, const UniqueIdBytes& id, int rank) {
  if (numRanks < 1 || numRanks > kMostRanks || rank < 0 || rank >= numRanks)
    return failed(kInvalidArgument, "rank %d of %d", rank, numRanks);
  if (shallFail("rank" + std::to_string(rank)))
    return failed(kSystemError, "Error while creating shared memory segment: No space left on device");
  int device = 0;
  if (const Result result = callDriver("cuCtxGetDevice", &device); result != kSuccess) return result;
  const std::string path(id.bytes, ::strnlen(id.bytes, sizeof(id.bytes)));
  const SharedMeeting meeting = meetingAt(path);
  if (meeting == nullptr) return failed(kSystemError, "cannot open %s", path.c_str());
  int expected = 0;
  if (!meeting->numRanks.compare_exchange_strong(expected, numRanks) && expected != numRanks)
    return failed(kInvalidArgument, "%d ranks, %d by another one", numRanks, expected);
  if (meeting->ranks[rank].isTaken.exchange(1) != 0) return failed(kInvalidArgument, "rank %d twice", rank);
  meeting->ranks[rank].device = device;
  if (meeting->numJoined.fetch_add(1) + 1 == numRanks) ::unlink(path.c_str());
  const auto end = std::chrono::steady_clock::now() + kJoinLimit;
  waitUntil([&] { return meeting->numJoined == numRanks || std::chrono::steady_clock::now() >= end; });
  if (meeting->numJoined != numRanks) {
    ::unlink(path.c_str());
    return failed(kSystemError, "%d of %d ranks have come", meeting->numJoined.load(), numRanks);
  }
  if (const Result result = checkDevices(*meeting, numRanks); result != kSuccess) return result;
  *comm = new ncclComm(std::make_shared<Rank>(meeting, rank, numRanks), kSuccess);
  return kSuccess;
}

extern "C" {

Result ncclGetVersion(int* version) {
  *version = 29903;  // newer than a real one
  return kSuccess;
}
const char* ncclGetErrorString(Result) { return "as the stand-in has it"; }
const char* ncclGetLastError(CommHandle) { return lastError; }

/// The path of a file that is not there yet.
Result ncclGetUniqueId(UniqueIdBytes* id) {
  if (shallFail("id")) return failed(kSystemError, "Bootstrap : no socket interface found");
  const char* const given = std::getenv("STAND_IN_NCCL_FOLDER");
  const char* const folder = given ? given : ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
  std::random_device random;
  const int length = std::snprintf(id->bytes, sizeof(id->bytes), "%s/nccl-stand-in-%08x%08x%08x%08x", folder,
                                   random(), random(), random(), random());
  return length < static_cast<int>(sizeof(id->bytes))
             ? kSuccess
             : failed(kSystemError, "STAND_IN_NCCL_FOLDER is too long");
}

Result ncclCommInitRank(CommHandle* comm, int numRanks, UniqueIdBytes id, int rank) {
  *comm = nullptr;
  const Result result = join(comm, numRanks, id, rank);
  if (!isInBackground()) return result;
  if (*comm == nullptr) *comm = new ncclComm(nullptr, result);
  return later(*comm, kSuccess);
}

Result ncclCommAbort(CommHandle comm) {
  if (comm->rank != nullptr) comm->rank->abort();
  delete comm;
  return kSuccess;
}
Result ncclCommGetAsyncError(CommHandle comm, Result* state) {
  if (comm->looksLeft > 0) {
    --comm->looksLeft;
    *state = kInProgress;
  } else {
    *state = comm->rank == nullptr ? comm->failure : comm->rank->failure();
  }
  return kSuccess;
}

Result ncclAllReduce(const void* send, void* receive, std::size_t count, int type, int op, CommHandle comm,
                     StreamHandle stream) {
  if (kindOf(type).itemBytes == 0 || kindOf(type).of(op) == nullptr)
    return failed(kInvalidArgument, "type %d, operation %d", type, op);
  const std::size_t numBytes = count * kindOf(type).itemBytes;
  const void* const from = placeOf(send, numBytes);
  void* const to = placeOf(receive, numBytes);
  if (from == nullptr || to == nullptr) return failed(kUnhandledCudaError, "%s", "an illegal memory access");
  if (shallFail(comm->rank->nextName())) return failed(kSystemError, "%s", "Cuda failure 2 'out of memory'");
  auto given = std::make_unique<Given>(Given{comm->rank, 0, {from, to, {count, type, op}}});
  if (group.depth == 0) return later(comm, give(stream, std::move(given)));
  group.waiting.emplace_back(stream, std::move(given));
  group.last = comm;
  return kSuccess;
}
Result ncclGroupStart() {
  ++group.depth;
  return kSuccess;
}
Result ncclGroupEnd() {
  if (group.depth == 0) return failed(kInvalidUsage, "ncclGroupEnd: %s", "not in a group");
  if (--group.depth > 0) return kSuccess;
  Result first = kSuccess;
  for (auto& [stream, given] : std::exchange(group.waiting, {})) {
    const Result result = give(stream, std::move(given));
    if (first == kSuccess) first = result;
  }
  return later(std::exchange(group.last, nullptr), first);
}

/// Not of NCCL: how many communicators this process has.
int standInCommunicators() { return numCommunicators; }

}  // extern "C"
