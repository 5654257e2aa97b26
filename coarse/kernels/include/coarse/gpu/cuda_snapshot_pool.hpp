#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "coarse/gpu/cuda_driver.hpp"
#include "coarse/gpu/cuda_pinned_pages.hpp"
#include "coarse/snapshot/snapshot_pool.hpp"

namespace coarse {

/// Old versions of blocks in the memory of a GPU. One process holds them, in memory of the same GPU: the
/// memory device that updates the blocks and reads the snapshots. Keeping a version allocates memory, and
/// freeing it returns the memory. Versions reach the host through two pinned buffers, used in turn.
class CudaSnapshotPool : public SnapshotPool {
 public:
  /// @throws cuda::Error if the GPU has no memory pools.
  CudaSnapshotPool(cuda::SharedContext context, std::vector<std::size_t> blockBytes);
  ~CudaSnapshotPool() override;

  bool store(std::size_t block, std::size_t place, const std::byte* current) override;
  void synchronize() override;
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
  std::mutex versionsMutex_;  // for versions_ and the work of both streams; not held during copies
  std::vector<cuda::DeviceAddress> versions_;
  cuda::Stream keeping_;
  // Versions are freed behind the copies of this stream, so that no version is freed while it is read.
  cuda::Stream reading_;
  std::array<std::unique_ptr<Staging>, 2> stagings_;  // made when the first version is read
};

}  // namespace coarse
