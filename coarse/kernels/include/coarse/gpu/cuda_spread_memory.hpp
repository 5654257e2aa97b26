#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "coarse/gpu/cuda_tensor_memory.hpp"
#include "coarse/shared_memory/address_ranges.hpp"
#include "coarse/snapshot/snapshot_pool.hpp"

namespace coarse {

/// Memory of several GPUs, on which one process computes: parameters and states lie there in adjacent pieces
/// (docs/design/gpu.md). The GPU that has the beginning of a shard's parameter does the shard's work. Slots
/// may also lie on other GPUs.
class CudaSpreadMemory : public TensorMemory {
 public:
  /// @param gpus the memory of each GPU; the first one gets the work that belongs to none.
  /// @throws std::invalid_argument if there are none.
  explicit CudaSpreadMemory(std::vector<std::shared_ptr<const CudaTensorMemory>> gpus);

  std::size_t numGpus() const noexcept { return gpus_.size(); }
  const CudaTensorMemory& gpu(std::size_t number) const noexcept { return *gpus_[number]; }
  /// The number of the GPU whose memory is mapped at `address`.
  std::size_t gpuOf(const void* address) const { return pieces_->find(address).value_or(0); }

  /// As CudaTensorMemory::map(), for all of the GPUs. Copies the memory that one of them cannot reach.
  /// @throws cuda::Error also if it is in several pieces, and one of the GPUs cannot reach them all.
  TensorBytes map(const Region& region, std::size_t numBytes, const std::string& what) const override;
  TensorBytes allocate(std::size_t numBytes) const override;
  TensorBytes reach(std::byte* memory, std::size_t numBytes) const override;
  std::unique_ptr<TensorCopies> makeCopies() const override;
  std::unique_ptr<ShardCompute> makeCompute(ShardCompute::Finish finish) const override;
  std::unique_ptr<RingCompute> makeRingCompute() const override;
  /// The pool of old versions: each goes to memory of the GPU that has the beginning of the block.
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
  std::shared_ptr<AddressRanges<std::size_t>> pieces_;  // the GPU of each mapped piece
};

}  // namespace coarse
