#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "coarse/emulation/pacer.hpp"
#include "coarse/node/transport.hpp"
#include "coarse/shared_memory/metrics.hpp"

/// Frames between the memory devices of different nodes (docs/design/nodes.md).
namespace coarse {

enum class FrameKind : std::uint8_t {
  kPartial = 1,  // a node's contribution to a shard, to the node that owns it
  kResult = 2,   // the result, to every other node
  kLeft = 3,     // a worker has closed the session
  kAbort = 4,    // nothing more will complete; the payload gives the reason
  kLost = 5,     // a worker is lost, and the others go on; the payload describes the loss
  // From the step of this frame on, a memory device stands in for a worker. Before the partial, then before
  // the result, of shard 0.
  kAbsent = 6,
  // About the shards that a lost node owned, between home devices (NodeTakeover):
  kReport = 7,     // this node's last contribution (step) and last result (numElements), to the new owner
  kFetch = 8,      // asks for the result of a step that others lack
  kHanded = 9,     // that result
  kAgreement = 10  // a message between control threads, as JSON
};

/// The header of every frame. A wire format: little-endian, as all supported processors.
struct FrameHeader {
  FrameKind kind = FrameKind::kPartial;
  std::uint8_t dtype = 0;
  std::uint8_t op = 0;
  std::uint8_t compression = 0;
  std::uint32_t group = 0;
  std::uint32_t shard = 0;  // for kLeft and kLost: the worker's rank
  std::uint32_t step = 0;
  std::uint32_t numElements = 0;  // for kAbsent: the worker's rank
  std::uint32_t numPresent = 0;   // workers that contributed
  std::uint32_t numCounted = 0;   // workers that count in a mean
  std::uint32_t settings =
      0;  // digest of the settings of the parameter's current or last update; 0 without an optimizer
  std::uint64_t payloadBytes = 0;
  MonotonicNs dueAt = 0;  // when emulated links have carried the payload; 0 without
};
static_assert(sizeof(FrameHeader) == 48);

/// Of the payload of kAbort, kLost and kAgreement.
inline constexpr std::uint64_t kMostTextBytes = 64 * 1024;

/// A message from another node, or its failure.
struct NodeEvent {
  enum class Kind : std::uint8_t {
    kLeft = 0,         // worker `number` of that node has closed the session
    kAborted = 1,      // the session is over, because of `text`
    kLost = 2,         // a connection to it cannot be used any more, because of `text`
    kEnded = 3,        // all its devices connected with this one have ended normally
    kSilent = 4,       // connection `number` to it is silent: `text`
    kInterrupted = 5,  // connection `number` to it broke, because of `text`; another can replace it
    kAnswering = 6,    // that connection is in order again
    kWorkerLost = 7,   // worker `number` of that node is lost, as `text` describes, and the others go on
    kAgreement = 8,    // `text` for the control thread
    kSettled = 9,      // the takeover of the shards of `node`, which is lost, is done here
  };
  Kind kind = Kind::kLost;
  std::size_t node = 0;
  std::uint32_t number = 0;
  std::string text;
  LossCause cause = LossCause::kUnknown;  // of kLost
};

/// What an event of a link is for its node.
NodeEvent::Kind nodeEventKind(LinkEvent::Kind kind) noexcept;

/// Memory that is read or written for a frame, and the owner that keeps it mapped until then.
struct FramePayload {
  std::byte* data = nullptr;
  std::shared_ptr<const void> keeper;
};

/// The connections of one memory device to the devices of other nodes, and the thread that serves them.
///
/// On each connection, frames to one node leave in the order of send(). The calling thread sends as much of a
/// frame as the transport accepts; the link's own thread sends the rest, and receives.
///
/// Thread safety: any thread may call send() and abort(); the owner's thread calls the others. The receiver
/// and the event function are called from the link's thread.
class NodeLinks final : private FrameHandler {
 public:
  /// Handles the frames of shards.
  struct Receiver {
    /// Returns the payload's destination. @throws LinkError if the frame is invalid.
    std::function<FramePayload(std::size_t node, const FrameHeader&)> open;
    /// The payload has arrived.
    std::function<void(std::size_t node, const FrameHeader&, const FramePayload&)> close;
    std::function<void(NodeEvent)> event;
  };

  /// Takes connected stream sockets: `fds[n]` to node n, empty for the node itself. Duplicates them; the
  /// caller closes its own. @throws std::system_error if a descriptor is invalid, or std::invalid_argument if
  /// a node has none.
  NodeLinks(std::size_t node, const std::vector<std::vector<int>>& fds, Receiver receiver,
            ProcessMetrics metrics = {}, LinkOptions options = {});
  /// As stop().
  ~NodeLinks();
  NodeLinks(const NodeLinks&) = delete;
  NodeLinks& operator=(const NodeLinks&) = delete;

  void start();
  /// Sends queued frames, says goodbye, and waits for a limited time until the others have received them.
  /// Idempotent.
  void stop() noexcept;

  /// Sends a frame to `node`, on the connection of its shard; drops a frame to a node that is gone. `payload`
  /// must stay unchanged until the receiver has reacted.
  void send(std::size_t node, const FrameHeader& header, FramePayload payload);
  /// Sends a frame to every other node, on all connections, with at most kMostTextBytes of `text`.
  void sendToAll(FrameHeader header, const std::string& text = {});
  /// Sends a frame to `node` on its first connection, which joins the home devices. Otherwise as send().
  void sendHome(std::size_t node, const FrameHeader& header, FramePayload payload);
  /// The same with a text.
  void sendHome(std::size_t node, FrameHeader header, const std::string& text);
  /// Notifies all other nodes that the session is over; drops queued frames.
  void abort(const std::string& text);
  /// Ends all connections to `node`, which is told by an abort with `text`. Frames of it are not handled any
  /// more when this returns. @pre start() was called; not from the links' thread.
  void cut(std::size_t node, const std::string& text);

  /// Replaces connection `number` to a node; the other end does the same. Takes ownership of `fd`.
  /// @throws std::invalid_argument if there is no such connection.
  void resume(std::size_t node, std::size_t number, int fd);
  /// Breaks that connection, so that both ends replace it. @throws as resume().
  void interrupt(std::size_t node, std::size_t number);
  /// Loses that connection, which cannot be replaced, because of `reason`. @throws as resume().
  void giveUp(std::size_t node, std::size_t number, const std::string& reason);

 private:
  struct Link;

  Payload open(std::size_t link, const std::byte* data, std::size_t headerBytes) override;
  void close(std::size_t link, const std::byte* data, const Payload& payload) override;
  void sent(std::size_t link, const std::byte* data, std::int64_t queuedNs) noexcept override;
  void event(LinkEvent event) override;

  void run();
  void end(Link& link);
  std::size_t linkOf(std::size_t node, std::size_t number) const;

  Receiver receiver_;
  std::vector<Link> links_;             // of all nodes, one after the other
  std::vector<std::size_t> firstLink_;  // by node; one more at the end
  std::unique_ptr<Transport> transport_;
  std::atomic<bool> isStopping_{false};
  std::thread thread_;
};

}  // namespace coarse
