#include "coarse/tensors/agreement.hpp"

#include <cstddef>
#include <cstring>
#include <sstream>

#include "coarse/reduce/update.hpp"

namespace coarse {
namespace {

std::string describe(const ShardShape& shape) {
  return std::to_string(shape.numElements) + " elements of dtype " +
         std::to_string(static_cast<int>(shape.dtype)) + " with op " +
         std::to_string(static_cast<int>(shape.op));
}

std::string nameOf(std::size_t client, const std::vector<int>& ranks) {
  return std::to_string(ranks.empty() ? static_cast<int>(client) : ranks[client]);
}

std::string directAllReduceDisagreement(const TensorGroup& group, std::uint32_t shard) {
  const std::uint8_t flags = group.directAllReduceFlags(shard);
  const bool hasRelay = (flags & kDirectAllReduce) != 0;
  for (std::size_t client = 1; client < group.plan().numClients; ++client) {
    const Contribution& other = group.control().contribution(shard, client);
    if ((other.flags & kDirectAllReduceFlags) == flags &&
        (!hasRelay || static_cast<Relay>(other.op) == group.relay(shard)))
      continue;
    return "workers disagree on whether or how they reduce " + group.describeTensor(shard) +
           " themselves: workers 0 and " + std::to_string(client) + " do not agree";
  }
  return {};
}

std::string bufferDisagreement(const TensorGroup& group, std::uint32_t shard, const std::vector<int>& ranks) {
  const ShardShape expected = group.shape(shard);
  for (std::size_t client = 0; client < group.plan().numClients; ++client) {
    const Contribution& other = group.control().contribution(shard, client);
    const ShardShape shape{other.numElements, static_cast<DType>(other.dtype),
                           static_cast<ReduceOp>(other.op)};
    if (shape.numElements == expected.numElements && shape.dtype == expected.dtype && shape.op == expected.op)
      continue;
    return "workers disagree on a buffer: worker " + nameOf(client, ranks) + " gave " + describe(shape) +
           ", another one " + describe(expected);
  }
  return {};
}

/// The first difference between two workers' settings of one tensor, with both values.
std::string firstDifference(const UpdateSettings& one, const UpdateSettings& other) {
  const auto differ = [](const char* name, auto first, auto second) {
    // Compares bits, so that NaN equals NaN.
    if (std::memcmp(&first, &second, sizeof(first)) == 0) return std::string();
    std::ostringstream text;
    text << name << " " << first << " and " << second;
    return text.str();
  };
  const std::string differences[] = {
      differ("rule", static_cast<std::uint32_t>(one.rule), static_cast<std::uint32_t>(other.rule)),
      differ("number of the update", one.updateNumber, other.updateNumber),
      differ("step size", one.stepSize, other.stepSize),
      differ("weight decay", one.gradientDecay, other.gradientDecay),
      differ("parameter scale", one.parameterScale, other.parameterScale),
      differ("scale of the gradient", one.gradientScale, other.gradientScale),
      differ("decay of the first state", one.firstDecay, other.firstDecay),
      differ("weight of the gradient in the first state", one.firstWeight, other.firstWeight),
      differ("momentum", one.momentum, other.momentum),
      differ("decay of the second state", one.secondDecay, other.secondDecay),
      differ("weight of the gradient in the second state", one.secondWeight, other.secondWeight),
      differ("bias correction", one.secondScale, other.secondScale),
      differ("epsilon", one.epsilon, other.epsilon),
  };
  for (const std::string& difference : differences) {
    if (!difference.empty()) return difference;
  }
  return {};
}

std::string updateDisagreement(const TensorGroup& group, std::uint32_t shard, const std::vector<int>& ranks) {
  constexpr std::uint8_t kKindOfUpdate = kUpdate | kReduced | kMeasure;
  constexpr std::size_t kComparedBytes = offsetof(UpdateSettings, hasGradient);
  const std::size_t first = group.firstClient(shard);
  const std::uint8_t expectedKind = group.control().contribution(shard, first).flags & kKindOfUpdate;
  const UpdateSettings expected = group.settings(shard, first);
  const auto tensor = [&] { return group.describeTensor(shard) + ": "; };
  for (std::size_t client = first + 1; client < group.plan().numClients; ++client) {
    if (group.isAbsent(shard, client)) continue;
    const auto whom = [&] {
      return tensor() + "workers " + nameOf(first, ranks) + " and " + nameOf(client, ranks) + " ";
    };
    if ((group.control().contribution(shard, client).flags & kKindOfUpdate) != expectedKind) {
      return whom() +
             "are at different points of a step: one averages a gradient, the other one updates the "
             "parameter. Call backward() and optimizer.step() equally often on every worker";
    }
    const UpdateSettings other = group.settings(shard, client);
    if ((expectedKind & kUpdate) != 0 && expected.written != other.written) {
      return whom() +
             "have written unlike values to this parameter since the last update, or one of them has and the "
             "other "
             "one has not. What is written to parameters between two steps (load_state_dict(), copy_(), an "
             "average of "
             "weights) every worker has to write alike, or put back what was there before the next step";
    }
    if ((expectedKind & kUpdate) == 0 || std::memcmp(&expected, &other, kComparedBytes) == 0) continue;
    return whom() + "disagree on the optimizer's settings: " + firstDifference(expected, other) +
           ". Every worker must run the same scheduler and load the same state";
  }
  if ((expectedKind & kUpdate) != 0 && !isRunnable(expected, group.plan().numStates))
    return tensor() + "no update rule, or one that keeps more state than was registered";
  return {};
}

}  // namespace

std::string disagreement(const TensorGroup& group, std::uint32_t shard, const std::vector<int>& ranks) {
  if (std::string difference = directAllReduceDisagreement(group, shard); !difference.empty())
    return difference;
  if (group.plan().hasOptimizer) return updateDisagreement(group, shard, ranks);
  if (group.plan().shards[shard].isDynamic) return bufferDisagreement(group, shard, ranks);
  return {};
}

}  // namespace coarse
