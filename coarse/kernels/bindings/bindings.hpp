#pragma once

#include <pybind11/pybind11.h>

namespace coarse {

/// One function per header; each only translates.
void registerCudaDriver(pybind11::module_& module);
void registerNccl(pybind11::module_& module);
void registerSharedMemory(pybind11::module_& module);
void registerMetrics(pybind11::module_& module);
void registerTensorMemory(pybind11::module_& module);
void registerTensorGroup(pybind11::module_& module);
void registerProxy(pybind11::module_& module);
void registerClient(pybind11::module_& module);
void registerAsyncReducer(pybind11::module_& module);
void registerAsyncRows(pybind11::module_& module);
void registerAsyncUpdates(pybind11::module_& module);
void registerGpuTransfers(pybind11::module_& module);
void registerHeartbeat(pybind11::module_& module);
void registerPacer(pybind11::module_& module);
void registerReduce(pybind11::module_& module);
void registerSnapshot(pybind11::module_& module);
void registerCudaBatches(pybind11::module_& module);
void registerCollectives(pybind11::module_& module);
void registerTimeline(pybind11::module_& module);

/// Deletes objects whose own thread may need the GIL before it can end.
struct DeleteWithoutGil {
  template <typename T>
  void operator()(T* object) const {
    const pybind11::gil_scoped_release release;
    delete object;
  }
};

}  // namespace coarse
