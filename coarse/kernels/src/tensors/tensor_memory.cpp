#include "coarse/tensors/tensor_memory.hpp"

#include <cstring>
#include <utility>

#include "coarse/reduce/copy.hpp"
#include "coarse/tensors/shard_reducer.hpp"
#include "coarse/tensors/tensor_group.hpp"
#include "coarse/timeline/recorder.hpp"

namespace coarse {
namespace {

/// Computes in the sync core itself: a shard is finished when begin() returns.
class HostCompute : public ShardCompute {
 public:
  explicit HostCompute(Finish finish) : finish_(std::move(finish)) {}
  void begin(const ShardTask& task) override {
    compute(task);
    finish_(task);
  }

 private:
  static void compute(const ShardTask& task) noexcept {
    const TimelineSpan span([&](TimelineEvent& event) { describe(event, task); });
    if (task.pieces.empty()) {
      computeShard(*task.group, task.entry.shard);
    } else {
      reducePieces(*task.group, task.entry.shard, task.pieces);
    }
  }

  static void describe(TimelineEvent& event, const ShardTask& task) noexcept {
    const std::uint32_t shard = task.entry.shard;
    const ShardShape shape = task.group->shape(shard);
    std::size_t numElements = task.pieces.empty() ? shape.numElements : 0;
    for (const ShardPiece& piece : task.pieces) numElements += piece.end - piece.begin;
    event.kind = task.group->isUpdate(shard) ? EventKind::kUpdate : EventKind::kReduce;
    event.group = task.group->plan().id;
    event.index = shard;
    event.step = task.entry.step;
    event.numBytes = numElements * itemBytes(shape.dtype);
  }

  Finish finish_;
};

class HostCopies : public TensorCopies {
 public:
  void copy(std::byte* to, const std::byte* from, std::size_t numBytes, NextUse use) override {
    if (use == NextUse::kSoon) {
      std::memcpy(to, from, numBytes);
    } else {
      copyBytesStreaming(to, from, numBytes);
    }
  }
};

class HostMemory : public TensorMemory {
 public:
  bool isHost() const noexcept override { return true; }
  TensorBytes map(const Region& region, std::size_t numBytes, const std::string& what) const override {
    const auto mapping =
        std::make_shared<Mapping>(mapShared(region, numBytes, Mapping::Access::kReadWrite, what));
    return {mapping, mapping->data()};
  }
  TensorBytes allocate(std::size_t numBytes) const override {
    return {new std::byte[numBytes], std::default_delete<std::byte[]>()};
  }
  TensorBytes reach(std::byte* memory, std::size_t) const override {
    return {std::shared_ptr<void>(), memory};
  }
  std::unique_ptr<TensorCopies> makeCopies() const override { return std::make_unique<HostCopies>(); }
  std::unique_ptr<ShardCompute> makeCompute(ShardCompute::Finish finish) const override {
    return std::make_unique<HostCompute>(std::move(finish));
  }
  std::unique_ptr<RingCompute> makeRingCompute() const override { return makeHostRingCompute(); }
};

}  // namespace

std::shared_ptr<const TensorMemory> hostMemory() {
  static const auto memory = std::make_shared<const HostMemory>();  // stateless
  return memory;
}

void copyRegion(const TensorMemory& memory, const Region& from, const Region& to, std::size_t numBytes) {
  const TensorBytes source = memory.map(from, numBytes, "what is copied");
  const TensorBytes target = memory.map(to, numBytes, "a copy");
  const std::unique_ptr<TensorCopies> copies = memory.makeCopies();
  copies->copy(target.get(), source.get(), numBytes);
  copies->synchronize();
}

}  // namespace coarse
