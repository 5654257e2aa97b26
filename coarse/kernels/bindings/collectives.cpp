#include <fcntl.h>
#include <pybind11/chrono.h>
#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "coarse/collectives/combine.hpp"
#include "coarse/collectives/shared_collectives.hpp"

namespace py = pybind11;

namespace coarse {
namespace {

constexpr const char* kCapsuleName = "coarse.kernels.Collectives";

/// Duplicates of descriptors, owned by this module; -1 stays -1.
std::vector<int> duplicated(const std::vector<int>& fds) {
  std::vector<int> own;
  for (int fd : fds) own.push_back(fd < 0 ? -1 : ::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  return own;
}

/// Destroys its object without the GIL, which ending threads may need to report the results of messages.
struct DropWithoutGil {
  std::shared_ptr<Collectives> dropped;

  void operator()(Collectives*) {
    // Without the GIL, or after the interpreter's end, there is nothing to release.
    if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) return dropped.reset();
    py::gil_scoped_release released;
    dropped.reset();
  }
};

std::shared_ptr<Collectives> makeCollectives(int sealedFd, std::size_t rank, std::size_t numRanks,
                                             std::size_t bufferBytes, std::vector<int> pidfds,
                                             std::vector<std::uint32_t> nodes,
                                             const std::vector<int>& links) {
  const std::shared_ptr<Collectives> made = SharedCollectives::shared(
      std::make_unique<GroupScratch>(sealedFd, rank, numRanks, bufferBytes, Liveness(std::move(pidfds)),
                                     Placement(std::move(nodes))),
      duplicated(links));
  return {made.get(), DropWithoutGil{made}};
}

void run(Collectives& collectives, CollectiveKind kind, const std::string& dtype, ElementType element,
         std::size_t elementBytes, Combine combine, int root, const std::vector<std::int64_t>& dims,
         std::uint64_t pieceBytes, const std::vector<std::uintptr_t>& inputs,
         const std::vector<std::uintptr_t>& outputs, const std::vector<std::uint64_t>& inputBytes,
         const std::vector<std::uint64_t>& outputBytes, std::chrono::milliseconds timeout) {
  Collective call;
  call.header.kind = kind;
  call.header.combine = combine;
  call.header.root = root;
  call.header.pieceBytes = pieceBytes;
  call.header.numDims = dims.size() > kMostDims ? kDimsNotTold : static_cast<std::uint8_t>(dims.size());
  if (dims.size() <= kMostDims) std::copy(dims.begin(), dims.end(), call.header.dims);
  std::strncpy(call.header.dtype, dtype.c_str(), kDTypeNameBytes - 1);
  call.element = element;
  call.elementBytes = elementBytes;
  call.inputs = reinterpret_cast<const void* const*>(inputs.data());
  call.outputs = reinterpret_cast<void* const*>(outputs.data());
  call.inputBytes = inputBytes.data();
  call.outputBytes = outputBytes.data();
  call.timeout = timeout;
  collectives.run(call);
}

void post(Collectives& collectives, bool isSend, int peer, int tag, std::uintptr_t data, std::size_t numBytes,
          const std::string& dtype, std::chrono::milliseconds timeout, py::function done) {
  // Called, and freed, by a thread that does not hold the GIL.
  const std::shared_ptr<py::function> callback(new py::function(std::move(done)), [](py::function* function) {
    py::gil_scoped_acquire acquired;
    delete function;
  });
  Message message;
  message.isSend = isSend;
  message.peer = peer;
  message.tag = tag;
  message.data = reinterpret_cast<void*>(data);
  message.numBytes = numBytes;
  std::strncpy(message.dtype, dtype.c_str(), kDTypeNameBytes - 1);
  message.timeout = timeout;
  message.done = [callback](const std::string& error, int from) {
    py::gil_scoped_acquire acquired;
    (*callback)(error, from);
  };
  py::gil_scoped_release released;
  collectives.post(message);
}

/// The same object for a torch extension, which shares no classes with this module.
py::capsule capsuleOf(const std::shared_ptr<Collectives>& collectives) {
  return py::capsule(new std::shared_ptr<Collectives>(collectives), kCapsuleName, [](PyObject* capsule) {
    delete static_cast<std::shared_ptr<Collectives>*>(PyCapsule_GetPointer(capsule, kCapsuleName));
  });
}

}  // namespace

void registerCollectives(py::module_& module) {
  py::native_enum<CollectiveKind>(module, "CollectiveKind", "enum.IntEnum")
      .value("BARRIER", CollectiveKind::kBarrier)
      .value("BROADCAST", CollectiveKind::kBroadcast)
      .value("ALL_REDUCE", CollectiveKind::kAllReduce)
      .value("REDUCE", CollectiveKind::kReduce)
      .value("ALL_GATHER", CollectiveKind::kAllGather)
      .value("REDUCE_SCATTER", CollectiveKind::kReduceScatter)
      .value("GATHER", CollectiveKind::kGather)
      .value("SCATTER", CollectiveKind::kScatter)
      .value("ALL_TO_ALL", CollectiveKind::kAllToAll)
      .finalize();
  py::native_enum<ElementType>(module, "ElementType", "enum.IntEnum")
      .value("OPAQUE", ElementType::kOpaque)
      .value("FLOAT32", ElementType::kFloat32)
      .value("FLOAT64", ElementType::kFloat64)
      .value("BFLOAT16", ElementType::kBFloat16)
      .value("FLOAT16", ElementType::kFloat16)
      .value("INT8", ElementType::kInt8)
      .value("UINT8", ElementType::kUInt8)
      .value("INT16", ElementType::kInt16)
      .value("INT32", ElementType::kInt32)
      .value("INT64", ElementType::kInt64)
      .value("BOOL", ElementType::kBool)
      .finalize();
  py::native_enum<Combine>(module, "Combine", "enum.IntEnum")
      .value("NONE", Combine::kNone)
      .value("SUM", Combine::kSum)
      .value("MEAN", Combine::kMean)
      .value("MAX", Combine::kMax)
      .value("MIN", Combine::kMin)
      .value("PRODUCT", Combine::kProduct)
      .value("BIT_AND", Combine::kBitAnd)
      .value("BIT_OR", Combine::kBitOr)
      .value("BIT_XOR", Combine::kBitXor)
      .finalize();
  module.def("group_scratch_bytes", &groupScratchBytes, py::arg("num_ranks"), py::arg("buffer_bytes"));
  py::class_<Collectives, std::shared_ptr<Collectives>>(module, "Collectives")
      .def(py::init(&makeCollectives), py::kw_only(), py::arg("fd"), py::arg("rank"), py::arg("num_ranks"),
           py::arg("buffer_bytes"), py::arg("pidfds"), py::arg("nodes"), py::arg("links"))
      .def("run", &run, py::kw_only(), py::arg("kind"), py::arg("dtype"), py::arg("element"),
           py::arg("element_bytes"), py::arg("combine"), py::arg("root"), py::arg("dims"),
           py::arg("piece_bytes"), py::arg("inputs"), py::arg("outputs"), py::arg("input_bytes"),
           py::arg("output_bytes"), py::arg("timeout"), py::call_guard<py::gil_scoped_release>())
      .def("post", &post, py::kw_only(), py::arg("is_send"), py::arg("peer"), py::arg("tag"), py::arg("data"),
           py::arg("num_bytes"), py::arg("dtype"), py::arg("timeout"), py::arg("done"))
      .def("close", &Collectives::close, py::call_guard<py::gil_scoped_release>())
      .def("capsule", &capsuleOf);
}

}  // namespace coarse
