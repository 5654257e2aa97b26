#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "coarse/reduce/dtype.hpp"
#include "coarse/reduce/reduce.hpp"
#include "coarse/reduce/row_buffer.hpp"
#include "coarse/reduce/update.hpp"
#include "coarse/shared_memory/layout.hpp"
#include "coarse/shared_memory/shared_memory.hpp"
#include "coarse/tensors/group_snapshots.hpp"
#include "coarse/tensors/replica.hpp"
#include "coarse/tensors/tensor_memory.hpp"
#include "coarse/tensors/undo_log.hpp"

namespace coarse {

/// How the contributions to a shard become its result.
enum class Algorithm : std::uint8_t {
  kGather =
      0,  // the device where the last contribution arrives reduces the whole tensor at once: lowest latency
  kDirect = 1,    // any free sync core of any device takes the shard; needs coherent shared memory
  kRing = 2,      // the sync cores of all devices pass chunks around (paper, section IV-A)
  kExchange = 3,  // each device reduces pieces, and fetches other devices' contributions to them
  kProbe = 4,     // no reduction: a memory range through which links are measured
  kNccl = 5,      // each device sums its own clients' contributions, and NCCL sums the results
};

/// A piece of a tensor, or a whole small one: the unit of synchronisation. Identical on all workers and
/// devices.
struct Shard {
  std::uint32_t tensor = 0;
  std::uint32_t numElements = 0;  // for a dynamic shard: its capacity in bytes
  // Bytes from the start of a client's slots, a multiple of the item size. Tables have no slots: their
  // offsets continue after the last slot.
  std::uint64_t offset = 0;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kMean;
  Algorithm algorithm = Algorithm::kDirect;
  bool isDynamic =
      false;  // each contribution brings its length, dtype and op; used for buffers that are not registered
};

/// The places of one tensor's parameter, in the segment of all parameters, and of the float32 arrays that an
/// optimizer keeps for it, in the segment of all such arrays.
struct KeptArrays {
  std::uint64_t slotOffset = 0;       // of the tensor
  std::uint64_t parameterOffset = 0;  // of the parameter
  std::uint64_t offset = 0;           // of the first array
  std::size_t parameterBytes = 0;     // of the parameter, in whole cache lines
  std::size_t arrayBytes = 0;         // from one array to the next
  std::size_t numArrays = 0;
};

/// Piece `piece` of `numElements` cut into `count`. Pieces end at cache lines of the smallest type, so that
/// two threads that each reduce one never write the same line.
ShardPiece pieceOf(std::uint32_t numElements, std::size_t piece, std::size_t count) noexcept;

/// The shards of the tensors that were registered together.
struct GroupPlan {
  std::uint32_t id = 0;
  std::size_t numClients = 0;
  // Workers of all nodes, if there are several and they go on without lost ones; else 0.
  std::size_t numRanks = 0;
  std::size_t slotBytes = 0;  // of one client; tensors may share slots if the group has an optimizer
  std::vector<Shard> shards;
  bool hasOptimizer = false;  // parameters and states lie in device memory, and shards can update them
  std::size_t numStates = 0;  // state tensors per parameter
  bool areGradients = false;  // their means may be compressed between nodes
  // For each tensor: the length of its rows if it is a table, else 0. Empty without tables.
  std::vector<std::uint32_t> rowElements;

  std::size_t numTensors() const noexcept {
    return shards.empty() ? 0 : shards.back().tensor + std::size_t{1};
  }
  /// Length of the segment with one client's slots; never 0.
  std::size_t clientBytes() const noexcept { return std::max(slotBytes, kCacheLineBytes); }
  /// Length of one client's settings for all tensors.
  std::size_t settingsBytes() const noexcept {
    return hasOptimizer ? numTensors() * sizeof(UpdateSettings) : 0;
  }
  /// Whether the group keeps master weights for a shard's parameter.
  bool hasMaster(const Shard& shard) const noexcept { return hasOptimizer && shard.dtype != DType::kFloat32; }
  /// The places of each tensor's float32 arrays: its states, then its master weights if it has any.
  std::vector<KeptArrays> keptArrays() const;
  bool isTable(const Shard& shard) const noexcept {
    return !rowElements.empty() && rowElements[shard.tensor] > 0;
  }
  /// The places of the rows of each table; empty without tables.
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

/// A shard's shape in the current step: from the plan, or from the contributions to a dynamic shard.
struct ShardShape {
  std::uint32_t numElements = 0;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kMean;
};

/// The memory, besides slots, that the devices and workers of a node share for a group with an optimizer. The
/// caller closes the descriptors.
struct OptimizerFds {
  std::vector<int> settings{};  // of each client, GroupPlan::settingsBytes() of host memory
  Region parameters = -1;       // GroupPlan::parameterBytes(), in the memory of the slots; absent, with all
                                // that follows, if another device makes all updates
  Region states = -1;           // GroupPlan::keptBytes(), likewise; absent if that is 0
  SnapshotFds snapshots{};      // of parameters and states; absent without snapshots
  ReplicaFds replica{};         // likewise; absent without a replica
  UndoFds undo{};               // likewise; absent if no begun step can be finished
};

/// The places of a group's parameters and states, or of copies with the same layout.
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

/// A tensor group in one memory device: shared state and the slots of every client.
class TensorGroup {
 public:
  /// Maps `controlFd` and the slots of every client, which lie in `memory`; the caller closes the
  /// descriptors.
  /// @throws std::invalid_argument if memory is too small, or neither sealed nor a device's; as
  /// TensorMemory::map().
  /// @param rowsFds one per client, of GroupPlan::rowsBytes(), sealed; empty without tables.
  TensorGroup(GroupPlan plan, int controlFd, const std::vector<Region>& slots,
              const OptimizerFds& optimizerFds = {}, const std::vector<int>& rowsFds = {},
              std::shared_ptr<const TensorMemory> memory = hostMemory());

  const GroupPlan& plan() const noexcept { return plan_; }
  /// The memory of slots, parameters and states.
  const TensorMemory& memory() const noexcept { return *memory_; }
  const GroupControl& control() const noexcept { return control_; }
  std::byte* parameters() const noexcept { return parameters_.get(); }
  std::byte* states() const noexcept { return states_.get(); }
  KeptMemory kept() const noexcept { return {parameters(), states()}; }
  std::byte* slot(std::size_t client, const Shard& shard) const noexcept {
    return slots_[client].get() + shard.offset;
  }
  /// The table to which a shard belongs. @pre plan().isTable().
  const RowTable& table(std::uint32_t shard) const noexcept { return tables_[plan_.shards[shard].tensor]; }
  RowBuffer rows(std::size_t client, const RowTable& table) const noexcept {
    return {rows_[client].data() + table.offset, table.numRows, table.rowBytes};
  }
  /// The first element of a shard within its tensor. @pre as for table().
  std::uint64_t firstElement(std::uint32_t shard) const noexcept { return firstElements_[shard]; }
  /// @pre all contributions to `shard` have arrived and agree.
  ShardShape shape(std::uint32_t shard) const noexcept;
  bool isPresent(std::uint32_t shard, std::size_t client) const noexcept;
  /// Whether the workers reduce the shard themselves. @pre all contributions have arrived and agree.
  bool usesDirectAllReduce(std::uint32_t shard) const noexcept;
  /// For a shard of direct all-reduce: whether the workers use NCCL between their GPUs.
  bool isByNccl(std::uint32_t shard) const noexcept;
  /// The shard's flags among kDirectAllReduceFlags. @pre all contributions have arrived and agree.
  std::uint8_t directAllReduceFlags(std::uint32_t shard) const noexcept;
  /// For a shard of direct all-reduce, with neither kAllGather nor kAllToAll.
  Relay relay(std::uint32_t shard) const noexcept {
    return static_cast<Relay>(control_.contribution(shard, 0).op);
  }
  /// The shard's tensor in messages, as "tensor #GROUP/NUMBER"; Python knows its name.
  std::string describeTensor(std::uint32_t shard) const;
  /// The memory device that took the client's contribution.
  std::size_t deviceOf(std::uint32_t shard, std::size_t client) const noexcept {
    return control_.contribution(shard, client).device;
  }
  /// Number of clients that count in a mean: those that still have inputs.
  std::uint32_t numCounted(std::uint32_t shard) const noexcept;
  /// The same, but at least 1.
  std::uint32_t divisor(std::uint32_t shard) const noexcept;
  std::uint32_t numPresent(std::uint32_t shard) const noexcept;
  /// Whether the shard's contributions update its parameter. @pre all have arrived and agree.
  bool isUpdate(std::uint32_t shard) const noexcept;
  /// Whether the shard's mean must be measured. @pre as for isUpdate().
  bool isMeasured(std::uint32_t shard) const noexcept;
  /// Whether the slots of an update already hold the mean. @pre as for isUpdate().
  bool isReduced(std::uint32_t shard) const noexcept;
  /// The settings that `client` gives for the tensor of `shard`, copied out of memory that the client can
  /// write.
  UpdateSettings settings(std::uint32_t shard, std::size_t client) const noexcept;
  /// The settings that all clients give, if they agree.
  UpdateSettings settings(std::uint32_t shard) const noexcept { return settings(shard, firstClient(shard)); }
  std::byte* parameter(const Shard& shard) const noexcept {
    return parameters_.get() + parameterOffset(shard);
  }
  float* state(const Shard& shard, std::size_t number) const noexcept {
    return reinterpret_cast<float*>(states_.get() + stateOffset(shard, number));
  }
  /// All parts that the optimizer keeps of a shard. @pre the group has an optimizer, and this device has its
  /// memory.
  std::vector<KeptPart> partsOf(std::uint32_t shard) const;
  /// The total bytes of these parts.
  std::size_t partBytes(std::uint32_t shard) const noexcept;
  /// @pre plan().hasMaster(shard).
  float* master(const Shard& shard) const noexcept { return state(shard, plan_.numStates); }
  /// Stops reading settings and writing results of these clients, which were lost. Contributions that they
  /// have made still count. Other threads may use the group meanwhile, unless the clients' memory is lost,
  /// too.
  void forget(const std::vector<std::size_t>& lostClients);
  bool isLost(std::size_t client) const noexcept { return isLost_[client].load(std::memory_order_acquire); }
  /// Reads settings and writes results of a client that has the place of a lost one, where it contributes
  /// itself.
  void remember(std::size_t client);
  /// Whether a memory device has stood in for the client in the last step of this shard, which is not
  /// dynamic.
  /// @pre all contributions have arrived.
  bool isStandIn(std::uint32_t shard, std::size_t client) const noexcept {
    // relaxed: what a device has recorded for the step is complete.
    return !plan_.shards[shard].isDynamic &&
           __atomic_load_n(&control_.contribution(shard, client).numElements, __ATOMIC_RELAXED) != 0;
  }
  /// Whether a memory device stands in for the client at this shard, or will.
  bool isAbsent(std::uint32_t shard, std::size_t client) const noexcept {
    return isLost(client) || isStandIn(shard, client);
  }
  /// The first client that has contributed to the shard itself, also if it is lost now; 0 for a dynamic
  /// shard. It stays the same until the shard's next step. @pre all contributions have arrived.
  std::size_t firstContributor(std::uint32_t shard) const noexcept;
  /// The first client that is not lost; plan().numClients if all are.
  std::size_t firstClient() const noexcept { return firstClient_.load(std::memory_order_acquire); }
  /// The first client that contributes to the shard itself and is not lost; if there is none,
  /// firstContributor(). @pre all contributions have arrived.
  std::size_t firstClient(std::uint32_t shard) const noexcept;
  /// Uses the replica's contents as the optimizer's parameters and states from now on. @pre as for forget();
  /// this device has a replica.
  void moveToReplica();
  /// Null without an optimizer or without snapshots.
  GroupSnapshots* snapshots() const noexcept { return snapshots_.get(); }
  const std::shared_ptr<GroupSnapshots>& sharedSnapshots() const noexcept { return snapshots_; }
  /// Null without a replica.
  Replica* replica() const noexcept { return replica_.get(); }
  /// Null without an undo log.
  UndoLog* undoLog() const noexcept { return undoLog_.get(); }
  /// Call before the parameter and the states of a shard change.
  void keepBefore(std::uint32_t shard) const {
    if (snapshots_ != nullptr) snapshots_->keep(shard);
    if (undoLog_ != nullptr) undoLog_->keep(*this, shard);
  }
  /// The same for several shards, whose copies run together.
  void keepBefore(const std::vector<std::uint32_t>& shards) const {
    if (snapshots_ != nullptr) snapshots_->keep(shards);
    if (undoLog_ != nullptr) undoLog_->keep(*this, shards.data(), shards.size());
  }

 private:
  void noteFirstClient() noexcept;
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
  std::vector<RowTable> tables_;              // by tensor; the next three are empty without tables
  std::vector<std::uint64_t> firstElements_;  // by shard
  std::vector<Mapping> rows_;
  std::vector<Mapping> settings_;  // of each client
  TensorBytes parameters_;
  TensorBytes states_;
  std::vector<KeptArrays> kept_;           // by tensor
  std::vector<std::atomic<bool>> isLost_;  // by client
  std::atomic<std::size_t> firstClient_{0};
  std::shared_ptr<GroupSnapshots> snapshots_;
  std::unique_ptr<Replica> replica_;
  std::unique_ptr<UndoLog> undoLog_;
};

}  // namespace coarse
