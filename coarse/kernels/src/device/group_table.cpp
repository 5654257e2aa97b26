#include "coarse/device/group_table.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace coarse {

TensorGroup* GroupTable::find(std::uint32_t group) const noexcept {
  const auto found = groups_.find(group);
  return found == groups_.end() ? nullptr : found->second.get();
}

void GroupTable::add(std::shared_ptr<TensorGroup> group) {
  inOrder_.push_back(group.get());
  const std::uint32_t id = group->plan().id;
  groups_.emplace(id, std::move(group));
}

GroupTable::Groups GroupTable::remove(std::uint32_t group,
                                      const std::function<bool(const TensorGroup&)>& isInUse) {
  const auto found = groups_.find(group);
  if (found == groups_.end()) return {};
  inOrder_.erase(std::find(inOrder_.begin(), inOrder_.end(), found->second.get()));
  retired_.push_back(std::move(found->second));
  groups_.erase(found);
  const auto firstUnused = std::partition(retired_.begin(), retired_.end(),
                                          [&](const auto& retired) { return isInUse(*retired); });
  Groups unused(std::make_move_iterator(firstUnused), std::make_move_iterator(retired_.end()));
  retired_.erase(firstUnused, retired_.end());
  return unused;
}

}  // namespace coarse
