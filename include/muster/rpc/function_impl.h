// The templates of function.h; include that one.
#pragma once

#include <cstring>

#include "muster/rpc/function.h"

namespace muster::rpc {
namespace detail {

// A type per function: its mangled name contains that of the function.
template <auto F, typename Object>
struct Tag {};

// Distinguishes two functions that have the same id.
struct Identity {
  uintptr_t words[2] = {0, 0};
  bool operator==(const Identity&) const = default;
};

template <auto F>
Identity identity_of() {
  Identity identity;
  using Type = std::remove_cv_t<decltype(F)>;
  if constexpr (std::is_class_v<Type>) {
    const auto call = &Type::operator();
    static_assert(sizeof call <= sizeof identity);
    std::memcpy(identity.words, &call, sizeof call);
  } else {
    const auto pointer = F;
    static_assert(sizeof pointer <= sizeof identity);
    std::memcpy(identity.words, &pointer, sizeof pointer);
  }
  return identity;
}

// Adds `function` to the table, or finds it there. The id comes from `tag`. `signature`, the type of a pointer to the
// function, supplies the parameters for the function's name; the name of `tag` does not have them.
const Function& add_function(const std::type_info& tag, const std::type_info& signature, Function function,
                             const Identity& identity);
[[noreturn]] void result_stays(const std::type_info& result);

template <typename R>
void send_result(R&& result, Outcome& outcome) {
  using Value = std::remove_cvref_t<R>;
  if constexpr (Sendable<Value>) {
    outcome.value = pack(std::move(result));
  } else {
    result_stays(typeid(Value));
  }
}

template <typename R>
void keep_result(R&& result, Outcome& outcome) {
  using Value = std::remove_cvref_t<R>;
  using Stored = typename Kept<Value>::type;
  outcome.type = &typeid(Stored);
  if constexpr (std::is_constructible_v<std::shared_ptr<Stored>, Value&&> && !std::is_same_v<Stored, Value>) {
    outcome.object = std::shared_ptr<Stored>(std::move(result));
  } else {
    outcome.object = std::make_shared<Value>(std::move(result));
  }
}

// The value of a call, made from what the function returned: references are copied, views become owners.
template <typename Result, typename Returned>
Result make_result(Returned&& returned) {
  if constexpr (std::is_convertible_v<Returned&&, Result>) {
    return std::forward<Returned>(returned);
  } else if constexpr (std::is_constructible_v<Result, Returned&&>) {
    return Result(std::forward<Returned>(returned));
  } else {
    return Result(std::begin(returned), std::end(returned));
  }
}

template <auto F, typename Object>
class InvocationOf final : public Invocation {
  using Facts = FactsOf<F>;
  using Returned = typename Facts::Result;
  using Result = result_of<F>;
  using Parameters = typename Facts::Parameters;
  static constexpr bool kCoroutine = is_task<Returned>;

 public:
  explicit InvocationOf(PayloadReader& payload) : arguments_(decode(payload, static_cast<arguments_of<F>*>(nullptr))) {}

  void run(void* object, bool store, Done done) noexcept override {
    if constexpr (kCoroutine) {
      drive(this, object, store, std::move(done));
    } else {
      Outcome outcome;
      try {
        if constexpr (std::is_void_v<Result>) {
          call(object);
          arguments_.reset();
          finish(store, outcome);
        } else {
          Result result = make_result<Result>(call(object));
          arguments_.reset();
          finish(store, outcome, std::move(result));
        }
      } catch (...) {
        failed(outcome);
      }
      arguments_.reset();
      done(std::move(outcome));
    }
  }

 private:
  template <typename... A>
  static std::tuple<A...> decode(PayloadReader& payload, std::tuple<A...>*) {
    return unpack<A...>(payload);
  }

  Returned call(void* object) {
    return [&]<size_t... I>(std::index_sequence<I...>)->Returned {
      auto& arguments = *arguments_;
      (void)arguments;
      if constexpr (std::is_void_v<Object>) {
        return F(pass<std::tuple_element_t<I, Parameters>>(std::get<I>(arguments))...);
      } else {
        Object& self = *static_cast<Object*>(object);
        if constexpr (!Facts::kMember) {
          return F(self, pass<std::tuple_element_t<I, Parameters>>(std::get<I>(arguments))...);
        } else if constexpr (requires {
                               (self.*F)(pass<std::tuple_element_t<I, Parameters>>(std::get<I>(arguments))...);
                             }) {
          return (self.*F)(pass<std::tuple_element_t<I, Parameters>>(std::get<I>(arguments))...);
        } else {
          static_assert(!sizeof(Object), "a member function for rvalues (&&) cannot be called on an object that stays");
        }
      }
    }
    (std::make_index_sequence<std::tuple_size_v<Parameters>>{});
  }

  // By value or &&: moved out; by const&, and views: what is held.
  template <typename P, typename A>
  static decltype(auto) pass(A& argument) {
    if constexpr (std::is_lvalue_reference_v<P>) {
      return static_cast<const A&>(argument);
    } else if constexpr (std::same_as<std::remove_cvref_t<P>, A>) {
      return static_cast<A&&>(argument);
    } else if constexpr (std::is_pointer_v<P>) {
      return argument.data();
    } else {
      return std::remove_cvref_t<P>(argument);
    }
  }

  static Detached drive(InvocationOf* self, void* object, bool store, Done done) {
    Outcome outcome;
    try {
      if constexpr (std::is_void_v<Result>) {
        {
          Returned task = self->call(object);
          co_await task;
        }
        self->arguments_.reset();
        finish(store, outcome);
      } else {
        std::optional<Result> result;
        {
          Returned task = self->call(object);
          result.emplace(make_result<Result>(co_await task));
        }
        self->arguments_.reset();
        finish(store, outcome, *std::move(result));
      }
    } catch (...) {
      failed(outcome);
    }
    self->arguments_.reset();
    done(std::move(outcome));
  }

  static void finish(bool, Outcome&) {}
  template <typename R>
  static void finish(bool store, Outcome& outcome, R&& result) {
    if (store) {
      keep_result(std::move(result), outcome);
    } else {
      send_result(std::move(result), outcome);
    }
  }
  static void failed(Outcome& outcome) {
    outcome = Outcome();
    outcome.error = std::current_exception();
  }

  std::optional<arguments_of<F>> arguments_;
};

template <auto F, typename Object>
struct Registration {
  static const Function& function() {
    static const Function& registered = add_function(typeid(Tag<F, Object>), typeid(F), describe(), identity_of<F>());
    return registered;
  }
  static Function describe() {
    Function function;
    if constexpr (!std::is_void_v<Object>) function.object_type = &typeid(Object);
    function.result_type = &typeid(result_of<F>);
    if constexpr (!std::is_void_v<stored_of<F>>) function.stored_type = &typeid(stored_of<F>);
    function.decode = [](PayloadReader& payload) -> std::unique_ptr<Invocation> {
      return std::make_unique<InvocationOf<F, Object>>(payload);
    };
    return function;
  }
  static const bool kLoaded;  // its initialisation, when the program is loaded, is the registration
};
template <auto F, typename Object>
const bool Registration<F, Object>::kLoaded = (Registration<F, Object>::function(), true);

template <const bool*>
struct Instantiate {};

template <typename T, typename... Args>
std::shared_ptr<T> construct(Args... args) {
  return std::make_shared<T>(std::move(args)...);
}

}  // namespace detail

template <auto F, typename Object>
const Function& function_of() {
  using Registered = detail::Registration<F, Object>;
  (void)detail::Instantiate<&Registered::kLoaded>();
  return Registered::function();
}

template <typename T, typename... Args>
const Function& constructor_of() {
  return function_of<&detail::construct<T, Held<Args>...>>();
}

}  // namespace muster::rpc
