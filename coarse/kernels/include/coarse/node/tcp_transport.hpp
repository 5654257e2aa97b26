#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "coarse/node/transport.hpp"
#include "coarse/shared_memory/metrics.hpp"

namespace coarse {

enum class TcpFrameType : std::uint8_t {
  kData = 1,      // a user's header and payload
  kReceived = 2,  // acknowledges only; has no number of its own
  kLast = 3,      // the sender ends
};

/// Starts every frame; the header follows, and then the payload. A wire format: little-endian, as all
/// supported processors.
struct TcpPrefix {
  std::uint32_t magic = 0;
  TcpFrameType type = TcpFrameType::kData;
  std::uint8_t headerBytes = 0;  // that follow
  std::uint16_t zero = 0;
  std::uint32_t number = 0;       // of this frame on its link, from 0 on, modulo 2^32
  std::uint32_t numReceived = 0;  // frames that the sender of this one has received on the link
};
static_assert(sizeof(TcpPrefix) == 16);

inline constexpr std::uint32_t kTcpMagic = 0x354e4f43;  // "CON5"

/// Frames over connected stream sockets. The thread that calls send() passes on as much as the socket
/// accepts; progress() passes on the rest.
///
/// Frames are numbered, and stay in the queue until the peer has acknowledged them: with its own frames, or
/// by itself after many frames or a second. So a link survives its connection: on a new one both ends say how
/// many frames they have received, and send the others again. This needs no copy. A payload may be written
/// again once the receiver has reacted to the frame, and then it does not ask for the frame again.
///
/// Thread safety: as Transport. Each link has one lock; no two are held at once. FrameHandler::sent() is
/// called with it, all else without.
class TcpTransport final : public Transport {
 public:
  /// @param fds connected stream sockets by link. This object closes them, even if it throws.
  /// @param handler outlives this object; called after construction.
  /// @param headerBytes of the shortest header
  /// @throws std::system_error if a descriptor is invalid.
  TcpTransport(const std::vector<int>& fds, FrameHandler& handler, std::size_t headerBytes,
               LinkOptions options = {}, ProcessMetrics metrics = {});
  ~TcpTransport() override;
  TcpTransport(const TcpTransport&) = delete;
  TcpTransport& operator=(const TcpTransport&) = delete;

  void send(std::size_t link, const void* header, std::size_t headerBytes, Payload payload) override;
  void dropUnsent(std::size_t link) override;
  void progress(std::chrono::milliseconds limit) override;
  void wake() noexcept override;
  void finish(std::chrono::milliseconds limit) override;
  void resume(std::size_t link, int fd) override;
  void interrupt(std::size_t link) override;
  void giveUp(std::size_t link, const std::string& reason) override;
  bool isGone(std::size_t link) const noexcept override;

 private:
  struct Frame;
  struct Link;

  void enqueue(Link& link, Frame frame);
  void flush(Link& link);
  bool sendSome(Link& link);
  void noteSent(Link& link, std::size_t numBytes);
  void wantWrites(Link& link, bool wanted);
  void insertAcknowledgement(Link& link);
  void acknowledge(Link& link);
  void takeAcknowledgement(Link& link, std::uint32_t numReceived);

  void receive(Link& link);
  bool receiveSome(Link& link);
  void openFrame(Link& link);
  void closeFrame(Link& link);
  void resend(Link& link);
  void endOfStream(Link& link);

  void lookAtAll();
  void look(Link& link);
  void takeOrders(Link& link);
  void adopt(Link& link, int fd);
  void watch(Link& link);
  void disconnect(Link& link);
  void breakOff(Link& link, const std::string& reason);
  void end(Link& link);
  void lose(Link& link, const std::string& reason, LossCause cause);

  FrameHandler& handler_;
  std::size_t headerBytes_;
  LinkOptions options_;
  ProcessMetrics metrics_;
  int epollFd_ = -1;
  int wakeFd_ = -1;
  std::atomic<bool> hasOrders_{false};
  std::vector<std::unique_ptr<Link>> links_;
  std::chrono::steady_clock::time_point nextLook_;  // used by progress() alone
};

}  // namespace coarse
