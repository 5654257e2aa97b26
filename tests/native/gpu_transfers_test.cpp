/// Tensors go from a GPU to the memory devices and come back while nobody waits but streams. The driver is
/// the stand-in of cuda_stand_in.cpp, whose device memory is the test's own.
#include "coarse/gpu_transfers.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <stdexcept>
#include <vector>

#include "contributions.hpp"
#include "fixture.hpp"

extern "C" void standInCapture(coarse::cuda::StreamHandle stream, bool isCapturing);

namespace coarse::test::gpu_transfers_test {
namespace {

constexpr std::uint32_t kGroup = 1;
constexpr std::uint32_t kShardElements = 200;
constexpr std::size_t kLeastBatchBytes = 1000,
                      kMostBatchBytes = 2500;  // some tensors are cut, some go together

const std::vector<TensorSpec>& someTensors() {
  static const std::vector<TensorSpec> tensors = {
      {7, DType::kFloat32, ReduceOp::kMean, Algorithm::kGather},
      {3001, DType::kFloat32, ReduceOp::kMean, Algorithm::kDirect},
      {1, DType::kBFloat16, ReduceOp::kMean, Algorithm::kGather},
      {900, DType::kBFloat16, ReduceOp::kMean, Algorithm::kDirect},
      {50, DType::kFloat16, ReduceOp::kSum, Algorithm::kDirect}};
  return tensors;
}

MappedMemory memoryOf(const Mapping& mapping, bool isOnGpu = false) {
  return {mapping.data(), mapping.numBytes(), isOnGpu};
}

/// A worker with a stream that computes, and gradients in its GPU's memory.
class GpuWorker {
 public:
  /// @param areSlotsOnGpu whether slots are taken for those of another GPU.
  /// @param results where other results than those of slots lie.
  GpuWorker(Cluster& cluster, const GroupPlan& plan, std::size_t rank,
            double timeoutSeconds = kPatienceSeconds, bool areSlotsOnGpu = false, MappedMemory results = {})
      : rank_(rank),
        context_(std::make_shared<cuda::Context>(0)),
        compute_(context_),
        gradients_(someTensors().size()),
        slots_(cluster.addToClient(plan, rank)),
        transfers_(cluster.client(rank), {kGroup, timeoutSeconds, kLeastBatchBytes, kMostBatchBytes},
                   context_, memoryOf(*slots_, areSlotsOnGpu), results) {}

  GpuTransfers& transfers() { return transfers_; }
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
  /// All tensors as the stream computes them, for bring().
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

class GpuJob : public testing::Test {
 protected:
  explicit GpuJob(std::size_t numClients = 2) : cluster_({numClients, 2, 1}) {
    plan_ = makePlan(kGroup, numClients, someTensors(), kShardElements);
    cluster_.start().addToProxies(plan_);
  }
  Cluster cluster_{{2, 2, 1}};
  GroupPlan plan_;
  Memory gate_{4096};  // a word at which a stream can be held
  cuda::DeviceAddress gateAddress() const { return reinterpret_cast<cuda::DeviceAddress>(gate_.data()); }
  void openGate() { reinterpret_cast<std::atomic<std::uint32_t>*>(gate_.data())->store(1); }
};

TEST_F(GpuJob, ComesBackReducedStepAfterStep) {
  together(2, [&](std::size_t rank) {
    GpuWorker worker(cluster_, plan_, rank);
    for (std::uint32_t step = 1; step <= 20; ++step) {
      ASSERT_NO_FATAL_FAILURE(worker.step(step));
      ASSERT_NO_FATAL_FAILURE(worker.expectResults({0, 1}, step, 2));
    }
  });
}

TEST_F(GpuJob, ComesBackFromSlotsOnAnotherGpuWhichAreNotPinned) {
  together(2, [&](std::size_t rank) {
    GpuWorker worker(cluster_, plan_, rank, kPatienceSeconds, true);
    EXPECT_NO_THROW(worker.pinSlots());
    for (std::uint32_t step = 1; step <= 5; ++step) {
      ASSERT_NO_FATAL_FAILURE(worker.step(step));
      ASSERT_NO_FATAL_FAILURE(worker.expectResults({0, 1}, step, 2));
    }
  });
}

TEST_F(GpuJob, GoesOnWithoutWaitingForTheGpu) {
  // Both workers give all of two steps before their GPUs have computed anything.
  GpuWorker first(cluster_, plan_, 0), second(cluster_, plan_, 1);
  for (GpuWorker* worker : {&first, &second}) {
    worker->compute().waitValue(gateAddress(), 1);
    for (std::uint32_t step = 1; step <= 2; ++step) ASSERT_NO_FATAL_FAILURE(worker->step(step));
    EXPECT_FALSE(worker->compute().isIdle());
  }
  openGate();
  ASSERT_NO_FATAL_FAILURE(first.expectResults({0, 1}, 2, 2));
  ASSERT_NO_FATAL_FAILURE(second.expectResults({0, 1}, 2, 2));
}

TEST_F(GpuJob, TakesPartWithoutAGradient) {
  together(2, [&](std::size_t rank) {
    GpuWorker worker(cluster_, plan_, rank);
    std::vector<GpuTensor> tensors;
    for (std::uint32_t tensor = 0; tensor < someTensors().size(); ++tensor) {
      worker.computeGradient(tensor, 1);
      tensors.push_back(worker.describe(tensor, rank == 0 ? std::uint8_t{kPresent} : std::uint8_t{0}));
    }
    ASSERT_EQ(worker.transfers().push(tensors, worker.compute().handle()), WaitStatus::kDone);
    ASSERT_EQ(worker.transfers().join(worker.compute().handle()), WaitStatus::kDone);
    ASSERT_NO_FATAL_FAILURE(worker.expectResults({0}, 1, 2));
  });
}

TEST_F(GpuJob, PushesLessAtOnceTowardsTheEndOfAStep) {
  together(2, [&](std::size_t rank) {
    GpuWorker worker(cluster_, plan_, rank);
    for (std::uint32_t step = 1; step <= 2; ++step) {
      EXPECT_EQ(worker.transfers().batchBytes(), kMostBatchBytes);
      const std::vector<GpuTensor> tensors = worker.computeAll(step);
      const std::uint32_t before = worker.transfers().numPushed();
      ASSERT_EQ(worker.transfers().push({tensors[1]}, worker.compute().handle()), WaitStatus::kDone);
      // 12004 of 13934 bytes, in shards of 800: three times 3200, and the rest, of which 4 bytes are no
      // batch.
      EXPECT_EQ(worker.transfers().numPushed() - before, 4);
      EXPECT_EQ(worker.transfers().batchBytes(), kLeastBatchBytes);
      ASSERT_EQ(worker.transfers().push({tensors[0], tensors[2], tensors[3], tensors[4]},
                                        worker.compute().handle()),
                WaitStatus::kDone);
      ASSERT_EQ(worker.transfers().join(worker.compute().handle()), WaitStatus::kDone);
      ASSERT_NO_FATAL_FAILURE(worker.expectResults({0, 1}, step, 2));
    }
  });
}

TEST_F(GpuJob, AnnouncesWhatWasBroughtBeforeIt) {
  together(2, [&](std::size_t rank) {
    GpuWorker worker(cluster_, plan_, rank);
    worker.compute().waitValue(gateAddress(), 1);
    std::vector<GpuTensor> tensors = worker.computeAll(1);
    ASSERT_EQ(worker.transfers().bring(tensors, worker.compute().handle()), WaitStatus::kDone);
    for (GpuTensor& tensor : tensors) tensor.source = 0;  // it is on its way to its slot
    ASSERT_EQ(worker.transfers().push(tensors, worker.compute().handle()), WaitStatus::kDone);
    EXPECT_FALSE(worker.transfers().hasBrought(worker.transfers().numPushed()));
    if (rank == 1) openGate();
    ASSERT_EQ(worker.transfers().join(worker.compute().handle()), WaitStatus::kDone);
    ASSERT_NO_FATAL_FAILURE(worker.expectResults({0, 1}, 1, 2));
    EXPECT_TRUE(worker.transfers().hasBrought(worker.transfers().numPushed()));
  });
}

/// Results that are not those of slots come from the host's memory, or from another GPU.
class GpuJobWithResults : public GpuJob, public testing::WithParamInterface<bool> {};

TEST_P(GpuJobWithResults, TakesThemWhereTheyLie) {
  const std::size_t cut = 1;  // a tensor of several batches
  together(2, [&](std::size_t rank) {
    const Bytes updated = contribution(DType::kFloat32, someTensors()[cut].numElements, 7 + rank, 1);
    const Memory memory(updated.size());
    std::copy(updated.begin(), updated.end(), memory.data());
    GpuWorker worker(cluster_, plan_, rank, kPatienceSeconds, false,
                     {memory.data(), updated.size(), GetParam()});
    std::vector<GpuTensor> tensors = worker.computeAll(1);
    tensors[cut].result = memory.data();
    ASSERT_EQ(worker.transfers().push(tensors, worker.compute().handle()), WaitStatus::kDone);
    ASSERT_EQ(worker.transfers().join(worker.compute().handle()), WaitStatus::kDone);
    worker.compute().synchronize();
    EXPECT_TRUE(worker.gradient(cut) == updated);
    EXPECT_TRUE(worker.gradient(0) == result(DType::kFloat32, ReduceOp::kMean, 7, {0, 1}, 1, 2));
    worker.transfers().close();
  });
}

INSTANTIATE_TEST_SUITE_P(Memories, GpuJobWithResults, testing::Bool(),
                         [](const auto& info) { return info.param ? "OfAnotherGpu" : "OfTheHost"; });

TEST_F(GpuJob, LeavesTheClientToItsOwner) {
  // Another group of the same client is pushed and pulled meanwhile.
  const std::vector<TensorSpec> others = {{777, DType::kFloat32, ReduceOp::kMean, Algorithm::kDirect}};
  cluster_.addGroup(makePlan(2, 2, others, kShardElements));
  together(2, [&](std::size_t rank) {
    GpuWorker worker(cluster_, plan_, rank);
    for (std::uint32_t step = 1; step <= 10; ++step) {
      ASSERT_NO_FATAL_FAILURE(worker.step(step));
      Bytes data = contribution(DType::kFloat32, 777, rank, step);
      ASSERT_EQ(cluster_.client(rank).push(2, 0, kPresent, data.data()), WaitStatus::kDone);
      ASSERT_EQ(cluster_.client(rank).pull(2, 0, data.data(), kPatienceSeconds), WaitStatus::kDone);
      ASSERT_TRUE(data == result(DType::kFloat32, ReduceOp::kMean, 777, {0, 1}, step, 2));
      ASSERT_NO_FATAL_FAILURE(worker.expectResults({0, 1}, step, 2));
    }
  });
}

TEST_F(GpuJob, OfALostDeviceLetsStreamsGo) {
  GpuWorker worker(cluster_, plan_, 0);  // and no second one
  ASSERT_NO_FATAL_FAILURE(worker.step(1));
  EXPECT_FALSE(worker.compute().isIdle());
  cluster_.loseDevice(1);
  worker.compute().synchronize();
  EXPECT_EQ(worker.transfers().status(), WaitStatus::kDeviceLost);
  EXPECT_EQ(cluster_.client(0).lostDevice(), 1u);
  EXPECT_EQ(worker.transfers().push({worker.describe(0)}, worker.compute().handle()),
            WaitStatus::kDeviceLost);
}

TEST_F(GpuJob, ThatTakesTooLongLetsStreamsGo) {
  GpuWorker worker(cluster_, plan_, 0, kMomentSeconds);
  ASSERT_NO_FATAL_FAILURE(worker.step(1));
  worker.compute().synchronize();
  EXPECT_EQ(worker.transfers().status(), WaitStatus::kTimedOut);
}

TEST_F(GpuJob, ThatWasAbortedLetsStreamsGo) {
  GpuWorker worker(cluster_, plan_, 0);
  ASSERT_NO_FATAL_FAILURE(worker.step(1));
  cluster_.inbox(0).abort();
  worker.compute().synchronize();
  EXPECT_EQ(worker.transfers().status(), WaitStatus::kAborted);
}

TEST_F(GpuJob, CanBeClosedInTheMiddleOfAStep) {
  GpuWorker worker(cluster_, plan_, 0);
  ASSERT_NO_FATAL_FAILURE(worker.step(1));
  worker.transfers().close();
  worker.compute().synchronize();
  EXPECT_THROW(worker.transfers().push({worker.describe(0)}, worker.compute().handle()), std::logic_error);
}

TEST_F(GpuJob, RefusesToBeCaptured) {
  GpuWorker worker(cluster_, plan_, 0);
  standInCapture(worker.compute().handle(), true);
  EXPECT_THROW(worker.transfers().push({worker.describe(0)}, worker.compute().handle()), cuda::Error);
  standInCapture(worker.compute().handle(), false);
}

TEST_F(GpuJob, RefusesTensorsThatDoNotExist) {
  GpuWorker worker(cluster_, plan_, 0);
  const std::vector<GpuTensor> unknown = {{99, kPresent, 0, 0, nullptr}};
  EXPECT_THROW(worker.transfers().push(unknown, worker.compute().handle()), std::invalid_argument);
  EXPECT_THROW(worker.transfers().bring(unknown, worker.compute().handle()), std::invalid_argument);
}

}  // namespace
}  // namespace coarse::test::gpu_transfers_test
