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
#include "coarse/gpu/gpu_own_path.hpp"
#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/shared_memory.hpp"
#include "coarse/shared_memory/waiting.hpp"

namespace coarse {

/// Memory that somebody else has mapped.
struct MappedMemory {
  std::byte* data = nullptr;
  std::size_t numBytes = 0;
  // Of the GPU for which it is mapped: that of the transfers, or one that has it where that does not reach
  // it. Null for the host's memory.
  cuda::SharedContext gpu = nullptr;
};

struct GpuTransfersConfig {
  std::uint32_t group = 0;
  // How long results may take, counted from when the GPU has brought what they are of.
  double timeoutSeconds = 0;
  // Memory devices are told once per batch: half of what is left of a step, within these limits. The last
  // ones are small, because nothing but them is on its way while they are.
  std::size_t leastBatchBytes = 1 << 20;
  std::size_t mostBatchBytes = 8 << 20;
};

/// A tensor in the memory of a GPU, on its way to the memory devices and back.
struct GpuTensor {
  std::uint32_t tensor = 0;
  std::uint8_t flags = 0;               // of its contribution
  cuda::DeviceAddress source = 0;       // what is copied to its slot first; 0 for nothing
  cuda::DeviceAddress destination = 0;  // where its result is copied; 0 for nowhere
  const std::byte* result = nullptr;    // where that lies in the memory of results; null for its slot
};

/// Brings the tensors of one group from a GPU to their slots and results back, while the GPU computes and the
/// processor goes on; nobody waits for anybody but streams for streams, and a thread of this class.
///
/// A push copies tensors on a stream of their own, behind what has computed them. When the copies are done,
/// the GPU counts in a word of pinned memory; the thread sees that, tells the memory devices, watches for the
/// results, and counts in another word. What copies results to the GPU waits for that word, on a second
/// stream, so that both directions of the bus are busy.
///
/// The thread never calls CUDA: whatever CUDA waits for, or holds locked, the thread goes on and with it all
/// streams. They wait for the second word only behind all pushes of their step, since streams may share a
/// hardware queue, in which a wait also stops what comes later.
///
/// If memory devices are lost or take too long, all streams are let go, results are what lies in the slots,
/// and every later call says so.
///
/// Shards of the workers' own path (useOwnPath) stay where they are: NCCL works there, and memory devices are
/// told of the contribution alone, so that who contributed, and who is late, is known of all shards alike.
///
/// Thread safety: one caller at a time, which is the client's.
class GpuTransfers {
 public:
  /// @param client has the group; must outlive this, and so must the group.
  /// @param slots of the group: as Client::addGroup() returned them, and pinned from now on; or as a GPU has
  /// mapped them, where they are another one's. They stay the caller's, and must outlive this, or its
  /// close(). Without data where slots lie on this GPU: then whoever computes writes to them, and GpuTensor
  /// has no source.
  /// @param results where results lie that are not those of slots, likewise: parameters, which updates
  /// change. Without data where there are none, or whoever computes reads them where they are.
  /// @throws cuda::Error if the memory cannot be pinned, or streams of the device cannot wait for words.
  GpuTransfers(Client& client, GpuTransfersConfig config, cuda::SharedContext context, MappedMemory slots,
               MappedMemory results = {});
  GpuTransfers(const GpuTransfers&) = delete;
  GpuTransfers& operator=(const GpuTransfers&) = delete;
  ~GpuTransfers();
  /// Lets all streams go, and waits for the copies that are under way. Idempotent; nothing can be pushed
  /// later.
  void close() noexcept;

  /// Copies tensors to their slots, as `stream` has computed them when all that it was given before is done.
  /// What is pushed later is announced when they are there; until a stream has joined, they must stay as they
  /// are. Returns and throws as push().
  WaitStatus bring(const std::vector<GpuTensor>& tensors, cuda::StreamHandle stream);
  /// Contributes tensors as `stream` has computed them when all that it was given before is done. They must
  /// stay as they are, and allocated, until a stream has joined.
  /// @returns kDone, also where results are never to come; else what has failed, and nothing was contributed.
  /// @throws cuda::Error if `stream` is captured into a CUDA graph, std::invalid_argument for a tensor that
  /// does not exist.
  WaitStatus push(const std::vector<GpuTensor>& tensors, cuda::StreamHandle stream);
  /// Length of the next batch. What push() is given at once is cut into batches of their lengths, tensors
  /// too, so that the first shards of a large one come back while the last ones are on their way.
  std::size_t batchBytes() const noexcept;
  /// Has what `stream` is given from now on wait for all results of what was pushed, which ends a step.
  WaitStatus join(cuda::StreamHandle stream);
  /// Has the workers reduce some shards by NCCL from the next push on; nullptr for none. All workers call it
  /// alike, and have set the path flags of the shards in the client. @pre all results of what was pushed are
  /// there.
  /// @param slots where the GPU of the worker sees them, for tensors that lie there; else 0.
  void useOwnPath(std::shared_ptr<GpuOwnPath> ownPath, cuda::DeviceAddress slots);
  /// Waits until NCCL has done what it was given in the steps that were joined, or something has failed.
  WaitStatus waitForOwnPath();
  /// What has failed so far; kDone if nothing has. @throws nccl::Error if that is NCCL.
  WaitStatus status() const;
  /// Counts what was pushed, for hasBrought(); wraps around.
  std::uint32_t numPushed() const;
  /// Whether everything is in its slot that was pushed when numPushed() was `count`: its memory may change.
  bool hasBrought(std::uint32_t count) const noexcept;

 private:
  /// Some shards of a tensor.
  struct Piece {
    ShardRange shards;
    std::uint8_t flags = 0;
    std::size_t numBytes = 0;
    std::byte* slot = nullptr;
    const std::byte* result = nullptr;
    const MappedMemory* resultMemory = nullptr;  // where that lies
    cuda::DeviceAddress source = 0;
    cuda::DeviceAddress destination = 0;
  };
  /// What is told, and comes back, together.
  struct Batch {
    std::uint32_t number = 0;  // from 1, wraps around
    std::vector<Piece> pieces;
  };
  using SharedBatch = std::shared_ptr<const Batch>;
  using SomeEvent = std::unique_ptr<cuda::Event>;
  /// A batch whose results no stream has been told to copy, and the event that marks it as brought.
  struct Unfetched {
    SharedBatch batch;
    SomeEvent brought;
  };
  /// What NCCL is to do in a step.
  struct OwnStep {
    std::uint32_t number = 0;     // from 1, wraps around
    std::uint32_t lastBatch = 0;  // of the step: when it has been brought, NCCL alone is waited for
  };
  /// How far GPU and thread are; each counts batches for the other.
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

  // In the caller's thread.
  void pin(const MappedMemory& memory);
  void tryWords();
  WaitStatus follow(cuda::StreamHandle stream);
  std::vector<Batch> cut(const std::vector<GpuTensor>& tensors);
  /// Whether the GPU of the transfers has that memory mapped for itself.
  bool isReached(const MappedMemory& memory) const noexcept {
    return memory.gpu->handle() == context_->handle();
  }
  bool isOwn(std::uint32_t shard) const noexcept { return ownPath_ != nullptr && ownPath_->has(shard); }
  WaitStatus takeOwn(const std::vector<GpuTensor>& tensors);
  void setGiving(bool isGiving);
  void joinOwn(cuda::StreamHandle stream);
  Piece pieceOf(const GpuTensor& tensor, std::uint32_t firstShard, const ShardRange& shards) const;
  void bring(const Piece& piece);
  SomeEvent markBrought();
  void followPush(SomeEvent brought);
  void fetch(const Batch& batch);

  // In the thread.
  void run();
  void work();
  bool announceBrought();
  bool releaseReturned();
  bool releaseSummed();
  void checkOwnPath();
  void failByNccl(const nccl::Error& error);
  std::shared_ptr<GpuOwnPath> ownPath() const;
  WaitStatus checkProgress();
  void fail(WaitStatus status, std::string ownFailure = {});

  Client& client_;
  const GpuTransfersConfig config_;
  const GroupPlan& plan_;
  cuda::SharedContext context_;
  MappedMemory slots_, results_;
  std::deque<cuda::HostRegistration> pinned_;  // until close()
  PinnedWords words_;
  cuda::Stream pushStream_, pullStream_;
  cuda::Event computed_, fetched_;
  std::deque<Unfetched> unfetched_;
  std::vector<SomeEvent> idleEvents_;
  std::size_t stepBytes_ = 0;         // of all tensors
  std::size_t leftBytes_ = 0;         // of those that were not pushed in this step
  cuda::DeviceAddress ownSlots_ = 0;  // where this GPU sees its slots
  std::uint32_t numOwnSteps_ = 0;

  mutable std::mutex mutex_;  // guards what follows, up to the next comment
  std::condition_variable hasWork_;
  std::deque<SharedBatch> pushed_;  // and not announced
  std::uint32_t lastNumber_ = 0;
  WaitStatus failure_ = WaitStatus::kDone;
  std::string ownFailure_;               // NCCL's, if it was first
  std::shared_ptr<GpuOwnPath> ownPath_;  // written by the caller, who reads it without the lock
  std::deque<OwnStep> ownSteps_;         // that were joined, and which NCCL has not done
  bool isGiving_ = false;                // the caller is in a call of NCCL's
  std::uint32_t numGivings_ = 0;         // of these, so far
  bool isStopping_ = false;

  // Of the thread alone.
  std::deque<SharedBatch> announced_;  // and without results
  AttendedClock clock_;
  Clock::time_point progressedAt_{}, givingSince_{};
  std::uint32_t givingSeen_ = 0;  // which one that was

  std::unique_ptr<std::thread> thread_;  // last: all else is there when it starts
};

}  // namespace coarse
