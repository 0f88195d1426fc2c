// Which types may be arguments and results of calls, and how they are packed.
//
//   numbers, characters, bool, enums, std::complex, std::string, at::Tensor; std::optional, variant, pair, tuple,
//   vector, array, list, deque, map, set and their unordered kin, unique_ptr and shared_ptr of such; structs with a
//   default constructor and the line MSGPACK_DEFINE(a, b). For other adaptors of msgpack, specialise rpc::is_sendable.
//
// Parameters that refer to memory of other objects arrive as owners (Held): std::string_view as std::string, std::span
// and at::ArrayRef as std::vector. A unique_ptr or shared_ptr that is null stays null; two shared_ptrs to one object
// arrive as pointers to two objects.
//
// Format: the values one after another, in msgpack's encoding; an enum or a character is its number, a long double a
// byte string as the processor has it, a variant [index, value], a tensor its index in Payload::tensors
// (tensor_msgpack.h).
//
// Bounds: a body is checked as a whole before any object is built: containers nest at most 128 deep, and have no more
// elements than there are bytes left for all of them. Decoding needs at most 24 times the body's bytes in addition to
// the values themselves.
//
// Errors: packing throws InvalidArgument (a string above 4 GiB); unpacking throws CorruptError, which names the types.
// An exception of an object's own pack or unpack function passes through. Thread-safety: no shared state.
#pragma once

#include <array>
#include <complex>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "muster/comm/tensor_msgpack.h"
#include "muster/rpc/payload.h"

namespace muster::rpc {
namespace detail {

// The output stream for msgpack: appends to a body.
class BodyWriter {
 public:
  explicit BodyWriter(std::string& body) : body_(body) {}
  void write(const char* data, size_t size) { body_.append(data, size); }

 private:
  std::string& body_;
};

// Reads the values of a body as msgpack objects, which refer to its bytes.
class BodyReader {
 public:
  explicit BodyReader(std::string_view body);
  BodyReader(const BodyReader&) = delete;
  BodyReader& operator=(const BodyReader&) = delete;

  msgpack::object next();    // CorruptError: there is no further value, or it does not parse
  void expect_done() const;  // CorruptError: bytes are left over

 private:
  msgpack::object parse(int depth);
  uint64_t number(size_t bytes);
  const char* take(size_t bytes);
  msgpack::object* room(size_t objects);
  void promise(size_t objects);  // that many more values must come

  std::string_view body_;
  size_t at_ = 0, expected_ = 0;
  size_t used_ = 0;
  std::array<msgpack::object, 16> near_;  // enough for most calls without an allocation
  std::vector<std::unique_ptr<msgpack::object[]>> far_;
};

// The number of the value, counted from 1, that contains the tensor with that index; nullopt if no value does.
std::optional<size_t> argument_with(std::string_view body, size_t tensor);

[[noreturn]] void cannot_send(const std::type_info& type, std::string_view why);
[[noreturn]] void is_not(const std::type_info& type, std::string_view why);

template <typename T>
concept MsgpackDefined = requires(const T& object, T& filled, msgpack::packer<BodyWriter>& out,
                                  const msgpack::object& in) {
  object.msgpack_pack(out);
  filled.msgpack_unpack(in);
};

template <typename T>
inline constexpr bool is_character =
    std::same_as<T, wchar_t> || std::same_as<T, char8_t> || std::same_as<T, char16_t> || std::same_as<T, char32_t>;

template <typename T>
inline constexpr bool sendable =
    (std::is_integral_v<T> && sizeof(T) <= 8) || std::is_floating_point_v<T> || std::is_enum_v<T> ||
    (MsgpackDefined<T> && std::default_initializable<T>);
}  // namespace detail

// Specialise it as true for a type with an adaptor of the program's own (namespace msgpack::adaptor).
template <typename T>
inline constexpr bool is_sendable = detail::sendable<T>;

// clang-format off
template <> inline constexpr bool is_sendable<std::string> = true;
template <> inline constexpr bool is_sendable<at::Tensor> = true;
template <> inline constexpr bool is_sendable<std::monostate> = true;
template <typename T> inline constexpr bool is_sendable<std::complex<T>> = is_sendable<T>;
template <typename T> inline constexpr bool is_sendable<std::optional<T>> = is_sendable<T> && std::copyable<T>;
template <typename T> inline constexpr bool is_sendable<std::unique_ptr<T>> = is_sendable<T> && !std::is_array_v<T>;
template <typename T> inline constexpr bool is_sendable<std::shared_ptr<T>> = is_sendable<T> && !std::is_array_v<T>;
template <typename T, size_t N> inline constexpr bool is_sendable<std::array<T, N>> = is_sendable<T>;
template <typename T> inline constexpr bool is_sendable<std::vector<T>> = is_sendable<T>;
template <typename T> inline constexpr bool is_sendable<std::deque<T>> = is_sendable<T>;
template <typename T> inline constexpr bool is_sendable<std::list<T>> = is_sendable<T>;
template <typename T, typename C> inline constexpr bool is_sendable<std::set<T, C>> = is_sendable<T>;
template <typename T, typename H, typename E>
inline constexpr bool is_sendable<std::unordered_set<T, H, E>> = is_sendable<T>;
template <typename K, typename V, typename C>
inline constexpr bool is_sendable<std::map<K, V, C>> = is_sendable<K> && is_sendable<V>;
template <typename K, typename V, typename H, typename E>
inline constexpr bool is_sendable<std::unordered_map<K, V, H, E>> = is_sendable<K> && is_sendable<V>;
template <typename A, typename B>
inline constexpr bool is_sendable<std::pair<A, B>> = is_sendable<A> && is_sendable<B>;
template <typename... T> inline constexpr bool is_sendable<std::tuple<T...>> = (is_sendable<T> && ...);
template <typename... T> inline constexpr bool is_sendable<std::variant<T...>> =
    (is_sendable<T> && ...) && (std::default_initializable<T> && ...);
// clang-format on

template <typename T>
concept Sendable = is_sendable<T>;

// The type of a parameter or result while it is sent and stored: the type itself, or, of a view, an owner.
template <typename T>
struct HeldAs {
  using type = T;
};
template <>
struct HeldAs<std::string_view> {
  using type = std::string;
};
template <>
struct HeldAs<const char*> {
  using type = std::string;
};
template <>
struct HeldAs<char*> {
  using type = std::string;
};
template <typename T, size_t N>
struct HeldAs<std::span<T, N>> {
  using type = std::vector<std::remove_cv_t<T>>;
};
template <typename T>
struct HeldAs<c10::ArrayRef<T>> {
  using type = std::vector<T>;
};
template <typename T>
using Held = typename HeldAs<std::decay_t<T>>::type;

namespace detail {

template <typename T>
constexpr void require_sendable() {
  static_assert(
      Sendable<T>,
      "muster::rpc cannot send this type. A struct needs a default constructor and the line "
      "MSGPACK_DEFINE(its, members); for what is inside of a container the same holds. A class that must stay where "
      "it is: make it with rpc::remote<T>() and call it through its RRef.");
}

template <typename T>
void pack_one(msgpack::packer<BodyWriter>& out, T&& value) {
  using Value = std::remove_cvref_t<T>;
  require_sendable<Value>();
  if constexpr (!std::is_trivially_destructible_v<Value> && std::is_rvalue_reference_v<T&&> &&
                !std::is_const_v<std::remove_reference_t<T>>) {
    const Value mine = std::move(value);  // destroyed right after, so that only the payload holds its tensors
    out.pack(mine);
  } else {
    out.pack(value);
  }
}

template <typename To, typename From>
void pack_as(msgpack::packer<BodyWriter>& out, From&& from) {
  using Value = std::remove_cvref_t<From>;
  if constexpr (std::same_as<To, Value>) {
    pack_one(out, std::forward<From>(from));
  } else if constexpr (std::is_convertible_v<From&&, To>) {
    To converted = std::forward<From>(from);
    pack_one(out, std::move(converted));
  } else {  // a vector of a span
    pack_one(out, To(std::begin(from), std::end(from)));
  }
}

}  // namespace detail

// Packs the values, converted to the types of a function's parameters: Parameters is a std::tuple of them (function.h).
// An rvalue is moved from, so that only the payload holds its tensors afterwards.
template <typename Parameters, typename... T>
Payload pack_for(T&&... values) {
  static_assert(std::tuple_size_v<Parameters> == sizeof...(T),
                "the call has more or fewer arguments than the function");
  Payload payload;
  muster::detail::PackContext context = muster::detail::pack_context();
  context.out = &payload.tensors;
  context.user = &payload.refs;
  const muster::detail::PackContext::Scope scope(context);
  detail::BodyWriter writer(payload.body);
  msgpack::packer<detail::BodyWriter> out(writer);
  try {
    [&]<size_t... I>(std::index_sequence<I...>) {
      (detail::pack_as<std::tuple_element_t<I, Parameters>>(out, std::forward<T>(values)), ...);
    }
    (std::index_sequence_for<T...>{});
  } catch (const msgpack::container_size_overflow& error) {
    detail::cannot_send(typeid(Parameters), error.what());
  }
  return payload;
}

// The same without a conversion.
template <typename... T>
Payload pack(T&&... values) {
  return pack_for<std::tuple<Held<T>...>>(std::forward<T>(values)...);
}

template <typename... T>
std::tuple<T...> unpack(PayloadReader& payload) {
  (detail::require_sendable<T>(), ...);
  muster::detail::PackContext context = muster::detail::pack_context();
  context.in = &payload.tensors;
  context.user = payload.refs;
  const muster::detail::PackContext::Scope scope(context);
  std::tuple<T...> values;
  try {
    detail::BodyReader reader(payload.body);
    std::apply([&](auto&... each) { (reader.next().convert(each), ...); }, values);
    reader.expect_done();
  } catch (const msgpack::type_error&) {
    detail::is_not(typeid(std::tuple<T...>), "its parts are of other kinds");
  }
  payload.tensors.clear();  // frees tensors that no value took; only the values hold the others
  return values;
}

}  // namespace muster::rpc

namespace msgpack {
MSGPACK_API_VERSION_NAMESPACE(MSGPACK_DEFAULT_API_NS) {
  namespace adaptor {

  // An enum without MSGPACK_ADD_ENUM is packed as its number. (MSGPACK_ADD_ENUM is the more specialised template.)
  template <typename T>
  struct pack<T, std::enable_if_t<std::is_enum_v<T>>> {
    template <typename Stream>
    packer<Stream>& operator()(packer<Stream>& out, const T& value) const {
      return out.pack(static_cast<std::underlying_type_t<T>>(value));
    }
  };
  template <typename T>
  struct convert<T, std::enable_if_t<std::is_enum_v<T>>> {
    const msgpack::object& operator()(const msgpack::object& in, T& value) const {
      std::underlying_type_t<T> number{};
      in.convert(number);
      value = static_cast<T>(number);
      return in;
    }
  };

  template <typename T>
  struct pack<T, std::enable_if_t<muster::rpc::detail::is_character<T>>> {
    template <typename Stream>
    packer<Stream>& operator()(packer<Stream>& out, T value) const {
      return out.pack(static_cast<int64_t>(value));
    }
  };
  template <typename T>
  struct convert<T, std::enable_if_t<muster::rpc::detail::is_character<T>>> {
    const msgpack::object& operator()(const msgpack::object& in, T& value) const {
      const auto number = in.as<int64_t>();
      value = static_cast<T>(number);
      if (static_cast<int64_t>(value) != number) throw msgpack::type_error();
      return in;
    }
  };

  template <>
  struct pack<long double> {
    template <typename Stream>
    packer<Stream>& operator()(packer<Stream>& out, long double value) const {
      char bytes[sizeof value] = {};
      // The x87's 80 bits are followed by padding.
      std::memcpy(bytes, &value, std::numeric_limits<long double>::digits == 64 ? 10 : sizeof value);
      out.pack_bin(sizeof bytes);
      return out.pack_bin_body(bytes, sizeof bytes);
    }
  };
  template <>
  struct convert<long double> {
    const msgpack::object& operator()(const msgpack::object& in, long double& value) const {
      if (in.type != msgpack::type::BIN || in.via.bin.size != sizeof value) throw msgpack::type_error();
      std::memcpy(&value, in.via.bin.ptr, sizeof value);
      return in;
    }
  };

  template <>
  struct pack<std::monostate> {
    template <typename Stream>
    packer<Stream>& operator()(packer<Stream>& out, const std::monostate&) const {
      return out.pack_nil();
    }
  };
  template <>
  struct convert<std::monostate> {
    const msgpack::object& operator()(const msgpack::object& in, std::monostate&) const {
      if (!in.is_nil()) throw msgpack::type_error();
      return in;
    }
  };

  template <typename... T>
  struct pack<std::variant<T...>> {
    template <typename Stream>
    packer<Stream>& operator()(packer<Stream>& out, const std::variant<T...>& value) const {
      out.pack_array(2);
      out.pack(static_cast<uint32_t>(value.index()));
      std::visit([&](const auto& alternative) { out.pack(alternative); }, value);
      return out;
    }
  };
  template <typename... T>
  struct convert<std::variant<T...>> {
    const msgpack::object& operator()(const msgpack::object& in, std::variant<T...>& value) const {
      if (in.type != msgpack::type::ARRAY || in.via.array.size != 2) throw msgpack::type_error();
      const auto index = in.via.array.ptr[0].as<uint32_t>();
      if (!alternative(std::index_sequence_for<T...>{}, index, in.via.array.ptr[1], value)) throw msgpack::type_error();
      return in;
    }

   private:
    template <size_t... I>
    static bool alternative(std::index_sequence<I...>, uint32_t index, const msgpack::object& in,
                            std::variant<T...>& value) {
      return ((index == I && (in.convert(value.template emplace<I>()), true)) || ...);
    }
  };

  }  // namespace adaptor
}
}  // namespace msgpack
