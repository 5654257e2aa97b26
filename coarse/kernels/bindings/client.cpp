#include "coarse/client/client.hpp"

#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <tuple>

#include "bindings.hpp"

namespace py = pybind11;

namespace coarse {
namespace {

/// Tensor, device, kind, target, slot owner, bytes.
using ProbeTuple =
    std::tuple<std::uint32_t, std::uint16_t, ProbeKind, std::uint8_t, std::uint8_t, std::uint32_t>;

ClientProbe toProbe(const ProbeTuple& values) {
  ClientProbe probe;
  probe.tensor = std::get<0>(values);
  probe.device = std::get<1>(values);
  probe.request = {std::get<2>(values), std::get<3>(values), std::get<4>(values), std::get<5>(values)};
  return probe;
}

/// Lets Ctrl-C end a wait.
void checkSignals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace

void registerClient(py::module_& module) {
  using ReleaseGil = py::call_guard<py::gil_scoped_release>;
  py::native_enum<WaitStatus>(module, "WaitStatus", "enum.IntEnum")
      .value("DONE", WaitStatus::kDone)
      .value("TIMED_OUT", WaitStatus::kTimedOut)
      .value("ABORTED", WaitStatus::kAborted)
      .value("DEVICE_LOST", WaitStatus::kDeviceLost)
      .value("FORKED", WaitStatus::kForked)
      .value("DEVICE_SILENT", WaitStatus::kDeviceSilent)
      .value("NO_CONTRIBUTION", WaitStatus::kNoContribution)
      .finalize();
  py::native_enum<ProbeKind>(module, "ProbeKind", "enum.IntEnum")
      .value("PUSH", ProbeKind::kPush)
      .value("PULL", ProbeKind::kPull)
      .value("BETWEEN_DEVICES", ProbeKind::kBetweenDevices)
      .value("BETWEEN_WORKERS", ProbeKind::kBetweenWorkers)
      .finalize();
  module.attr("PRESENT") = static_cast<int>(kPresent);
  module.attr("JOINED") = static_cast<int>(kJoined);
  module.attr("DIRECT_ALLREDUCE") = static_cast<int>(kDirectAllReduce);
  module.attr("ALL_GATHER") = static_cast<int>(kAllGather);
  module.attr("ALL_TO_ALL") = static_cast<int>(kAllToAll);
  module.attr("TWO_WAY_RING") = static_cast<int>(Relay::kTwoWayRing);
  module.attr("TREE") = static_cast<int>(Relay::kTree);
  module.attr("TWO_LEVEL") = static_cast<int>(Relay::kTwoLevel);
  module.attr("BY_NCCL") = static_cast<int>(kByNccl);
  module.attr("UPDATE") = static_cast<int>(kUpdate);
  module.attr("REDUCED") = static_cast<int>(kReduced);
  module.attr("MEASURE") = static_cast<int>(kMeasure);
  module.attr("NOBODY") = kNobody;
  module.attr("EVERYBODY") = kEverybody;
  module.attr("NO_EPOCH") = static_cast<int>(kNoEpoch);
  module.attr("EPOCHS_BYTES") = sizeof(EpochTable);
  py::class_<Client>(module, "Client")
      .def(py::init([](std::size_t numDevices, int segmentFd, int doorbellsFd, std::vector<int> watchFds,
                       std::uint32_t spinMicroseconds, std::size_t bytesPerRing, bool isEmulated,
                       std::uint32_t heartbeatMilliseconds, const ProcessMetrics& metrics, int epochsFd,
                       bool isNewcomer) {
             ClientConfig config;
             config.epochsFd = epochsFd;
             config.isNewcomer = isNewcomer;
             config.numDevices = numDevices;
             config.watchFds = std::move(watchFds);
             config.spinBudget = std::chrono::microseconds(spinMicroseconds);
             config.bytesPerRing = bytesPerRing;
             config.isEmulated = isEmulated;
             config.heartbeatLimit = std::chrono::milliseconds(heartbeatMilliseconds);
             config.metrics = metrics;
             return std::make_unique<Client>(std::move(config), segmentFd, doorbellsFd, checkSignals);
           }),
           py::arg("num_devices"), py::arg("segment_fd"), py::arg("doorbells_fd"), py::arg("watch_fds"),
           py::arg("spin_us"), py::arg("bytes_per_ring"), py::arg("is_emulated") = false,
           py::arg("heartbeat_ms") = 0, py::arg_v("metrics", ProcessMetrics(), "ProcessMetrics()"),
           py::arg("epochs_fd") = -1, py::arg("is_newcomer") = false)
      .def("add_group",
           py::overload_cast<GroupPlan, std::size_t, int, const Region&, std::vector<std::uint16_t>>(
               &Client::addGroup),
           py::arg("plan"), py::arg("client"), py::arg("control_fd"), py::arg("slots"), py::arg("routes"))
      .def(
          "tell_of_lateness",
          [](Client& client, double afterSeconds, py::function onLate) {
            client.tellOfLateness(afterSeconds, [onLate = std::move(onLate)](double waited) {
              const py::gil_scoped_acquire gil;
              onLate(waited);
            });
          },
          py::arg("after_s"), py::arg("on_late"))
      .def("give_up_view", &Client::giveUpView, py::arg("group"))
      .def("add_group_elsewhere",
           py::overload_cast<GroupPlan, std::size_t, int, std::shared_ptr<Mapping>,
                             std::shared_ptr<SlotCopies>, std::vector<std::uint16_t>>(&Client::addGroup),
           py::arg("plan"), py::arg("client"), py::arg("control_fd"), py::arg("view"), py::arg("copies"),
           py::arg("routes"))
      .def("add_peers", &Client::addPeers, py::arg("group"), py::arg("slots"))
      .def("reduce_pieces", &Client::reducePieces, py::arg("group"), py::arg("shards"), ReleaseGil())
      .def("copy_pieces", &Client::copyPieces, py::arg("group"), py::arg("shards"), ReleaseGil())
      .def("remove_group", &Client::removeGroup, py::arg("group"))
      .def("set_routes", &Client::setRoutes, py::arg("group"), py::arg("routes"))
      .def("set_direct_allreduce_flags", &Client::setDirectAllReduceFlags, py::arg("group"), py::arg("flags"),
           py::arg("relays") = std::vector<std::uint8_t>{})
      .def(
          "push",
          [](Client& client, std::uint32_t group, std::uint32_t tensor, std::uint8_t flags,
             std::uintptr_t source) {
            return client.push(group, tensor, flags, reinterpret_cast<const void*>(source));
          },
          py::arg("group"), py::arg("tensor"), py::arg("flags"), py::arg("source"), ReleaseGil())
      .def("flush", &Client::flush, ReleaseGil())
      .def(
          "pull",
          [](Client& client, std::uint32_t group, std::uint32_t tensor, std::uintptr_t destination,
             double timeout) {
            return client.pull(group, tensor, reinterpret_cast<void*>(destination), timeout);
          },
          py::arg("group"), py::arg("tensor"), py::arg("destination"), py::arg("timeout_s"), ReleaseGil())
      .def("pull_all", &Client::pullAll, py::arg("group"), py::arg("timeout_s"), ReleaseGil())
      .def("contributors", &Client::contributors, py::arg("group"), py::arg("tensor"))
      .def("missing_clients", &Client::missingClients, py::arg("group"), py::arg("tensor"))
      .def("clients_ahead", &Client::clientsAhead, py::arg("group"), py::arg("tensor"))
      .def("all_contributors", &Client::allContributors, py::arg("group"))
      .def("stand_ins", &Client::standIns, py::arg("group"))
      .def("absent_ranks", &Client::absentRanks, py::arg("group"))
      .def_property_readonly("newest_epoch", &Client::newestEpoch)
      .def("member_since", &Client::memberSince, py::arg("client"))
      .def("newcomers_of", &Client::newcomersOf, py::arg("epoch"))
      .def("enter_epoch", &Client::enterEpoch, py::arg("epoch"), py::arg("newcomers"))
      .def("steps", &Client::steps, py::arg("group"))
      .def("set_steps", &Client::setSteps, py::arg("group"), py::arg("steps"))
      .def("are_steps_done", &Client::areStepsDone, py::arg("group"))
      .def("updates", &Client::updates, py::arg("group"))
      .def(
          "measures",
          [](const Client& client, std::uint32_t group) {
            std::vector<std::pair<double, int>> measures;
            for (const GradientMeasure& measure : client.measures(group))
              measures.emplace_back(measure.sumOfSquares, measure.nonFiniteOf);
            return measures;
          },
          py::arg("group"))
      .def("is_late", &Client::isLate, py::arg("group"), py::arg("tensor"))
      .def(
          "all_reduce",
          [](Client& client, std::uint32_t group, std::uintptr_t buffer, std::size_t numElements, int dtype,
             int op, bool isPresent, double timeout) {
            return client.allReduce(group, reinterpret_cast<void*>(buffer), numElements,
                                    static_cast<DType>(dtype), static_cast<ReduceOp>(op), isPresent, timeout);
          },
          py::arg("group"), py::arg("buffer"), py::arg("num_elements"), py::arg("dtype"), py::arg("op"),
          py::arg("is_present"), py::arg("timeout_s"), ReleaseGil())
      .def(
          "probe",
          [](Client& client, std::uint32_t group, const std::vector<ProbeTuple>& probes, double timeout) {
            std::vector<ClientProbe> requests;
            for (const ProbeTuple& probe : probes) requests.push_back(toProbe(probe));
            std::vector<double> seconds;
            const py::gil_scoped_release release;
            const WaitStatus status = client.probe(group, requests, timeout, seconds);
            return std::pair(status, std::move(seconds));
          },
          py::arg("group"), py::arg("probes"), py::arg("timeout_s"))
      .def("check_peers", &Client::checkPeers)
      .def_property_readonly("lost_device", &Client::lostDevice)
      .def_property_readonly("timeline_session", &Client::timelineSession);
}

}  // namespace coarse
