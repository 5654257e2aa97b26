#include "coarse/tensors/tensor_group.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include "bindings.hpp"
#include "coarse/node/node_segment.hpp"

namespace py = pybind11;

namespace coarse {
namespace {

using ShardTuple = std::tuple<std::uint32_t, std::uint32_t, std::uint64_t, int, int, int, bool>;

Shard toShard(const ShardTuple& values) {
  Shard shard;
  shard.tensor = std::get<0>(values);
  shard.numElements = std::get<1>(values);
  shard.offset = std::get<2>(values);
  shard.dtype = static_cast<DType>(std::get<3>(values));
  shard.op = static_cast<ReduceOp>(std::get<4>(values));
  shard.algorithm = static_cast<Algorithm>(std::get<5>(values));
  shard.isDynamic = std::get<6>(values);
  return shard;
}

GroupPlan makePlan(std::uint32_t id, std::size_t numClients, std::size_t slotBytes,
                   const std::vector<ShardTuple>& shards, int numStates,
                   std::vector<std::uint32_t> rowElements, bool areGradients, std::size_t numRanks) {
  GroupPlan plan;
  plan.id = id;
  plan.numClients = numClients;
  plan.numRanks = numRanks;
  plan.slotBytes = slotBytes;
  for (const ShardTuple& shard : shards) plan.shards.push_back(toShard(shard));
  plan.hasOptimizer = numStates >= 0;
  plan.numStates = static_cast<std::size_t>(std::max(0, numStates));
  plan.rowElements = std::move(rowElements);
  plan.areGradients = areGradients;
  plan.validate();
  return plan;
}

}  // namespace

void registerTensorGroup(py::module_& module) {
  py::class_<GroupPlan>(module, "GroupPlan")
      .def(py::init(&makePlan), py::arg("id"), py::arg("num_clients"), py::arg("slot_bytes"),
           py::arg("shards"), py::arg("num_states") = -1,
           py::arg("row_elements") = std::vector<std::uint32_t>(), py::arg("are_gradients") = false,
           py::arg("num_ranks") = 0)
      .def_readonly("id", &GroupPlan::id)
      .def_readonly("num_clients", &GroupPlan::numClients)
      .def_readonly("num_ranks", &GroupPlan::numRanks)
      .def_readonly("slot_bytes", &GroupPlan::slotBytes)
      .def_property_readonly("client_bytes", &GroupPlan::clientBytes)
      .def_property_readonly("settings_bytes", &GroupPlan::settingsBytes)
      .def_property_readonly("parameter_bytes", &GroupPlan::parameterBytes)
      .def("parameter_offsets",
           [](const GroupPlan& plan) {
             std::vector<std::uint64_t> offsets;
             for (const KeptArrays& tensor : plan.keptArrays()) offsets.push_back(tensor.parameterOffset);
             return offsets;
           })
      .def_property_readonly("kept_bytes", &GroupPlan::keptBytes)
      .def("kept_arrays",
           [](const GroupPlan& plan) {
             std::vector<std::tuple<std::uint64_t, std::size_t, std::size_t>> arrays;
             for (const KeptArrays& tensor : plan.keptArrays())
               arrays.emplace_back(tensor.offset, tensor.arrayBytes, tensor.numArrays);
             return arrays;
           })
      .def_property_readonly("rows_bytes", &GroupPlan::rowsBytes)
      .def(
          "row_buffers",
          [](const GroupPlan& plan) {
            std::vector<std::array<std::size_t, 5>> buffers;
            for (const RowTable& table : plan.rowTables()) {
              const RowBuffer::ArrayPlaces places(table.numRows, table.rowBytes);
              buffers.push_back({table.offset, table.offset + places.given, table.offset + places.givenValues,
                                 table.offset + places.mean, table.offset + places.meanValues});
            }
            return buffers;
          })
      .def_property_readonly("num_shards", [](const GroupPlan& plan) { return plan.shards.size(); });
  module.def("client_segment_bytes", &ClientSegment::numBytes, py::arg("num_devices"));
  module.def(
      "doorbells_bytes", [](std::size_t numDevices) { return numDevices * sizeof(Doorbell); },
      py::arg("num_devices"));
  module.def("group_control_bytes", &GroupControl::numBytes, py::arg("num_shards"), py::arg("num_clients"),
             py::arg("num_ranks") = 0);
  module.def(
      "exchange_logs_bytes", [](std::size_t numDevices) { return numDevices * sizeof(ExchangeLog); },
      py::arg("num_devices"));
  module.def(
      "node_segment_bytes",
      [](const GroupPlan& plan, std::size_t node, std::size_t numNodes, bool isStaged, int compression,
         bool isWhole) {
        return NodeSegment::numBytes(plan, {node, numNodes}, isStaged, static_cast<Compression>(compression),
                                     isWhole);
      },
      py::arg("plan"), py::arg("node"), py::arg("num_nodes"), py::arg("is_staged"),
      py::arg("compression") = 0, py::arg("is_whole") = false);
  module.attr("UPDATE_SETTINGS_BYTES") = sizeof(UpdateSettings);
  module.attr("RING_LOGS_BYTES") = sizeof(RingLogs);
  module.attr("RING_SEGMENT_BYTES") = sizeof(RingSegment);
  module.attr("RING_LOG_CAPACITY") = kRingLogCapacity;
}

}  // namespace coarse
