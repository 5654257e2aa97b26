#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "coarse/emulation/pacer.hpp"
#include "coarse/shared_memory/metrics.hpp"

/// Frames between the memory devices of different nodes, over connected stream sockets
/// (docs/design/nodes.md).
namespace coarse {

enum class FrameKind : std::uint8_t {
  kPartial = 1,  // a node's contribution to a shard, to the node that owns it
  kResult = 2,   // the result, to every other node
  kLeft = 3,     // a worker has closed the session
  kAbort = 4,    // nothing more will complete; the payload gives the reason
  kBye = 5,      // the sender ends, and has sent everything that others wait for
};

/// Starts every frame; its payload follows. A wire format: little-endian, as all supported processors.
struct FrameHeader {
  std::uint32_t magic = 0;
  FrameKind kind = FrameKind::kBye;
  std::uint8_t dtype = 0;
  std::uint8_t op = 0;
  std::uint8_t reserved = 0;
  std::uint32_t group = 0;
  std::uint32_t shard = 0;  // for kLeft: the worker's rank
  std::uint32_t step = 0;
  std::uint32_t numElements = 0;
  std::uint32_t numPresent = 0;  // workers that contributed
  std::uint32_t numCounted = 0;  // workers that count in a mean
  std::uint32_t settings =
      0;  // digest of the settings of the parameter's current or last update; 0 without an optimizer
  std::uint32_t zero = 0;
  std::uint64_t payloadBytes = 0;
  MonotonicNs dueAt = 0;  // when emulated links have carried the payload; 0 without
};
static_assert(sizeof(FrameHeader) == 56);

inline constexpr std::uint32_t kFrameMagic = 0x344e4f43;  // "CON4"
inline constexpr std::uint64_t kMostAbortBytes = 64 * 1024;

/// An invalid frame arrived; its connection is unusable.
class LinkError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A message from another node, or its failure.
struct NodeEvent {
  enum class Kind : std::uint8_t {
    kLeft = 0,     // worker `rank` of that node has closed the session
    kAborted = 1,  // the session is over, because of `text`
    kLost = 2,     // a connection to it broke, because of `text`
    kEnded = 3,    // all its devices connected with this one have ended normally
  };
  Kind kind = Kind::kLost;
  std::size_t node = 0;
  std::uint32_t rank = 0;
  std::string text;
};

/// Memory that is read or written for a frame, and the owner that keeps it mapped until then.
struct FramePayload {
  std::byte* data = nullptr;
  std::shared_ptr<const void> keeper;
};

/// The connections of one memory device to the devices of other nodes, and the thread that serves them.
///
/// On each connection, frames to one node leave in the order of send(). The calling thread sends as much of a
/// frame as the socket accepts; the link's own thread sends the rest, and receives.
///
/// Thread safety: any thread may call send() and abort(); the owner's thread calls the others. The receiver
/// and the event function are called from the link's thread. Each connection has one lock; no two are held at
/// once.
class NodeLinks {
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
            ProcessMetrics metrics = {});
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
  void send(std::size_t node, FrameHeader header, FramePayload payload);
  /// Sends a frame to every other node, on all connections.
  void sendToAll(FrameHeader header);
  /// Notifies all other nodes that the session is over; drops queued frames.
  void abort(const std::string& text);

 private:
  struct Frame;
  struct Connection;

  void run();
  bool waitForEvents(int timeoutMilliseconds);
  void enqueue(Connection& connection, Frame frame);
  void flush(Connection& connection);
  bool sendSome(Connection& connection);
  void wantWrites(Connection& connection, bool wanted);
  void receive(Connection& connection);
  bool receiveSome(Connection& connection);
  void open(Connection& connection);
  void close(Connection& connection);
  void endOfStream(Connection& connection);
  void disconnect(Connection& connection);
  void loseUnreachable();
  void lose(Connection& connection, const std::string& reason);
  void sayGoodbye();
  bool isEveryoneGone();
  void wake() noexcept;

  std::size_t node_;
  Receiver receiver_;
  ProcessMetrics metrics_;
  int epollFd_ = -1;
  int wakeFd_ = -1;
  std::vector<std::vector<std::unique_ptr<Connection>>> connections_;  // by node
  std::atomic<bool> isStopping_{false};
  std::thread thread_;
};

}  // namespace coarse
