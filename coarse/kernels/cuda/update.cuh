// One thread's work on one tile of a shard that is updated.
#pragma once

#include "reduce.cuh"
#include "update_rules.cuh"

namespace coarse::cuda {

/// Elements that a thread loads at once: 16 bytes of float32, and 8 of narrow types, which keeps both
/// coalesced.
inline constexpr unsigned kGroup = 4;
inline constexpr unsigned kGroupsPerThread = kUpdateTileElements / kGroup / kThreads;
static_assert(kGroupsPerThread * kGroup * kThreads == kUpdateTileElements, "tiles are whole");

// Gradients in flight at a time, in addition to the parameter and its states.
inline constexpr unsigned kGradientsInFlight = 4;

template <class Element>
inline constexpr bool kIsNarrow = sizeof(typename Element::Stored) == 2;

/// The groups of one thread in a tile.
template <bool kIsWhole>
struct ThreadGroups {
  unsigned thread;
  unsigned numGroups;  // of the tile

  COARSE_DEVICE unsigned element(unsigned i) const { return (thread + i * kThreads) * kGroup; }
  COARSE_DEVICE bool has(unsigned i) const { return kIsWhole || thread + i * kThreads < numGroups; }
};

/// The arrays of an update: those of a shard, from the first element of a tile on.
template <class Element>
struct UpdateTile {
  using Stored = typename Element::Stored;
  void* const* gradients;
  unsigned numGradients;
  std::uint32_t divisor;
  std::uint64_t begin;
  Stored* parameter;
  float* master;
  float* states[3];

  COARSE_DEVICE const Stored* gradient(unsigned k) const {
    return static_cast<const Stored*>(gradients[k]) + begin;
  }
};

/// The weight to update: a narrow parameter that is not the rounding of its master weight first replaces it.
template <class Element>
COARSE_DEVICE float adopted(float master, typename Element::Stored parameter) {
  return Element::store(master) == parameter ? master : Element::load(parameter);
}

template <class Element, Rule kRule>
COARSE_DEVICE void updateElement(const RuleSettings& settings, const UpdateTile<Element>& tile, unsigned i) {
  float mean[1] = {Element::load(tile.gradient(0)[i])};
  COARSE_KEEP_LOOP
  for (unsigned k = 1; k < tile.numGradients; ++k)
    mean[0] = Sum::apply(mean[0], Element::load(tile.gradient(k)[i]));
  divide(mean, tile.divisor);
  const float gradient = Element::load(Element::store(mean[0]));
  float states[3] = {};
  for (int k = 0; k < numStatesOf(kRule); ++k) states[k] = tile.states[k][i];
  if constexpr (kIsNarrow<Element>) {
    const float weight =
        updated<kRule>(settings, gradient, adopted<Element>(tile.master[i], tile.parameter[i]), states);
    tile.master[i] = weight;
    tile.parameter[i] = Element::store(weight);
  } else {
    tile.parameter[i] = updated<kRule>(settings, gradient, tile.parameter[i], states);
  }
  for (int k = 0; k < numStatesOf(kRule); ++k) tile.states[k][i] = states[k];
}

/// Gradients of one thread's groups, from number `first` on.
template <class Element>
using GradientWords = Words<kGroup * sizeof(typename Element::Stored)>[kGradientsInFlight][kGroupsPerThread];

template <class Element, bool kIsWhole>
COARSE_DEVICE void loadGradients(const UpdateTile<Element>& tile, const ThreadGroups<kIsWhole>& own,
                                 unsigned first, GradientWords<Element>& loaded) {
  constexpr unsigned kBytes = kGroup * sizeof(typename Element::Stored);
  COARSE_UNROLL
  for (unsigned k = 0; k < kGradientsInFlight; ++k) {
    if (first + k >= tile.numGradients) continue;
    COARSE_UNROLL
    for (unsigned i = 0; i < kGroupsPerThread; ++i) {
      if (own.has(i)) loaded[k][i] = loadWords<kBytes>(tile.gradient(first + k) + own.element(i));
    }
  }
}

template <class Element, bool kIsFirst, bool kIsWhole>
COARSE_DEVICE void addGradients(const UpdateTile<Element>& tile, const ThreadGroups<kIsWhole>& own,
                                unsigned first, const GradientWords<Element>& loaded,
                                float (&sums)[kGroupsPerThread][kGroup]) {
  COARSE_UNROLL
  for (unsigned k = 0; k < kGradientsInFlight; ++k) {
    if (first + k >= tile.numGradients) continue;
    COARSE_UNROLL
    for (unsigned i = 0; i < kGroupsPerThread; ++i) {
      if (!own.has(i)) continue;
      float values[kGroup];
      unpack<Element>(loaded[k][i], values);
      COARSE_UNROLL
      for (unsigned lane = 0; lane < kGroup; ++lane)
        sums[i][lane] = kIsFirst && k == 0 ? values[lane] : Sum::apply(sums[i][lane], values[lane]);
    }
  }
}

/// Adds the gradients of one thread's groups in order (the first ones are `loaded`) and divides: the mean,
/// rounded as it would lie in a slot.
template <class Element, bool kIsWhole>
COARSE_DEVICE void meanOfGroups(const UpdateTile<Element>& tile, const ThreadGroups<kIsWhole>& own,
                                GradientWords<Element>& loaded, float (&means)[kGroupsPerThread][kGroup]) {
  addGradients<Element, true>(tile, own, 0, loaded, means);
  COARSE_KEEP_LOOP
  for (unsigned first = kGradientsInFlight; first < tile.numGradients; first += kGradientsInFlight) {
    loadGradients<Element>(tile, own, first, loaded);
    addGradients<Element, false>(tile, own, first, loaded, means);
  }
  COARSE_UNROLL
  for (unsigned i = 0; i < kGroupsPerThread; ++i) {
    divide(means[i], tile.divisor);
    COARSE_UNROLL
    for (unsigned lane = 0; lane < kGroup; ++lane)
      means[i][lane] = Element::load(Element::store(means[i][lane]));
  }
}

template <class Element, Rule kRule, bool kIsWhole>
COARSE_DEVICE void updateGroups(const RuleSettings& settings, const UpdateTile<Element>& tile,
                                const ThreadGroups<kIsWhole>& own) {
  constexpr unsigned kBytes = kGroup * sizeof(typename Element::Stored);
  constexpr int kNumStates = numStatesOf(kRule);
  GradientWords<Element> gradients;
  loadGradients<Element>(tile, own, 0, gradients);
  // All loads before the first use, and before the loop over further gradients, which would wait for them.
  Words<kBytes> parameters[kGroupsPerThread];
  Words<16> masters[kGroupsPerThread];
  Words<16> loadedStates[kNumStates + 1][kGroupsPerThread];
  COARSE_UNROLL
  for (unsigned i = 0; i < kGroupsPerThread; ++i) {
    if (!own.has(i)) continue;
    parameters[i] = loadWords<kBytes>(tile.parameter + own.element(i));
    if constexpr (kIsNarrow<Element>) masters[i] = loadWords<16>(tile.master + own.element(i));
    COARSE_UNROLL
    for (int k = 0; k < kNumStates; ++k) loadedStates[k][i] = loadWords<16>(tile.states[k] + own.element(i));
  }
  float means[kGroupsPerThread][kGroup] = {};
  meanOfGroups<Element>(tile, own, gradients, means);
  COARSE_UNROLL
  for (unsigned i = 0; i < kGroupsPerThread; ++i) {
    if (!own.has(i)) continue;
    float states[kGroup][3] = {};
    COARSE_UNROLL
    for (int k = 0; k < kNumStates; ++k) {
      const auto lanes = bitCast<Lanes<float, kGroup>>(loadedStates[k][i]);
      COARSE_UNROLL
      for (unsigned lane = 0; lane < kGroup; ++lane) states[lane][k] = lanes.values[lane];
    }
    const auto before = bitCast<Lanes<typename Element::Stored, kGroup>>(parameters[i]);
    float weights[kGroup];
    COARSE_UNROLL
    for (unsigned lane = 0; lane < kGroup; ++lane) {
      if constexpr (kIsNarrow<Element>) {
        const auto master = bitCast<Lanes<float, kGroup>>(masters[i]);
        weights[lane] = adopted<Element>(master.values[lane], before.values[lane]);
      } else {
        weights[lane] = before.values[lane];
      }
      weights[lane] = updated<kRule>(settings, means[i][lane], weights[lane], states[lane]);
    }
    storeWords<kBytes>(tile.parameter + own.element(i), pack<Element>(weights));
    if constexpr (kIsNarrow<Element>) storeAccumulators(tile.master + own.element(i), weights);
    COARSE_UNROLL
    for (int k = 0; k < kNumStates; ++k) {
      float lanes[kGroup];
      COARSE_UNROLL
      for (unsigned lane = 0; lane < kGroup; ++lane) lanes[lane] = states[lane][k];
      storeAccumulators(tile.states[k] + own.element(i), lanes);
    }
  }
}

template <class Element, Rule kRule>
COARSE_DEVICE void updateTileBy(const RuleSettings& settings, const UpdateTile<Element>& tile,
                                unsigned numElements, bool isAligned, unsigned thread) {
  unsigned rest = 0;
  if (isAligned) {
    const unsigned numGroups = numElements / kGroup;
    if (numElements == kUpdateTileElements) {
      return updateGroups<Element, kRule>(settings, tile, ThreadGroups<true>{thread, numGroups});
    }
    updateGroups<Element, kRule>(settings, tile, ThreadGroups<false>{thread, numGroups});
    rest = numGroups * kGroup;
  }
  COARSE_KEEP_LOOP
  for (unsigned i = rest + thread; i < numElements; i += kThreads)
    updateElement<Element, kRule>(settings, tile, i);
}

/// One thread's work on tile `number` of the shard; all threads of a block together update it.
template <class Element>
COARSE_DEVICE void updateTile(const UpdateBatch& batch, const UpdateShard& shard, std::uint32_t number,
                              unsigned thread) {
  const Range range = rangeOfTile(number, kUpdateTileElements, shard.numElements);
  if (range.end <= range.begin) return;
  const auto numElements = static_cast<unsigned>(range.end - range.begin);
  const RuleSettings settings = batch.settings[shard.settings];
  UpdateTile<Element> tile;
  tile.gradients = batch.arrays + shard.firstGradient;
  tile.numGradients = shard.numGradients;
  tile.divisor = shard.divisor;
  tile.begin = range.begin;
  tile.parameter = static_cast<typename Element::Stored*>(shard.parameter) + range.begin;
  tile.master = kIsNarrow<Element> ? shard.master + range.begin : nullptr;
  for (int k = 0; k < 3; ++k) {
    const bool isThere = k < numStatesOf(static_cast<Rule>(settings.rule));
    tile.states[k] = isThere ? shard.states[k] + range.begin : nullptr;
  }
  const bool isAligned = shard.isAligned != 0;
  switch (static_cast<Rule>(settings.rule)) {
    case Rule::kSgd:
      return updateTileBy<Element, Rule::kSgd>(settings, tile, numElements, isAligned, thread);
    case Rule::kSgdMomentum:
      return updateTileBy<Element, Rule::kSgdMomentum>(settings, tile, numElements, isAligned, thread);
    case Rule::kSgdNesterov:
      return updateTileBy<Element, Rule::kSgdNesterov>(settings, tile, numElements, isAligned, thread);
    case Rule::kAdam:
      return updateTileBy<Element, Rule::kAdam>(settings, tile, numElements, isAligned, thread);
    case Rule::kAdagrad:
      return updateTileBy<Element, Rule::kAdagrad>(settings, tile, numElements, isAligned, thread);
    case Rule::kLion:
      return updateTileBy<Element, Rule::kLion>(settings, tile, numElements, isAligned, thread);
    case Rule::kAmsgrad:
      return updateTileBy<Element, Rule::kAmsgrad>(settings, tile, numElements, isAligned, thread);
    case Rule::kNone:
      return;
  }
}

}  // namespace coarse::cuda
