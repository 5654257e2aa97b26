#pragma once

#include <chrono>
#include <cstdio>
#include <string>

namespace coarse {

/// A duration for messages: "0.25 s" below a second, else "10.0 s".
inline std::string inSeconds(std::chrono::duration<double> duration) {
  char text[32];
  std::snprintf(text, sizeof text, duration.count() < 1.0 ? "%.2f s" : "%.1f s", duration.count());
  return text;
}

}  // namespace coarse
