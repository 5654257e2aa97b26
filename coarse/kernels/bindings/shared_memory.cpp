#include "coarse/shared_memory.hpp"

#include <memory>

#include "bindings.hpp"

namespace py = pybind11;

namespace coarse {

void registerSharedMemory(py::module_& module) {
  module.def("create_sealed_memory", &createSealedMemory, py::arg("label"), py::arg("num_bytes"),
             py::call_guard<py::gil_scoped_release>());
  module.def("create_sparse_sealed_memory", &createSparseSealedMemory, py::arg("label"), py::arg("num_bytes"),
             py::call_guard<py::gil_scoped_release>());
  module.def("reopen_read_only", &reopenReadOnly, py::arg("fd"));
  module.def("sealed_bytes", &sealedBytes, py::arg("fd"));
  py::class_<Mapping, std::shared_ptr<Mapping>>(module, "Mapping", py::buffer_protocol())
      .def_buffer([](Mapping& mapping) {
        return py::buffer_info(reinterpret_cast<unsigned char*>(mapping.data()),
                               static_cast<py::ssize_t>(mapping.numBytes()));
      })
      .def_property_readonly(
          "address", [](const Mapping& mapping) { return reinterpret_cast<std::uintptr_t>(mapping.data()); });
}

}  // namespace coarse
