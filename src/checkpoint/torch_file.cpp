#include "checkpoint/torch_file.h"

#include <ATen/core/Dict.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::checkpoint {
namespace {

using Tensors = std::map<std::string, at::Tensor>;
using ReadStorage = std::function<std::optional<at::Tensor>(const std::string& key)>;

// --- what a pickle makes ---

struct Collection;
struct None {};
struct Mark {};
struct Global {  // "torch._utils._rebuild_tensor_v2"
  std::string name;
};
struct StorageRef {
  at::ScalarType dtype;
  std::string key;
};
using Value = std::variant<None, Mark, bool, int64_t, double, std::string, Global, StorageRef, at::Tensor, Collection*>;
struct Collection {
  enum class Kind { kTuple, kList, kDict } kind;
  std::vector<Value> items;  // of a dictionary: keys and values by turns
};

std::string words_for(const Value& value) {
  struct Words {
    std::string operator()(const None&) { return "None"; }
    std::string operator()(const Mark&) { return "nothing"; }
    std::string operator()(bool) { return "a bool"; }
    std::string operator()(int64_t) { return "an integer"; }
    std::string operator()(double) { return "a float"; }
    std::string operator()(const std::string&) { return "a string"; }
    std::string operator()(const Global& of) { return of.name; }
    std::string operator()(const StorageRef&) { return "a storage"; }
    std::string operator()(const at::Tensor&) { return "a tensor"; }
    std::string operator()(const Collection* of) {
      return of->kind == Collection::Kind::kDict   ? "a dictionary"
             : of->kind == Collection::Kind::kList ? "a list"
                                                   : "a tuple";
    }
  };
  return std::visit(Words(), value);
}

std::optional<at::ScalarType> dtype_of(const std::string& storage) {
  static const std::map<std::string, at::ScalarType> all = {{"torch.DoubleStorage", at::kDouble},
                                                            {"torch.FloatStorage", at::kFloat},
                                                            {"torch.HalfStorage", at::kHalf},
                                                            {"torch.BFloat16Storage", at::kBFloat16},
                                                            {"torch.LongStorage", at::kLong},
                                                            {"torch.IntStorage", at::kInt},
                                                            {"torch.ShortStorage", at::kShort},
                                                            {"torch.CharStorage", at::kChar},
                                                            {"torch.ByteStorage", at::kByte},
                                                            {"torch.BoolStorage", at::kBool},
                                                            {"torch.ComplexFloatStorage", at::kComplexFloat},
                                                            {"torch.ComplexDoubleStorage", at::kComplexDouble}};
  const auto found = all.find(storage);
  return found == all.end() ? std::nullopt : std::optional(found->second);
}

class Unpickler {
 public:
  Unpickler(std::string_view pickle, const std::string& name, const ReadStorage& storage)
      : pickle_(pickle), name_(name), read_storage_(storage) {}

  Tensors run() {
    for (;;) {
      at_ = next_;
      const auto code = static_cast<uint8_t>(bytes(1)[0]);
      if (code == '.') break;
      step(code);
    }
    Tensors all;
    add_tensors(pop(), "", 0, all);
    return all;
  }

 private:
  template <typename... Words>
  [[noreturn]] void fail(const Words&... words) const {
    throw CorruptError(text(name_, ", byte ", at_, " of the pickle: ", words...));
  }

  // --- reading ---

  std::string_view bytes(uint64_t count) {
    if (count > pickle_.size() - next_) fail("it ends too early");
    const auto some = pickle_.substr(next_, count);
    next_ += count;
    return some;
  }
  template <typename Number>
  Number number() {
    Number value;
    std::memcpy(&value, bytes(sizeof value).data(), sizeof value);
    return value;
  }
  std::string line() {
    const auto end = pickle_.find('\n', next_);
    if (end == std::string_view::npos) fail("a line does not end");
    std::string word(pickle_.substr(next_, end - next_));
    next_ = end + 1;
    return word;
  }

  // --- the stack ---

  void push(Value value) {
    if (stack_.size() >= kMostValues) fail("it makes too many values");
    stack_.push_back(std::move(value));
  }
  Value pop() {
    if (stack_.empty()) fail("it takes a value where there is none");
    Value value = std::move(stack_.back());
    stack_.pop_back();
    return value;
  }
  // Those above the last mark.
  std::vector<Value> pop_to_mark() {
    size_t begin = stack_.size();
    while (begin > 0 && !std::holds_alternative<Mark>(stack_[begin - 1])) --begin;
    if (begin == 0) fail("there is no mark");
    std::vector<Value> values(std::make_move_iterator(stack_.begin() + static_cast<ptrdiff_t>(begin)),
                              std::make_move_iterator(stack_.end()));
    stack_.resize(begin - 1);
    return values;
  }
  std::vector<Value> pop_last(size_t count) {
    std::vector<Value> values(count);
    for (size_t i = count; i-- > 0;) values[i] = pop();
    return values;
  }
  template <typename T>
  T take(Value value, const char* what) const {
    if (auto* const of = std::get_if<T>(&value)) return std::move(*of);
    fail("it has ", words_for(value), " where there should be ", what);
  }
  Collection& collection(const Value& value, Collection::Kind kind, const char* what) const {
    auto* const* const of = std::get_if<Collection*>(&value);
    if (!of || (*of)->kind != kind) fail("it has ", words_for(value), " where there should be ", what);
    return **of;
  }
  Value& top() {
    if (stack_.empty()) fail("it takes a value where there is none");
    return stack_.back();
  }
  void push_collection(Collection::Kind kind, std::vector<Value> items = {}) {
    // They live until the end of the whole, so that one may contain itself, and none is destroyed by recursion.
    collections_.push_back(std::make_unique<Collection>(Collection{kind, std::move(items)}));
    push(collections_.back().get());
  }
  void remember(uint64_t index) {
    if (memo_.size() >= kMostValues) fail("it makes too many values");
    memo_[index] = top();
  }
  void recall(uint64_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) fail("it asks for value ", index, ", which it has not kept");
    push(found->second);
  }

  // --- instructions ---

  void step(uint8_t code) {
    using Kind = Collection::Kind;
    switch (code) {
      case 0x80:  // PROTO
        if (const auto version = number<uint8_t>(); version < 2 || version > 5) fail("its protocol is ", int{version});
        return;
      case 0x95:  // FRAME
        return void(number<uint64_t>());
      case '(':
        return push(Mark());
      case 'N':
        return push(None());
      case 0x88:
        return push(true);
      case 0x89:
        return push(false);
      case 'K':
        return push(int64_t{number<uint8_t>()});
      case 'M':
        return push(int64_t{number<uint16_t>()});
      case 'J':
        return push(int64_t{number<int32_t>()});
      case 0x8a:  // LONG1
        return push(long_integer(bytes(number<uint8_t>())));
      case 'G':  // big-endian
        return push(std::bit_cast<double>(__builtin_bswap64(number<uint64_t>())));
      case 'X':
        return push(std::string(bytes(number<uint32_t>())));
      case 0x8c:
        return push(std::string(bytes(number<uint8_t>())));
      case '}':
        return push_collection(Kind::kDict);
      case ']':
        return push_collection(Kind::kList);
      case ')':
        return push_collection(Kind::kTuple);
      case 0x85:
      case 0x86:
      case 0x87:
        return push_collection(Kind::kTuple, pop_last(static_cast<size_t>(code - 0x84)));
      case 't':
        return push_collection(Kind::kTuple, pop_to_mark());
      case 'a': {
        auto item = pop();
        collection(top(), Kind::kList, "a list").items.push_back(std::move(item));
        return;
      }
      case 'e': {
        auto items = pop_to_mark();
        auto& list = collection(top(), Kind::kList, "a list").items;
        list.insert(list.end(), std::make_move_iterator(items.begin()), std::make_move_iterator(items.end()));
        return;
      }
      case 's':
        return set_items(pop_last(2));
      case 'u':
        return set_items(pop_to_mark());
      case 'q':
        return remember(number<uint8_t>());
      case 'r':
        return remember(number<uint32_t>());
      case 0x94:  // MEMOIZE
        return remember(memo_.size());
      case 'h':
        return recall(number<uint8_t>());
      case 'j':
        return recall(number<uint32_t>());
      case 'c': {
        const std::string module = line();
        return push(Global{module + "." + line()});
      }
      case 0x93: {  // STACK_GLOBAL
        const auto name = take<std::string>(pop(), "a name");
        return push(Global{take<std::string>(pop(), "a name") + "." + name});
      }
      case 'Q':
        return push(storage_of(pop()));
      case 'R': {
        const Value arguments = pop();
        return push(call(take<Global>(pop(), "a function"), collection(arguments, Kind::kTuple, "arguments").items));
      }
      case 'b':  // attributes, as state_dict() has them
        pop();
        collection(top(), Kind::kDict, "a dictionary");
        return;
      default:
        fail("it has the instruction ", int{code}, ", which makes no data");
    }
  }

  int64_t long_integer(std::string_view little_endian) const {
    if (little_endian.size() > sizeof(int64_t)) fail("an integer has ", little_endian.size(), " bytes");
    int64_t value = !little_endian.empty() && (little_endian.back() & 0x80) != 0 ? -1 : 0;
    std::memcpy(&value, little_endian.data(), little_endian.size());
    return value;
  }

  void set_items(std::vector<Value> items) {
    if (items.size() % 2 != 0) fail("a key has no value");
    auto& all = collection(top(), Collection::Kind::kDict, "a dictionary").items;
    all.insert(all.end(), std::make_move_iterator(items.begin()), std::make_move_iterator(items.end()));
  }

  // ("storage", class, key, device, elements)
  StorageRef storage_of(const Value& id) const {
    const auto& parts = collection(id, Collection::Kind::kTuple, "a storage").items;
    if (parts.size() != 5) fail("a storage is described by ", parts.size(), " values");
    const auto kind = take<Global>(parts[1], "a class of storages").name;
    const auto dtype = dtype_of(kind);
    if (!dtype) throw InvalidArgument(text(name_, " has a ", kind, ", whose dtype is not known here"));
    return {*dtype, take<std::string>(parts[2], "a key")};
  }

  Value call(const Global& function, const std::vector<Value>& arguments) {
    if (function.name == "collections.OrderedDict" && arguments.empty()) {
      collections_.push_back(std::make_unique<Collection>(Collection{Collection::Kind::kDict, {}}));
      return collections_.back().get();
    }
    if (function.name == "torch._utils._rebuild_parameter" && !arguments.empty())
      return take<at::Tensor>(arguments[0], "a tensor");
    if (function.name == "torch._utils._rebuild_tensor_v2" && arguments.size() >= 4)
      return tensor(take<StorageRef>(arguments[0], "a storage"), take<int64_t>(arguments[1], "an offset"),
                    numbers(arguments[2]), numbers(arguments[3]));
    throw InvalidArgument(text(name_, " calls ", function.name, ", and holds not only tensors"),
                          "Save a dictionary of tensors, such as a module's state_dict()");
  }

  std::vector<int64_t> numbers(const Value& tuple) const {
    std::vector<int64_t> all;
    for (const Value& item : collection(tuple, Collection::Kind::kTuple, "a shape").items) {
      all.push_back(take<int64_t>(item, "a number"));
      if (all.back() < 0) fail("a shape or stride has the number ", all.back());
    }
    return all;
  }

  at::Tensor tensor(const StorageRef& of, int64_t offset, const std::vector<int64_t>& sizes,
                    const std::vector<int64_t>& strides) {
    auto known = storages_.find(of.key);
    if (known == storages_.end()) {
      auto read = read_storage_(of.key);
      if (!read) fail("there is no storage ", of.key);
      known = storages_.emplace(of.key, std::move(*read)).first;
    }
    const at::Tensor& memory = known->second;
    const auto item = static_cast<uint64_t>(c10::elementSize(of.dtype));
    const uint64_t elements = memory.nbytes() / item;
    bool fits = offset >= 0 && sizes.size() == strides.size() && sizes.size() <= kMostDimensions;
    const bool is_empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
    uint64_t last = static_cast<uint64_t>(offset), count = 1;  // the last element, with care for overflow
    for (size_t d = 0; fits && d < sizes.size(); ++d) {
      const auto size = std::max<uint64_t>(static_cast<uint64_t>(sizes[d]), 1);
      const auto stride = static_cast<uint64_t>(strides[d]);
      fits = count <= kMostElements / size;  // a stride of 0 repeats elements
      if (fits) count *= size;
      if (is_empty || size == 1 || stride == 0) continue;
      fits = fits && size - 1 <= elements / stride && last + (size - 1) * stride <= elements;
      if (fits) last += (size - 1) * stride;
    }
    if (fits && is_empty) return at::empty(sizes, at::dtype(of.dtype));
    if (!fits || last >= elements)
      fail("a tensor of shape [", join(sizes), "] does not fit into storage ", of.key, " of ", elements, " elements");
    return at::empty({0}, at::dtype(of.dtype)).set_(memory.storage(), offset, sizes, strides);
  }

  void add_tensors(const Value& value, const std::string& name, int depth, Tensors& all) const {
    if (depth > kDeepest) throw CorruptError(text(name_, " has dictionaries within each other, more than ", kDeepest));
    if (const auto* const tensor = std::get_if<at::Tensor>(&value)) {
      all.insert_or_assign(name.empty() ? "tensor" : name, *tensor);
      return;
    }
    auto* const* const of = std::get_if<Collection*>(&value);
    if (!of || (*of)->kind != Collection::Kind::kDict)
      throw InvalidArgument(
          text(name_, " holds ", words_for(value), name.empty() ? "" : text(" under ", name), ", and not only tensors"),
          "Save a dictionary of tensors, such as a module's state_dict()");
    for (size_t i = 0; i + 1 < (*of)->items.size(); i += 2) {
      const auto* const key = std::get_if<std::string>(&(*of)->items[i]);
      if (!key)
        throw InvalidArgument(
            text(name_, " has a dictionary whose keys are not strings, but ", words_for((*of)->items[i])));
      add_tensors((*of)->items[i + 1], name.empty() ? *key : text(name, ".", *key), depth + 1, all);
    }
  }

  static constexpr size_t kMostValues = 10'000'000, kMostDimensions = 64;
  static constexpr uint64_t kMostElements = uint64_t{1} << 40;
  static constexpr int kDeepest = 100;

  const std::string_view pickle_;
  const std::string& name_;
  const ReadStorage& read_storage_;
  uint64_t next_ = 0, at_ = 0;
  std::vector<Value> stack_;
  std::unordered_map<uint64_t, Value> memo_;
  std::vector<std::unique_ptr<Collection>> collections_;
  std::map<std::string, at::Tensor> storages_;
};

}  // namespace

Tensors tensors_in_pickle(std::string_view pickle, const std::string& name, const ReadStorage& storage) {
  return Unpickler(pickle, name, storage).run();
}

Tensors tensors_of_torch_file(const std::string& path) {
  std::unique_ptr<caffe2::serialize::PyTorchStreamReader> reader;
  const auto record = [&](const std::string& key) -> std::optional<at::Tensor> {
    if (!reader->hasRecord(key)) return std::nullopt;
    auto [data, size] = reader->getRecord(key);
    auto keeper = std::make_shared<at::DataPtr>(std::move(data));
    return at::from_blob(
        keeper->get(), {static_cast<int64_t>(size)}, [keeper](void*) {}, at::kByte);
  };
  std::optional<at::Tensor> pickle;
  try {
    reader = std::make_unique<caffe2::serialize::PyTorchStreamReader>(path);
    pickle = record("data.pkl");
  } catch (const std::exception& error) {
    const std::string what = error.what();
    throw CorruptError(text(path, " is not a file of torch.save(): ", what.substr(0, what.find('\n'))));
  }
  if (!pickle) throw CorruptError(text(path, " is not a file of torch.save(): it has no data.pkl"));
  return tensors_in_pickle({static_cast<const char*>(pickle->const_data_ptr()), pickle->nbytes()}, path,
                           [&](const std::string& key) { return record("data/" + key); });
}

std::string torch_file_of(const Tensors& tensors) {
  c10::impl::GenericDict values(c10::StringType::get(), c10::TensorType::get());
  for (const auto& [name, tensor] : tensors) values.insert(name, tensor.clone());  // not a part of a larger storage
  std::string pickle, archive;
  // torch::pickle_save() adds the dictionary's type, which torch.load() takes for code.
  torch::jit::Pickler pickler([&](const char* bytes, size_t size) { pickle.append(bytes, size); }, nullptr, nullptr,
                              nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(values);
  pickler.stop();
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* bytes, size_t size) {
    archive.append(static_cast<const char*>(bytes), size);
    return size;
  });
  size_t number = 0;
  for (const at::Tensor& tensor : pickler.tensorData())
    writer.writeRecord(text("data/", number++), tensor.const_data_ptr(), tensor.nbytes());
  writer.writeRecord("data.pkl", pickle.data(), pickle.size());
  writer.writeEndOfFile();
  return archive;
}

}  // namespace muster::checkpoint
