#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

namespace coarse_torch {

/// The error as the future of a work has it, and as torch raises it in Python.
inline std::exception_ptr asDistError(const std::exception& error) {
  try {
    C10_THROW_ERROR(DistBackendError, std::string("coarse: ") + error.what());
  } catch (...) {
    return std::current_exception();
  }
}

/// One operation of a rank: done once its tensors hold the result.
class CoarseWork : public c10d::Work {
 public:
  /// @param result what the future is completed with.
  CoarseWork(c10d::OpType opType, const char* title, const std::vector<at::Tensor>& inputs,
             c10::IValue result, const std::vector<c10::Device>& devices, std::uint64_t sequence)
      : Work(-1, opType, title, inputs), result_(std::move(result)), sequence_(sequence) {
    const c10::TypePtr type =
        result_.isTensorList()
            ? c10::TypePtr(c10::ListType::create(c10::TensorType::get()))
            : c10::TypePtr(c10::ListType::create(c10::ListType::create(c10::TensorType::get())));
    future_ = c10::make_intrusive<c10::ivalue::Future>(type, devices);
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::uint64_t getSequencenumber() const override { return sequence_; }
  std::vector<at::Tensor> result() override {
    return result_.isTensorList() ? result_.toTensorVector() : std::vector<at::Tensor>{};
  }

  int sourceRank() const override { return source_; }
  void setSourceRank(int rank) { source_ = rank; }

  void complete(std::exception_ptr error) {
    if (error) {
      future_->setErrorIfNeeded(error);
    } else {
      future_->markCompleted(result_);
    }
    finish(std::move(error));
  }

 private:
  c10::IValue result_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::uint64_t sequence_;
  int source_ = -1;
};

/// Runs operations one after the other, in the order in which they were given: in a thread of its own, or in
/// the caller's where the caller would wait anyway and nothing is before it.
///
/// A fork of the process has no such thread: it must call nothing, the destructor neither.
///
/// Thread safety: all, from any thread.
class WorkQueue {
 public:
  using Body = std::function<void()>;

  WorkQueue() : thread_([this] { serve(); }) {}
  ~WorkQueue() { stop(); }
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  void run(c10::intrusive_ptr<CoarseWork> work, Body body, bool isAsync) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (isStopped_) {
      lock.unlock();
      work->complete(asDistError(std::runtime_error("the process group was destroyed")));
      return;
    }
    if (isAsync || isBusy_ || !queue_.empty()) {
      queue_.emplace_back(std::move(work), std::move(body));
      if (!isBusy_) given_.notify_one();
      return;
    }
    isBusy_ = true;
    lock.unlock();
    execute(*work, body);
    lock.lock();
    isBusy_ = false;
    tellNext();
  }

  /// Waits until everything was run, at most `limit`. @returns whether it was.
  bool drain(std::chrono::milliseconds limit) {
    std::unique_lock<std::mutex> lock(mutex_);
    return idle_.wait_for(lock, limit, [this] { return queue_.empty() && !isBusy_; });
  }

  /// Takes no more, and returns when what was running has ended. What had not begun gets an error.
  /// Idempotent.
  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      isStopped_ = true;
      given_.notify_one();
    }
    std::lock_guard<std::mutex> lock(joining_);
    if (thread_.joinable()) thread_.join();
  }

 private:
  static void execute(CoarseWork& work, const Body& body) {
    std::exception_ptr error;
    try {
      at::NoGradGuard noGrad;
      body();
    } catch (const c10::Error&) {
      error = std::current_exception();
    } catch (const std::exception& failure) {
      error = asDistError(failure);
    }
    work.complete(std::move(error));
  }

  // After each operation: a thread that is told in vain takes a core from ranks that wait for each other.
  void tellNext() {
    if (queue_.empty()) idle_.notify_all();
    if (!queue_.empty() || isStopped_) given_.notify_one();
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      given_.wait(lock, [this] { return (isStopped_ || !queue_.empty()) && !isBusy_; });
      if (isStopped_) break;
      {
        auto [work, body] = std::move(queue_.front());
        queue_.pop_front();
        isBusy_ = true;
        lock.unlock();
        execute(*work, body);
        // What it holds goes here, without the lock: a tensor's end may run any code.
      }
      lock.lock();
      isBusy_ = false;
      tellNext();
    }
    auto left = std::exchange(queue_, {});
    idle_.notify_all();
    lock.unlock();
    for (auto& [work, body] : left) {
      work->complete(asDistError(std::runtime_error("the process group was destroyed before this began")));
    }
  }

  std::mutex mutex_;               // guards queue_, isBusy_ and isStopped_
  std::condition_variable given_;  // thread_ waits for it alone
  std::condition_variable idle_;
  std::deque<std::pair<c10::intrusive_ptr<CoarseWork>, Body>> queue_;
  bool isBusy_ = false;
  bool isStopped_ = false;
  std::mutex joining_;  // guards thread_
  std::thread thread_;
};

}  // namespace coarse_torch
