// Trees of state: the templates of Snapshot::add(); snapshot.h includes this one.
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include <concepts>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "muster/comm/tensor_tree.h"

namespace muster {

// Any class that can write itself to a torch archive and read itself back: optimizers, samplers, your own classes.
template <typename T>
concept Archivable = requires(T& item, torch::serialize::OutputArchive& out, torch::serialize::InputArchive& in) {
  item.save(out);
  item.load(in);
};

namespace detail {

template <typename T>
concept SnapshotNumber = !std::is_const_v<T> && (std::integral<T> || std::same_as<T, float> || std::same_as<T, double>);
// The dtype of a tensor in the number's memory.
template <SnapshotNumber T>
constexpr at::ScalarType dtype_of() {
  using enum at::ScalarType;
  if constexpr (std::same_as<T, bool>) return Bool;
  if constexpr (std::floating_point<T>) return sizeof(T) == 4 ? Float : Double;
  constexpr bool kSigned = std::is_signed_v<T>;
  switch (sizeof(T)) {
    case 1:
      return kSigned ? Char : Byte;
    case 2:
      return kSigned ? Short : UInt16;
    case 4:
      return kSigned ? Int : UInt32;
    default:
      return kSigned ? Long : UInt64;
  }
}

template <typename T>
inline constexpr bool is_module_pointer = false;
template <std::derived_from<torch::nn::Module> T>
inline constexpr bool is_module_pointer<std::shared_ptr<T>> = true;
template <typename T>
inline constexpr bool is_unique = false;
template <typename T, typename D>
inline constexpr bool is_unique<std::unique_ptr<T, D>> = true;

// What holds items. Modules and optimizers are Archivable, and items.
template <typename T>
concept SnapshotBranch = !Archivable<T> && (HasTree<T> || is_sequence<T> || is_map<T> || is_ordered_dict<T> ||
                                            is_tuple<T> || is_unique<T> || (is_box<T> && !is_module_pointer<T>));

[[noreturn]] void throw_empty_snapshot_item(const std::string& name);

// Calls leaf(name, value) for all that a tree has below `name`.
template <typename T, typename Leaf>
void for_each_snapshot_item(const std::string& name, T& value, const Leaf& leaf) {
  if constexpr (!SnapshotBranch<T>) {
    leaf(name, value);
  } else if constexpr (is_box<T> || is_unique<T>) {
    if (!value) throw_empty_snapshot_item(name);
    for_each_snapshot_item(name, *value, leaf);
  } else {
    static_assert(!std::same_as<T, std::vector<bool>>, "nothing can refer to an element of a vector of bool: use char");
    for_each_child(value, [&](const auto& key, auto& child) {
      std::string path = name;
      path += '.';
      if constexpr (std::convertible_to<decltype(key), std::string>) {
        path += key;
      } else {
        path += std::to_string(key);
      }
      for_each_snapshot_item(path, child, leaf);
    });
  }
}

}  // namespace detail
}  // namespace muster
