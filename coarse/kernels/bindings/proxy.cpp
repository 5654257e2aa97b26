#include "coarse/device/proxy.hpp"

#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <tuple>

#include "bindings.hpp"
#include "coarse/gpu/nccl_runner.hpp"

namespace py = pybind11;

namespace coarse {
namespace {

using UpdatesTuple = std::tuple<std::uint32_t, std::uint32_t, std::vector<std::uint32_t>, std::string>;

template <typename Finish>
std::vector<UpdatesTuple> asTuples(Finish finish) {
  std::vector<GroupUpdates> finished;
  {
    const py::gil_scoped_release released;
    finished = finish();
  }
  std::vector<UpdatesTuple> all;
  for (GroupUpdates& each : finished)
    all.emplace_back(each.group, each.step, std::move(each.updateNumbers), std::move(each.problem));
  return all;
}

}  // namespace

void registerProxy(py::module_& module) {
  using ReleaseGil = py::call_guard<py::gil_scoped_release>;
  module.attr("THIS_DEVICE") = kThisDevice;
  py::native_enum<NodeEvent::Kind>(module, "NodeEventKind", "enum.IntEnum")
      .value("LEFT", NodeEvent::Kind::kLeft)
      .value("ABORTED", NodeEvent::Kind::kAborted)
      .value("LOST", NodeEvent::Kind::kLost)
      .value("ENDED", NodeEvent::Kind::kEnded)
      .value("SILENT", NodeEvent::Kind::kSilent)
      .value("INTERRUPTED", NodeEvent::Kind::kInterrupted)
      .value("ANSWERING", NodeEvent::Kind::kAnswering)
      .value("WORKER_LOST", NodeEvent::Kind::kWorkerLost)
      .value("AGREEMENT", NodeEvent::Kind::kAgreement)
      .value("SETTLED", NodeEvent::Kind::kSettled)
      .finalize();
  py::native_enum<LossCause>(module, "LossCause", "enum.IntEnum")
      .value("UNKNOWN", LossCause::kUnknown)
      .value("PEER_ENDED", LossCause::kPeerEnded)
      .value("INVALID_FRAME", LossCause::kInvalidFrame)
      .finalize();
  py::class_<ReplicaFds>(module, "Replica")
      .def(py::init([](int controlFd, const Region& parameters, const Region& states, std::size_t owner,
                       std::size_t keeper, bool isFilled) {
             return ReplicaFds{controlFd, parameters, states, owner, keeper, isFilled};
           }),
           py::kw_only(), py::arg("control_fd"), py::arg("parameters"), py::arg("states"), py::arg("owner"),
           py::arg("keeper"), py::arg("is_filled"));
  py::class_<UndoFds>(module, "UndoLog")
      .def(py::init([](int controlFd, const Region& parameters, const Region& states) {
             return UndoFds{controlFd, parameters, states};
           }),
           py::kw_only(), py::arg("control_fd"), py::arg("parameters"), py::arg("states"));
  module.def("undo_control_bytes", &UndoLog::controlBytes, py::arg("num_shards"));
  module.def("replica_control_bytes", &ReplicaControl::numBytes, py::arg("num_shards"));
  py::class_<RingMemory>(module, "RingMemory")
      .def(py::init([](int logsFd, std::vector<int> bufferFds, std::vector<Region> messages,
                       std::size_t messageBytes, const std::shared_ptr<TensorMemory>& memory) {
             return RingMemory{logsFd, std::move(bufferFds), std::move(messages), messageBytes,
                               memory == nullptr ? hostMemory() : memory};
           }),
           py::kw_only(), py::arg("logs_fd"), py::arg("buffer_fds"), py::arg("messages"),
           py::arg("message_bytes"), py::arg("memory") = nullptr);
  py::class_<CollectiveMemory>(module, "CollectiveMemory")
      .def(py::init([](int logsFd, std::vector<std::vector<std::size_t>> clientsOf,
                       std::shared_ptr<NcclRunner> runner, std::shared_ptr<TensorMemory> memory) {
             return CollectiveMemory{logsFd, std::move(clientsOf), std::move(runner), std::move(memory)};
           }),
           py::kw_only(), py::arg("logs_fd"), py::arg("clients_of"), py::arg("runner"), py::arg("memory"));
  module.attr("COLLECTIVE_LOGS_BYTES") = sizeof(CollectiveLogs);
  module.def("ring_messages_bytes", &ringMessagesBytes, py::arg("message_bytes"));
  module.attr("HOST_MESSAGE_BYTES") = kHostMessageBytes;
  module.attr("CUDA_MESSAGE_BYTES") = kCudaMessageBytes;
  py::class_<Proxy>(module, "Proxy")
      .def(py::init([](std::size_t device, std::size_t numDevices, std::size_t numClients,
                       std::size_t numSyncCores, int scheduling, std::vector<std::size_t> localClients,
                       std::uint32_t spinMicroseconds, int doorbellsFd, int eventFd, const RingMemory& rings,
                       const CollectiveMemory& collectives, int exchangeLogsFd, int linkTableFd,
                       std::size_t node, std::size_t numNodes, std::int64_t nodePatienceMs, bool resumesLinks,
                       int nodeCompression, bool mayLoseNodes, const ProcessMetrics& metrics, int epochsFd) {
             ProxyConfig config;
             config.device = device;
             config.numDevices = numDevices;
             config.numClients = numClients;
             config.numSyncCores = numSyncCores;
             config.scheduling = static_cast<Scheduling>(scheduling);
             config.localClients = std::move(localClients);
             config.spinMicroseconds = spinMicroseconds;
             config.exchangeLogsFd = exchangeLogsFd;
             config.linkTableFd = linkTableFd;
             config.node = node;
             config.numNodes = numNodes;
             config.nodeLinks = {std::chrono::milliseconds(nodePatienceMs), resumesLinks};
             config.nodeCompression = static_cast<Compression>(nodeCompression);
             config.mayLoseNodes = mayLoseNodes;
             config.metrics = metrics;
             config.epochsFd = epochsFd;
             return std::make_unique<Proxy>(std::move(config), doorbellsFd, eventFd, rings, collectives);
           }),
           py::kw_only(), py::arg("device"), py::arg("num_devices"), py::arg("num_clients"),
           py::arg("num_sync_cores"), py::arg("scheduling"), py::arg("local_clients"), py::arg("spin_us"),
           py::arg("doorbells_fd"), py::arg("event_fd"), py::arg_v("rings", RingMemory(), "RingMemory()"),
           py::arg_v("collectives", CollectiveMemory(), "CollectiveMemory()"),
           py::arg("exchange_logs_fd") = -1, py::arg("link_table_fd") = -1, py::arg("node") = 0,
           py::arg("num_nodes") = 1, py::arg("node_patience_ms") = LinkOptions().patience.count(),
           py::arg("resumes_links") = false, py::arg("node_compression") = 0,
           py::arg("may_lose_nodes") = false, py::arg_v("metrics", ProcessMetrics(), "ProcessMetrics()"),
           py::arg("epochs_fd") = -1)
      .def("join_nodes", &Proxy::joinNodes, py::arg("node"), py::arg("ranks"), py::arg("fds"))
      .def(
          "resume_link",
          [](Proxy& proxy, std::size_t node, std::size_t number, int fd) {
            proxy.nodeLinks().resume(node, number, fd);
          },
          py::arg("node"), py::arg("number"), py::arg("fd"))
      .def(
          "interrupt_link",
          [](Proxy& proxy, std::size_t node, std::size_t number) {
            proxy.nodeLinks().interrupt(node, number);
          },
          py::arg("node"), py::arg("number"))
      .def(
          "give_up_link",
          [](Proxy& proxy, std::size_t node, std::size_t number, const std::string& reason) {
            proxy.nodeLinks().giveUp(node, number, reason);
          },
          py::arg("node"), py::arg("number"), py::arg("reason"))
      .def("add_client", &Proxy::addClient, py::arg("client"), py::arg("segment_fd"))
      .def("start", &Proxy::start)
      .def("stop", &Proxy::stop, ReleaseGil())
      .def(
          "add_group",
          [](Proxy& proxy, GroupPlan plan, int controlFd, const std::vector<Region>& slots, bool initialise,
             const Region& nodeSegment, const Region& parameters, const Region& states, int snapshotRequestFd,
             int snapshotControlFd, int snapshotPoolFd, std::uint32_t step,
             std::vector<std::uint32_t> updateNumbers, const std::vector<int>& rowsFds,
             std::vector<int> settingsFds, const std::shared_ptr<TensorMemory>& memory,
             const ReplicaFds& replica, const UndoFds& undo, std::shared_ptr<SnapshotPool> versions) {
            GroupUpdates updates;
            updates.step = step;
            updates.updateNumbers = std::move(updateNumbers);
            proxy.addGroup(std::move(plan), controlFd, slots, initialise, nodeSegment,
                           {std::move(settingsFds),
                            parameters,
                            states,
                            {snapshotRequestFd, snapshotControlFd, snapshotPoolFd, std::move(versions)},
                            replica,
                            undo},
                           updates, rowsFds, memory == nullptr ? hostMemory() : memory);
          },
          py::arg("plan"), py::arg("control_fd"), py::arg("slots"), py::arg("initialise"),
          py::arg("node_segment") = Region(-1), py::arg("parameters") = Region(-1),
          py::arg("states") = Region(-1), py::arg("snapshot_request_fd") = -1,
          py::arg("snapshot_control_fd") = -1, py::arg("snapshot_pool_fd") = -1, py::kw_only(),
          py::arg("step") = 0, py::arg("update_numbers") = std::vector<std::uint32_t>(),
          py::arg("rows_fds") = std::vector<int>(), py::arg("settings_fds") = std::vector<int>(),
          py::arg("memory") = nullptr, py::arg_v("replica", ReplicaFds(), "Replica()"),
          py::arg_v("undo", UndoFds(), "UndoLog()"), py::arg("versions") = nullptr, ReleaseGil())
      .def("remove_group", &Proxy::removeGroup, py::arg("group"), ReleaseGil())
      .def("snapshots_of", &Proxy::snapshotsOf, py::arg("group"))
      .def(
          "finish_updates",
          [](Proxy& proxy, const std::vector<std::size_t>& lostClients) {
            return asTuples([&] { return proxy.finishGroupUpdates(lostClients); });
          },
          py::arg("lost_clients") = std::vector<std::size_t>())
      .def(
          "finish_replicas",
          [](Proxy& proxy, const std::vector<std::size_t>& lostClients, bool isOwnerLost) {
            return asTuples([&] { return proxy.finishReplicas(lostClients, isOwnerLost); });
          },
          py::arg("lost_clients"), py::arg("is_owner_lost"))
      .def("abort", &Proxy::abort, py::arg("clients"))
      .def("client_left", &Proxy::clientLeft, py::arg("client"))
      .def("client_ended", &Proxy::clientEnded, py::arg("client"))
      .def("stand_in_for", &Proxy::standInFor, py::arg("client"))
      .def("take_drained", &Proxy::takeDrained)
      .def("admit_newcomer", &Proxy::admitNewcomer, py::arg("client"), py::arg("segment_fd"), ReleaseGil())
      .def("set_ready", &Proxy::setReady, py::arg("client"), py::arg("is_ready"))
      .def("member_since", &Proxy::memberSince, py::arg("client"))
      .def("newcomer_ended", &Proxy::newcomerEnded, py::arg("client"))
      .def("set_boundary", &Proxy::setBoundary, py::arg("group"))
      .def("lose_worker", &Proxy::loseWorker, py::arg("client"), py::arg("text"))
      .def("worker_left_node", &Proxy::workerLeftNode, py::arg("node"))
      .def("node_ended", &Proxy::nodeEnded, py::arg("node"))
      .def("suspend_node", &Proxy::suspendNode, py::arg("node"), py::arg("text"), ReleaseGil())
      .def("report_without", &Proxy::reportWithout, py::arg("node"), ReleaseGil())
      .def("settle_without", &Proxy::settleWithout, py::arg("node"), ReleaseGil())
      .def("resume_without", &Proxy::resumeWithout, py::arg("node"), ReleaseGil())
      .def("tell_node", &Proxy::tellNode, py::arg("node"), py::arg("text"))
      .def("tell_all_nodes", &Proxy::tellAllNodes, py::arg("text"))
      .def("abort_nodes", &Proxy::abortNodes, py::arg("text"))
      .def("last_step", &Proxy::lastStep, py::arg("client"))
      .def("take_events",
           [](Proxy& proxy) {
             std::vector<std::pair<int, std::string>> events;
             for (ProxyEvent& event : proxy.takeEvents())
               events.emplace_back(event.client, std::move(event.message));
             return events;
           })
      .def(
          "take_node_events",
          [](Proxy& proxy) {
            std::vector<std::tuple<NodeEvent::Kind, std::size_t, std::uint32_t, py::bytes, LossCause>> events;
            for (const NodeEvent& event : proxy.takeNodeEvents())
              events.emplace_back(event.kind, event.node, event.number, py::bytes(event.text), event.cause);
            return events;
          })
      .def("statistics", [](const Proxy& proxy) {
        const ProxyStatistics statistics = proxy.statistics();
        return std::pair(statistics.numShards, statistics.numBytes);
      });
}

}  // namespace coarse
