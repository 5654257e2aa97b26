#include "coarse/tensors/tensor_group.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace coarse {
namespace {

std::uint32_t pieceBegin(std::uint32_t numElements, std::size_t piece, std::size_t count) noexcept {
  if (piece == count) return numElements;
  const std::uint64_t begin = std::uint64_t{numElements} * piece / count;
  return static_cast<std::uint32_t>(begin / kCacheLineBytes * kCacheLineBytes);
}

bool isFloating(DType dtype) noexcept {
  return dtype == DType::kFloat32 || dtype == DType::kFloat64 || dtype == DType::kBFloat16 ||
         dtype == DType::kFloat16;
}

}  // namespace

ShardPiece pieceOf(std::uint32_t numElements, std::size_t piece, std::size_t count) noexcept {
  return {pieceBegin(numElements, piece, count), pieceBegin(numElements, piece + 1, count)};
}

void GroupPlan::validate() const {
  if (numStates > kMostStates || (numStates > 0 && !hasOptimizer)) {
    throw std::invalid_argument("an optimizer keeps at most " + std::to_string(kMostStates) +
                                " states per parameter, not " + std::to_string(numStates));
  }
  if (!rowElements.empty() && rowElements.size() != numTensors())
    throw std::invalid_argument("every tensor needs the length of its rows, or none has one");
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const Shard& shard = shards[i];
    const std::size_t itemSize = shard.isDynamic ? 1 : itemBytes(shard.dtype);
    const std::size_t end = shard.offset + shard.numElements * itemSize;
    if (i > 0 && shard.tensor < shards[i - 1].tensor)
      throw std::invalid_argument("shard " + std::to_string(i) + " is not in the order of the tensors");
    if (isTable(shard)) {
      validateTable(shard);
    } else if (end > slotBytes || shard.offset > slotBytes || shard.offset % itemSize != 0) {
      throw std::invalid_argument("shard " + std::to_string(i) + " ends at byte " + std::to_string(end) +
                                  " of slots of " + std::to_string(slotBytes) + " bytes");
    }
    if (hasOptimizer && (!isUpdatable(shard.dtype) || shard.op != ReduceOp::kMean || shard.isDynamic)) {
      throw std::invalid_argument("shard " + std::to_string(i) +
                                  " has an optimizer: only means of float32, bfloat16 and float16 can update "
                                  "a parameter");
    }
  }
}

void GroupPlan::validateTable(const Shard& shard) const {
  const auto refuse = [&](const std::string& what) {
    throw std::invalid_argument("table " + std::to_string(shard.tensor) + ": " + what);
  };
  if (shard.numElements % rowElements[shard.tensor] != 0) refuse("shards are whole rows");
  if (shard.isDynamic || shard.op == ReduceOp::kMax || !isFloating(shard.dtype))
    refuse("only sums and means of floating-point numbers travel as rows");
  if (shard.algorithm != Algorithm::kDirect && shard.algorithm != Algorithm::kGather)
    refuse("rows are reduced in coherent memory only; choose the algorithm auto, direct or gather");
}

std::vector<RowTable> GroupPlan::rowTables() const {
  if (rowElements.empty()) return {};
  std::vector<RowTable> tables(numTensors());
  for (const Shard& shard : shards) {
    if (!isTable(shard)) continue;
    RowTable& table = tables[shard.tensor];
    table.rowElements = rowElements[shard.tensor];
    table.rowBytes = table.rowElements * itemBytes(shard.dtype);
    table.numRows += shard.numElements / table.rowElements;
  }
  std::size_t offset = 0;
  for (RowTable& table : tables) {
    if (table.rowElements == 0) continue;
    table.offset = offset;
    offset += RowBuffer::ArrayPlaces(table.numRows, table.rowBytes).end;
  }
  return tables;
}

std::size_t GroupPlan::rowsBytes() const {
  std::size_t end = 0;
  for (const RowTable& table : rowTables()) {
    if (table.rowElements > 0) end = table.offset + RowBuffer::ArrayPlaces(table.numRows, table.rowBytes).end;
  }
  return end;
}

std::vector<KeptArrays> GroupPlan::keptArrays() const {
  if (!hasOptimizer) return {};
  std::vector<KeptArrays> arrays(numTensors());
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const Shard& shard = shards[i];
    KeptArrays& tensor = arrays[shard.tensor];
    if (i == 0 || shard.tensor != shards[i - 1].tensor) tensor.slotOffset = shard.offset;
    tensor.numArrays = numStates + (hasMaster(shard) ? 1 : 0);
    const std::size_t end = (shard.offset - tensor.slotOffset) / itemBytes(shard.dtype) + shard.numElements;
    tensor.arrayBytes = roundUp(end * sizeof(float), kCacheLineBytes);
    tensor.parameterBytes = roundUp(end * itemBytes(shard.dtype), kCacheLineBytes);
  }
  std::uint64_t offset = 0, parameterOffset = 0;
  for (KeptArrays& tensor : arrays) {
    tensor.offset = offset;
    offset += tensor.numArrays * tensor.arrayBytes;
    tensor.parameterOffset = parameterOffset;
    parameterOffset += tensor.parameterBytes;
  }
  return arrays;
}

std::size_t GroupPlan::parameterBytes() const {
  const std::vector<KeptArrays> arrays = keptArrays();
  return arrays.empty() ? 0 : arrays.back().parameterOffset + arrays.back().parameterBytes;
}

std::size_t GroupPlan::keptBytes() const {
  const std::vector<KeptArrays> arrays = keptArrays();
  return arrays.empty() ? 0 : arrays.back().offset + arrays.back().numArrays * arrays.back().arrayBytes;
}

TensorGroup::TensorGroup(GroupPlan plan, int controlFd, const std::vector<Region>& slots,
                         const OptimizerFds& optimizerFds, const std::vector<int>& rowsFds,
                         std::shared_ptr<const TensorMemory> memory)
    : plan_(std::move(plan)), memory_(std::move(memory)), isLost_(plan_.numClients) {
  plan_.validate();
  if (slots.size() != plan_.numClients)
    throw std::invalid_argument("a tensor group needs the slots of every client");
  const std::size_t numShards = plan_.shards.size();
  controlMapping_ = mapSealed(controlFd, GroupControl::numBytes(numShards, plan_.numClients, plan_.numRanks),
                              Mapping::Access::kReadWrite, "group control");
  control_ = GroupControl(controlMapping_.data(), numShards, plan_.numClients, plan_.numRanks);
  for (const Region& region : slots) slots_.push_back(memory_->map(region, plan_.clientBytes(), "slots"));
  mapRows(rowsFds);
  if (plan_.hasOptimizer) mapOptimizer(optimizerFds);
}

void TensorGroup::mapOptimizer(const OptimizerFds& fds) {
  if (fds.settings.size() != plan_.numClients)
    throw std::invalid_argument("a tensor group with an optimizer needs the settings of every client");
  for (const int fd : fds.settings)
    settings_.push_back(mapSealed(fd, plan_.settingsBytes(), Mapping::Access::kReadOnly, "settings"));
  kept_ = plan_.keptArrays();
  if (fds.replica.control >= 0) {
    if (!tables_.empty())
      throw std::invalid_argument("tables have no replica: their updates change few rows");
    replica_ = std::make_unique<Replica>(plan_, *memory_, fds.replica);
  }
  if (fds.parameters.fd < 0) return;
  parameters_ = memory_->map(fds.parameters, plan_.parameterBytes(), "parameters");
  if (const std::size_t keptBytes = plan_.keptBytes(); keptBytes > 0)
    states_ = memory_->map(fds.states, keptBytes, "states");
  if (fds.snapshots.control >= 0 && fds.snapshots.hasPool())
    snapshots_ = std::make_shared<GroupSnapshots>(plan_, parameters_.get(), states_.get(), fds.snapshots);
  if (fds.undo.control >= 0) {
    if (!tables_.empty() || replica_ != nullptr)
      throw std::invalid_argument("neither tables nor groups with a replica undo a step");
    undoLog_ = std::make_unique<UndoLog>(plan_, *memory_, fds.undo);
  }
}

void TensorGroup::mapRows(const std::vector<int>& fds) {
  tables_ = plan_.rowTables();
  if (tables_.empty()) return;
  if (fds.size() != plan_.numClients)
    throw std::invalid_argument("a group with tables needs the rows of every client");
  std::uint64_t next = 0;
  for (std::size_t i = 0; i < plan_.shards.size(); ++i) {
    if (i > 0 && plan_.shards[i].tensor != plan_.shards[i - 1].tensor) next = 0;
    firstElements_.push_back(next);
    next += plan_.shards[i].numElements;
  }
  for (const int fd : fds)
    rows_.push_back(mapSealed(fd, plan_.rowsBytes(), Mapping::Access::kReadWrite, "rows"));
}

std::size_t TensorGroup::stateOffset(const Shard& shard, std::size_t number) const noexcept {
  const KeptArrays& kept = kept_[shard.tensor];
  const std::size_t element = (shard.offset - kept.slotOffset) / itemBytes(shard.dtype);
  return kept.offset + number * kept.arrayBytes + element * sizeof(float);
}

std::vector<KeptPart> TensorGroup::partsOf(std::uint32_t shardIndex) const {
  const Shard& shard = plan_.shards[shardIndex];
  std::vector<KeptPart> parts{{false, parameterOffset(shard), shard.numElements * itemBytes(shard.dtype)}};
  for (std::size_t i = 0; i < numKeptArrays(shard); ++i)
    parts.push_back({true, stateOffset(shard, i), shard.numElements * sizeof(float)});
  return parts;
}

std::size_t TensorGroup::partBytes(std::uint32_t shardIndex) const noexcept {
  const Shard& shard = plan_.shards[shardIndex];
  return shard.numElements * (itemBytes(shard.dtype) + numKeptArrays(shard) * sizeof(float));
}

void TensorGroup::forget(const std::vector<std::size_t>& lostClients) {
  for (const std::size_t client : lostClients) isLost_[client].store(true, std::memory_order_release);
  noteFirstClient();
}

void TensorGroup::remember(std::size_t client) {
  isLost_[client].store(false, std::memory_order_release);
  noteFirstClient();
}

void TensorGroup::noteFirstClient() noexcept {
  std::size_t first = 0;
  while (first < plan_.numClients && isLost(first)) ++first;
  firstClient_.store(first, std::memory_order_release);
}

std::size_t TensorGroup::firstClient(std::uint32_t shard) const noexcept {
  for (std::size_t client = firstClient(); client < plan_.numClients; ++client) {
    if (!isAbsent(shard, client)) return client;
  }
  return firstContributor(shard);
}

std::size_t TensorGroup::firstContributor(std::uint32_t shard) const noexcept {
  std::size_t client = 0;
  while (client < plan_.numClients && isStandIn(shard, client)) ++client;
  return client == plan_.numClients ? 0 : client;
}

void TensorGroup::moveToReplica() {
  snapshots_.reset();  // of the previous memory
  parameters_ = replica_->parameters();
  states_ = replica_->states();
}

ShardShape TensorGroup::shape(std::uint32_t shard) const noexcept {
  const Shard& plan = plan_.shards[shard];
  if (!plan.isDynamic) return {plan.numElements, plan.dtype, plan.op};
  // All contributions agree, including those of clients that only receive.
  const Contribution& contribution = control_.contribution(shard, 0);
  return {contribution.numElements, static_cast<DType>(contribution.dtype),
          static_cast<ReduceOp>(contribution.op)};
}

bool TensorGroup::isPresent(std::uint32_t shard, std::size_t client) const noexcept {
  return (control_.contribution(shard, client).flags & kPresent) != 0;
}

bool TensorGroup::usesDirectAllReduce(std::uint32_t shard) const noexcept {
  return (directAllReduceFlags(shard) & kDirectAllReduce) != 0;
}

std::string TensorGroup::describeTensor(std::uint32_t shard) const {
  return "tensor #" + std::to_string(plan_.id) + "/" + std::to_string(plan_.shards[shard].tensor);
}

bool TensorGroup::isByNccl(std::uint32_t shard) const noexcept {
  return (directAllReduceFlags(shard) & kByNccl) == kByNccl;
}

std::uint8_t TensorGroup::directAllReduceFlags(std::uint32_t shard) const noexcept {
  return control_.contribution(shard, 0).flags & kDirectAllReduceFlags;
}

std::uint32_t TensorGroup::numCounted(std::uint32_t shard) const noexcept {
  std::uint32_t count = 0;
  for (std::size_t client = 0; client < plan_.numClients; ++client) {
    if ((control_.contribution(shard, client).flags & kJoined) == 0) ++count;
  }
  return count;
}

std::uint32_t TensorGroup::divisor(std::uint32_t shard) const noexcept {
  return std::max(numCounted(shard), 1U);
}

bool TensorGroup::isUpdate(std::uint32_t shard) const noexcept {
  return (control_.contribution(shard, 0).flags & kUpdate) != 0;
}

bool TensorGroup::isMeasured(std::uint32_t shard) const noexcept {
  return (control_.contribution(shard, 0).flags & kMeasure) != 0;
}

bool TensorGroup::isReduced(std::uint32_t shard) const noexcept {
  return (control_.contribution(shard, 0).flags & kReduced) != 0;
}

UpdateSettings TensorGroup::settings(std::uint32_t shard, std::size_t client) const noexcept {
  UpdateSettings copy;
  std::memcpy(&copy, settings_[client].data() + plan_.shards[shard].tensor * sizeof(UpdateSettings),
              sizeof(UpdateSettings));
  return copy;
}

std::uint32_t TensorGroup::numPresent(std::uint32_t shard) const noexcept {
  std::uint32_t count = 0;
  for (std::size_t client = 0; client < plan_.numClients; ++client) count += isPresent(shard, client) ? 1 : 0;
  return count;
}

}  // namespace coarse
