#pragma once

#include <cstdint>

#include "coarse/shared_memory/layout.hpp"

namespace coarse {

struct ReadyShard {
  std::uint32_t shard = 0;
  std::uint32_t step = 0;
};

/// Appends a shard whose contributors are complete to the group's ready queue (many producers, many
/// consumers). The queue has a cell for each shard, and each shard is in it at most once.
/// @returns false, immediately, if the consumer of the last lap still holds the cell: it was interrupted, or
/// died, between its claim and its release.
[[nodiscard]] bool pushReady(const GroupControl& control, ReadyShard ready) noexcept;

/// Takes a ready shard; each goes to exactly one sync core of all memory devices. @returns false if no shard
/// is ready.
bool popReady(const GroupControl& control, ReadyShard& ready) noexcept;

struct RingEntry {
  std::uint32_t group = 0;
  std::uint32_t shard = 0;
  std::uint32_t step = 0;
  std::uint32_t completedAt = 0;  // low bits of the clock; in emulated sessions
};

/// Appends a shard to a ring's log, which every memory device processes in the same order. The common order
/// prevents the rings of several devices from waiting for each other.
void appendToRing(RingLog& log, const RingEntry& entry) noexcept;

/// Reads entry `position` of a ring's log. @returns false if it has not been appended yet.
bool readRing(const RingLog& log, std::uint64_t position, RingEntry& entry) noexcept;

}  // namespace coarse
