#include "coarse/shared_memory/metrics.hpp"

#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <string>

#include "bindings.hpp"

namespace py = pybind11;

namespace coarse {
namespace {

Metric metricOf(std::size_t number) {
  if (number >= kNumMetrics) throw std::out_of_range("there is no metric " + std::to_string(number));
  return static_cast<Metric>(number);
}

std::size_t checkedSeries(const MetricsBlock& block, Metric metric, std::size_t series) {
  if (series >= block.layout().numSeries(metric)) throw std::out_of_range("the metric has no such series");
  return series;
}

/// The cells of all series of a metric, one series after the other.
std::vector<std::uint64_t> cellsOf(const MetricsBlock& block, std::size_t number) {
  const Metric metric = metricOf(number);
  std::vector<std::uint64_t> cells;
  for (std::size_t series = 0; series < block.layout().numSeries(metric); ++series) {
    for (std::size_t part = 0; part < MetricsLayout::cellsPerSeries(metric); ++part)
      cells.push_back(block.read(metric, series, part));
  }
  return cells;
}

}  // namespace

void registerMetrics(py::module_& module) {
  py::native_enum<MetricKind>(module, "MetricKind", "enum.IntEnum")
      .value("COUNTER", MetricKind::kCounter)
      .value("GAUGE", MetricKind::kGauge)
      .value("HISTOGRAM", MetricKind::kHistogram)
      .finalize();
  py::native_enum<MetricUnit>(module, "MetricUnit", "enum.IntEnum")
      .value("NUMBER", MetricUnit::kNumber)
      .value("BYTES", MetricUnit::kBytes)
      .value("SECONDS", MetricUnit::kSeconds)
      .finalize();
  py::native_enum<MetricOwner>(module, "MetricOwner", "enum.IntEnum")
      .value("WORKER", MetricOwner::kWorker)
      .value("DEVICE", MetricOwner::kDevice)
      .finalize();
  py::native_enum<MetricLabel>(module, "MetricLabel", "enum.IntEnum")
      .value("NONE", MetricLabel::kNone)
      .value("DEVICE", MetricLabel::kDevice)
      .value("ALGORITHM", MetricLabel::kAlgorithm)
      .value("CAUSE", MetricLabel::kCause)
      .value("OUTCOME", MetricLabel::kOutcome)
      .value("FAILURE", MetricLabel::kFailure)
      .finalize();
  py::class_<MetricDeclaration>(module, "MetricDeclaration")
      .def_property_readonly("name", [](const MetricDeclaration& self) { return std::string(self.name); })
      .def_readonly("kind", &MetricDeclaration::kind)
      .def_readonly("unit", &MetricDeclaration::unit)
      .def_readonly("owner", &MetricDeclaration::owner)
      .def_property_readonly("labels",
                             [](const MetricDeclaration& self) {
                               std::vector<MetricLabel> labels;
                               for (const MetricLabel label : self.labels) {
                                 if (label != MetricLabel::kNone) labels.push_back(label);
                               }
                               return labels;
                             })
      .def_property_readonly("help", [](const MetricDeclaration& self) { return std::string(self.help); });
  module.def("metric_declarations",
             [] { return std::vector<MetricDeclaration>(kMetrics.begin(), kMetrics.end()); });
  module.def(
      "metric_label_values",
      [](MetricLabel label) {
        std::vector<std::string> values;
        for (const char* value : valuesOf(label)) values.emplace_back(value);
        return values;
      },
      py::arg("label"));
  module.def("metric_bucket_bounds_ns",
             [] { return std::vector<std::uint64_t>(kBucketBounds.begin(), kBucketBounds.end()); });
  module.def("metrics_bytes", &MetricsSegment::numBytes, py::arg("num_devices"), py::arg("num_clients"));
  py::class_<MetricsBlock>(module, "MetricsBlock")
      .def(py::init<>())
      .def(
          "add",
          [](const MetricsBlock& block, std::size_t metric, std::uint64_t amount, std::size_t series) {
            block.add(metricOf(metric), amount, checkedSeries(block, metricOf(metric), series));
          },
          py::arg("metric"), py::arg("amount") = 1, py::arg("series") = 0)
      .def(
          "set",
          [](const MetricsBlock& block, std::size_t metric, std::uint64_t value, std::size_t series) {
            block.set(metricOf(metric), value, checkedSeries(block, metricOf(metric), series));
          },
          py::arg("metric"), py::arg("value"), py::arg("series") = 0)
      .def(
          "observe_ns",
          [](const MetricsBlock& block, std::size_t metric, std::int64_t duration, std::size_t series) {
            if (kMetrics[static_cast<std::size_t>(metricOf(metric))].kind != MetricKind::kHistogram)
              throw std::invalid_argument("the metric is no histogram");
            block.observe(metricOf(metric), std::chrono::nanoseconds(duration),
                          checkedSeries(block, metricOf(metric), series));
          },
          py::arg("metric"), py::arg("duration_ns"), py::arg("series") = 0)
      .def("cells", &cellsOf, py::arg("metric"));
  py::class_<MetricsSegment>(module, "MetricsSegment")
      .def(py::init<int, std::size_t, std::size_t>(), py::arg("fd"), py::arg("num_devices"),
           py::arg("num_clients"))
      .def("device", &MetricsSegment::device, py::arg("device"))
      .def("client", &MetricsSegment::client, py::arg("client"));
}

}  // namespace coarse
