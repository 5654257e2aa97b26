#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>

namespace coarse {

/// Silence after which it is reported; longer than an idle connection goes without a probe.
constexpr std::chrono::milliseconds kReportedSilence{5000};

/// Makes a connection to another node send immediately, and ask the peer's machine for a sign of life while
/// it is idle, so that both ends notice soon when one of them has lost the connection. No effect on a socket
/// that is not TCP, as in tests.
inline void setNodeSocketOptions(int fd) noexcept {
  const auto set = [fd](int level, int name, int value) {
    ::setsockopt(fd, level, name, &value, sizeof(value));
  };
  constexpr int kMostProbes = 127;  // of the kernel; then the connection counts as broken
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 1);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set(IPPROTO_TCP, TCP_KEEPCNT, kMostProbes);
}

/// How long a peer's machine has answered neither data nor probes that await an answer. Call it periodically.
/// Unlike TCP_USER_TIMEOUT it tolerates a peer that accepts no data but whose kernel answers, such as a
/// stopped process.
inline std::chrono::milliseconds silenceOf(int fd) noexcept {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {};
  constexpr unsigned kMostUnanswered = 2;  // probes: one may just have been sent
  const bool isWaiting =
      (info.tcpi_unacked > 0 && info.tcpi_retransmits > 0) || info.tcpi_probes > kMostUnanswered;
  if (!isWaiting) return {};
  // Data may lack an acknowledgement of what was received, and still counts as an answer.
  return std::chrono::milliseconds(std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv));
}

}  // namespace coarse
