/// Client::compensateForLost(): weighted sums to which lost clients have not contributed.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <stdexcept>

#include "coarse/client/client.hpp"
#include "coarse/reduce/reduce.hpp"

namespace coarse {
namespace {

constexpr std::size_t kChunk = 1024;

void scaleDoubles(std::byte* values, std::size_t count, double factor) {
  for (std::size_t i = 0; i < count; ++i) {
    double value = 0;
    std::memcpy(&value, values + i * sizeof value, sizeof value);
    value *= factor;
    std::memcpy(values + i * sizeof value, &value, sizeof value);
  }
}

/// Multiplies float32 or narrower numbers in float64, and rounds each once to float32, then to its dtype.
void scaleFloats(DType dtype, std::byte* values, std::size_t count, double factor) {
  std::array<float, kChunk> chunk;
  for (std::size_t first = 0; first < count; first += kChunk) {
    const std::size_t length = std::min(kChunk, count - first);
    std::byte* const place = values + first * itemBytes(dtype);
    widen(dtype, place, chunk.data(), length);
    for (std::size_t i = 0; i < length; ++i) chunk[i] = static_cast<float>(chunk[i] * factor);
    narrow(dtype, chunk.data(), place, length, 1, ReduceOp::kSum);
  }
}

void scale(DType dtype, std::byte* values, std::size_t count, double factor) {
  if (dtype == DType::kFloat64) {
    scaleDoubles(values, count, factor);
  } else if (dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16) {
    scaleFloats(dtype, values, count, factor);
  }
}

}  // namespace

/// Whether a memory device stood in for a client in this step of a shard that is not dynamic.
bool Client::hasStandIn(const Group& group, std::uint32_t shard, std::size_t client,
                        std::uint32_t step) noexcept {
  // Another client may have pushed the next step, from which memory devices may stand in, too.
  const std::uint32_t first =
      __atomic_load_n(&group.control.contribution(shard, client).numElements, __ATOMIC_RELAXED);
  return first != 0 && first <= step;
}

void Client::compensateForLost(std::uint32_t groupId, std::uint32_t tensorIndex, std::byte* result,
                               const Weights& weights) const {
  const Group& group = find(groupId);
  const ClientTensor& tensor = group.tensors.at(tensorIndex);
  const std::uint64_t tensorOffset = group.plan.shards[tensor.firstShard].offset;
  for (std::uint32_t i = tensor.firstShard; i < tensor.firstShard + tensor.numShards; ++i) {
    const double factor = compensation(group, i, tensor.step, weights);
    if (factor == 1) continue;
    const Shard& shard = group.plan.shards[i];
    scale(shard.dtype, result + (shard.offset - tensorOffset), shard.numElements, factor);
  }
}

std::vector<double> Client::compensations(std::uint32_t groupId, std::uint32_t tensorIndex,
                                          const Weights& weights) const {
  const Group& group = find(groupId);
  const ClientTensor& tensor = group.tensors.at(tensorIndex);
  std::vector<double> factors;
  for (std::uint32_t i = tensor.firstShard; i < tensor.firstShard + tensor.numShards; ++i)
    factors.push_back(compensation(group, i, tensor.step, weights));
  return factors;
}

/// The factor of a weighted sum, so that those who have contributed have the weight of all.
double Client::compensation(const Group& group, std::uint32_t shard, std::uint32_t step,
                            const Weights& weights) {
  if (weights.count != group.plan.numClients)
    throw std::invalid_argument("every client needs its weight, also lost ones");
  double ofAll = 0, ofContributors = 0;
  for (std::size_t client = 0; client < weights.count; ++client) {
    ofAll += weights.values[client];
    if (!hasStandIn(group, shard, client, step)) ofContributors += weights.values[client];
  }
  return ofContributors == 0 ? 1 : ofAll / ofContributors;
}

}  // namespace coarse
