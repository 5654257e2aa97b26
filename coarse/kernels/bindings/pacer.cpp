#include "coarse/emulation/pacer.hpp"

#include <pybind11/stl.h>

#include <tuple>

#include "bindings.hpp"

namespace py = pybind11;

namespace coarse {
namespace {

using PathTuple = std::pair<double, std::vector<std::uint32_t>>;

LinkTableValues makeValues(double timeDilation, std::vector<double> gbytesPerSecond,
                           const std::vector<std::vector<std::optional<PathTuple>>>& paths,
                           std::uint32_t logCapacity) {
  LinkTableValues values;
  values.logCapacity = logCapacity;
  values.timeDilation = timeDilation;
  values.gbytesPerSecond = std::move(gbytesPerSecond);
  for (const auto& row : paths) {
    auto& written = values.paths.emplace_back();
    for (const auto& path : row)
      written.push_back(path ? std::optional(PathValues{path->first, path->second}) : std::nullopt);
  }
  return values;
}

}  // namespace

void registerPacer(py::module_& module) {
  module.def("link_table_bytes", &Pacer::numBytes, py::arg("num_endpoints"), py::arg("num_buckets"),
             py::arg("log_capacity") = 0);
  module.def(
      "write_link_table",
      [](int fd, double timeDilation, std::vector<double> gbytesPerSecond,
         const std::vector<std::vector<std::optional<PathTuple>>>& paths, std::uint32_t logCapacity) {
        Pacer::write(fd, makeValues(timeDilation, std::move(gbytesPerSecond), paths, logCapacity));
      },
      py::arg("fd"), py::arg("time_dilation"), py::arg("gbytes_per_s"), py::arg("paths"),
      py::arg("log_capacity") = 0);
  module.def(
      "read_transfers",
      [](int fd) {
        py::list transfers;
        for (const Transfer& each : Pacer(fd, Mapping::Access::kReadOnly).transfers()) {
          transfers.append(py::make_tuple(each.source, each.target, each.tag, each.numBytes, each.requestedUs,
                                          each.beginUs, each.dueUs));
        }
        return transfers;
      },
      py::arg("fd"));
  module.def(
      "read_served_transfers",
      [](int fd, double sinceUs) {
        const Pacer pacer(fd, Mapping::Access::kReadOnly);
        const double nowUs = pacer.nowUs();
        py::list transfers;
        for (const ServedTransfer& each : pacer.served(sinceUs)) {
          transfers.append(py::make_tuple(each.source, each.target, each.numBytes, each.endUs, each.latencyUs,
                                          each.serviceUs));
        }
        return std::pair(nowUs, transfers);
      },
      py::arg("fd"), py::arg("since_us"));
  py::class_<Pacer>(module, "Pacer")
      .def(py::init<int>(), py::arg("fd"))
      .def("set_bandwidth", &Pacer::setBandwidth, py::arg("bucket"), py::arg("gbytes_per_s"))
      .def("arrivals", [](const Pacer& pacer) {
        const ArrivalStatistics statistics = pacer.arrivals();
        return std::pair(statistics.numArrivals, statistics.latenessNs);
      });
}

}  // namespace coarse
