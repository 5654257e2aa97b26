#include "coarse/emulation/pacer.hpp"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <new>
#include <stdexcept>
#include <string>

#include "coarse/timeline/recorder.hpp"

namespace coarse {
namespace {

void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument("link table: " + what);
}

void requireBandwidth(double gbytesPerSecond) {
  require(gbytesPerSecond > 0 && std::isfinite(gbytesPerSecond),
          "a bandwidth of " + std::to_string(gbytesPerSecond) + " GB/s is not positive and finite");
}

void requireLatency(double latencyUs) {
  require(latencyUs >= 0 && std::isfinite(latencyUs),
          "a latency of " + std::to_string(latencyUs) + " us is negative or not finite");
}

// 1 GB/s is a byte per nanosecond.
double nsPerByteAt(double gbytesPerSecond) noexcept { return 1 / gbytesPerSecond; }

/// Takes `duration` of a bucket's time, not before `from`. @returns the end of the taken interval.
double take(std::atomic<double>& nextFree, double from, double duration) noexcept {
  // relaxed: the word guards nothing but itself.
  double free = nextFree.load(std::memory_order_relaxed);
  double end = 0;
  do {
    end = std::max(free, from) + duration;
  } while (!nextFree.compare_exchange_weak(free, end, std::memory_order_relaxed));
  return end;
}

/// 0 for up to 3 bytes, and one more for each factor of 4.
std::size_t sizeClassOf(std::size_t numBytes) noexcept {
  std::size_t sizeClass = 0;
  while ((numBytes >>= 2) > 0) ++sizeClass;
  return std::min(sizeClass, kNumSizeClasses - 1);
}

void note(ServedCell& cell, std::size_t numBytes, double endUs, double latencyUs,
          const std::array<float, kMostBucketsPerPath>& serviceUs) noexcept {
  std::uint32_t version = cell.version.load(std::memory_order_relaxed);
  // The concurrent writer has an equally new transfer.
  if (version % 2 == 1 || !cell.version.compare_exchange_strong(version, version + 1)) return;
  // release: a reader of any of these also sees the odd version.
  cell.numBytes.store(numBytes, std::memory_order_release);
  cell.endUs.store(endUs, std::memory_order_release);
  cell.latencyUs.store(latencyUs, std::memory_order_release);
  for (std::size_t i = 0; i < kMostBucketsPerPath; ++i)
    cell.serviceUs[i].store(serviceUs[i], std::memory_order_release);
  cell.version.store(version + 2, std::memory_order_release);
}

/// @returns whether `transfer` holds the values of one write.
bool readServed(const ServedCell& cell, const LinkPath& path, ServedTransfer& transfer) {
  const std::uint32_t version = cell.version.load(std::memory_order_acquire);
  if (version == 0 || version % 2 == 1) return false;
  transfer.numBytes = cell.numBytes.load(std::memory_order_acquire);
  transfer.endUs = cell.endUs.load(std::memory_order_acquire);
  transfer.latencyUs = cell.latencyUs.load(std::memory_order_acquire);
  for (std::size_t i = 0; i < path.numBuckets; ++i)
    transfer.serviceUs.emplace_back(path.buckets[i], cell.serviceUs[i].load(std::memory_order_acquire));
  return cell.version.load(std::memory_order_relaxed) == version;
}

}  // namespace

MonotonicNs monotonicNow() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return MonotonicNs{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void LinkTableValues::validate() const {
  require(timeDilation > 0 && std::isfinite(timeDilation), "the time dilation must be positive and finite");
  for (const double rate : gbytesPerSecond) requireBandwidth(rate);
  for (const auto& row : paths) {
    require(row.size() == paths.size(), "paths must be a square of all endpoints");
    for (const auto& path : row) {
      if (!path) continue;
      requireLatency(path->latencyUs);
      require(path->buckets.size() <= kMostBucketsPerPath,
              "a path has more than " + std::to_string(kMostBucketsPerPath) + " buckets");
      for (const std::uint32_t index : path->buckets)
        require(index < gbytesPerSecond.size(), "a path names bucket " + std::to_string(index) + " of " +
                                                    std::to_string(gbytesPerSecond.size()));
    }
  }
}

std::size_t Pacer::numBytes(std::size_t numEndpoints, std::size_t numBuckets,
                            std::size_t logCapacity) noexcept {
  return sizeof(LinkTableHeader) + numBuckets * sizeof(LinkBucket) +
         numEndpoints * numEndpoints *
             (sizeof(LinkPath) + kNumSizeClasses * kNewestOfClass * sizeof(ServedCell)) +
         logCapacity * sizeof(TransferLogCell);
}

void Pacer::write(int fd, const LinkTableValues& values) {
  values.validate();
  const std::size_t needed = numBytes(values.paths.size(), values.gbytesPerSecond.size(), values.logCapacity);
  require(sealedBytes(fd) >= needed, "needs " + std::to_string(needed) + " bytes of memory");
  const Mapping mapping(fd, needed, Mapping::Access::kReadWrite);
  auto* header = new (mapping.data()) LinkTableHeader{};
  header->numEndpoints = static_cast<std::uint32_t>(values.paths.size());
  header->numBuckets = static_cast<std::uint32_t>(values.gbytesPerSecond.size());
  header->timeDilation = values.timeDilation;
  header->logCapacity = values.logCapacity;
  header->epoch = monotonicNow();
  auto* bucket = reinterpret_cast<LinkBucket*>(header + 1);
  for (const double rate : values.gbytesPerSecond) {
    new (bucket) LinkBucket{};
    (bucket++)->nsPerByte.store(nsPerByteAt(rate), std::memory_order_relaxed);
  }
  auto* target = reinterpret_cast<LinkPath*>(bucket);
  for (const auto& row : values.paths) {
    for (const auto& path : row) {
      auto* written = new (target++) LinkPath{};
      if (!path) continue;
      written->exists = 1;
      written->latencyNs.store(path->latencyUs * 1000, std::memory_order_relaxed);
      written->numBuckets = static_cast<std::uint32_t>(path->buckets.size());
      std::copy(path->buckets.begin(), path->buckets.end(), written->buckets.begin());
    }
  }
}

Pacer::Pacer(int fd, Mapping::Access access) : mapping_(fd, sealedBytes(fd), access) {
  require(mapping_.numBytes() >= sizeof(LinkTableHeader) && numEndpoints() > 0 &&
              mapping_.numBytes() >= numBytes(numEndpoints(), numBuckets(), header().logCapacity),
          "the memory holds none");
}

LinkBucket& Pacer::bucket(std::size_t index) const noexcept {
  return reinterpret_cast<LinkBucket*>(mapping_.data() + sizeof(LinkTableHeader))[index];
}

LinkPath& Pacer::path(std::size_t source, std::size_t target) const noexcept {
  auto* paths = reinterpret_cast<LinkPath*>(mapping_.data() + sizeof(LinkTableHeader) +
                                            numBuckets() * sizeof(LinkBucket));
  return paths[source * numEndpoints() + target];
}

LinkPath& Pacer::checkedPath(std::size_t source, std::size_t target) const {
  require(std::max(source, target) < numEndpoints() && path(source, target).exists != 0,
          "there is no path from endpoint " + std::to_string(source) + " to " + std::to_string(target));
  return path(source, target);
}

ServedCell* Pacer::served(std::size_t source, std::size_t target, std::size_t sizeClass) const noexcept {
  const std::size_t numPaths = numEndpoints() * numEndpoints();
  auto* cells =
      reinterpret_cast<ServedCell*>(mapping_.data() + sizeof(LinkTableHeader) +
                                    numBuckets() * sizeof(LinkBucket) + numPaths * sizeof(LinkPath));
  return cells + ((source * numEndpoints() + target) * kNumSizeClasses + sizeClass) * kNewestOfClass;
}

TransferLogCell* Pacer::log() const noexcept {
  return reinterpret_cast<TransferLogCell*>(mapping_.data() + numBytes(numEndpoints(), numBuckets()));
}

void Pacer::write(const Transfer& transfer) noexcept {
  const std::uint32_t place = header().numLogged.fetch_add(1, std::memory_order_relaxed);
  if (place >= header().logCapacity) return;
  TransferLogCell& cell = log()[place];
  cell.transfer = transfer;
  cell.isWhole.store(1, std::memory_order_release);
}

std::vector<Transfer> Pacer::transfers() const {
  std::vector<Transfer> found;
  const std::uint32_t count =
      std::min(header().numLogged.load(std::memory_order_relaxed), header().logCapacity);
  for (std::uint32_t place = 0; place < count; ++place) {
    const TransferLogCell& cell = log()[place];
    if (cell.isWhole.load(std::memory_order_acquire) != 0) found.push_back(cell.transfer);
  }
  return found;
}

std::vector<ServedTransfer> Pacer::served(double sinceUs) const {
  std::vector<ServedTransfer> found;
  for (std::size_t source = 0; source < numEndpoints(); ++source) {
    for (std::size_t target = 0; target < numEndpoints(); ++target) {
      const ServedCell* const cells = served(source, target, 0);
      for (std::size_t i = 0; i < kNumSizeClasses * kNewestOfClass; ++i) {
        ServedTransfer transfer;
        transfer.source = static_cast<std::uint16_t>(source);
        transfer.target = static_cast<std::uint16_t>(target);
        if (readServed(cells[i], path(source, target), transfer) && transfer.endUs > sinceUs)
          found.push_back(std::move(transfer));
      }
    }
  }
  return found;
}

double Pacer::nowUs() const noexcept {
  return static_cast<double>(monotonicNow() - header().epoch) * 1e-3 / timeDilation();
}

MonotonicNs Pacer::reserve(std::size_t source, std::size_t target, std::size_t numBytes,
                           MonotonicNs requestedAt, std::uint32_t tag) noexcept {
  const MonotonicNs now = monotonicNow();
  requestedAt = std::clamp(requestedAt, now - kLongestCreditNs, now);
  LinkPath& way = path(source, target);
  if (way.exists == 0) return requestedAt;
  const std::uint64_t number = way.numTransfers.fetch_add(1, std::memory_order_relaxed);
  way.numBytes.fetch_add(numBytes, std::memory_order_relaxed);
  const double from = static_cast<double>(requestedAt - header().epoch);
  const double dilatedBytes = static_cast<double>(numBytes) * timeDilation();
  const double usPerNs = 1e-3 / timeDilation();
  double begin = from, end = from;
  std::array<float, kMostBucketsPerPath> serviceUs{};
  for (std::size_t i = 0; numBytes > 0 && i < way.numBuckets; ++i) {
    LinkBucket& shared = bucket(way.buckets[i]);
    const double duration = dilatedBytes * shared.nsPerByte.load(std::memory_order_relaxed);
    const double served = take(shared.nextFreeNs, from, duration);
    begin = std::max(begin, served - duration);
    end = std::max(end, served);
    serviceUs[i] = static_cast<float>(duration * usPerNs);
  }
  const double latencyNs = way.latencyNs.load(std::memory_order_relaxed);
  const double due = end + latencyNs * timeDilation();
  if (numBytes > 0) {
    note(served(source, target, sizeClassOf(numBytes))[number % kNewestOfClass], numBytes, due * usPerNs,
         latencyNs * 1e-3, serviceUs);
  }
  if (header().numLogged.load(std::memory_order_relaxed) < header().logCapacity) {
    write({static_cast<std::uint16_t>(source), static_cast<std::uint16_t>(target), tag, numBytes,
           from * usPerNs, begin * usPerNs, due * usPerNs});
  }
  if (Recorder* const timeline = recorder()) {
    TimelineEvent event;
    event.kind = EventKind::kTransfer;
    event.startNs = header().epoch + std::llround(begin);
    event.durationNs = std::llround(due - begin);
    event.numBytes = numBytes;
    event.detail = source << 16 | target;
    event.index = tag;
    timeline->record(event);
  }
  return header().epoch + std::llround(due);
}

void Pacer::countArrival(MonotonicNs due, MonotonicNs now) noexcept {
  header().numArrivals.fetch_add(1, std::memory_order_relaxed);
  header().latenessNs.fetch_add(static_cast<std::uint64_t>(std::max<MonotonicNs>(0, now - due)),
                                std::memory_order_relaxed);
}

void Pacer::setBandwidth(std::size_t index, double gbytesPerSecond) {
  requireBandwidth(gbytesPerSecond);
  require(index < numBuckets(),
          "there is no bucket " + std::to_string(index) + " among " + std::to_string(numBuckets()));
  bucket(index).nsPerByte.store(nsPerByteAt(gbytesPerSecond), std::memory_order_relaxed);
}

void Pacer::setLatency(std::size_t source, std::size_t target, double latencyUs) {
  requireLatency(latencyUs);
  checkedPath(source, target).latencyNs.store(latencyUs * 1000, std::memory_order_relaxed);
}

PathStatistics Pacer::statistics(std::size_t source, std::size_t target) const {
  const LinkPath& way = checkedPath(source, target);
  return {way.numTransfers.load(std::memory_order_relaxed), way.numBytes.load(std::memory_order_relaxed)};
}

ArrivalStatistics Pacer::arrivals() const noexcept {
  return {header().numArrivals.load(std::memory_order_relaxed),
          header().latenessNs.load(std::memory_order_relaxed)};
}

}  // namespace coarse
