#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "coarse/client/client.hpp"
#include "coarse/gpu/cuda_driver.hpp"
#include "coarse/gpu/gpu_direct_allreduce.hpp"
#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/shared_memory.hpp"
#include "coarse/shared_memory/waiting.hpp"

namespace coarse {

/// Memory that another object has mapped.
struct MappedMemory {
  std::byte* data = nullptr;
  std::size_t numBytes = 0;
  // The GPU for which it is mapped: the transfers' GPU, or the GPU that owns the memory if the transfers' GPU
  // cannot reach it. Null for host memory.
  cuda::SharedContext gpu = nullptr;
};

struct GpuTransfersConfig {
  std::uint32_t group = 0;
  // Time limit for results, counted from when the GPU has copied their inputs.
  double timeoutSeconds = 0;
  // Memory devices are notified once per batch: half of the rest of a step, within these limits. The last
  // batches are small, because no other transfer overlaps with them.
  std::size_t leastBatchBytes = 1 << 20;
  std::size_t mostBatchBytes = 8 << 20;
};

/// A tensor in GPU memory, on its way to the memory devices and back.
struct GpuTensor {
  std::uint32_t tensor = 0;
  std::uint8_t flags = 0;               // of its contribution
  cuda::DeviceAddress source = 0;       // copied to the slot first; 0 for no copy
  cuda::DeviceAddress destination = 0;  // where the result is copied; 0 for no copy
  const std::byte* result = nullptr;    // its place in the memory of results; null: in its slot
};

/// Copies the tensors of one group from a GPU to their slots, and results back, while the GPU computes and
/// the processor continues. Only streams and this class's thread wait.
///
/// A push copies tensors on a separate stream, behind the work that computes them. When the copies are done,
/// the GPU increments a word of pinned memory. The thread sees that, notifies the memory devices, watches for
/// the results, and increments another word. The copies of results to the GPU wait for that word, on a second
/// stream, so that both directions of the bus are busy.
///
/// The thread never calls CUDA: it continues, and so do all streams, even while CUDA waits or holds locks.
/// Streams wait for the second word only behind all pushes of their step, because streams may share a
/// hardware queue, in which a wait also blocks later work.
///
/// If memory devices are lost or take too long, all streams are released, results are the slots' contents,
/// and every later call reports the failure.
///
/// Shards of direct all-reduce (useDirectAllReduce) stay in place: NCCL works there. Memory devices receive
/// only the notice of the contribution, so that contributors and late workers are known for all shards alike.
///
/// Thread safety: one caller at a time, the client's caller.
class GpuTransfers {
 public:
  /// @param client has the group; must outlive this, and so must the group.
  /// @param slots of the group: as Client::addGroup() returned them, pinned from now on; or as a GPU has
  /// mapped them, if they are in another GPU's memory. The caller owns them; they must outlive this, or its
  /// close(). Without data if slots lie on this GPU: then the computing code writes to them, and GpuTensor
  /// has no source.
  /// @param results the memory of results that lie outside slots, likewise: parameters, which updates change.
  /// Without data if there are none, or if the computing code reads them in place.
  /// @throws cuda::Error if the memory cannot be pinned, or the device's streams cannot wait for words.
  GpuTransfers(Client& client, GpuTransfersConfig config, cuda::SharedContext context, MappedMemory slots,
               MappedMemory results = {});
  GpuTransfers(const GpuTransfers&) = delete;
  GpuTransfers& operator=(const GpuTransfers&) = delete;
  ~GpuTransfers();
  /// Releases all streams, and waits for the copies in progress. Idempotent; later pushes are impossible.
  void close() noexcept;

  /// Copies tensors to their slots, behind all work given to `stream` before. Later pushes are announced when
  /// these copies are complete; the tensors must stay unchanged until a stream has joined. Returns and throws
  /// as push().
  WaitStatus stage(const std::vector<GpuTensor>& tensors, cuda::StreamHandle stream);
  /// Contributes tensors, as they are after all work given to `stream` before. They must stay unchanged, and
  /// allocated, until a stream has joined.
  /// @returns kDone, even if results will never arrive; else the failure, and nothing was contributed.
  /// @throws cuda::Error if `stream` is captured into a CUDA graph, std::invalid_argument for a tensor that
  /// does not exist.
  WaitStatus push(const std::vector<GpuTensor>& tensors, cuda::StreamHandle stream);
  /// Length of the next batch. push() cuts its tensors, even within a tensor, into batches of this length, so
  /// that the first shards of a large tensor return while the last ones are in transit.
  std::size_t batchBytes() const noexcept;
  /// Makes later work of `stream` wait for all results of the pushes, which ends a step.
  WaitStatus join(cuda::StreamHandle stream);
  /// Makes the workers reduce some shards by NCCL from the next push on; nullptr for none. All workers must
  /// call it with the same shards, after setting the shards' flags in the client. @pre all results of
  /// previous pushes have arrived.
  /// @param slots the address of the slots on the worker's GPU, for tensors that lie there; else 0.
  void useDirectAllReduce(std::shared_ptr<GpuDirectAllReduce> directAllReduce, cuda::DeviceAddress slots);
  /// Waits until NCCL has done the work of all joined steps, or a failure occurs.
  WaitStatus waitForDirectAllReduce();
  /// The first failure; kDone if none. @throws nccl::Error for a failure of NCCL.
  WaitStatus status() const;
  /// Number of the last pushed batch, for hasBrought(); wraps around.
  std::uint32_t numPushed() const;
  /// Whether all batches up to `count`, a result of numPushed(), are in their slots, so that their source
  /// memory may change.
  bool hasBrought(std::uint32_t count) const noexcept;

 private:
  /// Some shards of a tensor.
  struct Piece {
    ShardRange shards;
    std::uint8_t flags = 0;
    std::size_t numBytes = 0;
    std::byte* slot = nullptr;
    const std::byte* result = nullptr;
    const MappedMemory* resultMemory = nullptr;  // the memory that holds it
    cuda::DeviceAddress source = 0;
    cuda::DeviceAddress destination = 0;
  };
  /// Pieces that are announced, and return, together.
  struct Batch {
    std::uint32_t number = 0;  // from 1, wraps around
    std::vector<Piece> pieces;
  };
  using SharedBatch = std::shared_ptr<const Batch>;
  using SomeEvent = std::unique_ptr<cuda::Event>;
  /// A batch whose results no stream copies yet, and the event that marks it as copied to the slots.
  struct Unfetched {
    SharedBatch batch;
    SomeEvent brought;
  };
  /// NCCL's work in a step.
  struct DirectStep {
    std::uint32_t number = 0;     // from 1, wraps around
    std::uint32_t lastBatch = 0;  // of the step: after it has been copied, only NCCL is awaited
  };
  /// Progress of GPU and thread; each counts batches for the other.
  struct Words {
    alignas(kCacheLineBytes) std::atomic<std::uint32_t> brought;   // to the slots; written by the GPU
    alignas(kCacheLineBytes) std::atomic<std::uint32_t> returned;  // results; written by the thread
    alignas(kCacheLineBytes) std::atomic<std::uint32_t> summed;    // steps of NCCL's; written by the GPU
  };
  /// Pinned memory for Words, which a fork does not copy.
  class PinnedWords {
   public:
    explicit PinnedWords(const cuda::SharedContext& context);
    Words& operator*() const noexcept { return *reinterpret_cast<Words*>(mapping_.data()); }
    Words* operator->() const noexcept { return &**this; }
    cuda::DeviceAddress brought() const noexcept;
    cuda::DeviceAddress returned() const noexcept;
    cuda::DeviceAddress summed() const noexcept;

   private:
    Mapping mapping_;
    cuda::HostRegistration registration_;
  };

  // Run by the caller's thread.
  void pin(const MappedMemory& memory);
  void tryWords();
  WaitStatus follow(cuda::StreamHandle stream);
  std::vector<Batch> cut(const std::vector<GpuTensor>& tensors);
  /// Whether the transfers' GPU has this memory mapped for itself.
  bool isReached(const MappedMemory& memory) const noexcept {
    return memory.gpu->handle() == context_->handle();
  }
  bool isDirect(std::uint32_t shard) const noexcept {
    return directAllReduce_ != nullptr && directAllReduce_->has(shard);
  }
  WaitStatus takeOwn(const std::vector<GpuTensor>& tensors);
  void setGiving(bool isGiving);
  void joinOwn(cuda::StreamHandle stream);
  Piece pieceOf(const GpuTensor& tensor, std::uint32_t firstShard, const ShardRange& shards) const;
  void stage(const Piece& piece);
  SomeEvent markBrought();
  void followPush(SomeEvent brought);
  void fetch(const Batch& batch);

  // Run by this class's thread.
  void run();
  void work();
  bool announceBrought();
  bool releaseReturned();
  bool releaseSummed();
  void checkDirectAllReduce();
  void failByNccl(const nccl::Error& error);
  std::shared_ptr<GpuDirectAllReduce> directAllReduce() const;
  WaitStatus checkProgress();
  void fail(WaitStatus status, std::string ownFailure = {});

  Client& client_;
  const GpuTransfersConfig config_;
  const GroupPlan& plan_;
  cuda::SharedContext context_;
  MappedMemory slots_, results_;
  std::deque<cuda::HostRegistration> pinned_;  // pinned until close()
  PinnedWords words_;
  cuda::Stream pushStream_, pullStream_;
  cuda::Event computed_, fetched_;
  std::deque<Unfetched> unfetched_;
  std::vector<SomeEvent> idleEvents_;
  std::size_t stepBytes_ = 0;         // of all tensors
  std::size_t leftBytes_ = 0;         // of the tensors not pushed in this step
  cuda::DeviceAddress ownSlots_ = 0;  // the slots' address on this GPU
  std::uint32_t numDirectSteps_ = 0;

  mutable std::mutex mutex_;  // guards the members below, up to the next comment
  std::condition_variable hasWork_;
  std::deque<SharedBatch> pushed_;  // pushed and not announced
  std::uint32_t lastNumber_ = 0;
  WaitStatus failure_ = WaitStatus::kDone;
  std::string ownFailure_;  // NCCL's, if it was the first failure
  std::shared_ptr<GpuDirectAllReduce>
      directAllReduce_;                 // written by the caller, who reads it without the lock
  std::deque<DirectStep> directSteps_;  // joined steps that NCCL has not completed
  bool isGiving_ = false;               // the caller is in a call of NCCL
  std::uint32_t numGivings_ = 0;        // number of such calls so far
  bool isStopping_ = false;

  // Used by the thread alone.
  std::deque<SharedBatch> announced_;  // announced, without results
  AttendedClock clock_;
  Clock::time_point progressedAt_{}, givingSince_{};
  std::uint32_t givingSeen_ = 0;  // the number of the last such call seen

  std::unique_ptr<std::thread> thread_;  // last: it needs all members above
};

}  // namespace coarse
