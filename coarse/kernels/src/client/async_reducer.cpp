#include "coarse/client/async_reducer.hpp"

#include <algorithm>
#include <exception>
#include <iterator>
#include <stdexcept>
#include <utility>

namespace coarse {
namespace {

constexpr const char* kClosed = "the session is closed";
constexpr std::chrono::microseconds kLookAfter{100};

/// Counts a caller inside the reducer; after the decrement it does not access the reducer.
class Inside {
 public:
  explicit Inside(std::atomic<int>& count) : count_(count) { count_.fetch_add(1); }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  ~Inside() { count_.fetch_sub(1); }

 private:
  std::atomic<int>& count_;
};

void reduceThrough(void* reducer, const char* key, const void* source, void* destination,
                   std::uint64_t numBytes, const double* weights, std::uint64_t numWeights,
                   CoarseReduceDone done, void* context) {
  static_cast<AsyncReducer*>(reducer)->reduce(
      key, source, destination, numBytes, [done, context](const char* failure) { done(context, failure); },
      kPresent, {weights, static_cast<std::size_t>(numWeights)});
}

}  // namespace

AsyncReducer::AsyncReducer(Client& client, double timeoutSeconds, Describe describe)
    : client_(client),
      timeoutSeconds_(timeoutSeconds),
      describe_(std::move(describe)),
      interface_{COARSE_ASYNC_REDUCER_VERSION, this, &reduceThrough},
      thread_([this] { run(); }) {}

AsyncReducer::~AsyncReducer() { close(); }

void AsyncReducer::close() noexcept {
  if (!owner_.isThisProcess()) return;
  {
    const std::lock_guard lock(mutex_);
    isStopping_ = true;
  }
  hasWork_.notify_all();
  if (thread_.joinable()) thread_.join();
  failAll(kClosed);
  // A result may arrive, and its receiver may close, before the caller that pushed it has left.
  while (numInside_.load() != 0) std::this_thread::sleep_for(kLookAfter);
}

void AsyncReducer::add(const std::string& key, std::uint32_t group, std::uint32_t tensor,
                       std::size_t numBytes) {
  const std::lock_guard lock(mutex_);
  Tensor added;
  added.group = group;
  added.index = tensor;
  added.numBytes = numBytes;
  if (!tensors_.try_emplace(key, std::move(added)).second)
    throw std::invalid_argument("there is a tensor of the name " + key + " already");
}

bool AsyncReducer::remove(const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto found = tensors_.find(key);
  if (found == tensors_.end()) return true;
  if (found->second.isUnderWay) return false;
  tensors_.erase(found);
  return true;
}

void AsyncReducer::reduce(std::string_view key, const void* source, void* destination, std::size_t numBytes,
                          Done done, std::uint8_t flags, Weights weights) {
  const Inside inside(numInside_);
  Request request{source, destination, std::move(done), flags, weights};
  numSubmitting_.fetch_add(1);
  const std::string failure = take(key, numBytes, request);
  // The last of concurrent callers wakes the memory devices, because a wake-up costs a context switch.
  if (numSubmitting_.fetch_sub(1) == 1) client_.flush();
  if (failure.empty()) {
    hasWork_.notify_one();
  } else {
    request.done(failure.c_str());
  }
}

std::string AsyncReducer::awaitOthers(std::uint32_t group, std::uint32_t tensor,
                                      const std::function<bool()>& isDone) {
  const Inside inside(numInside_);
  Patience patience(timeoutSeconds_);
  YieldingSpin spin(kLookAfter);
  while (!isDone()) {
    if (spin.yield()) continue;
    WaitStatus status = client_.checkPeers();
    if (status == WaitStatus::kDone && patience.isOver()) status = WaitStatus::kTimedOut;
    if (status != WaitStatus::kDone) failAll(describe(status, group, tensor));
    if (std::string reason = failure(); !reason.empty()) return reason;
    std::this_thread::sleep_for(kLookAfter);
    spin.reset();
  }
  return {};
}

std::string AsyncReducer::failure() {
  const std::lock_guard lock(mutex_);
  return isStopping_ && failure_.empty() ? kClosed : failure_;
}

/// @returns why the request was refused; empty if it was accepted.
std::string AsyncReducer::take(std::string_view key, std::size_t numBytes, Request& request) {
  Tensor* tensor = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) return failure_;
    if (isStopping_) return kClosed;
    const auto found = tensors_.find(std::string(key));
    if (found == tensors_.end()) return "no tensor was registered as " + std::string(key);
    tensor = &found->second;
    if (tensor->numBytes != numBytes)
      return std::string(key) + " has " + std::to_string(tensor->numBytes) + " bytes, not " +
             std::to_string(numBytes);
    if (tensor->isUnderWay) {
      tensor->waiting.push_back(std::move(request));
      return {};
    }
    tensor->isUnderWay = true;
  }
  return start(*tensor, request);
}

/// Pushes a tensor that is marked as in progress, so no one else uses it.
/// @returns why the request was refused; empty if it was accepted.
std::string AsyncReducer::start(Tensor& tensor, Request& request) {
  WaitStatus status = WaitStatus::kDone;
  try {
    status = client_.push(tensor.group, tensor.index, request.flags, request.source);
  } catch (const std::exception& error) {  // its group was removed
    refuseWaiting(tensor, error.what());
    return error.what();
  }
  const std::lock_guard lock(mutex_);
  if (!failure_.empty()) return failure_;
  if (status != WaitStatus::kDone) pushStatus_ = status;  // the thread reports it
  underWay_.push_back({&tensor, client_.shardsOf(tensor.group, tensor.index), std::move(request)});
  return {};
}

/// Frees a tensor that cannot be pushed, and refuses the requests that wait for it.
void AsyncReducer::refuseWaiting(Tensor& tensor, const char* reason) {
  std::deque<Request> refused;
  {
    const std::lock_guard lock(mutex_);
    tensor.isUnderWay = false;
    refused.swap(tensor.waiting);
  }
  for (const Request& request : refused) request.done(reason);
}

void AsyncReducer::run() {
  nameThread("coarse results");
  while (true) {
    {
      std::unique_lock lock(mutex_);
      hasWork_.wait(lock, [this] { return isStopping_ || !underWay_.empty(); });
      if (isStopping_) return;
    }
    WaitStatus status = WaitStatus::kDone;
    try {
      status = client_.waitUntil([this] { return collect(); }, timeoutSeconds_);
      const std::lock_guard lock(mutex_);
      if (status == WaitStatus::kDone) status = pushStatus_;
    } catch (const std::exception& error) {
      failAll(error.what());
    }
    if (status != WaitStatus::kDone) fail(status);
  }
}

/// Delivers completed results. @returns whether there were any, or the thread has another reason to check.
bool AsyncReducer::collect() {
  std::deque<UnderWay> finished = takeDone();
  const bool isAny = !finished.empty();
  while (!finished.empty()) {
    const UnderWay& next = finished.front();
    WaitStatus status = WaitStatus::kDone;
    try {
      status =
          client_.pull(next.tensor->group, next.tensor->index, next.request.destination, timeoutSeconds_);
      if (status == WaitStatus::kDone && next.request.weights.count > 0) {
        client_.compensateForLost(next.tensor->group, next.tensor->index,
                                  static_cast<std::byte*>(next.request.destination), next.request.weights);
      }
    } catch (...) {  // its group was removed
      putBack(std::move(finished), status);
      throw;
    }
    if (status != WaitStatus::kDone) {
      putBack(std::move(finished), status);
      return true;
    }
    finish(std::move(finished.front()));
    finished.pop_front();
  }
  const std::lock_guard lock(mutex_);
  return isAny || isStopping_ || pushStatus_ != WaitStatus::kDone || underWay_.empty();
}

/// @returns the completed requests, to be copied out without the lock.
std::deque<AsyncReducer::UnderWay> AsyncReducer::takeDone() {
  const std::lock_guard lock(mutex_);
  for (UnderWay& each : underWay_)  // check all before moving one: this throws if its group was removed
    each.isDone = client_.areDone(each.tensor->group, each.shards);
  const auto done = std::stable_partition(underWay_.begin(), underWay_.end(),
                                          [](const UnderWay& each) { return !each.isDone; });
  std::deque<UnderWay> taken(std::make_move_iterator(done), std::make_move_iterator(underWay_.end()));
  underWay_.erase(done, underWay_.end());
  return taken;
}

/// Notifies the caller after the tensor is free for the next request.
void AsyncReducer::finish(UnderWay&& finished) {
  Tensor& tensor = *finished.tensor;
  std::optional<Request> next;
  {
    const std::lock_guard lock(mutex_);
    tensor.isUnderWay = !tensor.waiting.empty();
    if (tensor.isUnderWay) {
      next = std::move(tensor.waiting.front());
      tensor.waiting.pop_front();
    }
  }
  finished.request.done(nullptr);
  if (!next) return;
  const std::string failure = start(tensor, *next);
  client_.flush();
  if (!failure.empty()) next->done(failure.c_str());
}

/// Requests that a failure interrupts end with everything else.
void AsyncReducer::putBack(std::deque<UnderWay> interrupted, WaitStatus status) {
  const std::lock_guard lock(mutex_);
  underWay_.insert(underWay_.begin(), std::make_move_iterator(interrupted.begin()),
                   std::make_move_iterator(interrupted.end()));
  pushStatus_ = status;
}

void AsyncReducer::fail(WaitStatus status) {
  std::string reason = describeOldest(status);
  failAll(std::move(reason));
}

std::string AsyncReducer::describeOldest(WaitStatus status) {
  std::uint32_t group = 0;
  std::uint32_t tensor = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!underWay_.empty()) {
      group = underWay_.front().tensor->group;
      tensor = underWay_.front().tensor->index;
    }
  }
  return describe(status, group, tensor);
}

std::string AsyncReducer::describe(WaitStatus status, std::uint32_t group, std::uint32_t tensor) {
  try {
    return describe_(status, group, tensor);
  } catch (const std::exception& error) {
    return error.what();
  }
}

void AsyncReducer::failAll(std::string reason) {
  std::vector<Request> failed;
  {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = std::move(reason);
    for (UnderWay& each : underWay_) failed.push_back(std::move(each.request));
    for (auto& [key, tensor] : tensors_) {
      for (Request& request : tensor.waiting) failed.push_back(std::move(request));
      tensor.waiting.clear();
    }
    underWay_.clear();
    pushStatus_ = WaitStatus::kDone;
  }
  // failure_ does not change any more.
  for (const Request& request : failed) request.done(failure_.c_str());
}

}  // namespace coarse
