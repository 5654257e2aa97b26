#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/shared_memory.hpp"

/// Counters, gauges and histograms that workers and memory devices keep in shared memory
/// (docs/design/metrics.md). The table kMetrics declares each once, for writers and readers.
namespace coarse {

enum class MetricKind : std::uint8_t { kCounter, kGauge, kHistogram };

/// The contents of a cell. Durations are nanoseconds there and seconds for readers.
enum class MetricUnit : std::uint8_t { kNumber, kBytes, kSeconds };

/// The kind of process that has the metric. Readers label its values with the worker or memory device.
enum class MetricOwner : std::uint8_t { kWorker, kDevice };

/// A label whose values are known: the names of an enumeration, or all memory devices of the node.
enum class MetricLabel : std::uint8_t { kNone, kDevice, kAlgorithm, kCause, kOutcome, kFailure };

/// How a shard is synchronised: an Algorithm, or one of two ways that need no reduction by memory devices.
inline constexpr std::size_t kByWorkers = 6;     // the workers reduce it themselves
inline constexpr std::size_t kUpdateByMean = 7;  // the parameter is updated by a mean that slots hold already
inline constexpr std::size_t kNumWays = 8;

/// The reason why a worker waits.
enum class WaitCause : std::uint8_t {
  kResults = 0,     // of pushed tensors
  kAllReduce = 1,   // of an unregistered buffer
  kQueue = 2,       // a place in the queue of a memory device
  kProbe = 3,       // a link's measurement
  kBackground = 4,  // results, in a thread besides the training's
  kRequest = 5,     // an answer of memory devices, such as to a registration; counted in Python
};
inline constexpr std::size_t kNumWaitCauses = 6;

enum class Metric : std::uint8_t {
  // of workers
  kPushedBytes,
  kPushedShards,
  kStepSeconds,
  kWaitSeconds,
  kOptimizerSeconds,
  kSamples,
  kWorldSize,
  kRestarts,
  kReplans,
  kRefusedRoutes,
  kCheckpointSaves,
  kCheckpointWrittenBytes,
  kCheckpointSaveSeconds,
  // of memory devices
  kTakenShards,
  kReducedBytes,
  kReducedShards,
  kSyncCoreBusySeconds,
  kSyncCores,
  kMemoryBytes,
  kWorkersPresent,
  kFailures,
  kNodeSentBytes,
  kNodeReceivedBytes,
  kSnapshotPoolBytes,
  kSnapshotPoolLimitBytes,
  kSnapshotsLost,
  kSnapshotWaits,
  kSnapshotWaitSeconds,
};
inline constexpr std::size_t kNumMetrics = 28;

/// Upper bounds of a histogram's buckets in nanoseconds; one more bucket holds what is longer.
inline constexpr std::array<std::uint64_t, 22> kBucketBounds = {
    10'000,         25'000,         50'000,         100'000,        250'000,       500'000,
    1'000'000,      2'500'000,      5'000'000,      10'000'000,     25'000'000,    50'000'000,
    100'000'000,    250'000'000,    500'000'000,    1'000'000'000,  2'500'000'000, 5'000'000'000,
    10'000'000'000, 25'000'000'000, 50'000'000'000, 100'000'000'000};

/// Cells of one histogram: its buckets, not cumulative, then the sum.
inline constexpr std::size_t kHistogramCells = kBucketBounds.size() + 2;

struct MetricDeclaration {
  Metric metric;  // its position in kMetrics
  const char* name;
  MetricKind kind;
  MetricUnit unit;
  MetricOwner owner;
  std::array<MetricLabel, 2> labels;  // besides the owner's; a series for each combination of values
  const char* help;
};

extern const std::array<MetricDeclaration, kNumMetrics> kMetrics;

/// The values of a label in the order of their numbers; empty for kDevice and kNone.
std::vector<const char*> valuesOf(MetricLabel label);

/// Where the metrics of one process lie, from the first.
class MetricsLayout {
 public:
  explicit MetricsLayout(std::size_t numDevices) noexcept;

  std::size_t numSeries(Metric metric) const noexcept;
  /// The first cell of a metric's first series; the others follow.
  std::size_t first(Metric metric) const noexcept { return first_[static_cast<std::size_t>(metric)]; }
  std::size_t numBytes() const noexcept { return roundUp(first_.back() * 8, kCacheLineBytes); }
  static std::size_t cellsPerSeries(Metric metric) noexcept {
    return kMetrics[static_cast<std::size_t>(metric)].kind == MetricKind::kHistogram ? kHistogramCells : 1;
  }

 private:
  std::size_t numDevices_;
  std::array<std::uint32_t, kNumMetrics + 1> first_{};
};

/// The metrics of one process. A default one counts nothing. Copies refer to the same memory.
///
/// Thread safety: any number of threads and processes may write and read. Each value is exact; values read
/// together may be of different moments.
class ProcessMetrics {
 public:
  using Cell = std::atomic<std::uint64_t>;

  ProcessMetrics() : layout_(0) {}
  ProcessMetrics(std::shared_ptr<const Mapping> memory, std::size_t offset, const MetricsLayout& layout)
      : memory_(std::move(memory)),
        cells_(reinterpret_cast<Cell*>(memory_->data() + offset)),
        layout_(layout) {}

  const MetricsLayout& layout() const noexcept { return layout_; }

  /// Adds to a counter. @param series the number of its combination of labels.
  void add(Metric metric, std::uint64_t amount, std::size_t series = 0) const noexcept {
    // relaxed: a value orders nothing else.
    if (cells_ != nullptr)
      cells_[layout_.first(metric) + series].fetch_add(amount, std::memory_order_relaxed);
  }
  /// Sets a gauge, or a counter that is counted elsewhere.
  void set(Metric metric, std::uint64_t value, std::size_t series = 0) const noexcept {
    if (cells_ != nullptr) cells_[layout_.first(metric) + series].store(value, std::memory_order_relaxed);
  }
  /// Adds a duration to a histogram.
  void observe(Metric metric, std::chrono::nanoseconds duration, std::size_t series = 0) const noexcept;
  /// A cell of a series: a histogram has several.
  std::uint64_t read(Metric metric, std::size_t series = 0, std::size_t part = 0) const noexcept {
    if (cells_ == nullptr) return 0;
    const std::size_t cell = layout_.first(metric) + series * MetricsLayout::cellsPerSeries(metric) + part;
    return cells_[cell].load(std::memory_order_relaxed);
  }

 private:
  std::shared_ptr<const Mapping> memory_;
  Cell* cells_ = nullptr;
  MetricsLayout layout_;
};

/// The metrics of a node's memory devices, then of its workers, in one segment that all of them map.
class MetricsSegment {
 public:
  /// @param fd the caller closes it.
  /// @throws std::invalid_argument if it is unsealed or too small.
  MetricsSegment(int fd, std::size_t numDevices, std::size_t numClients);
  static std::size_t numBytes(std::size_t numDevices, std::size_t numClients) noexcept {
    return (numDevices + numClients) * MetricsLayout(numDevices).numBytes();
  }
  /// @throws std::out_of_range if there is no such device or client.
  ProcessMetrics device(std::size_t device) const;
  ProcessMetrics client(std::size_t client) const;

 private:
  ProcessMetrics process(std::size_t number) const;

  std::size_t numDevices_;
  std::size_t numClients_;
  MetricsLayout layout_;
  std::shared_ptr<const Mapping> memory_;
};

/// Counts the time of a scope as a wait, from the first begin() on; nothing without it.
class WaitTimer {
 public:
  WaitTimer(const ProcessMetrics& metrics, WaitCause cause) noexcept : metrics_(metrics), cause_(cause) {}
  WaitTimer(const WaitTimer&) = delete;
  WaitTimer& operator=(const WaitTimer&) = delete;
  ~WaitTimer() {
    if (!hasBegun_) return;
    metrics_.observe(Metric::kWaitSeconds, std::chrono::steady_clock::now() - began_,
                     static_cast<std::size_t>(cause_));
  }
  void begin() noexcept {
    if (hasBegun_) return;
    hasBegun_ = true;
    began_ = std::chrono::steady_clock::now();
  }

 private:
  const ProcessMetrics& metrics_;
  WaitCause cause_;
  bool hasBegun_ = false;
  std::chrono::steady_clock::time_point began_{};
};

}  // namespace coarse
