// The kernels' parameter: one batch of shards, by value. The launching code fills a batch, and must keep only
// the arrays that it names alive.
//
//   kernel                      parameter     dtypes
//   reduce_sum_*, reduce_max_*  ReduceBatch   all; a mean is a sum with a divisor
//   ring_sum_*, ring_max_*      ReduceBatch   all
//   measure_*                   MeasureBatch  float32, bfloat16, float16
//   update_*                    UpdateBatch   float32, bfloat16, float16
//
// and hold_until, which takes a Hold (delay.cuh).
//
// * is a dtype: float32, float64, bfloat16, float16, int32, int64, uint8. Blocks have kThreads threads. The
// grid is one-dimensional and of any length: a block takes tiles until none are left, so more blocks than
// tiles, or than the GPU can run at once, gain nothing. No dynamic shared memory.
//
//   void* parameters[] = {&batch};
//   cuLaunchKernel(function, min(batch.numTiles, mostBlocks), 1, 1, kThreads, 1, 1, 0, stream, parameters,
//   nullptr);
//
// Arithmetic is that of coarse/reduce/reduce.hpp and coarse/reduce/update.hpp, to the bit.
#pragma once

#include "platform.cuh"

namespace coarse::cuda {

/// Bytes of each array that a block reduces at a time. The host's sums of squares use tiles of this length.
inline constexpr std::uint32_t kTileBytes = 8192;
/// Elements that a block updates at a time.
inline constexpr std::uint32_t kUpdateTileElements = 1024;

// A batch is a kernel parameter, for which every toolkit has 4 KiB.
inline constexpr std::uint32_t kMostArrays = 256;  // one per client that a memory device can serve
inline constexpr std::uint32_t kMostReduceShards = 60;
inline constexpr std::uint32_t kMostUpdateShards = 23;
inline constexpr std::uint32_t kMostSettings = 8;
inline constexpr std::uint16_t kNoArray = 0xffff;

/// One shard to reduce. Arrays are named by their positions in the batch; inputs and outputs may be the same,
/// or overlap in that list.
///
/// A ring's step adds the inputs to `received`, which another memory device has sent. It writes the result to
/// `sent`, for the next device, and the finished result to the outputs; any of these may be missing.
/// `received` and `sent` hold accumulators: float32 for 16-bit types, else the elements' own type. So a
/// widening has only an input and `sent`, and a narrowing has `received` and an output.
struct ReduceShard {
  std::uint64_t numElements;
  std::uint32_t firstTile;  // tiles of the shards before it
  std::uint32_t divisor;    // of a mean; 0 or 1 for everything else
  std::uint16_t firstInput;
  std::uint16_t numInputs;
  std::uint16_t firstOutput;
  std::uint16_t numOutputs;
  std::uint16_t received;   // kNoArray for none; only for rings
  std::uint16_t sent;       // likewise
  std::uint32_t isAligned;  // whether all arrays begin at multiples of 16 bytes
};
static_assert(sizeof(ReduceShard) == 32, "a wire format");

struct ReduceBatch {
  std::uint32_t numShards;
  std::uint32_t numTiles;
  std::uint32_t numArrays;
  std::uint32_t padding;
  void* arrays[kMostArrays];
  ReduceShard shards[kMostReduceShards];
};
static_assert(sizeof(ReduceBatch) == 3984, "a wire format");

/// GradientMeasure of coarse/shared_memory/layout.hpp, but NaN or Inf is attributed to a position among the
/// shard's inputs, not to a client.
struct ShardMeasure {
  double sumOfSquares;
  std::int32_t nonFiniteOf;
  std::uint32_t padding;
};
static_assert(sizeof(ShardMeasure) == 16, "a wire format");

inline constexpr std::int32_t kNobody = -1;
inline constexpr std::int32_t kEverybody = -2;

/// Means and their measures. One launch at a time uses the work space.
struct MeasureBatch {
  ReduceBatch reduce;
  double* tileSums;             // numTiles
  std::int32_t* tileOffenders;  // numTiles
  std::uint32_t* tilesDone;     // numShards, all 0 before the launch and after it
  ShardMeasure* measures;       // numShards: results, in any memory that the GPU can write
};
static_assert(sizeof(MeasureBatch) == 4016, "a wire format");

/// UpdateSettings of coarse/reduce/update.hpp (see there for the formulas), byte for byte.
struct alignas(16) RuleSettings {
  std::uint32_t rule;
  float gradientScale;
  float gradientDecay;
  float parameterScale;
  float stepSize;
  float firstDecay;
  float firstWeight;
  float momentum;
  float secondDecay;
  float secondWeight;
  float secondScale;
  float epsilon;
  std::uint32_t updateNumber;
  std::uint32_t written;
  std::uint32_t hasGradient;
  std::uint32_t reserved;
};
static_assert(sizeof(RuleSettings) == 64, "a wire format");

/// One shard to update by the mean of its gradients.
struct UpdateShard {
  std::uint64_t numElements;
  void* parameter;
  float* master;     // of a 16-bit parameter; else unused
  float* states[3];  // as many as the rule needs
  std::uint32_t firstTile;
  std::uint32_t divisor;
  std::uint16_t firstGradient;
  std::uint16_t numGradients;  // at least 1
  std::uint16_t settings;
  std::uint16_t
      isAligned;  // whether groups of four elements of all arrays begin at multiples of their length
};
static_assert(sizeof(UpdateShard) == 64, "a wire format");

struct UpdateBatch {
  std::uint32_t numShards;
  std::uint32_t numTiles;
  std::uint32_t numArrays;
  std::uint32_t numSettings;
  void* arrays[kMostArrays];  // gradients
  RuleSettings settings[kMostSettings];
  UpdateShard shards[kMostUpdateShards];
};
static_assert(sizeof(UpdateBatch) == 4048, "a wire format");

COARSE_DEVICE std::uint32_t numTilesOf(std::uint64_t numElements, std::uint64_t tileElements) {
  const std::uint64_t count = (numElements + tileElements - 1) / tileElements;
  return count == 0 ? 1 : static_cast<std::uint32_t>(count);  // even an empty shard is measured
}

// ---- Filling a batch, on the host ----
//
// Batches start as all zero. `arrays` may be null if there are none.
#if !defined(__CUDACC_RTC__)

/// Appends arrays to a batch. @returns their position.
/// @pre the batch has room for them.
template <class Batch>
inline std::uint16_t appendArrays(Batch& batch, const void* const* arrays, std::uint32_t count) {
  const std::uint32_t first = batch.numArrays;
  for (std::uint32_t i = 0; i < count; ++i) batch.arrays[first + i] = const_cast<void*>(arrays[i]);
  batch.numArrays += count;
  return static_cast<std::uint16_t>(first);
}

inline bool areAligned(const void* const* arrays, std::uint32_t count, std::uint64_t bytes) {
  std::uint64_t together = 0;
  for (std::uint32_t i = 0; i < count; ++i) together |= reinterpret_cast<std::uint64_t>(arrays[i]);
  return together % bytes == 0;
}

/// Appends a shard to reduce. If all inputs are outputs, in this order, they may be passed as the same list.
/// @returns false, without any change, if the batch has no room for it.
inline bool append(ReduceBatch& batch, std::uint64_t itemBytes, std::uint64_t numElements,
                   std::uint32_t divisor, const void* const* inputs, std::uint32_t numInputs,
                   void* const* outputs, std::uint32_t numOutputs, const void* received = nullptr,
                   void* sent = nullptr) {
  const bool isInPlace = inputs == outputs && numInputs == numOutputs;
  const std::uint32_t numMore =
      numInputs + (isInPlace ? 0 : numOutputs) + (received != nullptr) + (sent != nullptr);
  if (batch.numShards == kMostReduceShards || numMore > kMostArrays - batch.numArrays) return false;
  const void* const ends[] = {received, sent};
  ReduceShard& shard = batch.shards[batch.numShards++];
  shard.numElements = numElements;
  shard.firstTile = batch.numTiles;
  shard.divisor = divisor;
  shard.firstInput = appendArrays(batch, inputs, numInputs);
  shard.numInputs = static_cast<std::uint16_t>(numInputs);
  shard.firstOutput = isInPlace ? shard.firstInput : appendArrays(batch, outputs, numOutputs);
  shard.numOutputs = static_cast<std::uint16_t>(numOutputs);
  shard.received = received == nullptr ? kNoArray : appendArrays(batch, &ends[0], 1);
  shard.sent = sent == nullptr ? kNoArray : appendArrays(batch, &ends[1], 1);
  shard.isAligned =
      areAligned(inputs, numInputs, 16) && areAligned(outputs, numOutputs, 16) && areAligned(ends, 2, 16);
  batch.numTiles += numTilesOf(numElements, kTileBytes / itemBytes);
  return true;
}

/// Appends settings for the shards that follow, unless the last settings are the same.
/// @returns their position; kMostSettings, without any change, if the batch has no room for them.
inline std::uint32_t appendSettings(UpdateBatch& batch, const void* settings) {
  const std::uint32_t last = batch.numSettings - 1;
  if (batch.numSettings > 0 && memcmp(&batch.settings[last], settings, sizeof(RuleSettings)) == 0)
    return last;
  if (batch.numSettings == kMostSettings) return kMostSettings;
  memcpy(&batch.settings[batch.numSettings], settings, sizeof(RuleSettings));
  return batch.numSettings++;
}

/// Appends a shard to update by `settings`, an UpdateSettings that names a rule with at most `numStates`
/// states. Uses the arrays and numbers of `shard`, and computes the positions.
/// @returns false, without appending a shard, if the batch has no room for it.
inline bool append(UpdateBatch& batch, std::uint64_t itemBytes, UpdateShard shard, std::uint32_t numStates,
                   const void* settings, const void* const* gradients, std::uint32_t numGradients) {
  if (batch.numShards == kMostUpdateShards || numGradients > kMostArrays - batch.numArrays) return false;
  const std::uint32_t position = appendSettings(batch, settings);
  if (position == kMostSettings) return false;
  const void* wide[] = {shard.master, shard.states[0], shard.states[1], shard.states[2]};
  const void* const parameter[] = {shard.parameter};
  shard.firstTile = batch.numTiles;
  shard.firstGradient = appendArrays(batch, gradients, numGradients);
  shard.numGradients = static_cast<std::uint16_t>(numGradients);
  shard.settings = static_cast<std::uint16_t>(position);
  shard.isAligned = areAligned(gradients, numGradients, 4 * itemBytes) &&
                    areAligned(parameter, 1, 4 * itemBytes) && areAligned(wide, 1 + numStates, 16);
  batch.shards[batch.numShards++] = shard;
  batch.numTiles += numTilesOf(shard.numElements, kUpdateTileElements);
  return true;
}

#endif

}  // namespace coarse::cuda
