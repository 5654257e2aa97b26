// Workers on GPUs for the tests of what surrounds them, by the driver of cuda_stand_in.cpp.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "coarse/gpu/gpu_transfers.hpp"
#include "contributions.hpp"
#include "fixture.hpp"

namespace coarse::test {

inline constexpr std::uint32_t kGroup = 1;
inline constexpr std::uint32_t kShardElements = 200;
inline constexpr std::size_t kLeastBatchBytes = 1000,
                             kMostBatchBytes = 2500;  // some tensors are cut, some go together

inline const std::vector<TensorSpec>& someTensors() {
  static const std::vector<TensorSpec> tensors = {
      {7, DType::kFloat32, ReduceOp::kMean, Algorithm::kGather},
      {3001, DType::kFloat32, ReduceOp::kMean, Algorithm::kDirect},
      {1, DType::kBFloat16, ReduceOp::kMean, Algorithm::kGather},
      {900, DType::kBFloat16, ReduceOp::kMean, Algorithm::kDirect},
      {50, DType::kFloat16, ReduceOp::kSum, Algorithm::kDirect}};
  return tensors;
}

inline MappedMemory memoryOf(const Mapping& mapping, cuda::SharedContext gpu = nullptr) {
  return {mapping.data(), mapping.numBytes(), std::move(gpu)};
}

/// A worker with a stream that computes, and gradients in its GPU's memory.
class GpuWorker {
 public:
  /// @param slotsGpu for which slots are taken to be mapped; null for the host.
  /// @param results where other results than those of slots lie.
  /// @param device of the stand-in's.
  GpuWorker(Cluster& cluster, const GroupPlan& plan, std::size_t rank,
            double timeoutSeconds = kPatienceSeconds, cuda::SharedContext slotsGpu = nullptr,
            MappedMemory results = {}, int device = 0)
      : rank_(rank),
        context_(std::make_shared<cuda::Context>(device)),
        compute_(context_),
        gradients_(someTensors().size()),
        slots_(cluster.addToClient(plan, rank)),
        transfers_(cluster.client(rank), {kGroup, timeoutSeconds, kLeastBatchBytes, kMostBatchBytes},
                   context_, memoryOf(*slots_, std::move(slotsGpu)), results) {}

  GpuTransfers& transfers() { return transfers_; }
  const cuda::SharedContext& context() const { return context_; }
  /// @throws cuda::Error if they are pinned already.
  void pinSlots() { cuda::HostRegistration(context_, slots_->data(), slots_->numBytes()); }
  cuda::Stream& compute() { return compute_; }
  const Bytes& gradient(std::size_t tensor) const { return gradients_[tensor]; }

  /// Has the stream compute this step's contribution to a tensor.
  void computeGradient(std::uint32_t tensor, std::uint32_t step) {
    const TensorSpec& spec = someTensors()[tensor];
    computed_.push_back(contribution(spec.dtype, spec.numElements, rank_, step));
    const Bytes& values = computed_.back();
    gradients_[tensor].assign(values.size(), std::byte{0x5a});
    const cuda::ContextScope scope(*context_);
    compute_.copyToDevice(addressOf(tensor), values.data(), values.size());
  }
  GpuTensor describe(std::uint32_t tensor, std::uint8_t flags = kPresent) {
    return {tensor, flags, flags == kPresent ? addressOf(tensor) : 0, addressOf(tensor), nullptr};
  }
  /// Computes and pushes all tensors in an order of its own, and joins.
  void step(std::uint32_t step) {
    std::vector<std::uint32_t> order(someTensors().size());
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), std::mt19937_64(100 * rank_ + step));
    for (const std::uint32_t tensor : order) {
      computeGradient(tensor, step);
      ASSERT_EQ(transfers_.push({describe(tensor)}, compute_.handle()), WaitStatus::kDone);
    }
    ASSERT_EQ(transfers_.join(compute_.handle()), WaitStatus::kDone);
  }
  /// All tensors as the stream computes them, for stage().
  std::vector<GpuTensor> computeAll(std::uint32_t step) {
    std::vector<GpuTensor> tensors;
    for (std::uint32_t tensor = 0; tensor < someTensors().size(); ++tensor) {
      computeGradient(tensor, step);
      tensors.push_back(describe(tensor));
    }
    return tensors;
  }
  void expectResults(const std::vector<std::size_t>& present, std::uint32_t step, std::uint32_t divisor) {
    compute_.synchronize();
    for (std::size_t tensor = 0; tensor < someTensors().size(); ++tensor) {
      const TensorSpec& spec = someTensors()[tensor];
      ASSERT_TRUE(gradients_[tensor] == result(spec.dtype, spec.op, spec.numElements, present, step, divisor))
          << "tensor " << tensor << " at step " << step << " on worker " << rank_;
    }
    computed_.clear();
  }

 private:
  cuda::DeviceAddress addressOf(std::uint32_t tensor) {
    return reinterpret_cast<cuda::DeviceAddress>(gradients_[tensor].data());
  }

  std::size_t rank_;
  cuda::SharedContext context_;
  cuda::Stream compute_;
  std::vector<Bytes> gradients_;
  std::deque<Bytes> computed_;  // what is still to be copied to gradients_
  std::shared_ptr<Mapping> slots_;
  GpuTransfers transfers_;
};

}  // namespace coarse::test
