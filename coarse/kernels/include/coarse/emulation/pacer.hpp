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

/// The low bits of a time: enough for times less than four seconds ago.
using TimeStamp = std::uint32_t;
inline TimeStamp stampOf(MonotonicNs time) noexcept { return static_cast<TimeStamp>(time); }
/// The latest time up to `now` with this stamp.
inline MonotonicNs timeOf(TimeStamp stamp, MonotonicNs now) noexcept { return now - (stampOf(now) - stamp); }

/// A transfer that is noticed late, because its process did not get the processor, counts from its request
/// time, but at most from this long ago.
inline constexpr MonotonicNs kLongestCreditNs = 1'000'000'000;

inline constexpr std::size_t kMostBucketsPerPath = 8;

/// The path from one endpoint to another. Workers are the first endpoints, memory devices follow.
struct PathValues {
  double latencyUs = 0;
  std::vector<std::uint32_t> buckets;  // shared capacities that its transfers use
};

/// One transfer as the links served it. Times are those of the emulated machine, since the table was written.
struct Transfer {
  std::uint16_t source = 0;
  std::uint16_t target = 0;
  std::uint32_t tag = 0;  // the content, set by the requesting code: a shard
  std::uint64_t numBytes = 0;
  double requestedUs = 0;
  double beginUs = 0;  // when the last of its buckets started on it
  double dueUs = 0;
};

/// One of the newest transfers of a path, with the time that each link of its path worked on it, from the
/// link's start on it until its end. Time spent waiting for other transfers does not count.
struct ServedTransfer {
  std::uint16_t source = 0;
  std::uint16_t target = 0;
  std::uint64_t numBytes = 0;
  double endUs = 0;  // as Transfer::dueUs
  double latencyUs = 0;
  std::vector<std::pair<std::uint32_t, double>> serviceUs;  // by bucket
};

/// Size classes, each four times as large as the one before. A path keeps the newest transfers of each.
inline constexpr std::size_t kNumSizeClasses = 16;
inline constexpr std::size_t kNewestOfClass = 3;

/// The contents of a link table when a session starts.
struct LinkTableValues {
  std::uint32_t logCapacity = 0;        // number of transfers that are logged, from the first on
  double timeDilation = 1;              // factor by which all times are longer
  std::vector<double> gbytesPerSecond;  // of each bucket; G is 1e9
  std::vector<std::vector<std::optional<PathValues>>> paths;  // [source][target]

  /// @throws std::invalid_argument if a number is not positive and finite, the paths are not square, or one
  /// names a bucket that does not exist, or too many.
  void validate() const;
};

struct alignas(kCacheLineBytes) LinkTableHeader {
  std::uint32_t numEndpoints;
  std::uint32_t numBuckets;
  double timeDilation;
  MonotonicNs epoch;  // origin of other times in the table, so that a double is exact enough for them
  std::atomic<std::uint64_t> numArrivals;
  std::atomic<std::uint64_t> latenessNs;  // sum of the times by which arrivals were noticed late
  std::atomic<std::uint32_t> numLogged;   // transfers that asked for a place in the log
  std::uint32_t logCapacity;
};
static_assert(sizeof(LinkTableHeader) == kCacheLineBytes);

struct alignas(kCacheLineBytes) LinkBucket {
  std::atomic<double> nextFreeNs;  // its capacity is taken until then
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

/// A ServedTransfer of the path and size class of its position.
struct alignas(kCacheLineBytes) ServedCell {
  std::atomic<std::uint32_t> version;  // odd during a write
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

/// Computes when transfers arrive, by a link table in memory that all memory devices map.
///
/// A bucket serves the transfers that request it one after the other, at its rate. Intervals never overlap,
/// so no period carries more than the rate allows. While transfers wait, the bucket is never idle.
///
/// Thread safety: everything may be called from any thread of any process that maps the table; lock-free.
class Pacer {
 public:
  static std::size_t numBytes(std::size_t numEndpoints, std::size_t numBuckets,
                              std::size_t logCapacity = 0) noexcept;
  /// Writes a table into sealed memory of numBytes(). Call before any process maps it.
  /// @throws std::invalid_argument if the values are wrong or the memory is too small.
  static void write(int fd, const LinkTableValues& values);
  /// Maps a written table; the caller closes the descriptor.
  /// @throws std::invalid_argument if it holds none.
  explicit Pacer(int fd, Mapping::Access access = Mapping::Access::kReadWrite);

  /// Takes the capacity for a transfer that was requested at `requestedAt`, not later than now.
  /// @returns its arrival time: the end of the slowest of its buckets, plus its latency.
  /// @param tag for the log of transfers.
  /// @pre both endpoints exist. A transfer from an endpoint to itself takes no time.
  MonotonicNs reserve(std::size_t source, std::size_t target, std::size_t numBytes, MonotonicNs requestedAt,
                      std::uint32_t tag = 0) noexcept;
  /// Counts an arrival that was due at `due` and noticed at `now`.
  void countArrival(MonotonicNs due, MonotonicNs now) noexcept;

  /// Changes a link while it is in use. Transfers that have reserved keep their times.
  /// @throws std::invalid_argument if there is no such bucket or path, or the number is invalid.
  void setBandwidth(std::size_t bucket, double gbytesPerSecond);
  void setLatency(std::size_t source, std::size_t target, double latencyUs);

  double timeDilation() const noexcept { return header().timeDilation; }
  std::size_t numEndpoints() const noexcept { return header().numEndpoints; }
  std::size_t numBuckets() const noexcept { return header().numBuckets; }
  /// @throws std::invalid_argument if there is no such path.
  PathStatistics statistics(std::size_t source, std::size_t target) const;
  ArrivalStatistics arrivals() const noexcept;
  /// The first transfers of the session, up to the log's capacity, in the order of their requests at each
  /// process.
  std::vector<Transfer> transfers() const;
  /// The newest transfers of at least one byte: of each path and size class up to kNewestOfClass of those
  /// that ended later than `sinceUs`.
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
