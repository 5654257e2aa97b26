#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "coarse/address_ranges.hpp"
#include "coarse/cuda_tensor_memory.hpp"
#include "coarse/snapshot_pool.hpp"

namespace coarse {

/// Memory of several GPUs that reach each other, of which one process computes on each: parameters and states
/// that lie in pieces side by side (docs/design/gpu.md). What is done with a shard is done by the GPU that
/// has the beginning of its parameter.
class CudaSpreadMemory : public TensorMemory {
 public:
  /// @param gpus what computes on each; the first one has what belongs to none.
  /// @throws std::invalid_argument if there are none.
  explicit CudaSpreadMemory(std::vector<std::shared_ptr<const CudaTensorMemory>> gpus);

  std::size_t numGpus() const noexcept { return gpus_.size(); }
  const CudaTensorMemory& gpu(std::size_t number) const noexcept { return *gpus_[number]; }
  /// The number of the GPU in whose memory lies what was mapped at `address`.
  std::size_t gpuOf(const void* address) const { return pieces_->find(address).value_or(0); }

  /// As CudaTensorMemory::map(), for all of the GPUs.
  /// @throws cuda::Error also if some of it lies on none of them.
  TensorBytes map(const Region& region, std::size_t numBytes, const std::string& what) const override;
  std::unique_ptr<TensorCopies> makeCopies() const override;
  std::unique_ptr<ShardCompute> makeCompute(ShardCompute::Finish finish) const override;
  std::unique_ptr<RingCompute> makeRingCompute() const override;
  /// Where old versions of blocks go: each to memory of the GPU that has the beginning of the block.
  std::shared_ptr<SnapshotPool> makeSnapshotPool(const std::vector<std::size_t>& blockBytes) const;

 private:
  struct Piece {
    std::size_t offset;
    std::size_t numBytes;
    std::size_t gpu;
  };

  std::vector<Piece> piecesOf(const Region& region) const;
  std::size_t numberOf(int device) const;

  std::vector<std::shared_ptr<const CudaTensorMemory>> gpus_;
  std::shared_ptr<AddressRanges<std::size_t>> pieces_;  // the GPU of each piece that is mapped
};

}  // namespace coarse
