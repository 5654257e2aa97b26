#include "coarse/shared_memory/metrics.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"

namespace py = pybind11;

namespace coarse {
namespace {

// By the numbers of the enumerations.
const std::array<std::string, 3> kKinds = {"counter", "gauge", "histogram"};
const std::array<std::string, 3> kUnits = {"number", "bytes", "seconds"};
const std::array<std::string, 2> kOwners = {"worker", "device"};
const std::array<std::string, 6> kLabels = {"", "device", "algorithm", "cause", "outcome", "failure"};

/// Name, kind, unit, owner, labels, help.
using DeclarationTuple =
    std::tuple<std::string, std::string, std::string, std::string, std::vector<std::string>, std::string>;

DeclarationTuple toTuple(const MetricDeclaration& metric) {
  std::vector<std::string> labels;
  for (const MetricLabel label : metric.labels) {
    if (label != MetricLabel::kNone) labels.push_back(kLabels[static_cast<std::size_t>(label)]);
  }
  return {metric.name,
          kKinds[static_cast<std::size_t>(metric.kind)],
          kUnits[static_cast<std::size_t>(metric.unit)],
          kOwners[static_cast<std::size_t>(metric.owner)],
          std::move(labels),
          metric.help};
}

Metric metricOf(std::size_t number) {
  if (number >= kNumMetrics) throw std::out_of_range("there is no metric " + std::to_string(number));
  return static_cast<Metric>(number);
}

std::size_t checkedSeries(const ProcessMetrics& metrics, Metric metric, std::size_t series) {
  if (series >= metrics.layout().numSeries(metric)) throw std::out_of_range("the metric has no such series");
  return series;
}

/// The cells of all series of a metric, one series after the other.
std::vector<std::uint64_t> cellsOf(const ProcessMetrics& metrics, std::size_t number) {
  const Metric metric = metricOf(number);
  std::vector<std::uint64_t> cells;
  for (std::size_t series = 0; series < metrics.layout().numSeries(metric); ++series) {
    for (std::size_t part = 0; part < MetricsLayout::cellsPerSeries(metric); ++part)
      cells.push_back(metrics.read(metric, series, part));
  }
  return cells;
}

}  // namespace

void registerMetrics(py::module_& module) {
  module.def("metric_declarations", [] {
    std::vector<DeclarationTuple> declarations;
    for (const MetricDeclaration& each : kMetrics) declarations.push_back(toTuple(each));
    return declarations;
  });
  module.def(
      "metric_label_values",
      [](const std::string& label) {
        const auto found = std::find(kLabels.begin(), kLabels.end(), label);
        if (found == kLabels.end()) throw std::invalid_argument("there is no label " + label);
        std::vector<std::string> values;
        for (const char* value : valuesOf(static_cast<MetricLabel>(found - kLabels.begin())))
          values.emplace_back(value);
        return values;
      },
      py::arg("label"));
  module.def("metric_bucket_bounds_ns",
             [] { return std::vector<std::uint64_t>(kBucketBounds.begin(), kBucketBounds.end()); });
  module.def("metrics_bytes", &MetricsSegment::numBytes, py::arg("num_devices"), py::arg("num_clients"));
  py::class_<ProcessMetrics>(module, "ProcessMetrics")
      .def(py::init<>())
      .def(
          "add",
          [](const ProcessMetrics& metrics, std::size_t metric, std::uint64_t amount, std::size_t series) {
            metrics.add(metricOf(metric), amount, checkedSeries(metrics, metricOf(metric), series));
          },
          py::arg("metric"), py::arg("amount") = 1, py::arg("series") = 0)
      .def(
          "set",
          [](const ProcessMetrics& metrics, std::size_t metric, std::uint64_t value, std::size_t series) {
            metrics.set(metricOf(metric), value, checkedSeries(metrics, metricOf(metric), series));
          },
          py::arg("metric"), py::arg("value"), py::arg("series") = 0)
      .def(
          "observe_ns",
          [](const ProcessMetrics& metrics, std::size_t metric, std::int64_t duration, std::size_t series) {
            if (kMetrics[static_cast<std::size_t>(metricOf(metric))].kind != MetricKind::kHistogram)
              throw std::invalid_argument("the metric is no histogram");
            metrics.observe(metricOf(metric), std::chrono::nanoseconds(duration),
                            checkedSeries(metrics, metricOf(metric), series));
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
