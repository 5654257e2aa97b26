#include "coarse/gpu/cuda_tensor_memory.hpp"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>
#include <vector>

#include "batches.cuh"
#include "coarse/gpu/cuda_batches.hpp"
#include "coarse/gpu/cuda_pinned_pages.hpp"
#include "coarse/gpu/cuda_ring_compute.hpp"
#include "coarse/gpu/gpu_clock.hpp"
#include "coarse/tensors/batched_compute.hpp"
#include "coarse/tensors/shard_reducer.hpp"
#include "coarse/tensors/shard_runs.hpp"
#include "delay.cuh"

namespace coarse {
namespace {

// Tiles of the largest possible shard, 4 GiB.
constexpr std::size_t kMostMeasuredTiles = (std::size_t{1} << 32) / cuda::kTileBytes;

// Copies of memory that one GPU cannot reach, before a launch.
constexpr std::size_t kMostCopiedBytes = std::size_t{64} << 20;

using cuda::PinnedPages;
using cuda::pointerTo;

/// Work space in which kernels measure gradients. Launches of one stream use it in turn.
class MeasureSpace {
 public:
  MeasureSpace(const cuda::SharedContext& context, cuda::Stream& stream)
      : memory_(cuda::DeviceMemory::allocate(context, kNumBytes)) {
    stream.fill(memory_.address(), 0, memory_.numBytes());
  }
  static bool hasRoomFor(const cuda::ReduceBatch& batch, std::uint32_t numMoreTiles) noexcept {
    return batch.numTiles + std::size_t{numMoreTiles} <= kMostMeasuredTiles;
  }
  void lendTo(cuda::MeasureBatch& batch) const noexcept {
    auto* const base = static_cast<std::byte*>(pointerTo(memory_.address()));
    batch.tileSums = reinterpret_cast<double*>(base);
    batch.tileOffenders = reinterpret_cast<std::int32_t*>(base + kOffendersOffset);
    batch.tilesDone = reinterpret_cast<std::uint32_t*>(base + kDoneOffset);
  }

 private:
  static constexpr std::size_t kOffendersOffset = kMostMeasuredTiles * sizeof(double);
  static constexpr std::size_t kDoneOffset = kOffendersOffset + kMostMeasuredTiles * sizeof(std::int32_t);
  static constexpr std::size_t kNumBytes = kDoneOffset + cuda::kMostReduceShards * sizeof(std::uint32_t);

  cuda::DeviceMemory memory_;
};

/// The measures by the kernels of one batch of shards.
class Measures {
 public:
  explicit Measures(const cuda::SharedContext& context)
      : pages_(context, BatchedCompute::kMostShards * sizeof(cuda::ShardMeasure)) {}

  /// The address at which a launch stores the measures of these shards.
  cuda::ShardMeasure* expect(const std::vector<ShardRun>& runs) {
    auto* const next = static_cast<cuda::ShardMeasure*>(pages_.onDevice()) + measured_.size();
    measured_.insert(measured_.end(), runs.begin(), runs.end());
    return next;
  }
  /// Stores the measures in the groups. @pre the launches are done.
  void note() {
    const auto* result = reinterpret_cast<const cuda::ShardMeasure*>(pages_.data());
    for (const ShardRun& run : measured_) {
      run.group->control().measure(run.firstShard) = {result->sumOfSquares,
                                                      offenderOf(run, result->nonFiniteOf), 0};
      ++result;
    }
    measured_.clear();
  }

 private:
  /// The client that owns the input.
  static std::int32_t offenderOf(const ShardRun& run, std::int32_t position) noexcept {
    if (position < 0) return position;
    if (run.arrays != nullptr) return kEverybody;
    return static_cast<std::int32_t>(Contributions(*run.group, run.firstShard).clients[position]);
  }

  PinnedPages pages_;
  std::vector<ShardRun> measured_;
};

/// Makes a stream wait for times of the host's clock, by a kernel that reads the GPU's clock.
class StreamHolds {
 public:
  /// @param kernel null if streams cannot wait.
  StreamHolds(const cuda::SharedContext& context, cuda::FunctionHandle kernel)
      : kernel_(kernel), pages_(context, BatchedCompute::kMostStarted * sizeof(std::uint64_t)) {}

  MonotonicNs lead() const noexcept {
    return clock_.isFresh(monotonicNow()) ? static_cast<MonotonicNs>(cuda::kLongestHoldNs) : 0;
  }
  /// Makes later work of `stream` wait; if the last reading of the clock is old, reads it without waiting.
  /// @param batch the held batch, below kMostStarted, in use until note().
  void hold(std::size_t batch, MonotonicNs until, const cuda::Stream& stream) {
    if (kernel_ == nullptr) return;
    const MonotonicNs now = monotonicNow();
    cuda::Hold hold{};
    if (clock_.isFresh(now)) hold.until = clock_.shownAt(until);
    hold.startedAt = static_cast<std::uint64_t*>(pages_.onDevice()) + batch;
    launchedAt_[batch] = now;
    cuda::launchKernel(kernel_, cuda::LaunchShape{}, stream.handle(), {&hold});
  }
  /// @pre the launches of the batch are done.
  void note(std::size_t batch) noexcept {
    if (launchedAt_[batch] == 0) return;
    clock_.note(launchedAt_[batch], reinterpret_cast<const std::uint64_t*>(pages_.data())[batch]);
    launchedAt_[batch] = 0;
  }

 private:
  cuda::FunctionHandle kernel_;
  PinnedPages pages_;
  std::array<MonotonicNs, BatchedCompute::kMostStarted> launchedAt_{};  // 0 if nothing is held
  GpuClock clock_;
};

/// A kernel and its next batch.
template <class Batch>
struct Launch {
  cuda::FunctionHandle kernel = nullptr;
  Batch batch{};
  std::vector<ShardRun> measured{};  // for measuring kernels
};

/// The inputs and outputs of a run's reduction.
ShardArrays arraysOf(const ShardRun& run) {
  if (run.arrays != nullptr) return *run.arrays;
  const Contributions all(*run.group, run.firstShard, run.firstElement);
  ShardArrays arrays;
  arrays.inputs.assign(all.inputs.begin(), all.inputs.begin() + static_cast<std::ptrdiff_t>(all.numInputs));
  arrays.outputs.assign(all.slots.begin(), all.slots.begin() + static_cast<std::ptrdiff_t>(all.numSlots));
  arrays.op = run.group->shape(run.firstShard).op;
  arrays.divisor = run.group->divisor(run.firstShard);
  return arrays;
}

/// Runs batches of shards on its own stream: each is a few launches, followed by an event.
class CudaRunner : public BatchRunner {
 public:
  CudaRunner(const cuda::SharedContext& context, const CudaKernels& kernels,
             std::shared_ptr<const DistantMemory> distant);
  ~CudaRunner() override;

  void start(const ShardBatch& batch, MonotonicNs notBefore) override;
  MonotonicNs lead() const noexcept override { return holds_.lead(); }
  bool conclude() override;
  void wait() override;

 private:
  struct Started {
    explicit Started(const cuda::SharedContext& context) : done(context), measures(context) {}
    cuda::Event done;
    Measures measures;
  };

  Started& newest() noexcept { return *started_[numStarted_ % started_.size()]; }
  Started& oldest() noexcept { return *started_[numConcluded_ % started_.size()]; }
  static void keepBefore(const std::vector<ShardRun>& runs);
  void add(const ShardRun& run);
  void addReduction(const ShardRun& run);
  void addUpdate(const ShardRun& run);
  void bringNear(ShardArrays& arrays, std::size_t numBytes);
  template <class Batch, class Append>
  void addTo(Launch<Batch>& next, Append append);
  void flush();
  void launch(Launch<cuda::ReduceBatch>& next) { launch(next, next.batch.numTiles); }
  void launch(Launch<cuda::UpdateBatch>& next) { launch(next, next.batch.numTiles); }
  void launch(Launch<cuda::MeasureBatch>& next);
  template <class Batch>
  void launch(Launch<Batch>& next, std::uint32_t numTiles);

  cuda::SharedContext context_;
  std::uint32_t mostBlocks_;
  cuda::Stream stream_;
  NearCopies near_;
  // By dtype.
  std::vector<Launch<cuda::ReduceBatch>> sums_, maxima_;
  std::vector<Launch<cuda::MeasureBatch>> measured_;
  std::vector<Launch<cuda::UpdateBatch>> updates_;
  StreamHolds holds_;
  std::unique_ptr<MeasureSpace> measureSpace_;  // made at first use
  std::vector<std::unique_ptr<Started>> started_;
  std::size_t numStarted_ = 0;
  std::size_t numConcluded_ = 0;
};

template <class Batch>
std::vector<Launch<Batch>> launchesOf(const CudaKernels::ByDType& kernels) {
  std::vector<Launch<Batch>> launches;
  for (const cuda::FunctionHandle kernel : kernels) launches.push_back({kernel, Batch{}, {}});
  return launches;
}

CudaRunner::CudaRunner(const cuda::SharedContext& context, const CudaKernels& kernels,
                       std::shared_ptr<const DistantMemory> distant)
    : context_(context),
      mostBlocks_(cuda::mostBlocks(*context)),
      stream_(context, context->priorities().second),
      near_(stream_, std::move(distant)),
      sums_(launchesOf<cuda::ReduceBatch>(kernels.reduceSum)),
      maxima_(launchesOf<cuda::ReduceBatch>(kernels.reduceMax)),
      measured_(launchesOf<cuda::MeasureBatch>(kernels.measure)),
      updates_(launchesOf<cuda::UpdateBatch>(kernels.update)),
      holds_(context, kernels.holdUntil) {
  for (std::size_t i = 0; i < BatchedCompute::kMostStarted; ++i)
    started_.push_back(std::make_unique<Started>(context));
}

CudaRunner::~CudaRunner() {
  try {
    const cuda::ContextScope scope(*context_);
    stream_.synchronize();  // kernels may still work in memory that is freed with this
  } catch (const cuda::Error&) {
    // The failure was reported to the waiting thread.
  }
}

void CudaRunner::start(const ShardBatch& batch, MonotonicNs notBefore) {
  const cuda::ContextScope scope(*context_);
  if (notBefore > 0) holds_.hold(numStarted_ % started_.size(), notBefore, stream_);
  const std::vector<ShardRun> runs = runsOf(batch);
  keepBefore(runs);
  for (const ShardRun& run : runs) {
    add(run);
    if (near_.numBytes() > kMostCopiedBytes) flush();
  }
  flush();
  newest().done.record(stream_.handle());
  ++numStarted_;
}

/// Lets snapshots copy the blocks before their update.
void CudaRunner::keepBefore(const std::vector<ShardRun>& runs) {
  for (auto run = runs.begin(); run != runs.end();) {
    const TensorGroup& group = *run->group;
    std::vector<std::uint32_t> updated;
    for (; run != runs.end() && run->group == &group; ++run) {
      if (run->work != ShardWork::kUpdate) continue;
      for (std::uint32_t i = 0; i < run->numShards; ++i) updated.push_back(run->firstShard + i);
    }
    if (!updated.empty()) group.keepBefore(updated);
  }
}

bool CudaRunner::conclude() {
  const cuda::ContextScope scope(*context_);
  if (!oldest().done.isDone()) return false;
  oldest().measures.note();
  holds_.note(numConcluded_ % started_.size());
  ++numConcluded_;
  return true;
}

void CudaRunner::wait() {
  const cuda::ContextScope scope(*context_);
  oldest().done.synchronize();
}

void CudaRunner::add(const ShardRun& run) {
  if (run.work == ShardWork::kUpdate) {
    addUpdate(run);
  } else {
    addReduction(run);
  }
}

void CudaRunner::addReduction(const ShardRun& run) {
  const bool isMeasured = run.work == ShardWork::kMeasure;
  ShardArrays arrays = arraysOf(run);
  if (arrays.inputs.empty()) {
    if (isMeasured) run.group->control().measure(run.firstShard) = {0, kNobody, 0};
    return;
  }
  const auto dtype = static_cast<std::size_t>(run.group->shape(run.firstShard).dtype);
  const std::size_t itemSize = itemBytes(static_cast<DType>(dtype));
  const std::uint32_t divisor = arrays.op == ReduceOp::kMean ? arrays.divisor : 0;
  bringNear(arrays, run.numElements * itemSize);
  const auto numInputs = static_cast<std::uint32_t>(arrays.inputs.size());
  const auto numOutputs = static_cast<std::uint32_t>(arrays.outputs.size());
  // If all clients have contributed, one list of arrays is enough.
  const bool areSame =
      std::equal(arrays.inputs.begin(), arrays.inputs.end(), arrays.outputs.begin(), arrays.outputs.end());
  const void* const* inputs = areSame ? arrays.outputs.data() : arrays.inputs.data();
  const auto append = [&](cuda::ReduceBatch& batch) {
    return cuda::append(batch, itemSize, run.numElements, divisor, inputs, numInputs, arrays.outputs.data(),
                        numOutputs);
  };
  if (!isMeasured) {
    addTo((arrays.op == ReduceOp::kMax ? maxima_ : sums_)[dtype], append);
    return;
  }
  const std::uint32_t numTiles = cuda::numTilesOf(run.numElements, cuda::kTileBytes / itemSize);
  addTo(measured_[dtype], [&](cuda::MeasureBatch& batch) {
    return MeasureSpace::hasRoomFor(batch.reduce, numTiles) && append(batch.reduce);
  });
  measured_[dtype].measured.push_back(run);
}

/// Replaces arrays that this GPU cannot reach by copies.
void CudaRunner::bringNear(ShardArrays& arrays, std::size_t numBytes) {
  for (const void*& each : arrays.inputs) each = near_.toRead(each, numBytes);
  for (void*& each : arrays.outputs) each = near_.toWrite(each, numBytes);
}

void CudaRunner::addUpdate(const ShardRun& run) {
  const TensorGroup& group = *run.group;
  UpdateInputs inputs(group, run.firstShard);
  if (!inputs.isRunnable()) return;
  const Shard& shard = group.plan().shards[run.firstShard];
  for (std::size_t i = 0; i < inputs.numGradients; ++i)
    inputs.gradients[i] = near_.toRead(inputs.gradients[i], run.numElements * itemBytes(shard.dtype));
  cuda::UpdateShard arrays{};
  arrays.numElements = run.numElements;
  arrays.parameter = group.parameter(shard);
  if (group.plan().hasMaster(shard)) arrays.master = group.master(shard);
  for (std::size_t i = 0; i < group.plan().numStates; ++i) arrays.states[i] = group.state(shard, i);
  arrays.divisor = inputs.divisor;
  addTo(updates_[static_cast<std::size_t>(shard.dtype)], [&](cuda::UpdateBatch& batch) {
    return cuda::append(batch, itemBytes(shard.dtype), arrays,
                        static_cast<std::uint32_t>(numStates(inputs.settings.rule)), &inputs.settings,
                        inputs.gradients.data(), static_cast<std::uint32_t>(inputs.numGradients));
  });
}

/// @param append adds a shard to a batch. @returns false if the batch is full.
template <class Batch, class Append>
void CudaRunner::addTo(Launch<Batch>& next, Append append) {
  if (append(next.batch)) return;
  launch(next);
  if (!append(next.batch)) throwTooManyContributions();
}

void CudaRunner::flush() {
  for (auto* launches : {&sums_, &maxima_}) {
    for (auto& next : *launches) launch(next);
  }
  for (auto& next : measured_) launch(next);
  for (auto& next : updates_) launch(next);
  near_.sendBack();
}

void CudaRunner::launch(Launch<cuda::MeasureBatch>& next) {
  if (next.measured.empty()) return;
  if (measureSpace_ == nullptr) measureSpace_ = std::make_unique<MeasureSpace>(context_, stream_);
  measureSpace_->lendTo(next.batch);
  next.batch.measures = newest().measures.expect(next.measured);
  next.measured.clear();
  launch(next, next.batch.reduce.numTiles);
}

template <class Batch>
void CudaRunner::launch(Launch<Batch>& next, std::uint32_t numTiles) {
  if (numTiles == 0) return;
  cuda::launchBatch(next.kernel, numTiles, mostBlocks_, stream_.handle(), &next.batch);
  next.batch = Batch{};
}

/// Copies on its own stream, to memory that the GPU reaches.
class CudaCopies : public TensorCopies {
 public:
  CudaCopies(const cuda::SharedContext& context, std::shared_ptr<const DistantMemory> distant)
      : context_(context), stream_(context), distant_(std::move(distant)) {}

  void copy(std::byte* to, const std::byte* from, std::size_t numBytes, NextUse) override {
    const cuda::ContextScope scope(*context_);
    if (const auto owner = distant_->find(from)) {
      stream_.copyFrom(**owner, cuda::addressOf(to), cuda::addressOf(from), numBytes);
    } else {
      stream_.copyOnDevice(cuda::addressOf(to), cuda::addressOf(from), numBytes);
    }
  }
  void synchronize() override {
    const cuda::ContextScope scope(*context_);
    stream_.synchronize();
  }

 private:
  cuda::SharedContext context_;
  cuda::Stream stream_;
  std::shared_ptr<const DistantMemory> distant_;
};

}  // namespace

void CudaKernels::validate() const {
  const auto check = [](const ByDType& kernels, std::size_t dtype) {
    if (kernels[dtype] == nullptr)
      throw std::invalid_argument("there is no kernel for dtype " + std::to_string(dtype));
  };
  for (std::size_t dtype = 0; dtype < kNumDTypes; ++dtype) {
    check(reduceSum, dtype);
    check(reduceMax, dtype);
    check(ringSum, dtype);
    check(ringMax, dtype);
    if (!isUpdatable(static_cast<DType>(dtype))) continue;
    check(measure, dtype);
    check(update, dtype);
  }
}

CudaTensorMemory::CudaTensorMemory(cuda::SharedContext context, const CudaKernels& kernels)
    : context_(std::move(context)), kernels_(kernels), distant_(std::make_shared<DistantMemory>()) {
  kernels_.validate();
}

void CudaTensorMemory::checkLength(const Region& region, std::size_t numBytes, const std::string& what) {
  if (region.totalBytes() >= numBytes) return;
  throw std::invalid_argument(what + ": needs " + std::to_string(numBytes) + " bytes of a GPU, there are " +
                              std::to_string(region.totalBytes()));
}

TensorBytes CudaTensorMemory::map(const Region& region, std::size_t numBytes, const std::string& what) const {
  checkLength(region, numBytes, what);
  try {
    auto memory = std::make_shared<cuda::DeviceMemory>(cuda::DeviceMemory::import(context_, region));
    auto* const address = static_cast<std::byte*>(pointerTo(memory->address()));
    return {std::move(memory), address};
  } catch (const cuda::Error& error) {
    if (TensorBytes distant = mapDistant(region); distant != nullptr) return distant;
    throw cuda::Error(what + ": " + error.what());
  }
}

/// Maps memory of a GPU that this one cannot reach; null if the failure has another cause.
TensorBytes CudaTensorMemory::mapDistant(const Region& region) const {
  try {
    const int owner = cuda::deviceOf(region.gpu);
    if (owner < 0 || owner == context_->device()) return nullptr;
    auto there = std::make_shared<const cuda::Context>(owner);
    auto memory = cuda::DeviceMemory::import(there, region);
    auto* const address = static_cast<std::byte*>(pointerTo(memory.address()));
    distant_->add(address, memory.numBytes(), std::move(there));
    const auto mapped = std::make_shared<cuda::DeviceMemory>(std::move(memory));
    return {address, [mapped, distant = distant_](std::byte* begin) { distant->remove(begin); }};
  } catch (const cuda::Error&) {
    return nullptr;
  }
}

TensorBytes CudaTensorMemory::allocate(std::size_t numBytes) const {
  auto memory = std::make_shared<cuda::DeviceMemory>(cuda::DeviceMemory::allocate(context_, numBytes));
  auto* const address = static_cast<std::byte*>(pointerTo(memory->address()));
  return {std::move(memory), address};
}

TensorBytes CudaTensorMemory::reach(std::byte* memory, std::size_t numBytes) const {
  const auto registration = std::make_shared<cuda::HostRegistration>(context_, memory, numBytes);
  return {registration, static_cast<std::byte*>(pointerTo(registration->deviceAddress()))};
}

std::unique_ptr<TensorCopies> CudaTensorMemory::makeCopies() const {
  return std::make_unique<CudaCopies>(context_, distant_);
}

std::unique_ptr<ShardCompute> CudaTensorMemory::makeCompute(ShardCompute::Finish finish) const {
  return std::make_unique<BatchedCompute>(makeRunner(), std::move(finish));
}

std::unique_ptr<BatchRunner> CudaTensorMemory::makeRunner() const {
  return std::make_unique<CudaRunner>(context_, kernels_, distant_);
}

std::unique_ptr<RingCompute> CudaTensorMemory::makeRingCompute() const {
  return std::make_unique<CudaRingCompute>(context_, kernels_, distant_);
}

}  // namespace coarse
