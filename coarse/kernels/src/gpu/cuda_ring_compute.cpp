#include "coarse/gpu/cuda_ring_compute.hpp"

#include <stdexcept>
#include <utility>

#include "coarse/gpu/cuda_batches.hpp"

namespace coarse {

bool append(cuda::ReduceBatch& batch, const RingStep& step) {
  const auto* const inputs = reinterpret_cast<const void* const*>(step.inputs.data());
  auto* const outputs = reinterpret_cast<void* const*>(step.outputs.data());
  return cuda::append(batch, itemBytes(step.dtype), step.numElements,
                      step.op == ReduceOp::kMean ? step.divisor : 0, inputs,
                      static_cast<std::uint32_t>(step.inputs.size()), outputs,
                      static_cast<std::uint32_t>(step.outputs.size()), step.received, step.sent);
}

void throwTooManyContributions() {
  throw std::invalid_argument("a shard has more contributions than a kernel takes");
}

CudaRingCompute::CudaRingCompute(cuda::SharedContext context, const CudaKernels& kernels,
                                 std::shared_ptr<const DistantMemory> distant)
    : context_(std::move(context)),
      kernels_(kernels),
      mostBlocks_(cuda::mostBlocks(*context_)),
      stream_(context_, context_->priorities().second),
      near_(stream_, std::move(distant)),
      launched_(context_) {}

CudaRingCompute::~CudaRingCompute() {
  try {
    drain();
  } catch (const cuda::Error&) {
    // The failure was reported to the waiting thread.
  }
}

void CudaRingCompute::begin(const RingStep& step, Done done) {
  const cuda::ContextScope scope(*context_);
  cuda::ReduceBatch batch{};
  RingStep near = step;
  if (step.sent != nullptr)
    near.sent =
        static_cast<std::byte*>(near_.toWrite(step.sent, step.numElements * accumulatorBytes(step.dtype)));
  if (!append(batch, near)) throwTooManyContributions();
  const auto& kernels = step.op == ReduceOp::kMax ? kernels_.ringMax : kernels_.ringSum;
  cuda::launchBatch(kernels[static_cast<std::size_t>(step.dtype)], batch.numTiles, mostBlocks_,
                    stream_.handle(), &batch);
  near_.sendBack();
  launched_.record(stream_.handle());
  done_ = std::move(done);
}

bool CudaRingCompute::advance() {
  if (!isBusy()) return false;
  {
    const cuda::ContextScope scope(*context_);
    if (!launched_.isDone()) return false;
  }
  finish();
  return true;
}

void CudaRingCompute::drain() {
  if (!isBusy()) return;
  {
    const cuda::ContextScope scope(*context_);
    launched_.synchronize();
  }
  finish();
}

void CudaRingCompute::finish() { std::exchange(done_, nullptr)(); }

}  // namespace coarse
