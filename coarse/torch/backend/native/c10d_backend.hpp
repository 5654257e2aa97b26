#pragma once

#include <chrono>
#include <coarse/collectives/collective.hpp>
#include <coarse/shared_memory/forks.hpp>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "tensors.hpp"
#include "work.hpp"

namespace coarse_torch {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using std::chrono::milliseconds;

/// torch.distributed's backend "coarse": translates tensors into calls of coarse::Collectives, and thinks no
/// further (docs/design/torch-backend.md).
///
/// Operations run in the order in which they were issued, whatever thread issues them.
class CoarseBackend : public c10d::Backend {
 public:
  CoarseBackend(std::shared_ptr<coarse::Collectives> collectives, int rank, int size, milliseconds timeout);
  ~CoarseBackend() override;

  const std::string getBackendName() const override { return "coarse"; }
  // No `override` from here to the sequence numbers: older minors of torch do not have them in Backend.
  c10::intrusive_ptr<Options> getBackendOptions();
  void setTimeout(milliseconds timeout) { timeout_ = timeout; }
  void shutdown();
  void abort();

  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return issued_.load(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& outputSplits,
                        std::vector<std::int64_t>& inputSplits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool waitAllRanks) override;

 private:
  using Step = std::function<void()>;

  /// How an operation is announced: what torch's profiler, futures and time-outs see of it.
  struct Announcement {
    c10d::OpType opType;
    const char* title;
    Tensors inputs;
    c10::IValue result;
    bool isAsync = true;
  };

  /// @throws DistBackendError in a fork of the process.
  void checkOwner() const;
  milliseconds timeoutOf(milliseconds timeout) const;
  WorkPtr submit(Announcement announcement, std::vector<Step> steps);
  WorkPtr post(c10d::OpType opType, const char* title, Tensors& tensors, int peer, int tag);
  void checkRoot(std::int64_t root) const;
  void checkCount(const Tensors& tensors, const char* what) const;

  // Each checks its tensors and returns what is to be done.
  Step allReduceStep(const at::Tensor& tensor, const c10d::ReduceOp& op, milliseconds timeout);
  Step gatherStep(coarse::CollectiveKind kind, const Tensors& outputs, const at::Tensor& input,
                  std::int64_t root, milliseconds timeout);
  Step gatherFlatStep(const at::Tensor& output, const at::Tensor& input, milliseconds timeout);
  Step reduceScatterStep(const at::Tensor& output, const Tensors& inputs, const c10d::ReduceOp& op,
                         milliseconds timeout);
  Step reduceScatterFlatStep(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op,
                             milliseconds timeout);
  void sumSparse(at::Tensor& tensor, const at::Tensor& input, bool isMean, milliseconds timeout);
  Tensors gatherNow(const at::Tensor& input, milliseconds timeout);

  std::shared_ptr<coarse::Collectives> collectives_;
  std::atomic<milliseconds> timeout_;
  std::atomic<std::uint64_t> issued_{0};
  coarse::Owner owner_;
  std::unique_ptr<WorkQueue, coarse::LeakInForks> queue_;
};

}  // namespace coarse_torch
