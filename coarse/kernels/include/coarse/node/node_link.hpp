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

/// Frames between the memory devices of different nodes, over connected stream sockets
/// (docs/design/nodes.md).
namespace coarse {

enum class FrameKind : std::uint8_t {
  kPartial = 1,  // what a node contributes to a shard, to the node that owns it
  kResult = 2,   // what has come of it, to every other node
  kLeft = 3,     // a worker has closed the session
  kAbort = 4,    // nothing will complete any more; the payload says why
  kBye = 5,      // the sender ends, and has sent everything that others wait for
};

/// Starts every frame; its payload follows. A wire format: little-endian, as every processor that this is
/// built for.
struct FrameHeader {
  std::uint32_t magic = 0;
  FrameKind kind = FrameKind::kBye;
  std::uint8_t dtype = 0;
  std::uint8_t op = 0;
  std::uint8_t reserved = 0;
  std::uint32_t group = 0;
  std::uint32_t shard = 0;  // of kLeft: the worker's rank
  std::uint32_t step = 0;
  std::uint32_t numElements = 0;
  std::uint32_t numPresent = 0;  // workers that contributed
  std::uint32_t numCounted = 0;  // workers that share in a mean
  std::uint32_t settings =
      0;  // digest of what the shard's parameter was or is updated by; 0 without an optimizer
  std::uint32_t zero = 0;
  std::uint64_t payloadBytes = 0;
};
static_assert(sizeof(FrameHeader) == 48);

inline constexpr std::uint32_t kFrameMagic = 0x334e4f43;  // "CON3"
inline constexpr std::uint64_t kMostAbortBytes = 64 * 1024;

/// A frame came that cannot be; the connection it came on is of no further use.
class LinkError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// What another node has said or suffered.
struct NodeEvent {
  enum class Kind : std::uint8_t {
    kLeft = 0,     // worker `rank` of that node has closed the session
    kAborted = 1,  // the session is over, because of `text`
    kLost = 2,     // a connection to it broke, because of `text`
    kEnded = 3,    // all its devices that this one is connected with have ended in peace
  };
  Kind kind = Kind::kLost;
  std::size_t node = 0;
  std::uint32_t rank = 0;
  std::string text;
};

/// Memory that is read or written for a frame, and what keeps it mapped until then.
struct FramePayload {
  std::byte* data = nullptr;
  std::shared_ptr<const void> keeper;
};

/// The connections of one memory device to the devices of other nodes, and the thread that serves them.
///
/// Frames to one node leave in the order of send() on each connection. A frame is sent by the calling thread
/// as far as the socket takes it; the link's own thread sends the rest, and receives.
///
/// Thread safety: send() and abort() may be called from any thread; the others from the one that owns the
/// object. The receiver and the event function are called from the link's thread. Each connection has one
/// lock; no two are held at once.
class NodeLinks {
 public:
  /// What to do with frames of shards.
  struct Receiver {
    /// Says where the payload goes. @throws LinkError if the frame cannot be.
    std::function<FramePayload(std::size_t node, const FrameHeader&)> open;
    /// The payload is there.
    std::function<void(std::size_t node, const FrameHeader&, const FramePayload&)> close;
    std::function<void(NodeEvent)> event;
  };

  /// Takes connected stream sockets: `fds[n]` to node n, none to the node itself. Duplicates them; the
  /// caller's stay the caller's. @throws std::system_error if a descriptor is none, or std::invalid_argument
  /// if a node has none.
  NodeLinks(std::size_t node, const std::vector<std::vector<int>>& fds, Receiver receiver);
  /// As stop().
  ~NodeLinks();
  NodeLinks(const NodeLinks&) = delete;
  NodeLinks& operator=(const NodeLinks&) = delete;

  void start();
  /// Sends what is queued, says goodbye, and waits until the others have it, but not for ever. Idempotent.
  void stop() noexcept;

  /// Sends a frame to `node`, on the connection that its shard belongs to; one to a node that is gone is
  /// dropped. `payload` must stay as it is until the receiver has reacted.
  void send(std::size_t node, FrameHeader header, FramePayload payload);
  /// Sends a frame to every other node, on all connections.
  void sendToAll(FrameHeader header);
  /// Tells all other nodes that the session is over; frames that are still queued are dropped.
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
  int epollFd_ = -1;
  int wakeFd_ = -1;
  std::vector<std::vector<std::unique_ptr<Connection>>> connections_;  // by node
  std::atomic<bool> isStopping_{false};
  std::thread thread_;
};

}  // namespace coarse
