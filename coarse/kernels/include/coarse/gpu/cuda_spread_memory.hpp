#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "coarse/gpu/cuda_tensor_memory.hpp"
#include "coarse/shared_memory/address_ranges.hpp"
#include "coarse/snapshot/snapshot_pool.hpp"

namespace coarse {

/// Memory of GPUs, on several of which one process computes: parameters and states lie there in pieces side
/// by side (docs/design/gpu.md). What is done with a shard is done by the GPU that has the beginning of its
/// parameter. Slots may lie on others too.
class CudaSpreadMemory : public TensorMemory {
 public:
  /// @param gpus what computes on each; the first one has what belongs to none.
  /// @throws std::invalid_argument if there are none.
  explicit CudaSpreadMemory(std::vector<std::shared_ptr<const CudaTensorMemory>> gpus);

  std::size_t numGpus() const noexcept { return gpus_.size(); }
  const CudaTensorMemory& gpu(std::size_t number) const noexcept { return *gpus_[number]; }
  /// The number of the GPU in whose memory lies what was mapped at `address`.
  std::size_t gpuOf(const void* address) const { return pieces_->find(address).value_or(0); }

  /// As CudaTensorMemory::map(), for all of the GPUs. Of what one of them cannot reach it takes copies.
  /// @throws cuda::Error also if it is in several pieces, and one of the GPUs cannot reach them all.
  TensorBytes map(const Region& region, std::size_t numBytes, const std::string& what) const override;
  TensorBytes allocate(std::size_t numBytes) const override;
  TensorBytes reach(std::byte* memory, std::size_t numBytes) const override;
  std::unique_ptr<TensorCopies> makeCopies() const override;
  std::unique_ptr<ShardCompute> makeCompute(ShardCompute::Finish finish) const override;
  std::unique_ptr<RingCompute> makeRingCompute() const override;
  /// Where old versions of blocks go: each to memory of the GPU that has the beginning of the block.
  std::shared_ptr<SnapshotPool> makeSnapshotPool(const std::vector<std::size_t>& blockBytes) const;

 private:
  struct Piece {
    std::size_t offset;
    std::size_t numBytes;
    int device;
  };

  static std::vector<Piece> piecesOf(const Region& region);
  static bool reachesAll(int device, const std::vector<Piece>& pieces);
  static void useOwner(const std::vector<Piece>& pieces, std::vector<cuda::SharedContext>& users);
  void note(const std::byte* begin, const Piece& piece) const;

  std::vector<std::shared_ptr<const CudaTensorMemory>> gpus_;
  std::shared_ptr<AddressRanges<std::size_t>> pieces_;  // the GPU of each piece that is mapped
};

}  // namespace coarse
