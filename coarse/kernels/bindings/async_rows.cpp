#include "coarse/client/async_rows.hpp"

#include <memory>

#include "bindings.hpp"

namespace py = pybind11;

namespace coarse {

void registerAsyncRows(py::module_& module) {
  py::class_<AsyncRows, std::unique_ptr<AsyncRows, DeleteWithoutGil>>(module, "AsyncRows")
      .def(py::init<Client&, AsyncReducer&>(), py::arg("client"), py::arg("reducer"), py::keep_alive<1, 2>(),
           py::keep_alive<1, 3>())
      .def("add", &AsyncRows::add, py::arg("key"), py::arg("group"), py::arg("counter"), py::arg("table"),
           py::arg("rows_fd"), py::call_guard<py::gil_scoped_release>())
      .def("remove", &AsyncRows::remove, py::arg("key"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("interface", [](const AsyncRows& rows) {
        return reinterpret_cast<std::uintptr_t>(&rows.interface());
      });
}

}  // namespace coarse
