#include <fcntl.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings.hpp"
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

std::shared_ptr<Collectives> makeCollectives(int sealedFd, std::size_t rank, std::size_t numRanks,
                                             std::size_t bufferBytes, std::vector<int> pidfds,
                                             std::vector<std::uint32_t> nodes,
                                             const std::vector<int>& links) {
  return SharedCollectives::shared(
      std::make_unique<GroupScratch>(sealedFd, rank, numRanks, bufferBytes, Liveness(std::move(pidfds)),
                                     Placement(std::move(nodes))),
      duplicated(links));
}

/// The object for a torch extension, which shares no classes with this module, and alone calls it.
py::capsule capsuleOf(const std::shared_ptr<Collectives>& collectives) {
  return py::capsule(new std::shared_ptr<Collectives>(collectives), kCapsuleName, [](PyObject* capsule) {
    delete static_cast<std::shared_ptr<Collectives>*>(PyCapsule_GetPointer(capsule, kCapsuleName));
  });
}

}  // namespace

void registerCollectives(py::module_& module) {
  module.def("group_scratch_bytes", &groupScratchBytes, py::arg("num_ranks"), py::arg("buffer_bytes"));
  py::class_<Collectives, std::shared_ptr<Collectives>>(module, "Collectives")
      .def(py::init(&makeCollectives), py::kw_only(), py::arg("fd"), py::arg("rank"), py::arg("num_ranks"),
           py::arg("buffer_bytes"), py::arg("pidfds"), py::arg("nodes"), py::arg("links"))
      .def("capsule", &capsuleOf);
}

}  // namespace coarse
