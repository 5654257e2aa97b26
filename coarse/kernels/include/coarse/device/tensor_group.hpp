#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "coarse/recovery/replica.hpp"
#include "coarse/recovery/undo_log.hpp"
#include "coarse/reduce/dtype.hpp"
#include "coarse/reduce/reduce.hpp"
#include "coarse/reduce/row_buffer.hpp"
#include "coarse/reduce/update.hpp"
#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/shared_memory.hpp"
#include "coarse/shared_memory/tensor_memory.hpp"
#include "coarse/snapshot/group_snapshots.hpp"

namespace coarse {

/// How the contributions to a shard become its result.
enum class Algorithm : std::uint8_t {
  kGather =
      0,  // the device where the last contribution arrives reduces the whole tensor at once: lowest latency
  kDirect = 1,    // any free sync core of any device takes the shard; needs coherent shared memory
  kRing = 2,      // the sync cores of all devices pass chunks around (paper, section IV-A)
  kExchange = 3,  // each device reduces pieces, of which it fetches the contributions that others hold
  kProbe = 4,     // nothing is reduced: a range of memory through which links are measured
  kNccl = 5,      // NCCL adds up what each device has added up of its own clients' contributions
};

/// A piece of a tensor, or a whole small one: the unit of synchronisation. The same on all workers and
/// devices.
struct Shard {
  std::uint32_t tensor = 0;
  std::uint32_t numElements = 0;  // of a dynamic shard: bytes it can hold
  // Bytes from the start of a client's slots, a multiple of the item size. Tables have no slots: theirs go on
  // behind.
  std::uint64_t offset = 0;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kMean;
  Algorithm algorithm = Algorithm::kDirect;
  bool isDynamic =
      false;  // length, dtype and op come with each contribution: buffers that are not registered
};

/// Where the parameter of one tensor lies in the segment of all parameters, and the float32 arrays that an
/// optimizer keeps for it in the segment that has those of all.
struct KeptArrays {
  std::uint64_t slotOffset = 0;       // of the tensor
  std::uint64_t parameterOffset = 0;  // of the parameter
  std::uint64_t offset = 0;           // of the first array
  std::size_t parameterBytes = 0;     // of the parameter, in whole cache lines
  std::size_t arrayBytes = 0;         // from one array to the next
  std::size_t numArrays = 0;
};

/// Piece `piece` of `numElements` cut into `count`. Pieces end at cache lines of the smallest type, so that
/// no two who reduce one each write the same line.
ShardPiece pieceOf(std::uint32_t numElements, std::size_t piece, std::size_t count) noexcept;

/// The shards of the tensors that were registered together.
struct GroupPlan {
  std::uint32_t id = 0;
  std::size_t numClients = 0;
  std::size_t slotBytes = 0;  // of one client; tensors may share them where there is an optimizer
  std::vector<Shard> shards;
  bool hasOptimizer = false;  // parameters and states lie in device memory, and shards can update them
  std::size_t numStates = 0;  // state tensors per parameter
  // Of each tensor: the length of its rows if it is a table, else 0. Empty where there is no table.
  std::vector<std::uint32_t> rowElements;

  std::size_t numTensors() const noexcept {
    return shards.empty() ? 0 : shards.back().tensor + std::size_t{1};
  }
  /// Length of the segment with one client's slots, which is never empty.
  std::size_t clientBytes() const noexcept { return std::max(slotBytes, kCacheLineBytes); }
  /// Length of one client's settings for all tensors.
  std::size_t settingsBytes() const noexcept {
    return hasOptimizer ? numTensors() * sizeof(UpdateSettings) : 0;
  }
  /// Whether master weights are kept for a shard's parameter.
  bool hasMaster(const Shard& shard) const noexcept { return hasOptimizer && shard.dtype != DType::kFloat32; }
  /// Where the float32 arrays of each tensor lie: its states, then its master weights if it has some.
  std::vector<KeptArrays> keptArrays() const;
  bool isTable(const Shard& shard) const noexcept {
    return !rowElements.empty() && rowElements[shard.tensor] > 0;
  }
  /// Where the rows of each tensor lie that is a table; empty where there is none.
  std::vector<RowTable> rowTables() const;
  /// Length of the sparse segment with the rows of one client; 0 without tables.
  std::size_t rowsBytes() const;
  /// Length of all parameters.
  std::size_t parameterBytes() const;
  /// Length of the float32 arrays of all tensors.
  std::size_t keptBytes() const;

  /// @throws std::invalid_argument if a shard leaves the slots or is misaligned.
  void validate() const;

 private:
  void validateTable(const Shard& shard) const;
};

/// What a shard is in this very step: the plan's numbers, or those of the contributions of a dynamic shard.
struct ShardShape {
  std::uint32_t numElements = 0;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kMean;
};

/// What the devices and workers of a node share beside the slots of a group that has an optimizer.
/// Descriptors stay the caller's.
struct OptimizerFds {
  std::vector<int> settings{};  // of each client, GroupPlan::settingsBytes() of host memory
  Region parameters = -1;       // GroupPlan::parameterBytes(), in the memory of the slots; none, and nothing
                                // of what follows, where another device makes all updates
  Region states = -1;           // GroupPlan::keptBytes(), likewise; none where that is 0
  SnapshotFds snapshots{};      // of parameters and states; none without snapshots
  ReplicaFds replica{};         // likewise; none without a replica
  UndoFds undo{};               // likewise; none where a step that was begun can be finished
};

/// Where parameters and states of a group lie, or copies of them that are laid out alike.
struct KeptMemory {
  std::byte* parameters = nullptr;
  std::byte* states = nullptr;
};

/// One of the arrays that an optimizer keeps for a shard.
struct KeptPart {
  bool isState = false;
  std::size_t offset = 0;
  std::size_t numBytes = 0;
  std::byte* in(const KeptMemory& memory) const noexcept {
    return (isState ? memory.states : memory.parameters) + offset;
  }
};

/// A tensor group as one memory device holds it: shared state and the slots of every client.
class TensorGroup {
 public:
  /// Maps `controlFd` and the slots of every client, which are of `memory`; descriptors stay the caller's.
  /// @throws std::invalid_argument if memory is not sealed, and no device's, or too small; as
  /// TensorMemory::map().
  /// @param rowsFds one per client, of GroupPlan::rowsBytes(), sealed; none without tables.
  TensorGroup(GroupPlan plan, int controlFd, const std::vector<Region>& slots,
              const OptimizerFds& optimizerFds = {}, const std::vector<int>& rowsFds = {},
              std::shared_ptr<const TensorMemory> memory = hostMemory());

  const GroupPlan& plan() const noexcept { return plan_; }
  /// Where slots, parameters and states lie.
  const TensorMemory& memory() const noexcept { return *memory_; }
  const GroupControl& control() const noexcept { return control_; }
  std::byte* parameters() const noexcept { return parameters_.get(); }
  std::byte* states() const noexcept { return states_.get(); }
  KeptMemory kept() const noexcept { return {parameters(), states()}; }
  std::byte* slot(std::size_t client, const Shard& shard) const noexcept {
    return slots_[client].get() + shard.offset;
  }
  /// The table that a shard is of. @pre plan().isTable().
  const RowTable& table(std::uint32_t shard) const noexcept { return tables_[plan_.shards[shard].tensor]; }
  RowBuffer rows(std::size_t client, const RowTable& table) const noexcept {
    return {rows_[client].data() + table.offset, table.numRows, table.rowBytes};
  }
  /// Of the tensor that it is a piece of: where a shard begins. @pre as for table().
  std::uint64_t firstElement(std::uint32_t shard) const noexcept { return firstElements_[shard]; }
  /// @pre all contributions to `shard` have arrived and agree.
  ShardShape shape(std::uint32_t shard) const noexcept;
  bool isPresent(std::uint32_t shard, std::size_t client) const noexcept;
  /// Whether the workers reduce the shard themselves. @pre all contributions have arrived and agree.
  bool isOnOwnPath(std::uint32_t shard) const noexcept;
  /// On their own path, whether they do it by NCCL between their GPUs.
  bool isByNccl(std::uint32_t shard) const noexcept;
  /// Those of kPathFlags. @pre all contributions have arrived and agree.
  std::uint8_t pathFlags(std::uint32_t shard) const noexcept;
  /// The memory device that took the client's contribution.
  std::size_t deviceOf(std::uint32_t shard, std::size_t client) const noexcept {
    return control_.contribution(shard, client).device;
  }
  /// Number of clients that share in a mean: those that have not run out of inputs.
  std::uint32_t numCounted(std::uint32_t shard) const noexcept;
  /// The same, but 1 at least.
  std::uint32_t divisor(std::uint32_t shard) const noexcept;
  std::uint32_t numPresent(std::uint32_t shard) const noexcept;
  /// Whether the shard's contributions update its parameter. @pre all have arrived and agree.
  bool isUpdate(std::uint32_t shard) const noexcept;
  /// Whether the shard's mean is to be measured. @pre as for isUpdate().
  bool isMeasured(std::uint32_t shard) const noexcept;
  /// Whether the slots of an update hold the mean already. @pre as for isUpdate().
  bool isReduced(std::uint32_t shard) const noexcept;
  /// What `client` says of the tensor that `shard` is of; copied out of memory that the client can write.
  UpdateSettings settings(std::uint32_t shard, std::size_t client) const noexcept;
  /// What all say of it, if they agree.
  UpdateSettings settings(std::uint32_t shard) const noexcept { return settings(shard, firstClient()); }
  std::byte* parameter(const Shard& shard) const noexcept {
    return parameters_.get() + parameterOffset(shard);
  }
  float* state(const Shard& shard, std::size_t number) const noexcept {
    return reinterpret_cast<float*>(states_.get() + stateOffset(shard, number));
  }
  /// Of a shard all that the optimizer keeps. @pre there is an optimizer, and this device has its memory.
  std::vector<KeptPart> partsOf(std::uint32_t shard) const;
  /// The bytes of all of these.
  std::size_t partBytes(std::uint32_t shard) const noexcept;
  /// @pre plan().hasMaster(shard).
  float* master(const Shard& shard) const noexcept { return state(shard, plan_.numStates); }
  /// From now on slots and settings of these clients are looked at no more: they went with a memory device.
  /// @pre no worker and no sync core of any device uses the group any more.
  void forget(const std::vector<std::size_t>& lostClients);
  bool isLost(std::size_t client) const noexcept { return isLost_[client]; }
  /// The first one that is not lost; plan().numClients if all are.
  std::size_t firstClient() const noexcept { return firstClient_; }
  /// From now on what the replica has is what the optimizer keeps. @pre as for forget(); there is one here.
  void moveToReplica();
  /// Null without an optimizer or snapshots of what it keeps.
  GroupSnapshots* snapshots() const noexcept { return snapshots_.get(); }
  const std::shared_ptr<GroupSnapshots>& sharedSnapshots() const noexcept { return snapshots_; }
  /// Null without one.
  Replica* replica() const noexcept { return replica_.get(); }
  /// Null without one.
  UndoLog* undoLog() const noexcept { return undoLog_.get(); }
  /// To be called before the parameter and the states of a shard change.
  void keepBefore(std::uint32_t shard) const {
    if (snapshots_ != nullptr) snapshots_->keep(shard);
    if (undoLog_ != nullptr) undoLog_->keep(*this, shard);
  }
  /// The same for several, whose copies run together.
  void keepBefore(const std::vector<std::uint32_t>& shards) const {
    if (snapshots_ != nullptr) snapshots_->keep(shards);
    if (undoLog_ != nullptr) undoLog_->keep(*this, shards.data(), shards.size());
  }

 private:
  void mapRows(const std::vector<int>& fds);
  void mapOptimizer(const OptimizerFds& fds);
  std::size_t parameterOffset(const Shard& shard) const noexcept {
    const KeptArrays& kept = kept_[shard.tensor];
    return kept.parameterOffset + (shard.offset - kept.slotOffset);
  }
  std::size_t stateOffset(const Shard& shard, std::size_t number) const noexcept;
  std::size_t numKeptArrays(const Shard& shard) const noexcept {
    return plan_.numStates + (plan_.hasMaster(shard) ? 1 : 0);
  }

  GroupPlan plan_;
  std::shared_ptr<const TensorMemory> memory_;
  Mapping controlMapping_;
  GroupControl control_;
  std::vector<TensorBytes> slots_;
  std::vector<RowTable> tables_;              // by tensor; these three are empty without tables
  std::vector<std::uint64_t> firstElements_;  // by shard
  std::vector<Mapping> rows_;
  std::vector<Mapping> settings_;  // of each client
  TensorBytes parameters_;
  TensorBytes states_;
  std::vector<KeptArrays> kept_;  // by tensor
  std::vector<bool> isLost_;      // by client
  std::size_t firstClient_ = 0;
  std::shared_ptr<GroupSnapshots> snapshots_;
  std::unique_ptr<Replica> replica_;
  std::unique_ptr<UndoLog> undoLog_;
};

}  // namespace coarse
