#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

namespace coarse {

/// Where old versions of blocks lie to which snapshots refer. Each block has a place of its own for each
/// snapshot that can be held (docs/design/storage.md).
///
/// Thread safety: store() and settle() by any number of threads, each settling what it has stored; everything
/// else likewise, with at most one of store() and free() for a block and a place at a time.
class SnapshotPool {
 public:
  virtual ~SnapshotPool() = default;

  /// Takes memory for a version of a block ahead, at kCommonPlace, which all snapshots share and which is
  /// kept until the pool goes: what is stored there costs a copy and nothing else. @returns false if there is
  /// none.
  virtual bool warm(std::size_t /*block*/) noexcept { return false; }
  /// Begins to copy a block to its place. @returns false if there is no room; then nothing was taken.
  /// @throws cuda::Error where that is memory of a GPU.
  virtual bool store(std::size_t block, std::size_t place, const std::byte* current) = 0;
  /// Returns when what this thread has stored is there.
  /// @throws cuda::Error likewise.
  virtual void settle() {}
  /// Gives the memory of one version back. Its copy may be under way elsewhere, and is then worth nothing.
  virtual void free(std::size_t block, std::size_t place) noexcept = 0;
  /// Returns when others can have what was given back so far: for threads that may wait.
  virtual void trim() noexcept {}
  /// Copies a version to memory of the host. @returns false if there is none.
  virtual bool load(std::size_t block, std::size_t place, std::byte* destination) = 0;
  /// Copies a block from where it lies to memory of the host. It may be overwritten meanwhile; the caller
  /// then finds out, and throws the copy away.
  virtual void loadCurrent(std::size_t block, const std::byte* current, std::byte* destination) = 0;
};

/// Room for blocks in a sparse file, which all memory devices share: pages are taken when a version is kept,
/// and given back when it is freed; but for those that were taken ahead.
class SparsePool : public SnapshotPool {
 public:
  /// @param fd stays the caller's. @throws std::invalid_argument if it is not sealed or too small.
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
  std::byte* common_ = nullptr;  // kCommonPlace where it is mapped; nothing is stored there that has no pages
};

/// What a version takes: whole pages.
std::size_t versionBytes(std::size_t blockBytes) noexcept;

}  // namespace coarse
