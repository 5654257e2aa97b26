#include "coarse/gpu/nccl.hpp"

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "bindings.hpp"

namespace py = pybind11;

namespace coarse {

void registerNccl(py::module_& module) {
  py::register_exception<nccl::Error>(module, "NcclError", PyExc_RuntimeError);
  py::class_<nccl::Library, std::shared_ptr<nccl::Library>>(module, "NcclLibrary")
      .def(py::init<const std::string&>(), py::arg("path"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("path", &nccl::Library::path)
      .def_property_readonly("version",
                             [](const nccl::Library& library) {
                               const nccl::Version& version = library.version();
                               return py::make_tuple(version.major, version.minor, version.patch);
                             })
      .def("unique_id", [](const nccl::Library& library) {
        std::string bytes;
        {
          const py::gil_scoped_release release;
          bytes = library.makeUniqueId().bytes();
        }
        return py::bytes(bytes);
      });
  py::class_<nccl::Communicator, std::shared_ptr<nccl::Communicator>>(module, "NcclCommunicator")
      .def(py::init([](std::shared_ptr<nccl::Library> library, const py::bytes& uniqueId, int rank,
                       int numRanks, std::shared_ptr<cuda::Context> context) {
             const auto id = nccl::UniqueId::fromBytes(static_cast<std::string_view>(uniqueId));
             const py::gil_scoped_release release;
             return std::make_shared<nccl::Communicator>(std::move(library), id, rank, numRanks,
                                                         std::move(context));
           }),
           py::arg("library"), py::arg("unique_id"), py::arg("rank"), py::arg("num_ranks"),
           py::arg("context"))
      .def_property_readonly("rank", &nccl::Communicator::rank)
      .def_property_readonly("num_ranks", &nccl::Communicator::numRanks)
      .def(
          "all_reduce",
          [](nccl::Communicator& communicator, std::uintptr_t send, std::uintptr_t receive, std::size_t count,
             std::uint8_t dtype, std::uint8_t op, std::uintptr_t stream) {
            communicator.allReduce(reinterpret_cast<const void*>(send), reinterpret_cast<void*>(receive),
                                   count, static_cast<DType>(dtype), static_cast<ReduceOp>(op),
                                   reinterpret_cast<cuda::StreamHandle>(stream));
          },
          py::arg("send"), py::arg("receive"), py::arg("count"), py::arg("dtype"), py::arg("op"),
          py::arg("stream"), py::call_guard<py::gil_scoped_release>())
      .def("check", &nccl::Communicator::check)
      .def("abort", &nccl::Communicator::abort, py::call_guard<py::gil_scoped_release>());
}

}  // namespace coarse
