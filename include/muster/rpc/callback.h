// A function that is called once and may own objects that cannot be copied, as std::move_only_function, which C++20
// lacks.
//
// Functions of up to 48 bytes need no allocation. Thread-safety: a value. Calling an empty Callback is undefined, as it
// is for a null pointer to a function.
#pragma once

#include <concepts>
#include <cstddef>
#include <new>
#include <type_traits>
#include <utility>

namespace muster::rpc {

template <typename Signature>
class Callback;

template <typename R, typename... Args>
class Callback<R(Args...)> {
 public:
  Callback() = default;
  template <typename F>
  requires(!std::same_as<std::remove_cvref_t<F>, Callback> && std::is_invocable_r_v<R, std::decay_t<F>&, Args...>)
      Callback(F&& function) {
    using Held = std::decay_t<F>;
    if constexpr (fits<Held>()) {
      new (room_) Held(std::forward<F>(function));
      table_ = &kInPlace<Held>;
    } else {
      new (room_) Held*(new Held(std::forward<F>(function)));
      table_ = &kOnHeap<Held>;
    }
  }
  Callback(Callback&& other) noexcept { take(other); }
  Callback& operator=(Callback&& other) noexcept {
    if (this != &other) {
      reset();
      take(other);
    }
    return *this;
  }
  ~Callback() { reset(); }

  explicit operator bool() const { return table_ != nullptr; }
  R operator()(Args... args) { return table_->call(room_, std::forward<Args>(args)...); }

 private:
  struct Table {
    R (*call)(void*, Args&&...);
    void (*move)(void* from, void* to) noexcept;  // also destroys what is left in `from`
    void (*destroy)(void*) noexcept;
  };
  static constexpr size_t kRoom = 48;

  template <typename F>
  static constexpr bool fits() {
    return sizeof(F) <= kRoom && alignof(F) <= alignof(std::max_align_t) && std::is_nothrow_move_constructible_v<F>;
  }
  template <typename F>
  static constexpr Table kInPlace = {
      [](void* room, Args&&... args) -> R { return (*static_cast<F*>(room))(std::forward<Args>(args)...); },
      [](void* from, void* to) noexcept {
        new (to) F(std::move(*static_cast<F*>(from)));
        static_cast<F*>(from)->~F();
      },
      [](void* room) noexcept { static_cast<F*>(room)->~F(); }};
  template <typename F>
  static constexpr Table kOnHeap = {
      [](void* room, Args&&... args) -> R { return (**static_cast<F**>(room))(std::forward<Args>(args)...); },
      [](void* from, void* to) noexcept { new (to) F*(*static_cast<F**>(from)); },
      [](void* room) noexcept { delete *static_cast<F**>(room); }};

  void take(Callback& other) noexcept {
    table_ = std::exchange(other.table_, nullptr);
    if (table_) table_->move(other.room_, room_);
  }
  void reset() noexcept {
    if (table_) table_->destroy(room_);
    table_ = nullptr;
  }

  const Table* table_ = nullptr;
  alignas(std::max_align_t) std::byte room_[kRoom];
};

}  // namespace muster::rpc
