#include "checkpoint/torch_pickle.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

#include "base/text.h"
#include "base/utf8.h"
#include "checkpoint/unpickler.h"
#include "muster/base/error.h"

namespace muster::checkpoint {
namespace {

using pickled::Collection;
using pickled::Global;
using pickled::StorageRef;
using Tensors = std::map<std::string, at::Tensor>;
using ReadStorage = std::function<std::optional<at::Tensor>(const std::string& key)>;

struct PythonDtype {
  at::ScalarType dtype;
  std::string_view name;          // torch.float32
  std::string_view storage = "";  // torch.FloatStorage; newer dtypes have none
};
constexpr PythonDtype kPythonDtypes[] = {{at::kDouble, "float64", "DoubleStorage"},
                                         {at::kFloat, "float32", "FloatStorage"},
                                         {at::kHalf, "float16", "HalfStorage"},
                                         {at::kBFloat16, "bfloat16", "BFloat16Storage"},
                                         {at::kLong, "int64", "LongStorage"},
                                         {at::kInt, "int32", "IntStorage"},
                                         {at::kShort, "int16", "ShortStorage"},
                                         {at::kChar, "int8", "CharStorage"},
                                         {at::kByte, "uint8", "ByteStorage"},
                                         {at::kBool, "bool", "BoolStorage"},
                                         {at::kComplexFloat, "complex64", "ComplexFloatStorage"},
                                         {at::kComplexDouble, "complex128", "ComplexDoubleStorage"},
                                         {at::kComplexHalf, "complex32"},
                                         {at::kUInt64, "uint64"},
                                         {at::kUInt32, "uint32"},
                                         {at::kUInt16, "uint16"},
                                         {at::kFloat8_e5m2, "float8_e5m2"},
                                         {at::kFloat8_e4m3fn, "float8_e4m3fn"},
                                         {at::kFloat8_e5m2fnuz, "float8_e5m2fnuz"},
                                         {at::kFloat8_e4m3fnuz, "float8_e4m3fnuz"},
                                         {at::kFloat8_e8m0fnu, "float8_e8m0fnu"}};

// The dtype of which `global` is the name, or the class of storages.
std::optional<at::ScalarType> dtype_of(const Global& global, std::string_view PythonDtype::*part) {
  for (const PythonDtype& each : kPythonDtypes)
    if (!(each.*part).empty() && global.is(text("torch.", each.*part))) return each.dtype;
  return std::nullopt;
}

constexpr size_t kMostDimensions = 64;
constexpr uint64_t kMostElements = uint64_t{1} << 40, kMostEmptyBytes = uint64_t{1} << 62;
constexpr uint64_t kMostNameBytes = uint64_t{1} << 28, kMostRepeatedBytes = uint64_t{1} << 32;
constexpr int kDeepest = 100;

class TensorUnpickler : public Unpickler {
 public:
  TensorUnpickler(std::string_view pickle, const std::string& name, const ReadStorage& storage)
      : Unpickler(pickle, name), read_storage_(storage) {}

  Tensors tensors() {
    const Value all = run();
    if (std::holds_alternative<at::Tensor>(all)) {
      add(all, "tensor", 0);
    } else {
      add(all, std::nullopt, 0);
    }
    return std::move(tensors_);
  }

 private:
  // ("storage", class, key, device, elements)
  StorageRef storage_of(const Value& persistent_id) override {
    const auto& parts = collection(persistent_id, Kind::kTuple, "a storage").items;
    if (parts.size() != 5) fail("a storage is described by ", parts.size(), " values");
    if (take<std::string_view>(parts[0], "a kind of values") != "storage")
      fail("it refers to something other than storages");
    const auto kind = take<Global>(parts[1], "a class of storages");
    StorageRef ref{dtype_of(kind, &PythonDtype::storage), take<std::string_view>(parts[2], "a key")};
    if (!ref.dtype && !kind.is("torch.storage.UntypedStorage"))
      refuse("has a ", kind.words(), ", whose dtype is not known here");
    const auto elements = take<int64_t>(parts[4], "a number of elements");
    if (elements < 0 || __builtin_mul_overflow(static_cast<uint64_t>(elements),
                                               ref.dtype ? c10::elementSize(*ref.dtype) : size_t{1}, &ref.bytes))
      fail("a storage has ", elements, " elements");
    return ref;
  }

  Value call(const Global& function, const Values& arguments) override {
    const size_t count = arguments.size();
    if (function.is("collections.OrderedDict") && count == 0) return new_collection(Kind::kDict);
    if ((function.is("torch._utils._rebuild_parameter") && count == 3) ||
        (function.is("torch._utils._rebuild_parameter_with_state") && count == 4))
      return take<at::Tensor>(arguments[0], "a tensor");
    if (function.is("torch._utils._rebuild_tensor_v2") && (count == 6 || count == 7)) {
      const auto storage = take<StorageRef>(arguments[0], "a storage");
      if (!storage.dtype) fail("a tensor has no dtype");
      return tensor(storage, *storage.dtype, arguments, 6);
    }
    if (function.is("torch._utils._rebuild_tensor_v3") && (count == 7 || count == 8)) {
      const auto dtype = take<Global>(arguments[6], "a dtype");
      const auto known = dtype_of(dtype, &PythonDtype::name);
      if (!known) refuse("has a tensor of dtype ", dtype.words(), ", which is not known here");
      return tensor(take<StorageRef>(arguments[0], "a storage"), *known, arguments, 7);
    }
    // (function, class, arguments, attributes): a tensor with attributes, or a buffer
    if (function.is("torch._tensor._rebuild_from_type_v2") && count == 4) {
      const auto inner = take<Global>(arguments[0], "a function"), type = take<Global>(arguments[1], "a class");
      if (!type.is("torch.Tensor") && !type.is("torch.nn.parameter.Parameter") && !type.is("torch.nn.parameter.Buffer"))
        refuse("has a tensor of class ", type.words(), ", which is not known here");
      if (inner.is("torch._tensor._rebuild_from_type_v2")) fail("a tensor has two classes");
      return call(inner, collection(arguments[2], Kind::kTuple, "arguments").items);
    }
    refuse("calls ", function.words(), ", which is not read here");
  }

  std::vector<int64_t> numbers(const Value& tuple) const {
    const auto& items = collection(tuple, Kind::kTuple, "a shape").items;
    if (items.size() > kMostDimensions)
      fail("a tensor has ", items.size(), " dimensions, and up to ", kMostDimensions, " are read");
    std::vector<int64_t> all;
    for (const Value& item : items) {
      all.push_back(take<int64_t>(item, "a number"));
      if (all.back() < 0) fail("a shape or stride has the number ", all.back());
    }
    return all;
  }

  const at::Tensor& memory_of(const StorageRef& of) {
    auto known = storages_.find(of.key);
    if (known == storages_.end()) {
      auto read = read_storage_(std::string(of.key));
      if (!read) fail("there is no storage ", shortened(of.key));
      known = storages_.emplace(of.key, Storage{std::move(*read), of.dtype}).first;
    }
    const Storage& storage = known->second;
    if (storage.dtype != of.dtype) fail("storage ", shortened(of.key), " has two dtypes");
    if (storage.memory.nbytes() != of.bytes)
      fail("storage ", shortened(of.key), " has ", storage.memory.nbytes(), " bytes, and should have ", of.bytes);
    return storage.memory;
  }

  // Of (storage, offset, shape, strides, …), perhaps with a dictionary of bits.
  at::Tensor tensor(const StorageRef& of, at::ScalarType dtype, const Values& arguments, size_t bits) {
    const auto offset = take<int64_t>(arguments[1], "an offset");
    const auto sizes = numbers(arguments[2]), strides = numbers(arguments[3]);
    const at::Tensor made = view(of, dtype, offset, sizes, strides);
    if (arguments.size() > bits) set_bits(made, arguments[bits]);
    return made;
  }

  at::Tensor view(const StorageRef& of, at::ScalarType dtype, int64_t offset, const std::vector<int64_t>& sizes,
                  const std::vector<int64_t>& strides) {
    const at::Tensor& memory = memory_of(of);
    const uint64_t item = c10::elementSize(dtype), elements = memory.nbytes() / item;
    const bool is_empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
    const uint64_t most = is_empty ? kMostEmptyBytes / item : kMostElements;
    bool fits = offset >= 0 && sizes.size() == strides.size();
    uint64_t last = static_cast<uint64_t>(offset), count = 1;  // the last element, with care for overflow
    for (size_t d = 0; fits && d < sizes.size(); ++d) {
      const auto size = std::max<uint64_t>(static_cast<uint64_t>(sizes[d]), 1);
      const auto stride = static_cast<uint64_t>(strides[d]);
      fits = count <= most / size;  // a stride of 0 repeats elements
      if (fits) count *= size;
      if (is_empty || size == 1 || stride == 0) continue;
      fits = fits && size - 1 <= elements / stride && last + (size - 1) * stride <= elements;
      if (fits) last += (size - 1) * stride;
    }
    if (fits && is_empty) return at::empty(sizes, at::dtype(dtype));
    if (!fits || last >= elements)
      fail("a tensor of shape [", join(sizes), "] does not fit into storage ", shortened(of.key), " of ", elements,
           " elements");
    return at::empty({0}, at::dtype(dtype)).set_(memory.storage(), offset, sizes, strides);
  }

  // {"conj": True} and {"neg": True}: the values are the conjugates, or the negatives, of what the storage has.
  void set_bits(const at::Tensor& tensor, const Value& bits) {
    if (std::holds_alternative<pickled::None>(bits)) return;
    const auto& items = collection(bits, Kind::kDict, "a dictionary").items;
    spend(items.size());
    for (size_t i = 0; i + 1 < items.size(); i += 2) {
      const auto key = take<std::string_view>(items[i], "a name");
      const bool is_set = take<bool>(items[i + 1], "a bool");
      const auto dtype = tensor.scalar_type();
      if (key == "conj") {
        if (is_set && !tensor.is_complex()) fail("a tensor of real numbers is conjugated");
        if (tensor.is_complex()) tensor._set_conj(is_set);
      } else if (key == "neg") {
        if (is_set && !tensor.is_complex() && (!at::isFloatingType(dtype) || at::isFloat8Type(dtype)))
          fail("a tensor of ", c10::toString(dtype), " is negated");
        tensor._set_neg(is_set);
      } else {
        refuse("has a tensor with '", shortened(key), "', which is not read here");
      }
    }
  }

  // --- names ---

  // The tensors in `value`. No name: it is the whole.
  void add(const Value& value, const std::optional<std::string>& name, int depth) {
    if (depth > kDeepest)
      throw CorruptError(text(this->name(), " has dictionaries within each other, more than ", kDeepest));
    if (const auto* const tensor = std::get_if<at::Tensor>(&value)) return add_tensor(*name, *tensor);
    auto* const* const of = std::get_if<Collection*>(&value);
    if (!of || (*of)->kind != Kind::kDict)
      refuse("holds ", pickled::words_for(value), name ? text(" under ", shortened(*name)) : "",
             ", and not only tensors");
    for (const auto& [key, item] : last_of_each_key(**of, name ? name->size() : 0))
      add(*item, name ? text(*name, ".", key) : std::string(key), depth + 1);
  }

  // As Python has it, a later pair replaces an earlier one of the same key.
  std::map<std::string_view, const Value*> last_of_each_key(const Collection& dictionary, uint64_t prefix) {
    std::map<std::string_view, const Value*> all;
    spend(dictionary.items.size());  // a dictionary may be in many others
    for (size_t i = 0; i + 1 < dictionary.items.size(); i += 2) {
      const Value& key = dictionary.items[i];
      const auto* const name = std::get_if<std::string_view>(&key);
      if (!name)
        throw InvalidArgument(
            text("the keys of a dictionary in ", this->name(), ": expected strings, got ", pickled::words_for(key)));
      name_bytes_ += prefix + 1 + name->size();
      if (name_bytes_ > kMostNameBytes)
        throw CorruptError(text(this->name(), " has names of more than ", kMostNameBytes, " bytes together"));
      all[*name] = &dictionary.items[i + 1];
    }
    return all;
  }

  void add_tensor(const std::string& name, const at::Tensor& tensor) {
    if (const uint64_t stored = tensor.storage().nbytes(); tensor.nbytes() > stored)
      repeated_bytes_ += tensor.nbytes() - stored;
    if (repeated_bytes_ > kMostRepeatedBytes)
      throw InvalidArgument(text(this->name(), " has tensors that repeat their elements, such as '", shortened(name),
                                 "', of more than ", kMostRepeatedBytes, " bytes together"),
                            "Save what they repeat");
    if (!tensors_.emplace(name, tensor).second)
      throw InvalidArgument(text("two tensors of ", this->name(), " would be named '", shortened(name), "'"),
                            "Rename one of them");
  }

  struct Storage {
    at::Tensor memory;
    std::optional<at::ScalarType> dtype;
  };

  const ReadStorage& read_storage_;
  std::map<std::string_view, Storage> storages_;
  Tensors tensors_;
  uint64_t name_bytes_ = 0, repeated_bytes_ = 0;
};

// --- writing ---

std::string string_of(std::string_view words) {
  const auto length = static_cast<uint32_t>(words.size());
  return text('X', std::string_view(reinterpret_cast<const char*>(&length), sizeof length), words);
}
std::string integer_of(int64_t number) {
  return text("\x8a\x08", std::string_view(reinterpret_cast<const char*>(&number), sizeof number));
}
std::string tuple_of(at::IntArrayRef numbers) {
  std::string all = "(";
  for (const int64_t number : numbers) all += integer_of(number);
  return all + "t";
}
std::string global_of(std::string_view module, std::string_view name) { return text('c', module, '\n', name, '\n'); }

}  // namespace

Tensors tensors_in_pickle(std::string_view pickle, const std::string& name, const ReadStorage& storage) {
  return TensorUnpickler(pickle, name, storage).tensors();
}

std::string pickle_of(const Tensors& tensors) {
  std::string pickle = "\x80\x02}(";
  size_t key = 0;
  for (const auto& [name, tensor] : tensors) {
    if (!is_utf8(name)) throw InvalidArgument(text("the name '", shortened(name), "' is not UTF-8"), "Rename it");
    const auto* const found = std::find_if(std::begin(kPythonDtypes), std::end(kPythonDtypes),
                                           [&](const PythonDtype& each) { return each.dtype == tensor.scalar_type(); });
    if (found == std::end(kPythonDtypes))
      throw InvalidArgument(text("tensor '", shortened(name), "' is of dtype ", c10::toString(tensor.scalar_type()),
                                 ", which files of torch.save() are not written with here"),
                            "Convert it");
    const bool is_old = !found->storage.empty();
    pickle += string_of(name) + global_of("torch._utils", is_old ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
    pickle += "((" + string_of("storage") +
              (is_old ? global_of("torch", found->storage) : global_of("torch.storage", "UntypedStorage")) +
              string_of(text(key++)) + string_of("cpu") +
              integer_of(is_old ? tensor.numel() : static_cast<int64_t>(tensor.nbytes())) + "tQ";
    std::vector<int64_t> strides(static_cast<size_t>(tensor.dim()), 1);  // of contiguous elements
    for (size_t d = strides.size(); d-- > 1;)
      strides[d - 1] = strides[d] * std::max<int64_t>(tensor.size(static_cast<int64_t>(d)), 1);
    pickle += integer_of(0) + tuple_of(tensor.sizes()) + tuple_of(strides) + "\x89" +
              global_of("collections", "OrderedDict") + ")R" + (is_old ? "" : global_of("torch", found->name)) + "tR";
  }
  return pickle + "u.";
}

}  // namespace muster::checkpoint
