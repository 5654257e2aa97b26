#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>

namespace coarse {

/// How long a peer's machine may leave everything unanswered.
constexpr unsigned kMostSilenceMilliseconds = 10'000;

/// Has a connection to another node send at once, and notice within ten seconds or so a peer that vanishes
/// without a word, if nothing is under way; if something is, isUnreachable() tells. Of a socket that is not
/// TCP, as in tests, there is nothing to set.
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

/// Whether a peer's machine answers nothing any more, neither data nor questions for room. To be asked now
/// and then. Unlike TCP_USER_TIMEOUT it bears with a peer that takes nothing and whose kernel says so, as
/// that of a process which is stopped.
inline bool isUnreachable(int fd) noexcept {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
  constexpr unsigned kMostUnanswered = 2;  // questions: one may just have been sent
  const bool isWaiting =
      (info.tcpi_unacked > 0 && info.tcpi_retransmits > 0) || info.tcpi_probes > kMostUnanswered;
  // Data need not carry news of what was received, and counts as an answer all the same.
  return isWaiting && std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv) > kMostSilenceMilliseconds;
}

}  // namespace coarse
