#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "coarse/gpu/cuda_driver.hpp"
#include "coarse/gpu/cuda_pinned_pages.hpp"
#include "coarse/snapshot/snapshot_pool.hpp"

namespace coarse {

/// Old versions of blocks that lie in the memory of a GPU, in memory of that GPU which one process has: that
/// of the memory device which updates the blocks and reads the snapshots. It is taken when a version is kept
/// and given back when it is freed. Versions come to the host through pinned buffers, two by turns.
class CudaSnapshotPool : public SnapshotPool {
 public:
  /// @throws cuda::Error if the GPU has no memory pools.
  CudaSnapshotPool(cuda::SharedContext context, std::vector<std::size_t> blockBytes);
  ~CudaSnapshotPool() override;

  bool store(std::size_t block, std::size_t place, const std::byte* current) override;
  void settle() override;
  void free(std::size_t block, std::size_t place) noexcept override;
  void trim() noexcept override;
  bool load(std::size_t block, std::size_t place, std::byte* destination) override;
  void loadCurrent(std::size_t block, const std::byte* current, std::byte* destination) override;

 private:
  /// A piece of a block on its way to the host.
  struct Staging {
    explicit Staging(const cuda::SharedContext& context);
    cuda::PinnedPages pages;
    cuda::Event isThere;
  };

  template <class Locate>
  bool copyToHost(std::size_t numBytes, std::byte* destination, Locate locate);
  cuda::DeviceAddress& version(std::size_t block, std::size_t place) noexcept;

  cuda::SharedContext context_;
  std::vector<std::size_t> blockBytes_;
  // Locked in this order.
  std::mutex readersMutex_;   // for stagings_, and one reader at a time
  std::mutex versionsMutex_;  // for versions_ and what both streams are given; held for no copy
  std::vector<cuda::DeviceAddress> versions_;
  cuda::Stream keeping_;
  // Versions are freed behind the copies of this one, so that none goes while it is read.
  cuda::Stream reading_;
  std::array<std::unique_ptr<Staging>, 2> stagings_;  // made when the first version is read
};

}  // namespace coarse
