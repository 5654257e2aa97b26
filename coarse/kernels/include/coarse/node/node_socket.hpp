#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>

namespace coarse {

/// Longest time without any answer from a peer's machine.
constexpr unsigned kMostSilenceMilliseconds = 10'000;

/// Makes a connection to another node send immediately. If no data is in transit, the connection detects a
/// peer that vanishes silently within about ten seconds; if data is in transit, isUnreachable() detects it.
/// No effect on a socket that is not TCP, as in tests.
inline void setNodeSocketOptions(int fd) noexcept {
  const auto set = [fd](int level, int name, int value) {
    ::setsockopt(fd, level, name, &value, sizeof(value));
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set(IPPROTO_TCP, TCP_KEEPCNT, 5);
}

/// Whether a peer's machine answers neither data nor window probes. Call it periodically. Unlike
/// TCP_USER_TIMEOUT it tolerates a peer that accepts no data but whose kernel answers, such as a stopped
/// process.
inline bool isUnreachable(int fd) noexcept {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
  constexpr unsigned kMostUnanswered = 2;  // probes: one may just have been sent
  const bool isWaiting =
      (info.tcpi_unacked > 0 && info.tcpi_retransmits > 0) || info.tcpi_probes > kMostUnanswered;
  // Data may lack an acknowledgement of what was received, and still counts as an answer.
  return isWaiting && std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv) > kMostSilenceMilliseconds;
}

}  // namespace coarse
