#include "coarse/tensors/tensor_memory.hpp"

#include <pybind11/stl.h>

#include <map>
#include <string>

#include "bindings.hpp"
#include "coarse/gpu/cuda_slot_copies.hpp"
#include "coarse/gpu/cuda_spread_memory.hpp"
#include "coarse/gpu/cuda_tensor_memory.hpp"
#include "coarse/gpu/nccl_runner.hpp"
#include "coarse/tensors/group_snapshots.hpp"
#include "coarse/tensors/tensor_group.hpp"

namespace py = pybind11;

namespace coarse {
namespace {

/// By dtype; 0 if there is no kernel.
using Handles = std::vector<std::uintptr_t>;

CudaKernels::ByDType toFunctions(const Handles& handles) {
  CudaKernels::ByDType functions{};
  for (std::size_t dtype = 0; dtype < std::min(handles.size(), functions.size()); ++dtype)
    functions[dtype] = reinterpret_cast<cuda::FunctionHandle>(handles[dtype]);
  return functions;
}

}  // namespace

void registerTensorMemory(py::module_& module) {
  py::class_<TensorMemory, std::shared_ptr<TensorMemory>>(module, "TensorMemory");
  module.def(
      "copy_region",
      [](const std::shared_ptr<TensorMemory>& memory, const Region& from, const Region& to,
         std::size_t numBytes) {
        copyRegion(memory == nullptr ? *hostMemory() : *memory, from, to, numBytes);
      },
      py::arg("memory"), py::arg("source"), py::arg("destination"), py::arg("num_bytes"),
      py::call_guard<py::gil_scoped_release>());
  py::class_<CudaTensorMemory, TensorMemory, std::shared_ptr<CudaTensorMemory>>(module, "CudaTensorMemory")
      .def(py::init([](std::shared_ptr<cuda::Context> context, const Handles& reduceSum,
                       const Handles& reduceMax, const Handles& ringSum, const Handles& ringMax,
                       const Handles& measure, const Handles& update, std::uintptr_t holdUntil) {
             CudaKernels kernels;
             kernels.reduceSum = toFunctions(reduceSum);
             kernels.reduceMax = toFunctions(reduceMax);
             kernels.ringSum = toFunctions(ringSum);
             kernels.ringMax = toFunctions(ringMax);
             kernels.measure = toFunctions(measure);
             kernels.update = toFunctions(update);
             kernels.holdUntil = reinterpret_cast<cuda::FunctionHandle>(holdUntil);
             return std::make_shared<CudaTensorMemory>(std::move(context), kernels);
           }),
           py::arg("context"), py::kw_only(), py::arg("reduce_sum"), py::arg("reduce_max"),
           py::arg("ring_sum"), py::arg("ring_max"), py::arg("measure"), py::arg("update"),
           py::arg("hold_until"));
  py::class_<CudaSpreadMemory, TensorMemory, std::shared_ptr<CudaSpreadMemory>>(module, "CudaSpreadMemory")
      .def(py::init([](const std::vector<std::shared_ptr<CudaTensorMemory>>& gpus) {
             return std::make_shared<CudaSpreadMemory>(
                 std::vector<std::shared_ptr<const CudaTensorMemory>>(gpus.begin(), gpus.end()));
           }),
           py::arg("gpus"))
      .def(
          "snapshot_pool",
          [](const CudaSpreadMemory& memory, const GroupPlan& plan) {
            return memory.makeSnapshotPool(GroupSnapshots::blockBytes(plan));
          },
          py::arg("plan"));
  py::class_<NcclRunner, std::shared_ptr<NcclRunner>>(module, "NcclRunner")
      .def(py::init<std::shared_ptr<nccl::Communicator>, std::shared_ptr<CudaTensorMemory>,
                    std::vector<std::size_t>>(),
           py::arg("communicator"), py::arg("memory"), py::arg("local_clients"),
           py::call_guard<py::gil_scoped_release>())
      .def("connect", &NcclRunner::connect, py::call_guard<py::gil_scoped_release>());
  py::class_<SlotCopies, std::shared_ptr<SlotCopies>>(module, "SlotCopies");
  py::class_<CudaSlotCopies, SlotCopies, std::shared_ptr<CudaSlotCopies>>(module, "CudaSlotCopies")
      .def(py::init([](std::shared_ptr<cuda::DeviceMemory> slots, std::shared_ptr<Mapping> view) {
             return std::make_shared<CudaSlotCopies>(std::move(slots), std::move(view));
           }),
           py::arg("slots"), py::arg("view"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace coarse
