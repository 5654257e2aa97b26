#include "coarse/recovery/heartbeat.hpp"

#include <pybind11/stl.h>

#include "bindings.hpp"
#include "coarse/tensors/tensor_group.hpp"

namespace py = pybind11;

namespace coarse {
namespace {

/// A watch with its own mapping.
struct MappedWatch {
  MappedWatch(int doorbellsFd, std::size_t numDevices, std::uint32_t limitMilliseconds)
      : mapping(
            mapSealed(doorbellsFd, numDevices * sizeof(Doorbell), Mapping::Access::kReadOnly, "doorbells")),
        watch(reinterpret_cast<const Doorbell*>(mapping.data()), numDevices,
              std::chrono::milliseconds(limitMilliseconds)) {}
  Mapping mapping;
  HeartbeatWatch watch;
};

}  // namespace

void registerHeartbeat(py::module_& module) {
  py::class_<MappedWatch>(module, "HeartbeatWatch")
      .def(py::init<int, std::size_t, std::uint32_t>(), py::kw_only(), py::arg("doorbells_fd"),
           py::arg("num_devices"), py::arg("limit_ms"))
      .def("look", [](MappedWatch& self) { return self.watch.look(); });
}

}  // namespace coarse
