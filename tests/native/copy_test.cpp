/// copyBytes() and copyBytesStreaming(): exactly the bytes asked for, at any length and alignment.
#include "coarse/reduce/copy.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace {

using Copy = void (*)(void*, const void*, std::size_t);

class Copies : public testing::TestWithParam<Copy> {};

TEST_P(Copies, ExactlyTheBytesAskedFor) {
  for (const std::size_t numBytes : {0, 1, 15, 16, 63, 64, 65, 127, 128, 129, 1000, 4096, 70001}) {
    for (const std::size_t fromOffset : {0, 1, 33}) {
      for (const std::size_t toOffset : {0, 1, 17, 63}) {
        std::vector<unsigned char> from(numBytes + 128), to(numBytes + 128, 0xee);
        for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i * 31 % 229);
        std::vector<unsigned char> expected = to;
        std::copy_n(from.begin() + static_cast<long>(fromOffset), numBytes,
                    expected.begin() + static_cast<long>(toOffset));
        GetParam()(to.data() + toOffset, from.data() + fromOffset, numBytes);
        ASSERT_EQ(to, expected) << numBytes << " bytes from offset " << fromOffset << " to " << toOffset;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Copies,
                         testing::Values(Copy{coarse::copyBytes}, Copy{coarse::copyBytesStreaming}),
                         [](const auto& info) { return info.index == 0 ? "plain" : "streaming"; });

}  // namespace
