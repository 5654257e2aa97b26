#include <fcntl.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <memory>
#include <stdexcept>
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
                                             std::size_t bufferBytes, std::size_t numBuffers,
                                             std::vector<int> pidfds, std::vector<std::uint32_t> nodes,
                                             const std::vector<int>& links, std::int64_t nodePatienceMs,
                                             bool resumesLinks) {
  return SharedCollectives::shared(
      std::make_unique<GroupScratch>(sealedFd, rank, numRanks, bufferBytes, Liveness(std::move(pidfds)),
                                     Placement(std::move(nodes)), numBuffers),
      duplicated(links), LinkOptions{std::chrono::milliseconds(nodePatienceMs), resumesLinks});
}

/// The object for a torch extension, which shares no classes with this module, and alone calls it.
py::capsule capsuleOf(const std::shared_ptr<Collectives>& collectives) {
  return py::capsule(new std::shared_ptr<Collectives>(collectives), kCapsuleName, [](PyObject* capsule) {
    delete static_cast<std::shared_ptr<Collectives>*>(PyCapsule_GetPointer(capsule, kCapsuleName));
  });
}

/// A group's connections to other nodes. Does not keep the group alive.
class GroupLinks {
 public:
  /// @throws std::invalid_argument unless this process has the connections of its node.
  explicit GroupLinks(const std::shared_ptr<Collectives>& group) : group_(group) {
    const NodeBridge* const bridge = static_cast<const SharedCollectives&>(*group).bridge();
    if (bridge == nullptr) throw std::invalid_argument("this process has no connections to other nodes");
    eventFd_ = ::fcntl(bridge->eventFd(), F_DUPFD_CLOEXEC, 0);
  }
  ~GroupLinks() { ::close(eventFd_); }
  GroupLinks(const GroupLinks&) = delete;
  GroupLinks& operator=(const GroupLinks&) = delete;

  int eventFd() const noexcept { return eventFd_; }

  /// Calls `use` with the bridge. @returns false if the group has ended.
  template <typename Use>
  bool with(Use use) const {
    const py::gil_scoped_release release;  // this may be the last use of the group, which then ends
    const std::shared_ptr<Collectives> group = group_.lock();
    if (group == nullptr) return false;
    NodeBridge& bridge = *static_cast<SharedCollectives&>(*group).bridge();
    if (bridge.isOver()) return false;
    use(bridge);
    return true;
  }

 private:
  std::weak_ptr<Collectives> group_;
  int eventFd_ = -1;
};

/// Events as in Proxy.take_node_events(), without causes; None when the group has ended.
py::object takeEvents(const GroupLinks& links) {
  std::vector<NodeEvent> events;
  if (!links.with([&](NodeBridge& bridge) { events = bridge.takeEvents(); })) return py::none();
  py::list list;
  for (const NodeEvent& event : events)
    list.append(py::make_tuple(event.kind, event.node, event.number, py::bytes(event.text)));
  return list;
}

void resumeLink(const GroupLinks& links, std::size_t node, std::size_t, int fd) {
  if (!links.with([&](NodeBridge& bridge) { bridge.resume(node, fd); })) ::close(fd);
}

void interruptLink(const GroupLinks& links, std::size_t node, std::size_t) {
  links.with([&](NodeBridge& bridge) { bridge.interrupt(node); });
}

void giveUpLink(const GroupLinks& links, std::size_t node, std::size_t, const std::string& reason) {
  links.with([&](NodeBridge& bridge) { bridge.giveUp(node, reason); });
}

}  // namespace

void registerCollectives(py::module_& module) {
  module.def("group_scratch_bytes", &groupScratchBytes, py::arg("num_ranks"), py::arg("buffer_bytes"),
             py::arg("num_buffers"));
  py::class_<Collectives, std::shared_ptr<Collectives>>(module, "Collectives")
      .def(py::init(&makeCollectives), py::kw_only(), py::arg("fd"), py::arg("rank"), py::arg("num_ranks"),
           py::arg("buffer_bytes"), py::arg("num_buffers"), py::arg("pidfds"), py::arg("nodes"),
           py::arg("links"), py::arg("node_patience_ms") = LinkOptions().patience.count(),
           py::arg("resumes_links") = false)
      .def("capsule", &capsuleOf);
  py::class_<GroupLinks>(module, "GroupLinks")
      .def(py::init<const std::shared_ptr<Collectives>&>(), py::arg("group"))
      .def_property_readonly("event_fd", &GroupLinks::eventFd)
      .def("take_events", &takeEvents)
      .def("resume_link", &resumeLink, py::arg("node"), py::arg("number"), py::arg("fd"))
      .def("interrupt_link", &interruptLink, py::arg("node"), py::arg("number"))
      .def("give_up_link", &giveUpLink, py::arg("node"), py::arg("number"), py::arg("reason"));
}

}  // namespace coarse
