#include "coarse/snapshot/snapshot.hpp"

#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>

#include "bindings.hpp"
#include "coarse/gpu/cuda_snapshot_pool.hpp"
#include "coarse/tensors/group_snapshots.hpp"
#include "coarse/tensors/tensor_group.hpp"

namespace py = pybind11;

namespace coarse {
namespace {

/// The snapshots of a group for a process other than its proxy: with its own mappings.
class GroupReader {
 public:
  GroupReader(const GroupPlan& plan, const TensorMemory& memory, const Region& parameters,
              const Region& states, const SnapshotFds& fds, std::chrono::milliseconds patience)
      : parameters_(memory.map(parameters, plan.parameterBytes(), "parameters")),
        states_(plan.keptBytes() == 0 ? nullptr : memory.map(states, plan.keptBytes(), "states")),
        snapshots_(plan, parameters_.get(), states_.get(), fds, patience) {}

  bool read(std::uint32_t snapshot, std::uint32_t shard, std::size_t array, const py::buffer& destination) {
    check(shard, array);
    const py::buffer_info info = destination.request(true);
    const std::size_t numBytes = snapshots_.numBytes(shard, array);
    if (static_cast<std::size_t>(info.size * info.itemsize) < numBytes)
      throw std::invalid_argument("this block needs a buffer of " + std::to_string(numBytes) + " bytes");
    const py::gil_scoped_release unlocked;
    return snapshots_.read(snapshot, shard, array, static_cast<std::byte*>(info.ptr));
  }
  void letGo(std::uint32_t snapshot, std::uint32_t shard, std::size_t array) {
    check(shard, array);
    snapshots_.letGo(snapshot, shard, array);
  }
  std::size_t blockBytes(std::uint32_t shard, std::size_t array) const {
    check(shard, array);
    return snapshots_.numBytes(shard, array);
  }
  std::size_t numArrays() const { return snapshots_.numArrays(); }
  void keep(std::uint32_t shard) {
    check(shard, 0);
    snapshots_.keep(shard);
  }
  void keepAll() {
    std::vector<std::uint32_t> all(snapshots_.numShards());
    std::iota(all.begin(), all.end(), 0U);
    snapshots_.keep(all);
  }
  SnapshotStore& store() { return snapshots_.store(); }

 private:
  void check(std::uint32_t shard, std::size_t array) const {
    if (shard >= snapshots_.numShards() || array >= snapshots_.numArrays())
      throw std::invalid_argument("there is no array " + std::to_string(array) + " of shard " +
                                  std::to_string(shard));
  }

  TensorBytes parameters_, states_;
  GroupSnapshots snapshots_;
};

}  // namespace

void registerSnapshot(py::module_& module) {
  using ReleaseGil = py::call_guard<py::gil_scoped_release>;
  py::class_<SnapshotPool, std::shared_ptr<SnapshotPool>>(module, "SnapshotPool");
  py::class_<CudaSnapshotPool, SnapshotPool, std::shared_ptr<CudaSnapshotPool>>(module, "CudaSnapshotPool")
      .def(py::init([](std::shared_ptr<cuda::Context> context, const GroupPlan& plan) {
             return std::make_shared<CudaSnapshotPool>(std::move(context), GroupSnapshots::blockBytes(plan));
           }),
           py::arg("context"), py::arg("plan"));
  py::class_<SnapshotTrigger>(module, "SnapshotTrigger")
      .def(py::init<int, int, std::uint32_t>(), py::arg("request_fd"), py::arg("control_fd"),
           py::arg("client"))
      .def("begin", &SnapshotTrigger::begin)
      .def("impossible", &SnapshotTrigger::impossible);
  py::class_<SnapshotStatistics>(module, "SnapshotStatistics")
      .def_readonly("limit_bytes", &SnapshotStatistics::limitBytes)
      .def_readonly("taken_bytes", &SnapshotStatistics::takenBytes)
      .def_readonly("peak_bytes", &SnapshotStatistics::peakBytes)
      .def_readonly("kept_bytes", &SnapshotStatistics::keptBytes)
      .def_readonly("num_waits", &SnapshotStatistics::numWaits)
      .def_readonly("waited_s", &SnapshotStatistics::waitedSeconds)
      .def_readonly("num_lost", &SnapshotStatistics::numLost)
      .def_readonly("lost_of", &SnapshotStatistics::lostOf)
      .def_readonly("impossible", &SnapshotStatistics::impossible);
  py::class_<GroupSnapshots, std::shared_ptr<GroupSnapshots>>(module, "GroupSnapshots")
      .def_property_readonly("num_arrays", &GroupSnapshots::numArrays)
      .def_property_readonly("num_shards", &GroupSnapshots::numShards)
      .def("warm", &GroupSnapshots::warm, py::arg("shard"), py::arg("array"), ReleaseGil());
  py::class_<GroupReader>(module, "SnapshotReader")
      .def(py::init([](const GroupPlan& plan, const Region& parameters, const Region& states, int requestFd,
                       int controlFd, int poolFd, double patienceSeconds,
                       std::shared_ptr<SnapshotPool> versions, const std::shared_ptr<TensorMemory>& memory) {
             return std::make_unique<GroupReader>(
                 plan, memory == nullptr ? *hostMemory() : *memory, parameters, states,
                 SnapshotFds{requestFd, controlFd, poolFd, std::move(versions)},
                 std::chrono::milliseconds(static_cast<int>(patienceSeconds * 1000)));
           }),
           py::arg("plan"), py::arg("parameters"), py::arg("states"), py::arg("request_fd"),
           py::arg("control_fd"), py::arg("pool_fd"),
           py::arg("patience_s") = std::chrono::duration<double>(SnapshotStore::kPatience).count(),
           py::kw_only(), py::arg("versions") = nullptr, py::arg("memory") = nullptr)
      .def(
          "set_limit", [](GroupReader& reader, std::size_t limit) { reader.store().setLimit(limit); },
          py::arg("num_bytes"))
      .def_property_readonly("num_arrays", &GroupReader::numArrays)
      .def("block_bytes", &GroupReader::blockBytes, py::arg("shard"), py::arg("array"))
      .def("read", &GroupReader::read, py::arg("snapshot"), py::arg("shard"), py::arg("array"),
           py::arg("destination"))
      .def("let_go", &GroupReader::letGo, py::arg("snapshot"), py::arg("shard"), py::arg("array"),
           ReleaseGil())
      .def("keep", &GroupReader::keep, py::arg("shard"), ReleaseGil())
      .def("keep_all", &GroupReader::keepAll, ReleaseGil())
      .def(
          "release", [](GroupReader& reader, std::uint32_t snapshot) { reader.store().release(snapshot); },
          py::arg("snapshot"), ReleaseGil())
      .def(
          "is_lost",
          [](GroupReader& reader, std::uint32_t snapshot) { return reader.store().isLost(snapshot); },
          py::arg("snapshot"))
      .def("statistics", [](GroupReader& reader) { return reader.store().statistics(); });
  module.def(
      "snapshot_control_bytes",
      [](const GroupPlan& plan) {
        return SnapshotControl::numBytes(GroupSnapshots::blockBytes(plan).size());
      },
      py::arg("plan"));
  module.def(
      "snapshot_pool_bytes",
      [](const GroupPlan& plan) { return SparsePool::numBytes(GroupSnapshots::blockBytes(plan)); },
      py::arg("plan"));
  module.attr("SNAPSHOT_REQUEST_BYTES") = sizeof(SnapshotRequest);
  module.attr("MOST_SNAPSHOTS") = kMostSnapshots;
  module.attr("SNAPSHOT_PLACES") = kCommonPlace + 1;
}

}  // namespace coarse
