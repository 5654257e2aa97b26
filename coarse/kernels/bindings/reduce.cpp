#include "coarse/reduce/reduce.hpp"

#include <pybind11/stl.h>

#include "bindings.hpp"
#include "coarse/reduce/reduction_limit.hpp"

namespace py = pybind11;

namespace coarse {

void registerReduce(py::module_& module) {
  module.def("measure_reduction_limit", &measureReductionLimit, py::arg("num_workers"), py::arg("num_bytes"),
             py::arg("iterations"), py::arg("num_threads"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace coarse
