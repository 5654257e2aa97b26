#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/shared_memory.hpp"

/// Links of another machine, emulated in time: docs/design/emulation.md.
namespace coarse {

/// Nanoseconds of CLOCK_MONOTONIC, which all processes of a node share.
using MonotonicNs = std::int64_t;
MonotonicNs monotonicNow() noexcept;

/// The low bits of a time: enough for what was noted less than four seconds ago.
using TimeStamp = std::uint32_t;
inline TimeStamp stampOf(MonotonicNs time) noexcept { return static_cast<TimeStamp>(time); }
/// The latest time up to `now` with this stamp.
inline MonotonicNs timeOf(TimeStamp stamp, MonotonicNs now) noexcept { return now - (stampOf(now) - stamp); }

/// A transfer that is noticed late, because its process did not get the processor, counts from when it was
/// asked for, but never from longer ago.
inline constexpr MonotonicNs kLongestCreditNs = 1'000'000'000;

inline constexpr std::size_t kMostBucketsPerPath = 8;

/// The way from one endpoint to another. Workers are the first endpoints, memory devices follow.
struct PathValues {
  double latencyUs = 0;
  std::vector<std::uint32_t> buckets;  // capacities that its transfers share with others
};

/// One transfer as the links served it. Times are those of the emulated machine, since the table was written.
struct Transfer {
  std::uint16_t source = 0;
  std::uint16_t target = 0;
  std::uint32_t tag = 0;  // whoever reserved says what it carries: a shard
  std::uint64_t numBytes = 0;
  double requestedUs = 0;
  double beginUs = 0;  // the last of its buckets started on it
  double dueUs = 0;
};

/// One of the newest transfers of a path: how long each link of its way was at it, from when that link began
/// on it until it was through. What it waited for others before that does not count.
struct ServedTransfer {
  std::uint16_t source = 0;
  std::uint16_t target = 0;
  std::uint64_t numBytes = 0;
  double endUs = 0;  // as Transfer::dueUs
  double latencyUs = 0;
  std::vector<std::pair<std::uint32_t, double>> serviceUs;  // by bucket
};

/// Classes of sizes, each four times as large as the one before, of which a path keeps the newest transfers.
inline constexpr std::size_t kNumSizeClasses = 16;
inline constexpr std::size_t kNewestOfClass = 3;

/// What a link table says when a session starts.
struct LinkTableValues {
  std::uint32_t logCapacity = 0;        // transfers that are written down, the first ones
  double timeDilation = 1;              // all times are so many times longer
  std::vector<double> gbytesPerSecond;  // of each bucket; G is 1e9
  std::vector<std::vector<std::optional<PathValues>>> paths;  // [source][target]

  /// @throws std::invalid_argument if a number is not positive and finite, the paths are no square, or one
  /// names a bucket that does not exist, or too many.
  void validate() const;
};

struct alignas(kCacheLineBytes) LinkTableHeader {
  std::uint32_t numEndpoints;
  std::uint32_t numBuckets;
  double timeDilation;
  MonotonicNs epoch;  // other times in the table count from here, so that a double holds them exactly enough
  std::atomic<std::uint64_t> numArrivals;
  std::atomic<std::uint64_t> latenessNs;  // by which arrivals were noticed after they were due, in sum
  std::atomic<std::uint32_t> numLogged;   // transfers that asked for a place in the log
  std::uint32_t logCapacity;
};
static_assert(sizeof(LinkTableHeader) == kCacheLineBytes);

struct alignas(kCacheLineBytes) LinkBucket {
  std::atomic<double> nextFreeNs;  // until then its capacity is taken
  std::atomic<double> nsPerByte;
};
static_assert(sizeof(LinkBucket) == kCacheLineBytes && std::atomic<double>::is_always_lock_free);

struct alignas(kCacheLineBytes) LinkPath {
  std::atomic<double> latencyNs;
  std::atomic<std::uint64_t> numTransfers;
  std::atomic<std::uint64_t> numBytes;
  std::uint32_t exists;
  std::uint32_t numBuckets;
  std::array<std::uint32_t, kMostBucketsPerPath> buckets;
};
static_assert(sizeof(LinkPath) == kCacheLineBytes);

/// A ServedTransfer of the path and size class that its place stands for.
struct alignas(kCacheLineBytes) ServedCell {
  std::atomic<std::uint32_t> version;  // odd while it is written
  std::atomic<std::uint64_t> numBytes;
  std::atomic<double> endUs;
  std::atomic<double> latencyUs;
  std::array<std::atomic<float>, kMostBucketsPerPath> serviceUs;  // in the order of the path's buckets
};
static_assert(sizeof(ServedCell) == kCacheLineBytes && std::atomic<float>::is_always_lock_free);

struct TransferLogCell {
  std::atomic<std::uint32_t> isWhole;  // stored last
  Transfer transfer;
};

struct PathStatistics {
  std::uint64_t numTransfers = 0;
  std::uint64_t numBytes = 0;
};

struct ArrivalStatistics {
  std::uint64_t numArrivals = 0;
  std::uint64_t latenessNs = 0;
};

/// Says when transfers arrive, by a link table in memory that all memory devices map.
///
/// A bucket serves the transfers that ask for it one after the other, at its rate: intervals never overlap,
/// so no stretch of time carries more than the rate allows, and as long as transfers wait, none is left out.
///
/// Thread safety: everything may be called from any thread of any process that maps the table; lock-free.
class Pacer {
 public:
  static std::size_t numBytes(std::size_t numEndpoints, std::size_t numBuckets,
                              std::size_t logCapacity = 0) noexcept;
  /// Writes a table into sealed memory of numBytes(). Before anybody else maps it.
  /// @throws std::invalid_argument if the values are wrong or the memory is too small.
  static void write(int fd, const LinkTableValues& values);
  /// Maps a written table; the descriptor stays the caller's.
  /// @throws std::invalid_argument if it holds none.
  explicit Pacer(int fd, Mapping::Access access = Mapping::Access::kReadWrite);

  /// Takes the capacity for a transfer that was asked for at `requestedAt`, up to now.
  /// @returns when it arrives: at the end of the slowest of its buckets, and its latency later.
  /// @param tag for the log of transfers.
  /// @pre both endpoints exist. A transfer from an endpoint to itself takes no time.
  MonotonicNs reserve(std::size_t source, std::size_t target, std::size_t numBytes, MonotonicNs requestedAt,
                      std::uint32_t tag = 0) noexcept;
  /// Counts an arrival that was due at `due` and noticed at `now`.
  void countArrival(MonotonicNs due, MonotonicNs now) noexcept;

  /// Changes a link while it is in use. Transfers that have reserved keep their times.
  /// @throws std::invalid_argument if there is no such bucket or path, or the number cannot be.
  void setBandwidth(std::size_t bucket, double gbytesPerSecond);
  void setLatency(std::size_t source, std::size_t target, double latencyUs);

  double timeDilation() const noexcept { return header().timeDilation; }
  std::size_t numEndpoints() const noexcept { return header().numEndpoints; }
  std::size_t numBuckets() const noexcept { return header().numBuckets; }
  /// @throws std::invalid_argument if there is no such path.
  PathStatistics statistics(std::size_t source, std::size_t target) const;
  ArrivalStatistics arrivals() const noexcept;
  /// The first transfers of the session, as many as the table has places for, in the order of their requests
  /// at each process.
  std::vector<Transfer> transfers() const;
  /// The newest transfers that carried something: of each path and size class up to kNewestOfClass of those
  /// that were through later than `sinceUs`.
  std::vector<ServedTransfer> served(double sinceUs) const;
  /// Emulated time since the table was written.
  double nowUs() const noexcept;

 private:
  LinkTableHeader& header() const noexcept { return *reinterpret_cast<LinkTableHeader*>(mapping_.data()); }
  LinkBucket& bucket(std::size_t index) const noexcept;
  LinkPath& path(std::size_t source, std::size_t target) const noexcept;
  LinkPath& checkedPath(std::size_t source, std::size_t target) const;
  ServedCell* served(std::size_t source, std::size_t target, std::size_t sizeClass) const noexcept;
  TransferLogCell* log() const noexcept;
  void write(const Transfer& transfer) noexcept;

  Mapping mapping_;
};

}  // namespace coarse
