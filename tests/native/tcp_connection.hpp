// A connection over loopback: unlike socket pairs, it can be reset.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>

namespace coarse::test {

/// Both ends of a new connection.
inline std::array<int, 2> tcpConnection() {
  const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(::bind(listener, generic, size), 0);
  EXPECT_EQ(::listen(listener, 1), 0);
  EXPECT_EQ(::getsockname(listener, generic, &size), 0);
  const int one = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(::connect(one, generic, size), 0);
  const int other = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  EXPECT_GE(other, 0);
  ::close(listener);
  return {one, other};
}

/// Breaks a connection as a network does that resets it: what has not arrived is lost.
inline void breakConnection(int fd) {
  sockaddr nowhere{};
  nowhere.sa_family = AF_UNSPEC;
  ::connect(fd, &nowhere, sizeof nowhere);
}

}  // namespace coarse::test
