#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

/// Carries frames between nodes (docs/design/nodes.md). Every implementation must pass
/// tests/native/transport_test.cpp.
namespace coarse {

inline constexpr std::size_t kMostHeaderBytes = 160;

/// An invalid frame arrived; its link is unusable.
class LinkError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The memory of a frame's payload: pieces in their order, and the owner that keeps them mapped. Payloads are
/// sent from, and received into, memory that is shared anyway, and never copied.
struct Payload {
  std::vector<iovec> pieces;
  std::shared_ptr<const void> keeper;

  std::size_t numBytes() const noexcept {
    std::size_t sum = 0;
    for (const iovec& piece : pieces) sum += piece.iov_len;
    return sum;
  }
};

/// How links behave when a peer gives no answer or a connection breaks.
struct LinkOptions {
  std::chrono::milliseconds patience{600'000};  // for a peer that gives no answer; then its link is lost
  bool isResumable = false;  // whether resume() replaces a connection that broke; else its link is lost
};

/// Why a link was lost.
enum class LossCause : std::uint8_t {
  kUnknown = 0,    // the peer may live: it answered nothing for too long, or the connection broke
  kPeerEnded = 1,  // the peer's process has ended
  kInvalidFrame = 2,
};

/// What became of a link.
struct LinkEvent {
  enum class Kind : std::uint8_t {
    kSilent = 0,       // the peer's machine has answered nothing for a time, `text`
    kAnswering = 1,    // it answers again
    kInterrupted = 2,  // the connection broke, because of `text`; another one can replace it
    kEnded = 3,        // the peer has ended, and everything that it sent was received
    kLost = 4,         // no frame comes or goes any more, because of `text`
  };
  Kind kind = Kind::kLost;
  std::size_t link = 0;
  std::string text;
  LossCause cause = LossCause::kUnknown;  // of kLost
};

/// Handles the frames of a transport. Called by the thread that calls progress(), but sent() by any thread.
class FrameHandler {
 public:
  /// A header has arrived, and no byte of its payload was read. Returns the payload's place, which also says
  /// its length. Called again for a frame that a broken connection has cut off.
  /// @throws LinkError if the frame is invalid, which ends the link.
  virtual Payload open(std::size_t link, const std::byte* header, std::size_t headerBytes) = 0;
  /// The payload of that header has arrived, at its place. Called once for each frame, in their order.
  /// @throws LinkError as open().
  virtual void close(std::size_t link, const std::byte* header, const Payload& payload) = 0;
  /// A frame was passed on completely. Must not call the transport.
  virtual void sent(std::size_t link, const std::byte* header, std::int64_t queuedNs) noexcept = 0;
  virtual void event(LinkEvent event) = 0;

 protected:
  ~FrameHandler() = default;
};

/// Links to peers, numbered from 0 on. Frames of one link arrive in the order of send(), each once.
///
/// Thread safety: one thread calls progress(), then finish(); any thread may call the others.
class Transport {
 public:
  virtual ~Transport() = default;

  /// Sends a frame; drops it if the link has ended or was lost. Copies the header, not the payload, which
  /// must stay unchanged until the receiver has reacted to it.
  virtual void send(std::size_t link, const void* header, std::size_t headerBytes, Payload payload) = 0;
  /// Drops the frames of which no byte was passed on.
  virtual void dropUnsent(std::size_t link) = 0;
  /// Receives, and passes on what send() could not. Waits at most `limit` for something to do, by file
  /// descriptors.
  virtual void progress(std::chrono::milliseconds limit) = 0;
  /// Ends a wait of progress().
  virtual void wake() noexcept = 0;
  /// Sends everything that is queued, tells the peers that nothing more comes, and waits at most `limit`
  /// until they have received it. A peer that has finished receives nothing more. Later frames are dropped.
  virtual void finish(std::chrono::milliseconds limit) = 0;
  /// Continues a link over another connection to the same peer, a stream socket; the peer does the same with
  /// its end. Takes ownership of `fd`.
  virtual void resume(std::size_t link, int fd) = 0;
  /// Breaks the connection of a link, which both ends can then replace.
  virtual void interrupt(std::size_t link) = 0;
  /// Ends a link whose connection cannot be replaced, because of `reason`.
  virtual void giveUp(std::size_t link, const std::string& reason) = 0;
  /// Whether a link has ended or was lost: no frame of it is handled any more.
  virtual bool isGone(std::size_t link) const noexcept = 0;
};

}  // namespace coarse
