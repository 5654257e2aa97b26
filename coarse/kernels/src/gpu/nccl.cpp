#include "coarse/gpu/nccl.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace coarse::nccl {
namespace {

// Interval between polls of a call that NCCL runs in the background.
constexpr std::chrono::microseconds kLook{50};

constexpr const char* kInstall =
    "pip install 'coarse-train[nccl]' brings it (for drivers of CUDA 13: pip install nvidia-nccl-cu13)";

/// Decodes the decimal number of ncclGetVersion(), for example 23203 for 2.32.3; 2803 for 2.8.3.
Version decoded(int code) {
  const int major = code >= 10000 ? 10000 : 1000;
  return {code / major, code % major / 100, code % 100};
}

std::string adviceFor(Result result) {
  switch (result) {
    case kUnhandledCudaError:
      return "if its text is of an insufficient driver, NCCL is for a later CUDA: nvidia-nccl-cu12 runs "
             "under drivers from 525 on. ";
    case kSystemError:
      return "within a node NCCL needs room in /dev/shm (in a container, --shm-size), between nodes a "
             "network "
             "that both sides see (NCCL_SOCKET_IFNAME). ";
    case kInvalidUsage:
      return "each rank needs a GPU of its own; NCCL 2.30 and later take several ranks on one GPU where all "
             "of them have NCCL_MULTI_RANK_GPU_ENABLE=1. ";
    case kRemoteError:
      return "another rank has ended or cannot be reached: look at its messages. ";
    default:
      return "";
  }
}

int typeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return kTypeFloat32;
    case DType::kFloat64:
      return kTypeFloat64;
    case DType::kBFloat16:
      return kTypeBFloat16;
    case DType::kFloat16:
      return kTypeFloat16;
    case DType::kInt32:
      return kTypeInt32;
    case DType::kInt64:
      return kTypeInt64;
    case DType::kUInt8:
      return kTypeUInt8;
  }
  throw std::invalid_argument("an all-reduce by NCCL: not a DType");
}

int opOf(ReduceOp op, DType dtype) {
  switch (op) {
    case ReduceOp::kSum:
      return kOpSum;
    case ReduceOp::kMax:
      return kOpMax;
    case ReduceOp::kMean:
      if (dtype == DType::kFloat32 || dtype == DType::kFloat64) return kOpAvg;
  }
  throw std::invalid_argument(
      "a mean by NCCL is one of float32 or float64: add up others, and divide where the sum is used");
}

}  // namespace

UniqueId UniqueId::fromBytes(std::string_view bytes) {
  UniqueIdBytes id{};
  if (bytes.size() != kNumBytes) {
    throw std::invalid_argument("a unique id of NCCL has " + std::to_string(kNumBytes) + " bytes, not " +
                                std::to_string(bytes.size()));
  }
  std::copy(bytes.begin(), bytes.end(), id.bytes);
  return UniqueId(id);
}

Library::Library(const std::string& path) : path_(path) {
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = ::dlerror();
    throw Error("there is no NCCL: " + (reason != nullptr ? reason : path) + ". " + kInstall);
  }
#define COARSE_NCCL_FIND(name, result, ...)                                       \
  api_.name = reinterpret_cast<result (*)(__VA_ARGS__)>(::dlsym(library, #name)); \
  if (api_.name == nullptr)                                                       \
    throw Error(path + " has no " #name ": NCCL 2.13 is the oldest that will do. " + kInstall);
  COARSE_NCCL_FUNCTIONS(COARSE_NCCL_FIND)
#undef COARSE_NCCL_FIND
  int code = 0;
  check(api_.ncclGetVersion(&code), "ncclGetVersion");
  version_ = decoded(code);
}

UniqueId Library::makeUniqueId() const {
  UniqueIdBytes id{};
  check(api_.ncclGetUniqueId(&id), "ncclGetUniqueId");
  return UniqueId(id);
}

void Library::check(Result result, const std::string& call) const {
  if (result == kSuccess) return;
  std::string message = call + ": " + api_.ncclGetErrorString(result) + " (" + std::to_string(result) + ")";
  // The last error of any communicator; the argument is not used.
  const char* const last = api_.ncclGetLastError(nullptr);
  if (last != nullptr && *last != '\0') message += ": " + std::string(last);
  throw Error(message + "; " + adviceFor(result) + "NCCL_DEBUG=INFO has NCCL say more");
}

Communicator::Communicator(SharedLibrary library, const UniqueId& id, int rank, int numRanks,
                           cuda::SharedContext context)
    : library_(std::move(library)), rank_(rank), numRanks_(numRanks), context_(std::move(context)) {
  if (rank < 0 || rank >= numRanks) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(numRanks) +
                                " for NCCL: expected 0 <= rank < numRanks");
  }
  const cuda::ContextScope scope(*context_);
  try {
    settle(library_->api().ncclCommInitRank(&handle_, numRanks, id.id(), rank), "ncclCommInitRank");
  } catch (const Error&) {
    abort();
    throw;
  }
}

Communicator::~Communicator() {
  if (context_->isUsable()) abort();
}

void Communicator::allReduce(const void* send, void* receive, std::size_t count, DType dtype, ReduceOp op,
                             cuda::StreamHandle stream) {
  // NCCL returns to the GPU that was current, and would create a context there.
  const cuda::ContextScope scope(*context_);
  const int type = typeOf(dtype), operation = opOf(op, dtype);
  CommHandle handle = nullptr;
  {
    const std::lock_guard lock(mutex_);
    handle = usableHandle();
  }
  settle(library_->api().ncclAllReduce(send, receive, count, type, operation, handle, stream),
         "ncclAllReduce");
}

void Communicator::check() const {
  const Result state = asyncState();
  if (state != kInProgress) library_->check(state, described("an operation of the communicator"));
}

void Communicator::settle(Result result, const char* call) const {
  while (result == kInProgress) {
    std::this_thread::sleep_for(kLook);
    result = asyncState();
  }
  library_->check(result, described(call));
}

Result Communicator::asyncState() const {
  const std::lock_guard lock(mutex_);  // so that abort() leaves the handle until NCCL has answered
  Result state = kSuccess;
  library_->check(library_->api().ncclCommGetAsyncError(usableHandle(), &state),
                  described("ncclCommGetAsyncError"));
  return state;
}

void Communicator::abort() noexcept {
  CommHandle handle = nullptr;
  {
    const std::lock_guard lock(mutex_);
    handle = std::exchange(handle_, nullptr);
  }
  if (handle == nullptr) return;
  try {
    const cuda::ContextScope scope(*context_);
    // Without the lock: a call of another thread may block in NCCL until this ends it.
    library_->api().ncclCommAbort(handle);
  } catch (const cuda::Error&) {
    // The GPU has failed, or this is a fork: leaves NCCL unchanged.
  }
}

std::string Communicator::described(const char* call) const {
  return std::string(call) + " (rank " + std::to_string(rank_) + " of " + std::to_string(numRanks_) +
         ", cuda:" + std::to_string(context_->device()) + ")";
}

CommHandle Communicator::usableHandle() const {
  if (handle_ == nullptr) throw Error(described("the communicator") + " was aborted");
  return handle_;
}

GroupScope::GroupScope(const Communicator& communicator)
    : communicator_(communicator), api_(communicator.library()->api()) {
  communicator.library()->check(api_.ncclGroupStart(), "ncclGroupStart");
  isOpen_ = true;
}

GroupScope::~GroupScope() {
  if (isOpen_) api_.ncclGroupEnd();
}

void GroupScope::end() {
  if (std::exchange(isOpen_, false)) communicator_.settle(api_.ncclGroupEnd(), "ncclGroupEnd");
}

}  // namespace coarse::nccl
