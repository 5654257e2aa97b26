#include "coarse/gpu/gpu_transfers.hpp"

#include <pybind11/stl.h>

#include <tuple>
#include <utility>

#include "bindings.hpp"
#include "coarse/shared_memory/forks.hpp"

namespace py = pybind11;

namespace coarse {
namespace {

/// Tensor, flags, source, destination, result.
using TensorTuple = std::tuple<std::uint32_t, std::uint8_t, std::uint64_t, std::uint64_t, std::uintptr_t>;

/// Address, bytes, the GPU for which it is mapped.
using MemoryTuple = std::tuple<std::uintptr_t, std::size_t, std::shared_ptr<cuda::Context>>;

MappedMemory toMemory(const MemoryTuple& tuple) {
  const auto& [address, numBytes, gpu] = tuple;
  return {reinterpret_cast<std::byte*>(address), numBytes, gpu};
}

/// As large as a batch of copies to slots, so that both paths are busy early.
constexpr std::size_t kDirectAllReduceBucketBytes = GpuTransfersConfig{}.mostBatchBytes;

/// A method that takes tensors in the order of `stream`.
template <WaitStatus (GpuTransfers::*method)(const std::vector<GpuTensor>&, cuda::StreamHandle)>
WaitStatus take(GpuTransfers& transfers, const std::vector<TensorTuple>& tuples, std::uintptr_t stream) {
  std::vector<GpuTensor> tensors;
  tensors.reserve(tuples.size());
  for (const auto& [tensor, flags, source, destination, result] : tuples)
    tensors.push_back({tensor, flags, source, destination, reinterpret_cast<const std::byte*>(result)});
  return (transfers.*method)(tensors, reinterpret_cast<cuda::StreamHandle>(stream));
}

}  // namespace

void registerGpuTransfers(py::module_& module) {
  using ReleaseGil = py::call_guard<py::gil_scoped_release>;
  py::class_<GpuDirectAllReduce, std::shared_ptr<GpuDirectAllReduce>>(module, "GpuDirectAllReduce")
      .def(py::init([](std::shared_ptr<nccl::Communicator> communicator, const Client& client,
                       std::uint32_t group, const std::vector<std::uint32_t>& shards) {
             return std::make_shared<GpuDirectAllReduce>(std::move(communicator), client.plan(group), shards,
                                                         kDirectAllReduceBucketBytes);
           }),
           py::arg("communicator"), py::arg("client"), py::arg("group"), py::arg("shards"),
           py::keep_alive<1, 3>());
  using Holder = std::unique_ptr<GpuTransfers, LeakInForks>;
  py::class_<GpuTransfers, Holder>(module, "GpuTransfers")
      .def(py::init([](Client& client, std::uint32_t group, std::shared_ptr<cuda::Context> context,
                       const MemoryTuple& slots, const MemoryTuple& results, double timeoutSeconds) {
             GpuTransfersConfig config;
             config.group = group;
             config.timeoutSeconds = timeoutSeconds;
             return Holder(
                 new GpuTransfers(client, config, std::move(context), toMemory(slots), toMemory(results)));
           }),
           py::arg("client"), py::arg("group"), py::arg("context"), py::arg("slots"), py::arg("results"),
           py::arg("timeout_s"), py::keep_alive<1, 2>(), ReleaseGil())
      .def("stage", &take<&GpuTransfers::stage>, py::arg("tensors"), py::arg("stream"), ReleaseGil())
      .def("push", &take<&GpuTransfers::push>, py::arg("tensors"), py::arg("stream"), ReleaseGil())
      .def(
          "join",
          [](GpuTransfers& transfers, std::uintptr_t stream) {
            return transfers.join(reinterpret_cast<cuda::StreamHandle>(stream));
          },
          py::arg("stream"), ReleaseGil())
      .def("use_direct_allreduce", &GpuTransfers::useDirectAllReduce, py::arg("direct_allreduce").none(true),
           py::arg("slots"))
      .def("wait_for_direct_allreduce", &GpuTransfers::waitForDirectAllReduce, ReleaseGil())
      .def("status", &GpuTransfers::status)
      .def_property_readonly("batch_bytes", &GpuTransfers::batchBytes)
      .def_property_readonly("num_pushed", &GpuTransfers::numPushed)
      .def("has_brought", &GpuTransfers::hasBrought, py::arg("count"))
      .def("close", &GpuTransfers::close, ReleaseGil());
}

}  // namespace coarse
