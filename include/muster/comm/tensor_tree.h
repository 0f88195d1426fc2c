// The tensors in a value. A value is a tree, whose leaves are tensors:
//
//   at::Tensor                                                            itself
//   vector, deque, list, array, pair, tuple, optional, map and
//   unordered_map, torch::OrderedDict (the values), shared_ptr of what
//   has tensors                                                           those inside
//   a struct with a member  auto tree() { return std::tie(data, target); }
//                                                                         those of the members that it names
//   any other type                                                        none
//
// Thread-safety: no shared state. Source: torchopt.pytree, with the kinds of nodes that C++ has.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <concepts>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch {
template <typename Key, typename Value>
class OrderedDict;
}

namespace muster {
namespace detail {

template <typename T>
concept HasTree = requires(T& value) {
  std::tuple_size<std::remove_cvref_t<decltype(value.tree())>>::value;
};

// What kind of node T is.
// clang-format off
template <typename T> inline constexpr bool is_sequence = false;
template <typename T> inline constexpr bool is_sequence<std::vector<T>> = true;
template <typename T> inline constexpr bool is_sequence<std::deque<T>> = true;
template <typename T> inline constexpr bool is_sequence<std::list<T>> = true;
template <typename T> inline constexpr bool is_map = false;
template <typename K, typename V, typename C> inline constexpr bool is_map<std::map<K, V, C>> = true;
template <typename K, typename V, typename H, typename E> inline constexpr bool is_map<std::unordered_map<K, V, H, E>> = true;
template <typename T> inline constexpr bool is_ordered_dict = false;
template <typename K, typename V> inline constexpr bool is_ordered_dict<torch::OrderedDict<K, V>> = true;
template <typename T> inline constexpr bool is_tuple = false;
template <typename A, typename B> inline constexpr bool is_tuple<std::pair<A, B>> = true;
template <typename... T> inline constexpr bool is_tuple<std::tuple<T...>> = true;
template <typename T, size_t N> inline constexpr bool is_tuple<std::array<T, N>> = true;
template <typename T> inline constexpr bool is_box = false;  // holds one or none
template <typename T> inline constexpr bool is_box<std::optional<T>> = true;
template <typename T> inline constexpr bool is_box<std::shared_ptr<T>> = true;
template <typename T> inline constexpr bool is_shared = false;
template <typename T> inline constexpr bool is_shared<std::shared_ptr<T>> = true;

template <typename T> struct HasTensors : std::false_type {};
template <> struct HasTensors<at::Tensor> : std::true_type {};
template <HasTree T> struct HasTensors<T> : std::true_type {};
template <typename T> requires is_sequence<T> struct HasTensors<T> : HasTensors<typename T::value_type> {};
template <typename T> requires is_map<T> struct HasTensors<T> : HasTensors<typename T::mapped_type> {};
template <typename K, typename V> struct HasTensors<torch::OrderedDict<K, V>> : HasTensors<V> {};
template <typename T> struct HasTensors<std::optional<T>> : HasTensors<T> {};
template <typename T> struct HasTensors<std::shared_ptr<T>> : HasTensors<std::remove_const_t<T>> {};
template <typename T, size_t N> struct HasTensors<std::array<T, N>> : HasTensors<T> {};
template <typename A, typename B> struct HasTensors<std::pair<A, B>> : std::disjunction<HasTensors<A>, HasTensors<B>> {};
template <typename... T> struct HasTensors<std::tuple<T...>> : std::disjunction<HasTensors<T>...> {};
// clang-format on

// Calls fn(key, child) for each child of a container, a tuple or a struct with tree(). The key is a map's, or the
// child's position.
template <typename T, typename Fn>
void for_each_child(T& value, const Fn& fn) {
  if constexpr (is_sequence<T>) {
    size_t i = 0;
    for (auto& each : value) fn(i++, each);
  } else if constexpr (is_map<T>) {
    for (auto& [key, each] : value) fn(key, each);
  } else if constexpr (is_ordered_dict<T>) {
    for (auto& each : value) fn(each.key(), each.value());
  } else if constexpr (is_tuple<T>) {
    size_t i = 0;
    std::apply([&](auto&... each) { (fn(i++, each), ...); }, value);
  } else {
    auto members = value.tree();
    for_each_child(members, fn);
  }
}

// Calls fn(at::Tensor&) for each leaf, also for undefined tensors. The object of a shared_ptr is copied first, so that
// other holders of it see no change.
template <typename T, typename Fn>
void for_each_leaf(T& value, Fn&& fn) {
  if constexpr (!HasTensors<T>::value) {
    return;
  } else if constexpr (std::same_as<T, at::Tensor>) {
    fn(value);
  } else if constexpr (is_box<T>) {
    if (!value) return;
    if constexpr (is_shared<T>) {
      auto mine = std::make_shared<std::remove_cvref_t<decltype(*value)>>(*value);
      for_each_leaf(*mine, fn);
      value = std::move(mine);
    } else {
      for_each_leaf(*value, fn);
    }
  } else {
    for_each_child(value, [&](const auto&, auto& child) { for_each_leaf(child, fn); });
  }
}

// The same for the defined tensors only.
template <typename T, typename Fn>
void for_each_tensor(T& value, Fn&& fn) {
  for_each_leaf(value, [&](at::Tensor& leaf) {
    if (leaf.defined()) fn(leaf);
  });
}

}  // namespace detail
}  // namespace muster
