#include "coarse/gpu/nccl_runner.hpp"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <thread>
#include <utility>

#include "batches.cuh"
#include "coarse/gpu/cuda_batches.hpp"
#include "coarse/gpu/cuda_pinned_pages.hpp"
#include "coarse/gpu/cuda_ring_compute.hpp"
#include "coarse/shared_memory/durations.hpp"
#include "coarse/tensors/shard_runs.hpp"

namespace coarse {
namespace {

// Sums begin at multiples of this, as kernels that move vectors require.
constexpr std::size_t kAlignment = 512;

std::size_t sumBytes(const RingStep& piece) noexcept {
  return roundUp(piece.numElements * accumulatorBytes(piece.dtype), kAlignment);
}

DType accumulatorOf(DType dtype) noexcept {
  return accumulatorBytes(dtype) == itemBytes(dtype) ? dtype : DType::kFloat32;
}

/// Whether the slot of the device's one client already is the sum of its contributions.
bool isReadyAsSum(const RingStep& piece) noexcept {
  return piece.outputs.size() == 1 && piece.inputs.size() == 1 && accumulatorOf(piece.dtype) == piece.dtype;
}

std::byte* pointerTo(const cuda::DeviceMemory& memory) noexcept {
  return static_cast<std::byte*>(cuda::pointerTo(memory.address()));
}

}  // namespace

void NcclLimits::validate() const {
  if (pieceBytes < sizeof(std::int64_t) || roundUp(pieceBytes, kAlignment) > roundBytes)
    throw std::invalid_argument("a round of NCCL has room for a piece at least, and that for a number");
}

NcclRunner::NcclRunner(std::shared_ptr<nccl::Communicator> communicator,
                       std::shared_ptr<const CudaTensorMemory> memory, std::vector<std::size_t> localClients,
                       const NcclLimits& limits)
    : communicator_(std::move(communicator)),
      memory_(std::move(memory)),
      context_(memory_->context()),
      localClients_(std::move(localClients)),
      limits_(limits),
      mostBlocks_(cuda::mostBlocks(*context_)),
      stream_(context_, context_->priorities().second),
      sums_(cuda::DeviceMemory::allocate(context_, limits_.roundBytes)) {
  limits_.validate();
  for (std::size_t i = 0; i < BatchedCompute::kMostStarted; ++i)
    done_.push_back(std::make_unique<cuda::Event>(context_));
}

/// Waits, because no work may remain in memory that is freed with this.
NcclRunner::~NcclRunner() {
  try {
    for (; numConcluded_ < numStarted_; ++numConcluded_) wait();
  } catch (const std::exception&) {
    // Work that waited for lost devices was ended.
  }
}

void NcclRunner::connect() {
  attempt([&] {
    std::byte* const sums = pointerTo(sums_);
    for (std::size_t numBytes = sizeof(float); numBytes <= limits_.roundBytes; numBytes *= 64)
      communicator_->allReduce(sums, sums, numBytes / sizeof(float), DType::kFloat32, ReduceOp::kSum,
                               stream_.handle());
    stream_.synchronize();
    communicator_->check();
  });
}

void NcclRunner::start(const ShardBatch& batch, MonotonicNs) {
  attempt([&] {
    std::deque<RingStep> pieces = piecesOf(batch);
    while (!pieces.empty()) addUp(takeRound(pieces));
    done_[numStarted_++ % done_.size()]->record(stream_.handle());
  });
}

/// The inputs and outputs of each piece on this device. All devices have as many pieces, of the same lengths.
std::deque<RingStep> NcclRunner::piecesOf(const ShardBatch& batch) const {
  std::deque<RingStep> pieces;
  for (const ShardRun& run : runsOf(batch)) {
    const TensorGroup& group = *run.group;
    const Shard& shard = group.plan().shards[run.firstShard];
    const ShardShape shape = group.shape(run.firstShard);
    const std::size_t most = limits_.pieceBytes / accumulatorBytes(shape.dtype);
    for (std::size_t first = 0; first < run.numElements; first += most) {
      RingStep& piece = pieces.emplace_back();
      piece.dtype = shape.dtype;
      piece.op = shape.op;
      piece.divisor = group.divisor(run.firstShard);
      piece.numElements = std::min<std::size_t>(most, run.numElements - first);
      for (const std::size_t client : localClients_) {
        std::byte* const slot = group.slot(client, shard) + first * itemBytes(shape.dtype);
        piece.outputs.push_back(slot);
        if (group.isPresent(run.firstShard, client)) piece.inputs.push_back(slot);
      }
    }
  }
  return pieces;
}

/// The first pieces whose sums fit.
std::vector<RingStep> NcclRunner::takeRound(std::deque<RingStep>& pieces) const {
  std::vector<RingStep> round;
  std::size_t numBytes = 0;
  while (!pieces.empty() && numBytes + sumBytes(pieces.front()) <= limits_.roundBytes) {
    round.push_back(std::move(pieces.front()));
    pieces.pop_front();
    round.back().sent = pointerTo(sums_) + numBytes;
    numBytes += sumBytes(round.back());
  }
  return round;
}

/// Makes the stream sum pieces, first here, then over all devices, and finish them.
void NcclRunner::addUp(const std::vector<RingStep>& round) {
  std::vector<RingStep> before, after;
  nccl::GroupScope operations(*communicator_);
  for (const RingStep& piece : round) {
    const bool isInPlace = isReadyAsSum(piece);
    std::byte* const sum = isInPlace ? piece.outputs[0] : piece.sent;
    if (!isInPlace) {
      before.push_back(piece);
      before.back().outputs.clear();
    }
    if (!isInPlace || piece.op == ReduceOp::kMean) {
      after.push_back(piece);
      after.back().received = sum;
      after.back().sent = nullptr;
      after.back().inputs.clear();
    }
    communicator_->allReduce(sum, sum, piece.numElements, accumulatorOf(piece.dtype), ReduceOp::kSum,
                             stream_.handle());
  }
  launch(before);  // before the operations, which the stream gets at their end
  operations.end();
  launch(after);
}

void NcclRunner::launch(const std::vector<RingStep>& steps) {
  std::array<cuda::ReduceBatch, kNumDTypes> batches{};
  const auto flush = [&](std::size_t dtype) {
    if (batches[dtype].numTiles == 0) return;
    cuda::launchBatch(memory_->kernels().ringSum[dtype], batches[dtype].numTiles, mostBlocks_,
                      stream_.handle(), &batches[dtype]);
    batches[dtype] = cuda::ReduceBatch{};
  };
  for (const RingStep& step : steps) {
    const auto dtype = static_cast<std::size_t>(step.dtype);
    if (append(batches[dtype], step)) continue;
    flush(dtype);
    if (!append(batches[dtype], step)) throwTooManyContributions();
  }
  for (std::size_t dtype = 0; dtype < kNumDTypes; ++dtype) flush(dtype);
}

bool NcclRunner::conclude() {
  const cuda::ContextScope scope(*context_);
  communicator_->check();
  if (!done_[numConcluded_ % done_.size()]->isDone()) return false;
  ++numConcluded_;
  return true;
}

void NcclRunner::wait() {
  attempt([&] {
    const auto deadline = std::chrono::steady_clock::now() + limits_.patience;
    while (!done_[numConcluded_ % done_.size()]->isDone()) {
      communicator_->check();
      if (std::chrono::steady_clock::now() > deadline) {
        throw nccl::Error("other memory devices have not come to a collective of NCCL within " +
                          inSeconds(limits_.patience));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  });
}

/// Runs `work`; if it fails, no work stays in progress.
template <typename Work>
void NcclRunner::attempt(Work work) {
  const cuda::ContextScope scope(*context_);
  try {
    work();
  } catch (const std::exception&) {
    end();
    throw;
  }
}

void NcclRunner::end() noexcept {
  communicator_->abort();
  try {
    stream_.synchronize();  // kernels behind NCCL's work use slots and sums
  } catch (const cuda::Error&) {
    // The GPU has failed, and does nothing more.
  }
}

}  // namespace coarse
