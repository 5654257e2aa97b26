#include "coarse/copy.hpp"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace coarse {

void copyBytes(void* destination, const void* source, std::size_t numBytes) noexcept {
  if (numBytes != 0) std::memcpy(destination, source, numBytes);
}

#if defined(__x86_64__)
namespace {

constexpr std::size_t kLineBytes = 64;

void streamLine(char* to, const char* from) noexcept {
  const __m128i* source = reinterpret_cast<const __m128i*>(from);
  __m128i* destination = reinterpret_cast<__m128i*>(to);
  const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
  const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
  _mm_stream_si128(destination, a);
  _mm_stream_si128(destination + 1, b);
  _mm_stream_si128(destination + 2, c);
  _mm_stream_si128(destination + 3, d);
}

}  // namespace

void copyBytesStreaming(void* destination, const void* source, std::size_t numBytes) noexcept {
  char* to = static_cast<char*>(destination);
  const char* from = static_cast<const char*>(source);
  const std::size_t toLineStart = (0 - reinterpret_cast<std::uintptr_t>(to)) % kLineBytes;
  const std::size_t head = toLineStart < numBytes ? toLineStart : numBytes;
  copyBytes(to, from, head);
  std::size_t done = head;
  for (; done + kLineBytes <= numBytes; done += kLineBytes) streamLine(to + done, from + done);
  copyBytes(to + done, from + done, numBytes - done);
  _mm_sfence();
}
#else
void copyBytesStreaming(void* destination, const void* source, std::size_t numBytes) noexcept {
  copyBytes(destination, source, numBytes);
}
#endif

}  // namespace coarse
