#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "c10d_backend.hpp"

namespace {

constexpr const char* kCapsuleName = "coarse.kernels.Collectives";

c10::intrusive_ptr<coarse_torch::CoarseBackend> create(const py::capsule& collectives, int rank, int size,
                                                       std::chrono::milliseconds timeout) {
  auto* shared = static_cast<std::shared_ptr<coarse::Collectives>*>(
      PyCapsule_GetPointer(collectives.ptr(), kCapsuleName));
  if (shared == nullptr) throw py::error_already_set();
  return c10::make_intrusive<coarse_torch::CoarseBackend>(*shared, rank, size, timeout);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "torch.distributed's backend \"coarse\".";
  module.attr("COLLECTIVE_ABI") = coarse::kCollectiveAbi;
  py::class_<coarse_torch::CoarseBackend, c10d::Backend, c10::intrusive_ptr<coarse_torch::CoarseBackend>>(
      module, "CoarseBackend");
  module.def("create", &create, py::arg("collectives"), py::kw_only(), py::arg("rank"), py::arg("size"),
             py::arg("timeout"));
}
