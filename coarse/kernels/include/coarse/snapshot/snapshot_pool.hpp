#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

namespace coarse {

/// The place of old versions of blocks to which snapshots refer. Each block has its own place for each
/// snapshot that can be held (docs/design/storage.md).
///
/// Thread safety: store() and synchronize() by any number of threads, where each synchronizes its own stores;
/// everything else likewise. At most one store() or free() at a time for a block and a place.
class SnapshotPool {
 public:
  virtual ~SnapshotPool() = default;

  /// Allocates memory for a version of a block in advance, at kCommonPlace, which all snapshots share. The
  /// memory stays allocated as long as the pool, so storing there costs only a copy. @returns false if no
  /// memory is available.
  virtual bool warm(std::size_t /*block*/) noexcept { return false; }
  /// Begins to copy a block to its place. @returns false if there is no room; then nothing was allocated.
  /// @throws cuda::Error for memory of a GPU.
  virtual bool store(std::size_t block, std::size_t place, const std::byte* current) = 0;
  /// Returns when this thread's stores are complete.
  /// @throws cuda::Error likewise.
  virtual void synchronize() {}
  /// Frees the memory of one version. Another thread may be copying it; that copy is then invalid.
  virtual void free(std::size_t block, std::size_t place) noexcept = 0;
  /// Returns when others can use the memory freed so far: for threads that may wait.
  virtual void trim() noexcept {}
  /// Copies a version to host memory. @returns false if there is none.
  virtual bool load(std::size_t block, std::size_t place, std::byte* destination) = 0;
  /// Copies a block in place to host memory. A concurrent update may overwrite it; the caller then detects
  /// that and discards the copy.
  virtual void loadCurrent(std::size_t block, const std::byte* current, std::byte* destination) = 0;
};

/// Room for blocks in a sparse file, which all memory devices share. Keeping a version allocates pages, and
/// freeing it returns them, except those allocated in advance.
class SparsePool : public SnapshotPool {
 public:
  /// @param fd the caller closes it. @throws std::invalid_argument if it is not sealed or too small.
  SparsePool(const std::vector<std::size_t>& blockBytes, int fd);
  ~SparsePool() override;
  SparsePool(const SparsePool&) = delete;
  SparsePool& operator=(const SparsePool&) = delete;

  static std::size_t numBytes(const std::vector<std::size_t>& blockBytes) noexcept;

  bool warm(std::size_t block) noexcept override;
  bool store(std::size_t block, std::size_t place, const std::byte* current) noexcept override;
  void free(std::size_t block, std::size_t place) noexcept override;
  bool load(std::size_t block, std::size_t place, std::byte* destination) override;
  void loadCurrent(std::size_t block, const std::byte* current, std::byte* destination) override;

 private:
  std::size_t offset(std::size_t block, std::size_t place) const noexcept {
    return place * placeBytes_ + blockOffsets_[block];
  }
  void mapPages(std::size_t block) noexcept;

  std::vector<std::size_t> blockBytes_;
  std::vector<std::size_t> blockOffsets_;  // within a place
  std::size_t placeBytes_ = 0;
  std::vector<std::atomic<bool>> isMapped_;  // whether mapPages() has been called
  int fd_ = -1;
  std::byte* common_ = nullptr;  // mapping of kCommonPlace; stores need pages there
};

/// Bytes of a version: whole pages.
std::size_t versionBytes(std::size_t blockBytes) noexcept;

}  // namespace coarse
