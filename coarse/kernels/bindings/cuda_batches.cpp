#include <pybind11/stl.h>

#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "batches.cuh"
#include "bindings.hpp"
#include "coarse/reduce/reduce.hpp"
#include "coarse/reduce/update.hpp"

namespace py = pybind11;

namespace coarse {
namespace {

using Addresses = std::vector<std::uintptr_t>;
/// Elements, divisor, inputs, outputs, received array, sent array; 0 for either of the last two if absent.
using ReduceRow =
    std::tuple<std::uint64_t, std::uint32_t, Addresses, Addresses, std::uintptr_t, std::uintptr_t>;
/// Elements, divisor, gradients, parameter, master weights or 0, states, settings.
using UpdateRow =
    std::tuple<std::uint64_t, std::uint32_t, Addresses, std::uintptr_t, std::uintptr_t, Addresses, py::bytes>;

std::vector<void*> pointers(const Addresses& addresses) {
  std::vector<void*> result;
  for (const std::uintptr_t address : addresses) result.push_back(reinterpret_cast<void*>(address));
  return result;
}

UpdateSettings settingsOf(const py::bytes& bytes) {
  const auto view = static_cast<std::string_view>(bytes);
  UpdateSettings settings;
  if (view.size() != sizeof settings)
    throw py::value_error("settings have " + std::to_string(sizeof settings) + " bytes, not " +
                          std::to_string(view.size()));
  std::memcpy(&settings, view.data(), sizeof settings);
  return settings;
}

template <class Batch>
py::tuple packed(const Batch& batch) {
  return py::make_tuple(py::bytes(reinterpret_cast<const char*>(&batch), sizeof batch), batch.numTiles);
}

py::tuple reduceBatch(std::uint8_t dtype, const std::vector<ReduceRow>& rows) {
  cuda::ReduceBatch batch{};
  for (const auto& [numElements, divisor, inputs, outputs, received, sent] : rows) {
    const std::vector<void*> in = pointers(inputs), out = pointers(outputs);
    if (!cuda::append(batch, itemBytes(static_cast<DType>(dtype)), numElements, divisor, in.data(),
                      static_cast<std::uint32_t>(in.size()), in == out ? in.data() : out.data(),
                      static_cast<std::uint32_t>(out.size()), reinterpret_cast<const void*>(received),
                      reinterpret_cast<void*>(sent)))
      throw py::value_error("shard " + std::to_string(batch.numShards) + " does not fit into the batch");
  }
  return packed(batch);
}

py::tuple updateBatch(std::uint8_t dtype, const std::vector<UpdateRow>& rows) {
  cuda::UpdateBatch batch{};
  for (const auto& [numElements, divisor, gradients, parameter, master, states, bytes] : rows) {
    const UpdateSettings settings = settingsOf(bytes);
    if (!isRunnable(settings, states.size()) || states.size() > kMostStates || gradients.empty())
      throw py::value_error("shard " + std::to_string(batch.numShards) +
                            " has no rule, or too few arrays for it");
    cuda::UpdateShard shard{};
    shard.numElements = numElements;
    shard.divisor = divisor;
    shard.parameter = reinterpret_cast<void*>(parameter);
    shard.master = reinterpret_cast<float*>(master);
    for (std::size_t i = 0; i < states.size(); ++i) shard.states[i] = reinterpret_cast<float*>(states[i]);
    const std::vector<void*> in = pointers(gradients);
    if (!cuda::append(batch, itemBytes(static_cast<DType>(dtype)), shard,
                      static_cast<std::uint32_t>(numStates(settings.rule)), &settings, in.data(),
                      static_cast<std::uint32_t>(in.size())))
      throw py::value_error("shard " + std::to_string(batch.numShards) + " does not fit into the batch");
  }
  return packed(batch);
}

void reduceArrays(std::uint8_t dtype, std::uint8_t op, const Addresses& inputs, const Addresses& outputs,
                  std::size_t numElements, std::uint32_t divisor) {
  const std::vector<void*> in = pointers(inputs), out = pointers(outputs);
  reduce(static_cast<DType>(dtype), static_cast<ReduceOp>(op), in.data(), in.size(), out.data(), out.size(),
         numElements, divisor);
}

void updateArrays(std::uint8_t dtype, const UpdateRow& row) {
  const auto& [numElements, divisor, gradients, parameter, master, states, bytes] = row;
  const std::vector<void*> in = pointers(gradients), kept = pointers(states);
  const UpdateSettings settings = settingsOf(bytes);
  if (!isRunnable(settings, states.size()) || gradients.empty())
    throw py::value_error("the update has no rule, or too few arrays for it");
  std::vector<float*> floats;
  for (void* state : kept) floats.push_back(static_cast<float*>(state));
  UpdateArrays arrays;
  arrays.gradients = in.data();
  arrays.numGradients = in.size();
  arrays.parameter = reinterpret_cast<void*>(parameter);
  arrays.master = reinterpret_cast<float*>(master);
  arrays.states = floats.data();
  arrays.numElements = numElements;
  update(settings, static_cast<DType>(dtype), arrays, divisor);
}

double sumOfSquaresAt(std::uint8_t dtype, std::uintptr_t address, std::size_t numElements) {
  return sumOfSquares(static_cast<DType>(dtype), reinterpret_cast<const void*>(address), numElements);
}

}  // namespace

void registerCudaBatches(py::module_& module) {
  module.def("cuda_reduce_batch", &reduceBatch, py::arg("dtype"), py::arg("shards"));
  module.def("cuda_update_batch", &updateBatch, py::arg("dtype"), py::arg("shards"));
  module.def("reduce_arrays", &reduceArrays, py::arg("dtype"), py::arg("op"), py::arg("inputs"),
             py::arg("outputs"), py::arg("num_elements"), py::arg("divisor"));
  module.def("update_arrays", &updateArrays, py::arg("dtype"), py::arg("shard"));
  module.def("sum_of_squares", &sumOfSquaresAt, py::arg("dtype"), py::arg("address"),
             py::arg("num_elements"));
}

}  // namespace coarse
