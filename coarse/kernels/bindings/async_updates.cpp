#include "coarse/client/async_updates.hpp"

#include <memory>

#include "bindings.hpp"

namespace py = pybind11;

namespace coarse {

void registerAsyncUpdates(py::module_& module) {
  py::class_<AsyncUpdates, std::unique_ptr<AsyncUpdates, DeleteWithoutGil>>(module, "AsyncUpdates")
      .def(py::init<AsyncReducer&>(), py::arg("reducer"), py::keep_alive<1, 2>())
      .def(
          "add",
          [](AsyncUpdates& updates, const std::string& key, std::uint32_t group, std::uint32_t tensor,
             std::size_t numBytes, std::uintptr_t parameter, std::uintptr_t settings, bool writes,
             std::uintptr_t copied, std::size_t numClients, std::size_t client) {
            updates.add(key, {group, tensor, numBytes, reinterpret_cast<std::byte*>(parameter),
                              reinterpret_cast<UpdateSettings*>(settings), writes,
                              reinterpret_cast<std::atomic<std::uint32_t>*>(copied), numClients, client});
          },
          py::arg("key"), py::arg("group"), py::arg("tensor"), py::arg("num_bytes"), py::arg("parameter"),
          py::arg("settings"), py::arg("writes"), py::arg("copied"), py::arg("num_clients"),
          py::arg("client"), py::call_guard<py::gil_scoped_release>())
      .def("remove", &AsyncUpdates::remove, py::arg("key"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("interface", [](const AsyncUpdates& updates) {
        return reinterpret_cast<std::uintptr_t>(&updates.interface());
      });
}

}  // namespace coarse
