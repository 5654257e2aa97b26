#include "coarse/client/async_reducer.hpp"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "bindings.hpp"

namespace py = pybind11;

namespace coarse {
namespace {

/// Key, source, destination, bytes.
using RequestTuple = std::tuple<std::string, std::uintptr_t, std::uintptr_t, std::size_t>;

/// Waits until `count` requests have ended.
class Latch {
 public:
  explicit Latch(std::size_t count) : left_(count) {}
  void countDown(const char* failure) {
    const std::lock_guard lock(mutex_);
    if (failure != nullptr && failure_.empty()) failure_ = failure;
    if (--left_ == 0) isOver_.notify_all();
  }
  std::string wait() {
    std::unique_lock lock(mutex_);
    isOver_.wait(lock, [this] { return left_ == 0; });
    return failure_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable isOver_;
  std::size_t left_;
  std::string failure_;
};

/// Releases the GIL, which the reducer's thread may need before it can end. Leaks in forks.
struct CloseWithoutGil {
  LeakInForks remove;
  void operator()(AsyncReducer* reducer) const {
    {
      const py::gil_scoped_release release;
      reducer->close();
    }
    remove(reducer);
  }
};
using Holder = std::unique_ptr<AsyncReducer, CloseWithoutGil>;

std::string reduceAll(AsyncReducer& reducer, const std::vector<RequestTuple>& requests,
                      const std::vector<double>& weights) {
  Latch latch(requests.size());
  for (const auto& [key, source, destination, numBytes] : requests)
    reducer.reduce(key, reinterpret_cast<const void*>(source), reinterpret_cast<void*>(destination), numBytes,
                   [&latch](const char* failure) { latch.countDown(failure); }, kPresent,
                   {weights.data(), weights.size()});
  return latch.wait();
}

}  // namespace

void registerAsyncReducer(py::module_& module) {
  using ReleaseGil = py::call_guard<py::gil_scoped_release>;
  py::class_<AsyncReducer, Holder>(module, "AsyncReducer")
      .def(
          py::init([](Client& client, double timeoutSeconds, py::function describe) {
            return Holder(new AsyncReducer(client, timeoutSeconds,
                                           [describe = std::move(describe)](
                                               WaitStatus status, std::uint32_t group, std::uint32_t tensor) {
                                             const py::gil_scoped_acquire gil;
                                             return describe(status, group, tensor).cast<std::string>();
                                           }));
          }),
          py::arg("client"), py::arg("timeout_s"), py::arg("describe"), py::keep_alive<1, 2>())
      .def("add", &AsyncReducer::add, py::arg("key"), py::arg("group"), py::arg("tensor"),
           py::arg("num_bytes"), ReleaseGil())
      .def("remove", &AsyncReducer::remove, py::arg("key"), ReleaseGil())
      .def("reduce_all", &reduceAll, py::arg("requests"), py::arg("weights") = std::vector<double>(),
           ReleaseGil())
      .def("close", &AsyncReducer::close, ReleaseGil())
      .def_property_readonly("interface", [](const AsyncReducer& reducer) {
        return reinterpret_cast<std::uintptr_t>(&reducer.interface());
      });
}

}  // namespace coarse
