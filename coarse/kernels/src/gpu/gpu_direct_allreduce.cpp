#include "coarse/gpu/gpu_direct_allreduce.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "coarse/gpu/cuda_pinned_pages.hpp"

namespace coarse {
namespace {

// Patience for an NCCL call of another thread: such a call only gives work to the GPU, unless it waits for
// other ranks.
constexpr std::chrono::seconds kPatience{1};
constexpr std::chrono::milliseconds kLook{1};

std::size_t bytesOf(const Shard& shard) noexcept { return shard.numElements * itemBytes(shard.dtype); }

}  // namespace

GpuDirectAllReduce::GpuDirectAllReduce(std::shared_ptr<nccl::Communicator> communicator,
                                       const GroupPlan& plan, const std::vector<std::uint32_t>& shards,
                                       std::size_t bucketBytes)
    : communicator_(std::move(communicator)),
      plan_(plan),
      // With its own priority, so that it shares no hardware queue with computation.
      stream_(communicator_->context(), communicator_->context()->priorities().second),
      summed_(communicator_->context()),
      isTaken_(plan.shards.size()),
      taken_(plan.shards.size()) {
  std::size_t numBytes = bucketBytes;
  std::uint32_t next = 0;
  for (const std::uint32_t shard : shards) {
    checkShard(shard);
    isTaken_[shard] = true;
    const bool isNewBucket =
        std::exchange(numBytes, numBytes + coarse::bytesOf(plan.shards[shard])) >= bucketBytes;
    if (isNewBucket) {
      buckets_.emplace_back();
      numBytes = coarse::bytesOf(plan.shards[shard]);
    }
    Bucket& bucket = buckets_.back();
    const bool goesOn =
        !bucket.empty() && shard == next && plan.shards[shard].tensor == plan.shards[shard - 1].tensor;
    if (!goesOn) bucket.push_back({shard, shard, 0});
    bucket.back().last = next = shard + 1;
    bucket.back().numElements += plan.shards[shard].numElements;
  }
}

void GpuDirectAllReduce::checkShard(std::uint32_t shard) const {
  const auto refuse = [shard](const char* why) {
    throw std::invalid_argument("shard " + std::to_string(shard) + " of direct all-reduce " + why);
  };
  if (shard >= plan_.shards.size()) refuse("does not exist");
  if (isTaken_[shard]) refuse("comes twice");
  const Shard& plan = plan_.shards[shard];
  // NCCL rounds 16-bit types at each addition, and its maximum ignores NaN.
  const bool isSummed = plan.op == ReduceOp::kSum || plan.op == ReduceOp::kMean;
  const bool isExact = plan.dtype == DType::kFloat32 || plan.dtype == DType::kFloat64;
  if (!isSummed || !isExact || plan.isDynamic || plan_.isTable(plan))
    refuse("is no sum or mean of float32 or float64");
}

void GpuDirectAllReduce::take(const ShardRange& shards, cuda::DeviceAddress address, bool isPresent) {
  const std::uint64_t begin = plan_.shards[shards.first].offset;
  for (std::uint32_t shard = shards.first; shard < shards.last; ++shard) {
    if (!isTaken_[shard]) continue;
    if (taken_[shard].address != 0) {
      throw std::logic_error(
          "a tensor that the workers reduce themselves was pushed twice in a step, which ends by join()");
    }
    taken_[shard] = {address + (plan_.shards[shard].offset - begin), isPresent};
    hasTaken_ = isInStep_ = true;
  }
}

void GpuDirectAllReduce::advance(const cuda::Event& computed) {
  if (!std::exchange(hasTaken_, false)) return;
  stream_.wait(computed);
  while (numSummed_ < buckets_.size() && isComplete(buckets_[numSummed_])) sumUp(buckets_[numSummed_++]);
}

void GpuDirectAllReduce::join(cuda::StreamHandle stream, cuda::DeviceAddress word, std::uint32_t number) {
  if (numSummed_ < buckets_.size()) {
    throw std::logic_error(
        "a step has ended without some of the tensors that the workers reduce themselves: every worker "
        "pushes all of them in each step");
  }
  stream_.writeValue(word, number);
  summed_.record(stream_.handle());
  cuda::waitForEvent(stream, summed_);
  std::fill(taken_.begin(), taken_.end(), Place{});
  numSummed_ = 0;
  isInStep_ = false;
}

void GpuDirectAllReduce::abort() noexcept {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  std::unique_lock lock(callMutex_, std::try_to_lock);
  while (!lock.owns_lock() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(kLook);
    lock.try_lock();
  }
  communicator_->abort();
}

std::size_t GpuDirectAllReduce::bytesOf(const Run& run) const noexcept {
  return run.numElements * itemBytes(plan_.shards[run.first].dtype);
}

bool GpuDirectAllReduce::isComplete(const Bucket& bucket) const noexcept {
  return std::all_of(bucket.begin(), bucket.end(), [this](const Run& run) {
    return taken_[run.first].address != 0 && taken_[run.last - 1].address != 0;
  });
}

void GpuDirectAllReduce::sumUp(const Bucket& bucket) {
  for (const Run& run : bucket) {
    if (!taken_[run.first].isPresent) stream_.fill(taken_[run.first].address, 0, bytesOf(run));
  }
  const std::lock_guard lock(callMutex_);
  nccl::GroupScope operations(*communicator_);
  for (const Run& run : bucket) {
    const Shard& first = plan_.shards[run.first];
    void* const array = cuda::pointerTo(taken_[run.first].address);
    communicator_->allReduce(array, array, run.numElements, first.dtype, first.op, stream_.handle());
  }
  operations.end();
}

}  // namespace coarse
