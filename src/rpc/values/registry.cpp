// The table of functions that may be called: open addressing, read without a lock. Entries are never removed, and a
// table that was outgrown stays, because a thread may be reading it; all tables together take twice the memory of the
// last one.
#include <cxxabi.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/rpc/function.h"

namespace muster::rpc {
namespace {

struct Entry {
  Function function;
  detail::Identity identity;
  std::atomic<const Entry*> other{nullptr};  // another function with the same id
};

struct Table {
  explicit Table(size_t size) : slots(size) {}
  std::vector<std::atomic<const Entry*>> slots;  // a power of two, at most half of them taken

  const Entry* find(uint64_t id) const {
    for (size_t i = id & (slots.size() - 1);; i = (i + 1) & (slots.size() - 1)) {
      const Entry* const entry = slots[i].load(std::memory_order_acquire);
      if (!entry || entry->function.id == id) return entry;
    }
  }
  void put(const Entry* entry) {
    size_t i = entry->function.id & (slots.size() - 1);
    while (slots[i].load(std::memory_order_relaxed)) i = (i + 1) & (slots.size() - 1);
    slots[i].store(entry, std::memory_order_release);
  }
};

struct Registry {
  std::atomic<const Table*> table{nullptr};
  std::mutex mutex;  // held while a function is added
  std::deque<Entry> entries;
  std::deque<Table> tables;
  std::atomic<size_t> count{0};
};

// Made when the first function is added; never destroyed, because functions may be looked up until the process ends.
Registry& registry() {
  static Registry* const registry = new Registry;
  return *registry;
}

uint64_t fnv1a(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  return hash;
}

std::string demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> readable(abi::__cxa_demangle(name, nullptr, nullptr, &status),
                                                             &std::free);
  return readable ? readable.get() : name;
}

void replace_all(std::string& in, std::string_view what, std::string_view by) {
  for (size_t at = 0; (at = in.find(what, at)) != std::string::npos; at += by.size()) in.replace(at, what.size(), by);
}

// Shortens the names that the compiler spells out to the ones that a reader would write.
std::string tidied(std::string name) {
  replace_all(name, "std::__cxx11::", "std::");
  replace_all(name, "std::basic_string<char, std::char_traits<char>, std::allocator<char> >", "std::string");
  replace_all(name, "std::basic_string_view<char, std::char_traits<char> >", "std::string_view");
  // ", std::allocator<T> >" at the end of a container
  constexpr std::string_view kAllocator = ", std::allocator<";
  for (size_t at = 0; (at = name.find(kAllocator, at)) != std::string::npos;) {
    size_t end = at + kAllocator.size();
    for (int depth = 1; end < name.size() && depth > 0; ++end)
      depth += name[end] == '<' ? 1 : name[end] == '>' ? -1 : 0;
    name.erase(at, end - at);
  }
  replace_all(name, " >", ">");
  return name;
}

// "(int, at::Tensor const&) const" of "double (A::*)(int, at::Tensor const&) const": the last pair of parentheses and
// what follows.
std::string parameters_of(const std::type_info& signature) {
  std::string name = tidied(demangled(signature.name()));
  if (constexpr std::string_view kNoexcept = " noexcept"; name.ends_with(kNoexcept))
    name.resize(name.size() - kNoexcept.size());
  size_t open = name.rfind(')');
  if (open == std::string::npos) return "()";
  for (int depth = 1; depth > 0 && open > 0;) {
    --open;
    depth += name[open] == ')' ? 1 : name[open] == '(' ? -1 : 0;
  }
  return name.substr(open);
}

// "vector" of "std::vector<int>".
std::string_view class_name(std::string_view type) {
  if (type.ends_with('>')) {
    size_t open = type.size() - 1;
    for (int depth = 1; depth > 0 && open > 0;) {
      --open;
      depth += type[open] == '>' ? 1 : type[open] == '<' ? -1 : 0;
    }
    type = type.substr(0, open);
  }
  const size_t last = type.rfind("::");
  return last == std::string_view::npos ? type : type.substr(last + 2);
}

// The function's part of "muster::rpc::detail::Tag<&(forward(at::Tensor)), void>".
std::string function_name(const std::type_info& tag, const std::type_info& signature) {
  std::string name = tidied(demangled(tag.name()));
  const size_t open = name.find("Tag<");
  if (open == std::string::npos) return name;
  std::string_view inner = std::string_view(name).substr(open + 4);
  inner.remove_suffix(1);
  // The second parameter, the object, comes after the last comma outside of brackets.
  int depth = 0;
  size_t comma = inner.size();
  for (size_t i = 0; i < inner.size(); ++i) {
    if (std::string_view("(<{[").find(inner[i]) != std::string_view::npos) ++depth;
    if (std::string_view(")>}]").find(inner[i]) != std::string_view::npos) --depth;
    if (inner[i] == ',' && depth == 0) comma = i;
  }
  inner = inner.substr(0, comma);
  if (inner.starts_with('&')) inner.remove_prefix(1);
  if (inner.starts_with('(') && inner.ends_with(')')) inner = inner.substr(1, inner.size() - 2);
  // construct<T, A…>(A…) is T's constructor; a function template is shown with the type that it returns.
  constexpr std::string_view kConstruct = "muster::rpc::detail::construct<";
  if (const size_t at = inner.find(kConstruct); at != std::string_view::npos) {
    std::string_view rest = inner.substr(at + kConstruct.size());
    size_t end = 0;
    for (int level = 0; end < rest.size(); ++end) {
      if (rest[end] == '<' || rest[end] == '(') ++level;
      if (level == 0 && (rest[end] == ',' || rest[end] == '>')) break;
      if (rest[end] == '>' || rest[end] == ')') --level;
    }
    const std::string_view type = rest.substr(0, end);
    return text(type, "::", class_name(type), parameters_of(signature));
  }
  // "&f" has lost its parameters, "&(A::f(int) const)" and lambdas have them.
  const bool complete = inner.ends_with(')') || inner.ends_with(") const") || inner.ends_with('}');
  return text(inner, complete ? "" : parameters_of(signature));
}

// "program+0x1a2b", which addr2line turns into a line.
std::string place(const Entry& entry) {
  const auto* const address = reinterpret_cast<const void*>(entry.function.decode);
  Dl_info info{};
  if (!::dladdr(address, &info) || !info.dli_fname) return text(address);
  const auto offset = static_cast<const char*>(address) - static_cast<const char*>(info.dli_fbase);
  return text(info.dli_fname, "+", reinterpret_cast<const void*>(offset));
}

}  // namespace

std::string type_name(const std::type_info& type) { return tidied(demangled(type.name())); }

const Function* find_function(uint64_t id) {
  const Table* const table = registry().table.load(std::memory_order_acquire);
  const Entry* const entry = table ? table->find(id) : nullptr;
  if (!entry) return nullptr;
  if (const Entry* const other = entry->other.load(std::memory_order_acquire))
    throw InvalidArgument(text("two functions have the name ", entry->function.name,
                               ", so a call cannot tell them apart: "
                               "the one called from ",
                               place(*entry), " and the one called from ", place(*other)),
                          "They are static, or in unnamed namespaces, in two files: rename one, or put them into "
                          "namespaces with names");
  return &entry->function;
}

size_t function_count() { return registry().count.load(std::memory_order_relaxed); }

namespace detail {

const Function& add_function(const std::type_info& tag, const std::type_info& signature, Function function,
                             const Identity& identity) {
  function.id = fnv1a(tag.name());
  function.name = function_name(tag, signature);
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const Table* table = all.table.load(std::memory_order_relaxed);
  if (table) {
    if (const Entry* const there = table->find(function.id)) {
      // The same function may be named in two libraries: it gets one entry. Another function with this id is
      // remembered, so that a call can report it.
      if (there->identity == identity) return there->function;
      Entry& entry = all.entries.emplace_back();
      entry.function = std::move(function);
      entry.identity = identity;
      entry.other.store(there, std::memory_order_relaxed);
      const_cast<Entry*>(there)->other.store(&entry, std::memory_order_release);
      return entry.function;
    }
  }
  Entry& entry = all.entries.emplace_back();
  entry.function = std::move(function);
  entry.identity = identity;
  const size_t count = all.count.load(std::memory_order_relaxed) + 1;
  if (!table || 2 * count > table->slots.size()) {
    Table& larger = all.tables.emplace_back(table ? 2 * table->slots.size() : 64);
    if (table)
      for (const auto& slot : table->slots)
        if (const Entry* const old = slot.load(std::memory_order_relaxed)) larger.put(old);
    larger.put(&entry);
    all.table.store(&larger, std::memory_order_release);
  } else {
    const_cast<Table*>(table)->put(&entry);
  }
  all.count.store(count, std::memory_order_relaxed);
  return entry.function;
}

void result_stays(const std::type_info& result) {
  throw InvalidArgument(
      text("the result, of type ", type_name(result), ", cannot be sent"),
      "Call it with rpc::remote, which keeps the result where it is, or give the type MSGPACK_DEFINE");
}

}  // namespace detail
}  // namespace muster::rpc
