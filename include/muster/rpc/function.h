// Functions that other workers may call. Naming one in a call, rpc::sync<&forward>(…), is its registration: a template
// over the function puts it into the program's table when the program is loaded. No macro, no string.
//
//   at::Tensor forward(at::Tensor x);                     free function, also noexcept
//   constexpr auto twice = [](int x) { return 2 * x; };   lambda that captures nothing
//   at::Tensor Model::act(const at::Tensor&) const;       member: called on an object (RRef<Model>)
//   void train(Model& model, at::Tensor batch);           free function of an object: first parameter T&
//   rpc::Task<int> slow(int x);                           coroutine: the result is the int
//
// An id is the hash of the function's mangled name, so it is the same in every process that has the function with the
// same parameters; a program that has it with other parameters reports "unknown function". Two functions with the same
// name (both `static`, in two files) have the same id: a call of either throws InvalidArgument, which says where they
// are.
//
// Parameters are received by value: an out-parameter (T& other than the first) does not compile. Results by reference
// are copied; a std::span arrives as a std::vector, a std::string_view as a std::string. With `store` (rpc::remote) the
// result stays as an object: what a unique_ptr or shared_ptr points to, or the value itself.
//
// Errors: Outcome::error has what a function throws; find_function() throws InvalidArgument, decode() CorruptError.
// Thread-safety: any thread may read the table without a lock, also while a library that is being loaded adds to it.
#pragma once

#include <concepts>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "muster/rpc/callback.h"
#include "muster/rpc/payload.h"
#include "muster/rpc/serialize.h"
#include "muster/rpc/task.h"

namespace muster::rpc {

// The outcome of a call: an error, or a value, or an object that stays (with `store`).
struct Outcome {
  std::exception_ptr error;
  Payload value;
  std::shared_ptr<void> object;
  const std::type_info* type = nullptr;  // of object
};
using Done = Callback<void(Outcome&&)>;

// A decoded call: the arguments, in one allocation.
class Invocation {
 public:
  virtual ~Invocation() = default;
  // Calls the function, once, on `object` (null for a function that is not called on an object). Calls `done` exactly
  // once, perhaps later and in another thread, after the arguments and a coroutine's frame were destroyed. Until then
  // the Invocation must live; `done` may destroy it. Does not throw; `done` must not throw either.
  virtual void run(void* object, bool store, Done done) noexcept = 0;
};

struct Function {
  uint64_t id = 0;
  std::string name;                             // "forward(at::Tensor)"
  const std::type_info* object_type = nullptr;  // of the object that it is called on; null: none
  const std::type_info* result_type = nullptr;  // result_of: void, or the type that is sent
  const std::type_info* stored_type = nullptr;  // with `store`; null: the result cannot be kept (void)
  std::unique_ptr<Invocation> (*decode)(PayloadReader&) = nullptr;  // CorruptError
};

// Finds a function of this program by id. Null if there is none; InvalidArgument if two functions have the id.
const Function* find_function(uint64_t id);
size_t function_count();

std::string type_name(const std::type_info& type);  // "std::vector<int>"; std's long forms are made short

// Compile-time facts of a function F.
namespace detail {

template <typename F>
struct Signature;
// clang-format off
#define MUSTER_RPC_SIGNATURE(QUALIFIERS, CONST)                                              \
  template <typename R, typename C, typename... A> struct Signature<R (C::*)(A...) QUALIFIERS> { \
    using Result = R;                                                                        \
    using Class = CONST C;                                                                   \
    using Parameters = std::tuple<A...>;                                                     \
  };
MUSTER_RPC_SIGNATURE(, ) MUSTER_RPC_SIGNATURE(const, const) MUSTER_RPC_SIGNATURE(&, ) MUSTER_RPC_SIGNATURE(const&, const)
MUSTER_RPC_SIGNATURE(noexcept, ) MUSTER_RPC_SIGNATURE(const noexcept, const)
MUSTER_RPC_SIGNATURE(& noexcept, ) MUSTER_RPC_SIGNATURE(const& noexcept, const)
MUSTER_RPC_SIGNATURE(&&, ) MUSTER_RPC_SIGNATURE(&& noexcept, )
#undef MUSTER_RPC_SIGNATURE
    // clang-format on
    template <typename R, typename... A>
    struct Signature<R (*)(A...)> {
  using Result = R;
  using Class = void;
  using Parameters = std::tuple<A...>;
};
template <typename R, typename... A>
struct Signature<R (*)(A...) noexcept> : Signature<R (*)(A...)> {};

// Whether a function's first parameter, of type P, is the object that a free function or lambda is called on.
template <typename P>
inline constexpr bool is_object_parameter =
    std::is_lvalue_reference_v<P> && !std::is_const_v<std::remove_reference_t<P>>;

template <typename Parameters>
struct SplitObject {
  using Object = void;
  using Rest = Parameters;
};
template <typename P, typename... A>
requires is_object_parameter<P>
struct SplitObject<std::tuple<P, A...>> {
  using Object = std::remove_reference_t<P>;
  using Rest = std::tuple<A...>;
};

template <typename F>
struct Facts {  // of a lambda
  using Of = Signature<decltype(&F::operator())>;
  using Result = typename Of::Result;
  using Object = typename SplitObject<typename Of::Parameters>::Object;
  using Parameters = typename SplitObject<typename Of::Parameters>::Rest;
  static constexpr bool kMember = false;
};
template <typename F>
requires std::is_pointer_v<F>
struct Facts<F> {
  using Result = typename Signature<F>::Result;
  using Object = typename SplitObject<typename Signature<F>::Parameters>::Object;
  using Parameters = typename SplitObject<typename Signature<F>::Parameters>::Rest;
  static constexpr bool kMember = false;
};
template <typename F>
requires std::is_member_function_pointer_v<F>
struct Facts<F> {
  using Result = typename Signature<F>::Result;
  using Object = std::remove_const_t<typename Signature<F>::Class>;
  using Parameters = typename Signature<F>::Parameters;
  static constexpr bool kMember = true;
};

template <typename Parameters>
struct Arguments;
template <typename... P>
struct Arguments<std::tuple<P...>> {
  static_assert(((!std::is_lvalue_reference_v<P> || std::is_const_v<std::remove_reference_t<P>>)&&...),
                "a parameter of a remote function is a reference that it could write to, which would not come back: "
                "return the value instead");
  using type = std::tuple<Held<P>...>;
};

template <typename R>
struct Awaited {
  using type = R;
};
template <typename R>
struct Awaited<Task<R>> {
  using type = R;
};

template <typename R>
struct Kept {
  using type = R;
};
template <typename T>
struct Kept<std::unique_ptr<T>> {
  using type = T;
};
template <typename T>
struct Kept<std::shared_ptr<T>> {
  using type = T;
};

template <auto F>
using FactsOf = Facts<std::remove_cv_t<decltype(F)>>;

}  // namespace detail

template <auto F>
using arguments_of = typename detail::Arguments<typename detail::FactsOf<F>::Parameters>::type;  // a std::tuple
template <auto F>
using object_of = typename detail::FactsOf<F>::Object;  // void: not called on an object
template <auto F>
using result_of = Held<typename detail::Awaited<typename detail::FactsOf<F>::Result>::type>;  // what the caller gets
template <auto F>
using stored_of = typename detail::Kept<result_of<F>>::type;  // the T of the RRef<T> that rpc::remote<F>() gives

// The registration of F. Object is the type whose pointer run() gets: by default the class of F; a derived class, if
// the object belongs to one.
template <auto F, typename Object = object_of<F>>
const Function& function_of();

// The registration of T's constructor from Args; its calls have `store` set.
template <typename T, typename... Args>
const Function& constructor_of();

}  // namespace muster::rpc

#include "muster/rpc/function_impl.h"  // IWYU pragma: export
