#include "coarse/gpu/cuda_driver.hpp"

#include <pybind11/stl.h>

#include <memory>

#include "bindings.hpp"
#include "coarse/gpu/cuda_peers.hpp"
#include "coarse/gpu/cuda_unused_memory.hpp"
#include "dlpack.hpp"

namespace py = pybind11;

namespace coarse {
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

cuda::StreamHandle toStream(std::uintptr_t stream) { return reinterpret_cast<cuda::StreamHandle>(stream); }

void unmap(cuda::DeviceMemory* memory) { delete memory; }

void leaveUnused(cuda::DeviceMemory* memory) {
  cuda::leaveUnused(std::unique_ptr<cuda::DeviceMemory>(memory));
}

/// @param arguments the bytes of each, as the kernel takes them.
void launchKernel(const cuda::Context& context, std::uintptr_t kernel, unsigned int numBlocks,
                  unsigned int numThreads, std::uintptr_t stream, const std::vector<std::string>& arguments) {
  const cuda::ContextScope scope(context);
  cuda::LaunchShape shape;
  shape.grid[0] = numBlocks;
  shape.block[0] = numThreads;
  std::vector<void*> pointers;
  for (const std::string& argument : arguments) pointers.push_back(const_cast<char*>(argument.data()));
  cuda::launchKernel(reinterpret_cast<cuda::FunctionHandle>(kernel), shape, toStream(stream), pointers);
}

void registerStreams(py::module_& module) {
  py::class_<cuda::Event>(module, "CudaEvent")
      .def(py::init([](std::shared_ptr<cuda::Context> context, bool isTimed) {
             return std::make_unique<cuda::Event>(
                 std::move(context), isTimed ? cuda::Event::Timing::kMeasured : cuda::Event::Timing::kNone);
           }),
           py::arg("context"), py::kw_only(), py::arg("is_timed") = false)
      .def(
          "record",
          [](cuda::Event& event, std::uintptr_t stream) {
            const cuda::ContextScope scope(*event.context());
            event.record(toStream(stream));
          },
          py::arg("stream"))
      .def("is_done",
           [](const cuda::Event& event) {
             const cuda::ContextScope scope(*event.context());
             return event.isDone();
           })
      .def(
          "synchronize",
          [](const cuda::Event& event) {
            const cuda::ContextScope scope(*event.context());
            event.synchronize();
          },
          ReleaseGil())
      .def(
          "milliseconds_since",
          [](const cuda::Event& event, const cuda::Event& start) {
            const cuda::ContextScope scope(*event.context());
            return event.millisecondsSince(start);
          },
          py::arg("start"));
  py::class_<cuda::Stream>(module, "CudaStream")
      .def(py::init([](std::shared_ptr<cuda::Context> context, int priority) {
             return std::make_unique<cuda::Stream>(std::move(context), priority);
           }),
           py::arg("context"), py::kw_only(), py::arg("priority") = 0)
      .def_property_readonly(
          "handle",
          [](const cuda::Stream& stream) { return reinterpret_cast<std::uintptr_t>(stream.handle()); })
      .def(
          "wait",
          [](cuda::Stream& stream, const cuda::Event& event) {
            const cuda::ContextScope scope(*stream.context());
            stream.wait(event);
          },
          py::arg("event"))
      .def(
          "copy_to_device",
          [](cuda::Stream& stream, std::uint64_t destination, std::uintptr_t source, std::size_t numBytes) {
            const cuda::ContextScope scope(*stream.context());
            stream.copyToDevice(destination, reinterpret_cast<const void*>(source), numBytes);
          },
          py::arg("destination"), py::arg("source"), py::arg("num_bytes"), ReleaseGil())
      .def(
          "copy_to_host",
          [](cuda::Stream& stream, std::uintptr_t destination, std::uint64_t source, std::size_t numBytes) {
            const cuda::ContextScope scope(*stream.context());
            stream.copyToHost(reinterpret_cast<void*>(destination), source, numBytes);
          },
          py::arg("destination"), py::arg("source"), py::arg("num_bytes"), ReleaseGil())
      .def(
          "copy_on_device",
          [](cuda::Stream& stream, std::uint64_t destination, std::uint64_t source, std::size_t numBytes) {
            const cuda::ContextScope scope(*stream.context());
            stream.copyOnDevice(destination, source, numBytes);
          },
          py::arg("destination"), py::arg("source"), py::arg("num_bytes"), ReleaseGil())
      .def(
          "copy_from",
          [](cuda::Stream& stream, const cuda::Context& other, std::uint64_t destination,
             std::uint64_t source, std::size_t numBytes) {
            const cuda::ContextScope scope(*stream.context());
            stream.copyFrom(other, destination, source, numBytes);
          },
          py::arg("other"), py::arg("destination"), py::arg("source"), py::arg("num_bytes"), ReleaseGil())
      .def(
          "copy_to",
          [](cuda::Stream& stream, const cuda::Context& other, std::uint64_t destination,
             std::uint64_t source, std::size_t numBytes) {
            const cuda::ContextScope scope(*stream.context());
            stream.copyTo(other, destination, source, numBytes);
          },
          py::arg("other"), py::arg("destination"), py::arg("source"), py::arg("num_bytes"), ReleaseGil())
      .def(
          "fill",
          [](cuda::Stream& stream, std::uint64_t destination, unsigned char value, std::size_t numBytes) {
            const cuda::ContextScope scope(*stream.context());
            stream.fill(destination, value, numBytes);
          },
          py::arg("destination"), py::arg("value"), py::arg("num_bytes"), ReleaseGil())
      .def(
          "synchronize",
          [](const cuda::Stream& stream) {
            const cuda::ContextScope scope(*stream.context());
            stream.synchronize();
          },
          ReleaseGil())
      .def("is_idle", [](const cuda::Stream& stream) {
        const cuda::ContextScope scope(*stream.context());
        return stream.isIdle();
      });
}

void registerMemory(py::module_& module) {
  py::class_<cuda::HostRegistration>(module, "CudaHostRegistration")
      .def(py::init([](std::shared_ptr<cuda::Context> context, std::uintptr_t address, std::size_t numBytes,
                       bool isReadOnly) {
             using Access = cuda::HostRegistration::Access;
             return std::make_unique<cuda::HostRegistration>(
                 std::move(context), reinterpret_cast<void*>(address), numBytes,
                 isReadOnly ? Access::kReadOnly : Access::kReadWrite);
           }),
           py::arg("context"), py::arg("address"), py::arg("num_bytes"), py::kw_only(),
           py::arg("is_read_only") = false, ReleaseGil());
  module.def("cuda_unmap_unused", &cuda::unmapUnused, ReleaseGil());
  py::class_<cuda::DeviceMemory, std::shared_ptr<cuda::DeviceMemory>>(module, "CudaMemory")
      .def_static(
          "allocate",
          [](std::shared_ptr<cuda::Context> context, std::size_t numBytes) {
            return std::make_shared<cuda::DeviceMemory>(
                cuda::DeviceMemory::allocate(std::move(context), numBytes));
          },
          py::arg("context"), py::arg("num_bytes"), ReleaseGil())
      .def_static(
          "page_bytes",
          [](const cuda::Context& context) { return cuda::DeviceMemory::roundUpToPages(context, 1); },
          py::arg("context"))
      .def_static(
          "import_region",
          [](std::shared_ptr<cuda::Context> context, const Region& region, bool settles, bool isOwn) {
            cuda::unmapUnused();
            cuda::DeviceMemory memory = cuda::DeviceMemory::import(std::move(context), region);
            if (isOwn) cuda::requireKeptCopies(memory, region);
            return std::shared_ptr<cuda::DeviceMemory>(new cuda::DeviceMemory(std::move(memory)),
                                                       settles ? &leaveUnused : &unmap);
          },
          py::arg("context"), py::arg("region"), py::kw_only(), py::arg("settles") = false,
          py::arg("is_own") = false, ReleaseGil())
      .def("export_fd", &cuda::DeviceMemory::exportFd)
      .def(
          "dlpack_capsule",
          [](std::shared_ptr<cuda::DeviceMemory> memory, std::size_t start, std::size_t numBytes) {
            return dlpackCapsule(std::move(memory), start, numBytes);
          },
          py::arg("start"), py::arg("num_bytes"))
      .def_property_readonly("device",
                             [](const cuda::DeviceMemory& memory) { return memory.context()->device(); })
      .def_property_readonly("address", &cuda::DeviceMemory::address)
      .def_property_readonly("num_bytes", &cuda::DeviceMemory::numBytes);
}

}  // namespace

void registerCudaDriver(py::module_& module) {
  const auto error = py::register_exception<cuda::Error>(module, "CudaError", PyExc_RuntimeError);
  py::register_exception<cuda::OutOfMemoryError>(module, "CudaOutOfMemoryError", error.ptr());
  module.def("cuda_unavailable_reason", &cuda::unavailableReason, ReleaseGil());
  module.def("cuda_driver_version", &cuda::driverVersion);
  module.def("cuda_num_devices", &cuda::numDevices);
  module.def("cuda_device_name", &cuda::deviceName, py::arg("device"));
  module.def("cuda_device_uuid", &cuda::deviceUuid, py::arg("device"));
  module.def("cuda_device_bus_id", &cuda::deviceBusId, py::arg("device"));
  module.def(
      "cuda_device_attribute",
      [](int device, int attribute) {
        return cuda::deviceAttribute(device, static_cast<cuda::DeviceAttribute>(attribute));
      },
      py::arg("device"), py::arg("attribute"));
  module.def("cuda_can_access_peer", &cuda::canAccessPeer, py::arg("device"), py::arg("peer"));
  module.def("cuda_reaches_peer", &cuda::reachesPeer, py::arg("device"), py::arg("peer"), ReleaseGil());
  module.def("cuda_take_peer_warnings", &cuda::takePeerWarnings);
  py::class_<cuda::Context, std::shared_ptr<cuda::Context>>(module, "CudaContext")
      .def(py::init<int>(), py::arg("device"), ReleaseGil())
      .def_property_readonly("device", &cuda::Context::device)
      .def("synchronize", &cuda::Context::synchronize, ReleaseGil())
      .def("memory_info",
           [](const cuda::Context& context) {
             const cuda::MemoryInfo info = context.memoryInfo();
             return std::pair(info.freeBytes, info.totalBytes);
           })
      .def(
          "load_module",
          [](const cuda::Context& context, const std::string& code) {
            return reinterpret_cast<std::uintptr_t>(cuda::loadModule(context, code.data()));
          },
          py::arg("code"), ReleaseGil())
      .def(
          "find_kernel",
          [](const cuda::Context& context, std::uintptr_t loaded, const std::string& name) {
            const auto handle = reinterpret_cast<cuda::ModuleHandle>(loaded);
            return reinterpret_cast<std::uintptr_t>(cuda::findKernel(context, handle, name));
          },
          py::arg("module"), py::arg("name"))
      .def("launch", &launchKernel, py::arg("kernel"), py::arg("num_blocks"), py::arg("num_threads"),
           py::arg("stream"), py::arg("arguments"));
  registerStreams(module);
  registerMemory(module);
}

}  // namespace coarse
