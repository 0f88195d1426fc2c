#include "checkpoint/archive.h"

#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>
#include <memory>
#include <string_view>

#include "checkpoint/item_values.h"
#include "muster/base/error.h"

namespace muster::checkpoint {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// More nodes within each other than any archive has. All that follows them is recursive.
constexpr int kDeepestArchive = 100;

struct Node {
  std::string key, kind;
  at::Tensor tensor;             // the value of a leaf
  std::vector<Node> parts = {};  // the children of any other node

  bool is_leaf() const { return kind != "archive" && kind != "tensors" && kind != "tuple"; }
};

// --- values as tensors ---

template <typename T>
at::Tensor tensor_from(const T* values, size_t count, at::ScalarType dtype, at::IntArrayRef sizes) {
  at::Tensor tensor = at::empty(sizes, dtype);
  if (count > 0) std::memcpy(tensor.mutable_data_ptr(), values, count * sizeof(T));
  return tensor;
}

[[noreturn]] void malformed(const std::string& name) {
  throw CorruptError(text("'", name, "' is not a valid entry of an archive"), kSameMuster);
}

template <typename T>
std::vector<T> values_of(const at::Tensor& tensor, at::ScalarType dtype, const std::string& name) {
  if (tensor.scalar_type() != dtype) malformed(name);
  std::vector<T> values(static_cast<size_t>(tensor.numel()));
  if (!values.empty()) std::memcpy(values.data(), tensor.const_data_ptr(), tensor.nbytes());
  return values;
}
template <typename T>
T value_of(const at::Tensor& tensor, at::ScalarType dtype, const std::string& name) {
  const auto values = values_of<T>(tensor, dtype, name);
  if (values.size() != 1) malformed(name);
  return values[0];
}

// --- values of an archive ---

Node node_of(std::string key, const c10::IValue& value) {
  const auto leaf = [&](const char* kind, at::Tensor tensor) { return Node{std::move(key), kind, std::move(tensor)}; };
  if (value.isTensor() && value.toTensor().defined()) {
    const auto tensor = value.toTensor().detach().to(at::kCPU).contiguous();
    return leaf("tensor", tensor.resolve_conj().resolve_neg());
  }
  if (value.isNone() || value.isTensor()) return leaf("none", tensor_of(int64_t{0}));
  if (value.isInt()) return leaf("int", tensor_of(value.toInt()));
  if (value.isDouble()) return leaf("double", tensor_of(value.toDouble()));
  if (value.isBool()) return leaf("bool", tensor_of(static_cast<int64_t>(value.toBool())));
  if (value.isString()) {
    const auto& string = value.toStringRef();
    const auto size = static_cast<int64_t>(string.size());
    return leaf("string", tensor_from(string.data(), string.size(), at::kByte, {size}));
  }
  if (value.isIntList()) {
    const auto list = value.toIntVector();
    return leaf("ints", tensor_from(list.data(), list.size(), at::kLong, {static_cast<int64_t>(list.size())}));
  }
  if (value.isDoubleList()) {
    const auto list = value.toDoubleVector();
    return leaf("doubles", tensor_from(list.data(), list.size(), at::kDouble, {static_cast<int64_t>(list.size())}));
  }
  Node node{std::move(key), value.isTuple() ? "tuple" : "tensors", {}};
  const auto add = [&](const c10::IValue& part) { node.parts.push_back(node_of(text(node.parts.size()), part)); };
  if (value.isTuple()) {
    for (const auto& part : value.toTupleRef().elements()) add(part);
  } else if (value.isTensorList()) {
    for (const at::Tensor& part : value.toTensorVector()) add(part);
  } else {
    throw InvalidArgument(text("'", node.key, "' is of type ", value.type()->str(), ", which a snapshot cannot hold"),
                          "Save tensors, numbers, strings, lists of numbers or of tensors, and tuples");
  }
  return node;
}

Node node_of(std::string key, InputArchive& archive) {
  Node node{std::move(key), "archive", {}};
  for (const auto& name : archive.keys()) {
    InputArchive nested;
    if (archive.try_read(name, nested)) {
      node.parts.push_back(node_of(name, nested));
    } else {
      c10::IValue value;
      archive.read(name, value);
      node.parts.push_back(node_of(name, value));
    }
  }
  return node;
}

c10::IValue value_of(const Node& node) {
  const auto& [key, kind, tensor, parts] = node;
  if (kind == "none") return {};
  // A copy: the caller may keep the tensor, which must not keep all of the file's bytes alive.
  if (kind == "tensor") return tensor.clone();
  if (kind == "int") return value_of<int64_t>(tensor, at::kLong, key);
  if (kind == "double") return value_of<double>(tensor, at::kDouble, key);
  if (kind == "bool") return value_of<int64_t>(tensor, at::kLong, key) != 0;
  if (kind == "ints") return values_of<int64_t>(tensor, at::kLong, key);
  if (kind == "doubles") return values_of<double>(tensor, at::kDouble, key);
  if (kind == "string") {
    const auto bytes = values_of<char>(tensor, at::kByte, key);
    return std::string(bytes.begin(), bytes.end());
  }
  if (kind == "tuple") {
    std::vector<c10::IValue> values;
    for (const auto& part : parts) values.push_back(value_of(part));
    return c10::ivalue::Tuple::create(std::move(values));
  }
  if (kind != "tensors") malformed(key);
  c10::List<at::Tensor> list;
  for (const auto& part : parts) {
    if (part.kind != "none" && part.kind != "tensor") malformed(key);
    list.push_back(part.kind == "none" ? at::Tensor() : value_of(part).toTensor());
  }
  return list;
}

void write(const Node& node, OutputArchive& archive) {
  for (const auto& part : node.parts) {
    if (part.kind == "archive") {
      OutputArchive nested(archive.compilation_unit());
      write(part, nested);
      archive.write(part.key, nested);
    } else {
      archive.write(part.key, value_of(part));
    }
  }
}

// An OutputArchive cannot list its contents. `in` can, after the bytes of `out` have been loaded into it.
void reread(OutputArchive& out, InputArchive& in) {
  std::string bytes;
  out.save_to([&](const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  in.load_from(bytes.data(), bytes.size());
}

// --- optimizers ---

Node* find(Node& node, std::string_view key) {
  const auto found = std::find_if(node.parts.begin(), node.parts.end(), [&](const Node& n) { return n.key == key; });
  return found == node.parts.end() ? nullptr : &*found;
}

// Replaces the parameters' addresses with numbers, in a tree that has the layout of torch::optim's serialize(). A tree
// of another layout stays as it is.
void number_parameters(Node& root) {
  Node* const groups = find(root, "param_groups");
  Node* const state = find(root, "state");
  if (groups == nullptr || state == nullptr || groups->kind != "archive" || state->kind != "archive") return;
  std::map<std::string, size_t> numbers;  // by address
  for (auto& group : groups->parts)
    for (auto& part : group.parts) {
      if (part.kind != "string" || !part.key.starts_with("params/")) continue;
      const auto address = value_of(part).toStringRef();
      const auto number = text(numbers.emplace(address, numbers.size() + 1).first->second);
      part.tensor = tensor_from(number.data(), number.size(), at::kByte, {static_cast<int64_t>(number.size())});
    }
  // State that belongs to no parameter (any more) is harmless, but its name is an address that means nothing to another
  // run.
  std::erase_if(state->parts, [&](const Node& part) { return !numbers.contains(part.key); });
  std::sort(state->parts.begin(), state->parts.end(),
            [&](const Node& a, const Node& b) { return numbers[a.key] < numbers[b.key]; });
  for (auto& part : state->parts) part.key = text(numbers[part.key]);
}

// --- trees as entries ---

std::string escaped(const std::string& key) {
  std::string result;
  for (const char c : key) result += c == '/' ? ":" : c == ':' ? "%3A" : c == '%' ? "%25" : std::string(1, c);
  return result;
}

std::string unescaped(std::string_view name) {
  std::string result;
  for (size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '%' && i + 2 < name.size()) {
      result += name[i + 1] == '3' ? ':' : '%';
      i += 2;
    } else {
      result += name[i] == ':' ? '/' : name[i];
    }
  }
  return result;
}

void flatten(const Node& node, const std::string& name, Entries& entries, int depth = 0) {
  if (depth > kDeepestArchive)
    throw InvalidArgument(text("'", name, "' lies in more than ", kDeepestArchive, " archives within each other"),
                          "Save fewer within each other");
  const auto order = static_cast<int64_t>(entries.size());
  entries.push_back({.name = name,
                     .kind = node.kind,
                     .order = order,
                     .tensor = node.is_leaf() ? node.tensor : tensor_of(static_cast<int64_t>(node.parts.size()))});
  for (const auto& part : node.parts)
    flatten(part, name.empty() ? escaped(part.key) : name + "/" + escaped(part.key), entries, depth + 1);
}

// The tree that begins at entry `next`. Moves `next` behind it.
Node unflatten(const Entries& entries, size_t& next, int depth = 0) {
  if (next == entries.size() || depth > kDeepestArchive) malformed(entries.empty() ? "" : entries.back().full_name());
  const Entry& entry = entries[next++];
  Node node{unescaped(std::string_view(entry.name).substr(entry.name.rfind('/') + 1)), entry.kind, entry.tensor};
  if (!node.is_leaf()) {
    const auto count = value_of<int64_t>(entry.tensor, at::kLong, entry.full_name());
    for (int64_t i = 0; i < count; ++i) node.parts.push_back(unflatten(entries, next, depth + 1));
  }
  return node;
}

}  // namespace

Entries save_archive(const SaveFn& save) {
  OutputArchive out;
  save(out);
  InputArchive in;
  reread(out, in);
  Node root = node_of("", in);
  number_parameters(root);
  Entries entries;
  flatten(root, "", entries);
  return entries;
}

void load_archive(const Entries& entries, const LoadFn& load) {
  size_t next = 0;
  const Node root = unflatten(entries, next);
  if (root.kind != "archive" || next != entries.size()) malformed(entries.front().full_name());
  OutputArchive out;
  write(root, out);
  InputArchive in;
  reread(out, in);
  load(in);
}

}  // namespace muster::checkpoint
