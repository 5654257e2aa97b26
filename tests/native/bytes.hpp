// Compares the contents of memory.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

namespace coarse::test {

/// Compared in one call: one by one, bytes take most of a test's time under a sanitizer.
struct Bytes : std::vector<std::byte> {
  using std::vector<std::byte>::vector;

  friend bool operator==(const Bytes& one, const Bytes& other) {
    return one.size() == other.size() &&
           (one.empty() || std::memcmp(one.data(), other.data(), one.size()) == 0);
  }
  friend bool operator!=(const Bytes& one, const Bytes& other) { return !(one == other); }
};

}  // namespace coarse::test
