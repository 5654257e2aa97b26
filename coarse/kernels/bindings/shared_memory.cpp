#include "coarse/shared_memory/shared_memory.hpp"

#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "coarse/client/private_view.hpp"

namespace py = pybind11;

namespace coarse {

namespace {

std::vector<std::pair<std::size_t, std::size_t>> pairsOf(const std::vector<ByteRange>& ranges) {
  std::vector<std::pair<std::size_t, std::size_t>> pairs;
  for (const ByteRange& each : ranges) pairs.emplace_back(each.offset, each.numBytes);
  return pairs;
}

void registerPrivateView(py::module_& module) {
  py::class_<PrivateView, std::shared_ptr<PrivateView>>(module, "PrivateView", py::buffer_protocol())
      .def(py::init<const Region&, std::size_t>(), py::arg("region"), py::arg("num_bytes"),
           py::call_guard<py::gil_scoped_release>())
      .def_buffer([](PrivateView& view) {
        return py::buffer_info(reinterpret_cast<unsigned char*>(view.data()),
                               static_cast<py::ssize_t>(view.numBytes()));
      })
      .def("written",
           [](const PrivateView& view) {
             std::vector<ByteRange> ranges;
             {
               const py::gil_scoped_release release;
               ranges = view.written();
             }
             return pairsOf(ranges);
           })
      .def(
          "changed",
          [](const PrivateView& view, const py::buffer& shared) {
            const py::buffer_info info = shared.request();
            if (info.size * info.itemsize < static_cast<py::ssize_t>(view.numBytes()))
              throw std::invalid_argument("the shared memory is shorter than the view of it");
            std::vector<ByteRange> ranges;
            {
              const py::gil_scoped_release release;
              ranges = view.changed(static_cast<const std::byte*>(info.ptr));
            }
            return pairsOf(ranges);
          },
          py::arg("shared"))
      .def("give_back", [](const PrivateView& view) {
        const py::gil_scoped_release release;
        for (const ByteRange& range : view.written()) view.giveBack(range);
      });
}

}  // namespace

void registerSharedMemory(py::module_& module) {
  module.def("create_sealed_memory", &createSealedMemory, py::arg("label"), py::arg("num_bytes"),
             py::call_guard<py::gil_scoped_release>());
  module.def("create_sparse_sealed_memory", &createSparseSealedMemory, py::arg("label"), py::arg("num_bytes"),
             py::call_guard<py::gil_scoped_release>());
  module.def("create_bound_memory", &createBoundMemory, py::arg("label"), py::arg("num_bytes"),
             py::arg("nodes"), py::arg("is_allocated"), py::call_guard<py::gil_scoped_release>());
  module.def("reopen_read_only", &reopenReadOnly, py::arg("fd"));
  module.def("sealed_bytes", &sealedBytes, py::arg("fd"));
  py::class_<Region>(module, "Region")
      .def(py::init<int>(), py::arg("fd"))
      .def(py::init([](int fd, std::size_t offset, std::size_t numBytes, std::string gpu,
                       std::vector<Region> rest) {
             Region region(fd, offset, numBytes, std::move(gpu));
             region.rest = std::move(rest);
             return region;
           }),
           py::arg("fd"), py::arg("offset"), py::arg("num_bytes"), py::arg("gpu") = "",
           py::arg("rest") = std::vector<Region>{});
  py::implicitly_convertible<py::int_, Region>();
  py::class_<Mapping, std::shared_ptr<Mapping>>(module, "Mapping", py::buffer_protocol())
      .def(py::init([](const Region& region, std::size_t numBytes, bool readOnly) {
             const auto access = readOnly ? Mapping::Access::kReadOnly : Mapping::Access::kReadWrite;
             return std::make_shared<Mapping>(mapShared(region, numBytes, access, "a mapping"));
           }),
           py::arg("region"), py::arg("num_bytes"), py::kw_only(), py::arg("read_only") = false)
      .def_buffer([](Mapping& mapping) {
        return py::buffer_info(reinterpret_cast<unsigned char*>(mapping.data()),
                               static_cast<py::ssize_t>(mapping.numBytes()), mapping.isReadOnly());
      })
      .def("populate", &Mapping::populate, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly(
          "address", [](const Mapping& mapping) { return reinterpret_cast<std::uintptr_t>(mapping.data()); });
  registerPrivateView(module);
}

}  // namespace coarse
