#include "bindings.hpp"
#include "coarse/timeline/recorder.hpp"

namespace py = pybind11;

namespace coarse {
namespace {

void recordSpan(std::uint32_t name, std::int64_t startNs, std::int64_t durationNs) {
  Recorder* const active = recorder();
  if (active == nullptr) return;
  TimelineEvent event;
  event.index = name;
  event.startNs = startNs;
  event.durationNs = durationNs;
  active->record(event);
}

void recordReady(std::uint16_t session, std::uint32_t group, std::uint32_t tensor) {
  Recorder* const active = recorder();
  if (active == nullptr) return;
  TimelineEvent event;
  event.kind = EventKind::kReady;
  event.session = session;
  event.group = group;
  event.index = tensor;
  event.startNs = timelineNow();
  active->record(event);
}

}  // namespace

void registerTimeline(py::module_& module) {
  module.attr("TIMELINE_MAGIC") = kTimelineMagic;
  module.attr("TIMELINE_HEADER_BYTES") = kTimelineHeaderBytes;
  module.attr("TIMELINE_INSTANT") = kInstant;
  module.def("timeline_bytes", &Recorder::numBytes, py::arg("capacity"));
  module.def("open_timeline", &openTimeline, py::arg("fd"), py::arg("capacity"));
  module.def("close_timeline", &closeTimeline);
  module.def("is_timeline_open", [] { return recorder() != nullptr; });
  module.def("record_span", &recordSpan, py::arg("name"), py::arg("begin_ns"), py::arg("duration_ns"));
  module.def("record_ready", &recordReady, py::arg("session"), py::arg("group"), py::arg("tensor"));
}

}  // namespace coarse
