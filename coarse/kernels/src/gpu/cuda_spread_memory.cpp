#include "coarse/gpu/cuda_spread_memory.hpp"

#include <algorithm>
#include <deque>
#include <stdexcept>
#include <utility>

#include "coarse/gpu/cuda_peers.hpp"
#include "coarse/gpu/cuda_snapshot_pool.hpp"
#include "coarse/tensors/tensor_group.hpp"

namespace coarse {
namespace {

/// The copies of each GPU, by destination.
class SpreadCopies : public TensorCopies {
 public:
  explicit SpreadCopies(const CudaSpreadMemory& memory) : memory_(memory) {
    for (std::size_t i = 0; i < memory.numGpus(); ++i) copies_.push_back(memory.gpu(i).makeCopies());
  }

  void copy(std::byte* to, const std::byte* from, std::size_t numBytes, NextUse use) override {
    copies_[memory_.gpuOf(to)]->copy(to, from, numBytes, use);
  }
  void synchronize() override {
    for (const auto& each : copies_) each->synchronize();
  }

 private:
  const CudaSpreadMemory& memory_;
  std::vector<std::unique_ptr<TensorCopies>> copies_;
};

/// Divides each batch among the GPUs. A batch is done when its last part is done.
class SpreadRunner : public BatchRunner {
 public:
  explicit SpreadRunner(const CudaSpreadMemory& memory) : memory_(memory) {
    for (std::size_t i = 0; i < memory.numGpus(); ++i) runners_.push_back(memory.gpu(i).makeRunner());
  }

  void start(const ShardBatch& batch, MonotonicNs notBefore) override {
    std::vector<ShardBatch>& shares = started_.emplace_back(runners_.size());
    for (const ShardTask& task : batch) shares[gpuOf(*task.group, task.entry.shard)].push_back(task);
    for (std::size_t i = 0; i < shares.size(); ++i) {
      if (!shares[i].empty()) runners_[i]->start(shares[i], notBefore);
    }
  }
  MonotonicNs lead() const noexcept override {
    MonotonicNs shortest = runners_.front()->lead();
    for (const auto& each : runners_) shortest = std::min(shortest, each->lead());
    return shortest;
  }
  bool conclude() override {
    std::vector<ShardBatch>& shares = started_.front();
    bool isDone = true;
    for (std::size_t i = 0; i < shares.size(); ++i) {
      if (shares[i].empty()) continue;
      if (runners_[i]->conclude()) {
        shares[i].clear();
      } else {
        isDone = false;
      }
    }
    if (isDone) started_.pop_front();
    return isDone;
  }
  void wait() override {
    const std::vector<ShardBatch>& shares = started_.front();
    for (std::size_t i = 0; i < shares.size(); ++i) {
      if (!shares[i].empty()) runners_[i]->wait();
    }
  }

 private:
  std::size_t gpuOf(const TensorGroup& group, std::uint32_t shard) const {
    return group.plan().hasOptimizer ? memory_.gpuOf(group.parameter(group.plan().shards[shard])) : 0;
  }

  const CudaSpreadMemory& memory_;
  std::vector<std::unique_ptr<BatchRunner>> runners_;
  std::deque<std::vector<ShardBatch>> started_;  // each GPU's part of a batch, until it is concluded there
};

/// The pools of all GPUs; at most one has a version.
class SpreadPool : public SnapshotPool {
 public:
  /// @param gpuOf as CudaSpreadMemory::gpuOf().
  SpreadPool(std::vector<std::unique_ptr<SnapshotPool>> pools,
             std::shared_ptr<const AddressRanges<std::size_t>> pieces)
      : pools_(std::move(pools)), pieces_(std::move(pieces)) {}

  bool store(std::size_t block, std::size_t place, const std::byte* current) override {
    return poolOf(current).store(block, place, current);
  }
  void synchronize() override {
    for (const auto& each : pools_) each->synchronize();
  }
  void free(std::size_t block, std::size_t place) noexcept override {
    for (const auto& each : pools_) each->free(block, place);
  }
  void trim() noexcept override {
    for (const auto& each : pools_) each->trim();
  }
  bool load(std::size_t block, std::size_t place, std::byte* destination) override {
    return std::any_of(pools_.begin(), pools_.end(),
                       [&](const auto& each) { return each->load(block, place, destination); });
  }
  void loadCurrent(std::size_t block, const std::byte* current, std::byte* destination) override {
    poolOf(current).loadCurrent(block, current, destination);
  }

 private:
  SnapshotPool& poolOf(const std::byte* current) const { return *pools_[pieces_->find(current).value_or(0)]; }

  std::vector<std::unique_ptr<SnapshotPool>> pools_;
  std::shared_ptr<const AddressRanges<std::size_t>> pieces_;
};

}  // namespace

CudaSpreadMemory::CudaSpreadMemory(std::vector<std::shared_ptr<const CudaTensorMemory>> gpus)
    : gpus_(std::move(gpus)), pieces_(std::make_shared<AddressRanges<std::size_t>>()) {
  if (gpus_.empty()) throw std::invalid_argument("memory spread over GPUs needs one at least");
}

TensorBytes CudaSpreadMemory::map(const Region& region, std::size_t numBytes, const std::string& what) const {
  CudaTensorMemory::checkLength(region, numBytes, what);
  try {
    const std::vector<Piece> pieces = piecesOf(region);
    std::vector<cuda::SharedContext> users;
    std::vector<std::shared_ptr<const CudaTensorMemory>> far;
    for (const auto& gpu : gpus_) {
      if (reachesAll(gpu->context()->device(), pieces)) {
        users.push_back(gpu->context());
      } else {
        far.push_back(gpu);
      }
    }
    if (!far.empty()) useOwner(pieces, users);
    const auto memory = std::make_shared<cuda::DeviceMemory>(
        cuda::DeviceMemory::import(users.front(), region, {users.begin() + 1, users.end()}));
    auto* const address = static_cast<std::byte*>(cuda::pointerTo(memory->address()));
    for (const Piece& each : pieces) note(address + each.offset, each);
    for (const auto& gpu : far) gpu->distant().add(address, memory->numBytes(), users.front());
    return {address, [memory, pieces, far, known = pieces_](std::byte* begin) {
              for (const Piece& each : pieces) known->remove(begin + each.offset);
              for (const auto& gpu : far) gpu->distant().remove(begin);
            }};
  } catch (const cuda::Error& error) {
    throw cuda::Error(what + ": " + error.what());
  }
}

bool CudaSpreadMemory::reachesAll(int device, const std::vector<Piece>& pieces) {
  return std::all_of(pieces.begin(), pieces.end(), [&](const Piece& piece) {
    return piece.device == device || cuda::reachesPeer(device, piece.device);
  });
}

/// Makes the GPU that owns memory its first user, from which others copy.
void CudaSpreadMemory::useOwner(const std::vector<Piece>& pieces, std::vector<cuda::SharedContext>& users) {
  const int owner = pieces.front().device;
  if (pieces.size() > 1)
    throw cuda::Error("a GPU cannot reach all of it, which begins on cuda:" + std::to_string(owner));
  const auto found =
      std::find_if(users.begin(), users.end(), [&](const auto& each) { return each->device() == owner; });
  if (found == users.end()) {
    users.insert(users.begin(), std::make_shared<const cuda::Context>(owner));
  } else {
    std::iter_swap(users.begin(), found);
  }
}

std::vector<CudaSpreadMemory::Piece> CudaSpreadMemory::piecesOf(const Region& region) {
  std::vector<Piece> pieces;
  const auto add = [&](const Region& piece) {
    const std::size_t offset = pieces.empty() ? 0 : pieces.back().offset + pieces.back().numBytes;
    const int device = cuda::deviceOf(piece.gpu);
    if (device < 0)
      throw cuda::Error("lies on " + piece.gpu + ", which CUDA_VISIBLE_DEVICES hides from this process");
    pieces.push_back({offset, piece.numBytes, device});
  };
  add(region);
  for (const Region& piece : region.rest) add(piece);
  return pieces;
}

/// Records which of the GPUs has a piece, if one of them has it.
void CudaSpreadMemory::note(const std::byte* begin, const Piece& piece) const {
  const auto found = std::find_if(gpus_.begin(), gpus_.end(),
                                  [&](const auto& gpu) { return gpu->context()->device() == piece.device; });
  if (found != gpus_.end())
    pieces_->add(begin, piece.numBytes, static_cast<std::size_t>(found - gpus_.begin()));
}

TensorBytes CudaSpreadMemory::allocate(std::size_t numBytes) const {
  return gpus_.front()->allocate(numBytes);
}

/// All GPUs see memory that one GPU has pinned at the same address.
TensorBytes CudaSpreadMemory::reach(std::byte* memory, std::size_t numBytes) const {
  return gpus_.front()->reach(memory, numBytes);
}

std::unique_ptr<TensorCopies> CudaSpreadMemory::makeCopies() const {
  return std::make_unique<SpreadCopies>(*this);
}

std::unique_ptr<ShardCompute> CudaSpreadMemory::makeCompute(ShardCompute::Finish finish) const {
  return std::make_unique<BatchedCompute>(std::make_unique<SpreadRunner>(*this), std::move(finish));
}

std::unique_ptr<RingCompute> CudaSpreadMemory::makeRingCompute() const {
  return gpus_.front()->makeRingCompute();
}

std::shared_ptr<SnapshotPool> CudaSpreadMemory::makeSnapshotPool(
    const std::vector<std::size_t>& blockBytes) const {
  std::vector<std::unique_ptr<SnapshotPool>> pools;
  for (const auto& gpu : gpus_)
    pools.push_back(std::make_unique<CudaSnapshotPool>(gpu->context(), blockBytes));
  return std::make_shared<SpreadPool>(std::move(pools), pieces_);
}

}  // namespace coarse
