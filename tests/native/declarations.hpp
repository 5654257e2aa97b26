// Whether functions that COARSE declares itself can be called as a library's header declares them.
#pragma once

#include <type_traits>

namespace coarse::test {

/// Whether two types are passed alike: the same, enumerations for integers, structures of the same size.
template <typename Ours, typename Theirs>
constexpr bool arePassedAlike() {
  if constexpr (std::is_same_v<Ours, Theirs>) {
    return true;
  } else if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    using OurTarget = std::remove_pointer_t<Ours>;
    using TheirTarget = std::remove_pointer_t<Theirs>;
    if constexpr (std::is_const_v<OurTarget> != std::is_const_v<TheirTarget>) {
      return false;
    } else if constexpr (std::is_class_v<OurTarget>) {
      return std::is_class_v<TheirTarget> && sizeof(OurTarget) == sizeof(TheirTarget) &&
             alignof(OurTarget) == alignof(TheirTarget);
    } else {
      return arePassedAlike<std::remove_const_t<OurTarget>, std::remove_const_t<TheirTarget>>();
    }
  } else if constexpr (std::is_class_v<Ours> && std::is_class_v<Theirs>) {
    return std::is_trivially_copyable_v<Ours> && std::is_trivially_copyable_v<Theirs> &&
           sizeof(Ours) == sizeof(Theirs) && alignof(Ours) == alignof(Theirs);
  } else if constexpr (std::is_enum_v<Ours> || std::is_enum_v<Theirs>) {
    return sizeof(Ours) == sizeof(Theirs) && !std::is_pointer_v<Ours> && !std::is_pointer_v<Theirs>;
  } else if constexpr (std::is_integral_v<Ours> && std::is_integral_v<Theirs>) {
    return sizeof(Ours) == sizeof(Theirs) && std::is_signed_v<Ours> == std::is_signed_v<Theirs>;
  } else {
    return false;
  }
}

template <typename Ours, typename Theirs>
struct AreCalledAlike : std::false_type {};
template <typename OurResult, typename... Ours, typename TheirResult, typename... Theirs>
struct AreCalledAlike<OurResult (*)(Ours...), TheirResult (*)(Theirs...)> {
  static constexpr bool compare() {
    if constexpr (sizeof...(Ours) != sizeof...(Theirs)) {
      return false;
    } else {
      return arePassedAlike<OurResult, TheirResult>() && (arePassedAlike<Ours, Theirs>() && ...);
    }
  }
  static constexpr bool value = compare();
};

/// The same for what functions take and return.
template <typename Ours, typename Theirs>
inline constexpr bool areCalledAlike = AreCalledAlike<Ours, Theirs>::value;

}  // namespace coarse::test
