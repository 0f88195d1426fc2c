// Trees of state: the templates of Snapshot::add(); snapshot.h includes this one.
#pragma once

#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/base/error.h"
#include "muster/comm/tensor_tree.h"

namespace muster {

class Snapshot;
struct SnapshotItemOptions;

namespace detail {

// Numbers and strings besides int64_t and double, which have items of their own.
template <typename T>
concept SnapshotValue =
    !std::is_const_v<T> && (std::integral<T> || std::same_as<T, float> || std::same_as<T, std::string>);

template <typename T>
inline constexpr bool is_module_pointer = false;
template <std::derived_from<torch::nn::Module> T>
inline constexpr bool is_module_pointer<std::shared_ptr<T>> = true;
template <typename T>
inline constexpr bool is_unique = false;
template <typename T, typename D>
inline constexpr bool is_unique<std::unique_ptr<T, D>> = true;

template <typename T>
concept SavesItself = requires(T& item, torch::serialize::OutputArchive& out, torch::serialize::InputArchive& in) {
  item.save(out);
  item.load(in);
};
// Modules and optimizers save themselves, too.
template <typename T>
concept SnapshotBranch = !SavesItself<T> && (HasTree<T> || is_sequence<T> || is_map<T> || is_ordered_dict<T> ||
                                             is_tuple<T> || is_unique<T> || (is_box<T> && !is_module_pointer<T>));

[[noreturn]] void throw_empty_snapshot_item(const std::string& name);

// Calls leaf(name, value) for all that a tree has below `name`.
template <typename T, typename Leaf>
void for_each_snapshot_item(const std::string& name, T& value, const Leaf& leaf) {
  const auto below = [&](const auto& key, auto& child) {
    std::string path = name;
    path += '.';
    if constexpr (std::convertible_to<decltype(key), std::string>) {
      path += key;
    } else {
      path += std::to_string(key);
    }
    for_each_snapshot_item(path, child, leaf);
  };
  if constexpr (!SnapshotBranch<T>) {
    leaf(name, value);
  } else if constexpr (HasTree<T>) {
    auto members = value.tree();
    for_each_snapshot_item(name, members, leaf);
  } else if constexpr (is_sequence<T>) {
    static_assert(!std::same_as<T, std::vector<bool>>, "nothing can refer to an element of a vector of bool: use char");
    size_t i = 0;
    for (auto& each : value) below(i++, each);
  } else if constexpr (is_map<T>) {
    for (auto& [key, each] : value) below(key, each);
  } else if constexpr (is_ordered_dict<T>) {
    for (auto& each : value) below(each.key(), each.value());
  } else if constexpr (is_tuple<T>) {
    size_t i = 0;
    std::apply([&](auto&... each) { (below(i++, each), ...); }, value);
  } else {
    if (!value) throw_empty_snapshot_item(name);
    for_each_snapshot_item(name, *value, leaf);
  }
}

}  // namespace detail
}  // namespace muster
