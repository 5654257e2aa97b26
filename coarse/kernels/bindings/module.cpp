#include <system_error>

#include "bindings.hpp"

namespace py = pybind11;

PYBIND11_MODULE(_native, module) {
  module.doc() = "The data path of COARSE: shared memory, queues, sync cores.";
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const std::system_error& error) {
      // OSError(errno, text) selects the right subclass itself.
      py::tuple args = py::make_tuple(error.code().value(), error.what());
      PyErr_SetObject(PyExc_OSError, args.ptr());
    }
  });
  coarse::registerCudaDriver(module);
  coarse::registerNccl(module);
  coarse::registerSharedMemory(module);
  coarse::registerMetrics(module);
  coarse::registerTensorMemory(module);
  coarse::registerTensorGroup(module);
  coarse::registerProxy(module);
  coarse::registerClient(module);
  coarse::registerAsyncReducer(module);
  coarse::registerAsyncRows(module);
  coarse::registerAsyncUpdates(module);
  coarse::registerGpuTransfers(module);
  coarse::registerHeartbeat(module);
  coarse::registerPacer(module);
  coarse::registerReduce(module);
  coarse::registerSnapshot(module);
  coarse::registerCudaBatches(module);
  coarse::registerCollectives(module);
  coarse::registerTimeline(module);
}
