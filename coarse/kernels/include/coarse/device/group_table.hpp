#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "coarse/tensors/tensor_group.hpp"

namespace coarse {

/// Finds a registered tensor group by its id; nullptr if there is none.
using FindGroup = std::function<TensorGroup*(std::uint32_t group)>;

/// The tensor groups of one memory device.
///
/// Thread safety: any number of readers, or one writer alone.
class GroupTable {
 public:
  using Groups = std::vector<std::shared_ptr<TensorGroup>>;

  /// @returns nullptr if there is none.
  TensorGroup* find(std::uint32_t group) const noexcept;
  /// In the order in which they were added.
  const std::vector<TensorGroup*>& all() const noexcept { return inOrder_; }

  /// @pre no group has the same id.
  void add(std::shared_ptr<TensorGroup> group);
  /// Removes a group, if it exists; keeps it mapped while `isInUse` returns true for it.
  /// @returns this group and those removed earlier that are no longer in use, for the caller to drop.
  Groups remove(std::uint32_t group, const std::function<bool(const TensorGroup&)>& isInUse);

 private:
  std::unordered_map<std::uint32_t, std::shared_ptr<TensorGroup>> groups_;
  std::vector<TensorGroup*> inOrder_;
  Groups retired_;  // removed while in use
};

}  // namespace coarse
