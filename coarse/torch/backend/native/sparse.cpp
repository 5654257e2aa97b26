#include <stdexcept>

#include "c10d_backend.hpp"

namespace coarse_torch {

using coarse::CollectiveKind;

/// `input` of every rank, by rank; runs at once.
Tensors CoarseBackend::gatherNow(const at::Tensor& input, milliseconds timeout) {
  Tensors outputs;
  for (int rank = 0; rank < size_; ++rank) outputs.push_back(at::empty_like(input));
  gatherStep(CollectiveKind::kAllGather, outputs, input, -1, timeout)();
  return outputs;
}

/// Adds the sparse tensors of all ranks up into `tensor`. Ranks have rows of different numbers, so that they
/// first tell each other how many, and pad what they send.
void CoarseBackend::sumSparse(at::Tensor& tensor, const at::Tensor& input, bool isMean,
                              milliseconds timeout) {
  const std::int64_t numRows = input._nnz();
  std::vector<std::int64_t> counts;
  for (const at::Tensor& count : gatherNow(at::scalar_tensor(numRows, at::kLong), timeout)) {
    counts.push_back(count.item<std::int64_t>());
  }
  const std::int64_t most = *std::max_element(counts.begin(), counts.end());
  const at::Tensor indices = at::zeros({input.sparse_dim(), most}, at::kLong);
  indices.narrow(1, 0, numRows).copy_(input._indices());
  std::vector<std::int64_t> shape = input._values().sizes().vec();
  shape[0] = most;
  const at::Tensor values = at::zeros(shape, input.options().device(at::kCPU).layout(at::kStrided));
  values.narrow(0, 0, numRows).copy_(input._values());
  const Tensors allIndices = gatherNow(indices, timeout);
  const Tensors allValues = gatherNow(values, timeout);
  at::Tensor sum;
  for (int rank = 0; rank < size_; ++rank) {
    const at::Tensor term = at::sparse_coo_tensor(allIndices[rank].narrow(1, 0, counts[rank]),
                                                  allValues[rank].narrow(0, 0, counts[rank]), input.sizes(),
                                                  input.options().device(at::kCPU));
    sum = rank == 0 ? term : sum + term;
  }
  sum = sum.coalesce();
  if (isMean) sum.div_(size_);
  tensor.copy_(sum);
}

WorkPtr CoarseBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  TORCH_CHECK_VALUE(tensors.size() == 1 && tensors[0].is_sparse(), "coarse: takes one sparse tensor");
  const bool isMean = options.reduceOp == c10d::ReduceOp::AVG;
  TORCH_CHECK_VALUE(isMean || options.reduceOp == c10d::ReduceOp::SUM,
                    "coarse: sparse tensors take SUM and AVG alone");
  at::Tensor tensor = tensors[0];  // itself: a detached sparse tensor does not share what copy_() replaces
  const at::Tensor input = tensor.coalesce().cpu();
  return submit({c10d::OpType::_ALLREDUCE_SPARSE, "coarse:sparse_all_reduce", tensors, tensors},
                {[this, tensor, input, isMean, timeout = timeoutOf(options.timeout)]() mutable {
                  sumSparse(tensor, input, isMean, timeout);
                }});
}

void CoarseBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool waitAllRanks) {
  // Its time begins now, not when what was issued before has ended.
  const milliseconds timeout = timeoutOf(options.timeout);
  TORCH_CHECK(rank_ != 0 || timeout.count() > 0 || size_ == 1, "Rank 0 timed out in monitoredBarrier after ",
              timeout.count(), " ms.");
  c10d::BarrierOptions limited = options;
  limited.timeout = timeout;
  const WorkPtr work = barrier(limited);
  try {
    work->wait();
  } catch (const std::exception& error) {
    const std::string missing = collectives_->missingRanks();
    if (rank_ != 0 || missing.empty()) {
      TORCH_CHECK(false, "Rank ", rank_,
                  " successfully reached monitoredBarrier, but received errors while waiting for ",
                  "send/recv from rank 0. Original exception: ", error.what());
    }
    const std::string first = missing.substr(0, missing.find(','));
    TORCH_CHECK(false, waitAllRanks ? "Ranks " + missing : "Rank " + first,
                " failed to pass monitoredBarrier in ", timeout.count(),
                " ms. Original exception: ", error.what());
  }
}

}  // namespace coarse_torch
