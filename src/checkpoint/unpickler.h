// Runs Python's pickles as far as they make data.
//
// A pickle is a program for a machine with a stack. This machine knows the instructions that make numbers, strings,
// tuples, lists and dictionaries. What a pickle calls, and what its persistent ids stand for, a derived class decides;
// it refuses what it does not know. Strings are views of the pickle, which must outlive all values.
//
// What a pickle may cost is bounded: it makes at most ten million values, counted over the whole run, and a value that
// is recalled is not copied.
//
// Errors: CorruptError, which names the file and the byte of the pickle; InvalidArgument for data of other types, such
// as bytes and sets, and for objects. Thread-safety: none. Source: PEP 307, PEP 3154; pickletools.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::checkpoint {

namespace pickled {

struct Collection;
struct None {};
struct Mark {};
struct Global {  // "torch._utils", "_rebuild_tensor_v2"
  std::string_view module, name;
  bool is(std::string_view both) const;  // "torch._utils._rebuild_tensor_v2"
  std::string words() const;             // the same, for messages
};
struct StorageRef {
  std::optional<at::ScalarType> dtype;  // none: it is one of bytes
  std::string_view key;
  uint64_t bytes = 0;
};
using Value =
    std::variant<None, Mark, bool, int64_t, double, std::string_view, Global, StorageRef, at::Tensor, Collection*>;
struct Collection {
  enum class Kind { kTuple, kList, kDict } kind;
  std::vector<Value> items;  // of a dictionary: keys and values by turns
};

std::string words_for(const Value& value);

}  // namespace pickled

class Unpickler {
 public:
  Unpickler(const Unpickler&) = delete;
  Unpickler& operator=(const Unpickler&) = delete;

 protected:
  using Value = pickled::Value;
  using Values = std::vector<Value>;
  using Kind = pickled::Collection::Kind;

  // `name`: of the file, for messages.
  Unpickler(std::string_view pickle, const std::string& name) : pickle_(pickle), name_(name) {}
  virtual ~Unpickler() = default;

  // What the pickle describes. The values live as long as this object.
  Value run();

  virtual Value call(const pickled::Global& function, const Values& arguments) = 0;
  virtual pickled::StorageRef storage_of(const Value& persistent_id) = 0;

  template <typename... Words>
  [[noreturn]] void fail(const Words&... words) const {
    throw CorruptError(text(name_, ", byte ", at_, " of the pickle: ", words...));
  }
  // The pickle is right, but not one of tensors only: InvalidArgument.
  template <typename... Words>
  [[noreturn]] void refuse(const Words&... words) const {
    throw InvalidArgument(text(name_, " ", words...), "Save a dictionary of tensors, such as a module's state_dict()");
  }
  template <typename T>
  T take(Value value, const char* what) const {
    if (auto* const of = std::get_if<T>(&value)) return std::move(*of);
    fail("it has ", pickled::words_for(value), " where there should be ", what);
  }
  pickled::Collection& collection(const Value& value, Kind kind, const char* what) const;
  Value new_collection(Kind kind, Values items = {});
  // Work on `count` more values.
  void spend(uint64_t count);

  const std::string& name() const { return name_; }

 private:
  std::string_view bytes(uint64_t count);
  template <typename Number>
  Number number();
  std::string_view line();
  std::string_view string(uint64_t length);
  int64_t long_integer(std::string_view little_endian) const;

  void push(Value value);
  Value pop();
  Value& top();
  Values pop_to_mark();  // those above the last mark
  Values pop_last(size_t count);
  void remember(uint64_t index);
  void recall(uint64_t index);
  void add_items(Kind kind, Values items);  // to the collection at the top

  void step(uint8_t code);
  [[noreturn]] void refuse_instruction(uint8_t code);

  const std::string_view pickle_;
  const std::string& name_;
  uint64_t next_ = 0, at_ = 0, spent_ = 0;
  Values stack_;
  std::map<uint64_t, Value> memo_;
  // They live until the end of the whole, so that one may contain itself, and none is destroyed by recursion.
  std::deque<pickled::Collection> collections_;
};

}  // namespace muster::checkpoint
