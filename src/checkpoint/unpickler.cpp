#include "checkpoint/unpickler.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>

#include "base/utf8.h"

namespace muster::checkpoint {

using pickled::Collection;
using pickled::Global;

namespace {

constexpr uint64_t kMostValues = 10'000'000;

const char* words_for_kind(Collection::Kind kind) {
  return kind == Collection::Kind::kDict ? "a dictionary" : kind == Collection::Kind::kList ? "a list" : "a tuple";
}

}  // namespace

bool Global::is(std::string_view both) const {
  return both.size() == module.size() + 1 + name.size() && both.starts_with(module) && both.ends_with(name) &&
         both[module.size()] == '.';
}

std::string Global::words() const { return shortened(text(module.substr(0, 200), ".", name.substr(0, 200))); }

std::string pickled::words_for(const Value& value) {
  struct Words {
    std::string operator()(const None&) { return "None"; }
    std::string operator()(const Mark&) { return "nothing"; }
    std::string operator()(bool) { return "a bool"; }
    std::string operator()(int64_t) { return "an integer"; }
    std::string operator()(double) { return "a float"; }
    std::string operator()(std::string_view) { return "a string"; }
    std::string operator()(const Global& of) { return of.words(); }
    std::string operator()(const StorageRef&) { return "a storage"; }
    std::string operator()(const at::Tensor&) { return "a tensor"; }
    std::string operator()(const Collection* of) { return words_for_kind(of->kind); }
  };
  return std::visit(Words(), value);
}

Unpickler::Value Unpickler::run() {
  for (;;) {
    at_ = next_;
    const auto code = static_cast<uint8_t>(bytes(1)[0]);
    if (code == '.') return pop();
    step(code);
  }
}

void Unpickler::spend(uint64_t count) {
  if (count > kMostValues - spent_) fail("it makes more than ", kMostValues, " values");
  spent_ += count;
}

// --- reading ---

std::string_view Unpickler::bytes(uint64_t count) {
  if (count > pickle_.size() - next_) fail("it ends too early");
  const auto some = pickle_.substr(next_, count);
  next_ += count;
  return some;
}

template <typename Number>
Number Unpickler::number() {
  Number value;
  std::memcpy(&value, bytes(sizeof value).data(), sizeof value);
  return value;
}

std::string_view Unpickler::line() {
  const auto end = pickle_.find('\n', next_);
  if (end == std::string_view::npos) fail("a line does not end");
  const auto word = string(end - next_);
  next_ = end + 1;
  return word;
}

std::string_view Unpickler::string(uint64_t length) {
  const auto all = bytes(length);
  if (!is_utf8(all)) fail("a string is not UTF-8");
  return all;
}

int64_t Unpickler::long_integer(std::string_view little_endian) const {
  if (little_endian.size() > sizeof(int64_t))
    refuse("holds an integer of ", little_endian.size(), " bytes, and not only tensors");
  int64_t value = !little_endian.empty() && (little_endian.back() & 0x80) != 0 ? -1 : 0;
  std::memcpy(&value, little_endian.data(), little_endian.size());
  return value;
}

// --- the stack ---

void Unpickler::push(Value value) {
  spend(1);
  stack_.push_back(std::move(value));
}

Unpickler::Value Unpickler::pop() {
  Value value = std::move(top());
  stack_.pop_back();
  return value;
}

Unpickler::Value& Unpickler::top() {
  if (stack_.empty()) fail("it takes a value where there is none");
  return stack_.back();
}

Unpickler::Values Unpickler::pop_to_mark() {
  size_t begin = stack_.size();
  while (begin > 0 && !std::holds_alternative<pickled::Mark>(stack_[begin - 1])) --begin;
  if (begin == 0) fail("there is no mark");
  Values values = pop_last(stack_.size() - begin);
  stack_.pop_back();
  return values;
}

Unpickler::Values Unpickler::pop_last(size_t count) {
  if (count > stack_.size()) fail("it takes a value where there is none");
  const auto begin = stack_.end() - static_cast<ptrdiff_t>(count);
  Values values(std::make_move_iterator(begin), std::make_move_iterator(stack_.end()));
  stack_.erase(begin, stack_.end());
  return values;
}

Collection& Unpickler::collection(const Value& value, Kind kind, const char* what) const {
  auto* const* const of = std::get_if<Collection*>(&value);
  if (!of || (*of)->kind != kind) fail("it has ", pickled::words_for(value), " where there should be ", what);
  return **of;
}

Unpickler::Value Unpickler::new_collection(Kind kind, Values items) {
  spend(1);
  collections_.push_back({kind, std::move(items)});
  return &collections_.back();
}

void Unpickler::remember(uint64_t index) {
  spend(1);
  memo_[index] = top();
}

void Unpickler::recall(uint64_t index) {
  const auto found = memo_.find(index);
  if (found == memo_.end()) fail("it asks for value ", index, ", which it has not kept");
  push(found->second);
}

void Unpickler::add_items(Kind kind, Values items) {
  if (kind == Kind::kDict && items.size() % 2 != 0) fail("a key has no value");
  auto& all = collection(top(), kind, words_for_kind(kind)).items;
  all.insert(all.end(), std::make_move_iterator(items.begin()), std::make_move_iterator(items.end()));
}

// --- instructions ---

void Unpickler::step(uint8_t code) {
  switch (code) {
    case 0x80:  // PROTO
      if (const auto version = number<uint8_t>(); version < 2 || version > 5)
        fail("its protocol is ", int{version}, ", and 2 to 5 are read");
      return;
    case 0x95:  // FRAME
      return void(number<uint64_t>());
    case '(':
      return push(pickled::Mark());
    case 'N':
      return push(pickled::None());
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
      return push(string(number<uint32_t>()));
    case 0x8c:
      return push(string(number<uint8_t>()));
    case '}':
      return push(new_collection(Kind::kDict));
    case ']':
      return push(new_collection(Kind::kList));
    case ')':
      return push(new_collection(Kind::kTuple));
    case 0x85:
    case 0x86:
    case 0x87:
      return push(new_collection(Kind::kTuple, pop_last(static_cast<size_t>(code - 0x84))));
    case 't':
      return push(new_collection(Kind::kTuple, pop_to_mark()));
    case 'a':
      return add_items(Kind::kList, pop_last(1));
    case 'e':
      return add_items(Kind::kList, pop_to_mark());
    case 's':
      return add_items(Kind::kDict, pop_last(2));
    case 'u':
      return add_items(Kind::kDict, pop_to_mark());
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
      const auto module = line();
      return push(Global{module, line()});
    }
    case 0x93: {  // STACK_GLOBAL
      const auto name = take<std::string_view>(pop(), "a name");
      return push(Global{take<std::string_view>(pop(), "a name"), name});
    }
    case 'Q':
      return push(storage_of(pop()));
    case 'R': {
      const Value arguments = pop();
      const auto function = take<Global>(pop(), "a function");
      return push(call(function, collection(arguments, Kind::kTuple, "arguments").items));
    }
    case 'b':  // attributes, as state_dict() has them
      pop();
      collection(top(), Kind::kDict, "a dictionary");
      return;
    default:
      refuse_instruction(code);
  }
}

void Unpickler::refuse_instruction(uint8_t code) {
  const char* holds = nullptr;
  switch (code) {
    case 'B':
    case 'C':
    case 0x8e:
    case 0x96:
      holds = "bytes";
      break;
    case 'T':
    case 'U':
      holds = "a string of Python 2";
      break;
    case 0x8b:
      holds = "an integer of more than 255 bytes";
      break;
    case 0x8d:
      holds = "a string of 4 GiB or more";
      break;
    case 0x8f:
    case 0x91:
      holds = "a set";
      break;
    case 0x81:  // NEWOBJ and NEWOBJ_EX: of a class and arguments
    case 0x92:
      pop_last(code == 0x81 ? 1 : 2);
      refuse("holds an object of ", pickled::words_for(pop()), ", and not only tensors");
    case 'F':
    case 'I':
    case 'L':
    case 'P':
    case 'S':
    case 'V':
    case 'd':
    case 'g':
    case 'l':
    case 'p':
      throw InvalidArgument(text(name_, ": expected a pickle of protocol 2 to 5, got 0 or 1"),
                            "Save it without pickle_protocol");
    default:
      fail("it has the instruction ", int{code}, ", which makes no data");
  }
  refuse("holds ", holds, ", and not only tensors");
}

}  // namespace muster::checkpoint
