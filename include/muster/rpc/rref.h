// RRef<T>: a reference to an object that lives on some worker, its owner.
//
//   RRef<Server> server = rpc::remote<Server>("ps", config);        // made there; does not wait
//   at::Tensor w = server.sync<&Server::pull>(keys);                // called there
//   rpc::sync<&train>("trainer1", server);                          // handed on: the trainer calls the same object
//   RRef<Agent> self = rpc::make_rref(agent);                       // an object of this worker, for other workers
//
// A call on an object waits, at the owner, until the object has been made; if making it failed, the call fails with
// that error. The functions are members of T (or its bases), or free functions that take a T& first.
//
// The owner keeps the object as long as any worker holds an RRef to it, or an RRef is on its way; the RRefs of a worker
// that dies do not count (src/rpc/objects/object_table.h has the protocol). When the owner dies, all operations on the
// RRef fail with PeerLost.
//
// An RRef is valid only until rpc::shutdown(); a later init() does not make it valid again.
//
// Making an object may take any time, unless the call has a timeout of its own. Without one, remote() throws
// TimeoutError if the owner has not taken the call within Options::timeout.
//
// Errors: as call.h; InvalidArgument if local_value() is called for another worker's object, or an empty RRef is used;
// Aborted if an RRef that was made before rpc::shutdown(), or in another World, is used or sent.
// Thread-safety: a value; copies are the same reference. Handlers of one object run concurrently: an object that is not
// read-only needs its own mutex.
// Source: torch.distributed.rpc.RRef.
#pragma once

#include <cstring>
#include <memory>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "muster/rpc/call.h"

namespace muster::rpc {

template <typename T>
class RRef;
template <typename T>
inline constexpr bool is_sendable<RRef<T>> = true;

namespace detail {

struct Reference;  // src/rpc/objects/reference.h

struct NewObject {
  std::shared_ptr<Reference> reference;
  uint64_t id = 0;
};
NewObject new_object(int owner);  // a reference to the object that a call with `store` is going to make
void abandon_object(int owner, uint64_t id, std::exception_ptr error);  // the call was never sent
std::shared_ptr<Reference> keep_object(std::shared_ptr<void> value, const std::type_info& type);
const WorkerInfo& owner_of(const std::shared_ptr<Reference>& reference);  // InvalidArgument for null; Aborted
uint64_t object_of(const Reference& reference);
std::shared_ptr<void> local_value_of(const std::shared_ptr<Reference>& reference, const std::type_info& type);

inline constexpr int8_t kReferenceExt = 2;
uint32_t add_reference(std::shared_ptr<Reference> reference);        // to the payload being packed; returns its place
std::shared_ptr<Reference> reference_at(const msgpack::object& in);  // from the payload being unpacked

template <typename T>
T copy_of(T& object) {
  return object;
}

}  // namespace detail

template <typename T>
class RRef {
 public:
  RRef() = default;  // empty: refers to no object
  explicit RRef(std::shared_ptr<detail::Reference> reference) : reference_(std::move(reference)) {}

  explicit operator bool() const { return reference_ != nullptr; }
  const WorkerInfo& owner() const { return detail::owner_of(reference_); }
  bool is_owner() const { return owner().id == worker_info().id; }

  // A copy of the object. T must be Sendable.
  T to_here() const { return to_here(options_); }
  T to_here(CallOptions options) const { return call<T>(function_of<&detail::copy_of<T>, T>(), options, pack()).get(); }
  // On its owner: the object itself. Waits until it has been made.
  std::shared_ptr<T> local_value() const {
    return std::static_pointer_cast<T>(detail::local_value_of(reference_, typeid(T)));
  }

  template <auto F, typename... A>
  Future<result_of<F>> async(A&&... args) const {
    return call<result_of<F>>(function_of<F, T>(), options_, pack_for<arguments_of<F>>(std::forward<A>(args)...));
  }
  template <auto F, typename... A>
  result_of<F> sync(A&&... args) const {
    return async<F>(std::forward<A>(args)...).get();
  }
  template <auto F, typename... A>
  RRef<stored_of<F>> remote(A&&... args) const;

  // The same reference, for calls with other options: rref.with({.timeout = 1s}).sync<&T::f>().
  RRef with(CallOptions options) const {
    RRef other = *this;
    other.options_ = options;
    return other;
  }

  const std::shared_ptr<detail::Reference>& reference() const { return reference_; }

 private:
  template <typename R>
  Future<R> call(const Function& function, CallOptions options, Payload payload) const {
    const int to = owner().id;
    return detail::call<R>(
        to, {.function = &function, .object = detail::object_of(*reference_), .timeout = options.timeout},
        std::move(payload));
  }

  std::shared_ptr<detail::Reference> reference_;
  CallOptions options_;
};

namespace detail {
template <typename T>
RRef<T> create(int owner, CallSpec spec, Payload payload) {
  NewObject made = new_object(owner);
  spec.store = true;
  spec.result = made.id;
  RRef<T> result(std::move(made.reference));
  if (!spec.timeout) {  // making the object may take any time; that its owner takes the call may not
    spec.timeout = std::chrono::milliseconds(0);
    spec.is_sent_in_time = true;
  }
  try {
    call<void>(owner, spec, std::move(payload));
  } catch (...) {
    abandon_object(owner, made.id, std::current_exception());
    throw;
  }
  return result;
}
}  // namespace detail

template <typename T>
template <auto F, typename... A>
RRef<stored_of<F>> RRef<T>::remote(A&&... args) const {
  const int to = owner().id;
  return detail::create<stored_of<F>>(
      to, {.function = &function_of<F, T>(), .object = detail::object_of(*reference_), .timeout = options_.timeout},
      pack_for<arguments_of<F>>(std::forward<A>(args)...));
}

// Calls a function and keeps the result on the worker that computed it.
template <auto F, typename... A>
RRef<stored_of<F>> remote(const To& to, A&&... args) {
  detail::must_not_need_an_object<F>();
  return detail::create<stored_of<F>>(to.rank(), {.function = &function_of<F>(), .timeout = to.options().timeout},
                                      pack_for<arguments_of<F>>(std::forward<A>(args)...));
}

// Makes a new T from these arguments, on the worker `to`.
template <typename T, typename... A>
RRef<T> remote(const To& to, A&&... args) {
  return detail::create<T>(to.rank(), {.function = &constructor_of<T, Held<A>...>(), .timeout = to.options().timeout},
                           pack(std::forward<A>(args)...));
}

// A reference to an object of this worker. The object lives at least as long as any worker holds an RRef to it.
template <typename T>
RRef<T> make_rref(std::shared_ptr<T> object) {
  return RRef<T>(detail::keep_object(std::move(object), typeid(T)));
}

}  // namespace muster::rpc

namespace msgpack {
MSGPACK_API_VERSION_NAMESPACE(MSGPACK_DEFAULT_API_NS) {
  namespace adaptor {

  // An RRef is packed as its place among the references of the message; an empty one as nil.
  template <typename T>
  struct pack<muster::rpc::RRef<T>> {
    template <typename Stream>
    packer<Stream>& operator()(packer<Stream>& out, const muster::rpc::RRef<T>& rref) const {
      if (!rref) return out.pack_nil();
      const uint32_t place = muster::rpc::detail::add_reference(rref.reference());
      char bytes[sizeof place];
      std::memcpy(bytes, &place, sizeof place);
      out.pack_ext(sizeof bytes, muster::rpc::detail::kReferenceExt);
      return out.pack_ext_body(bytes, sizeof bytes);
    }
  };
  template <typename T>
  struct convert<muster::rpc::RRef<T>> {
    const msgpack::object& operator()(const msgpack::object& in, muster::rpc::RRef<T>& rref) const {
      rref = in.is_nil() ? muster::rpc::RRef<T>() : muster::rpc::RRef<T>(muster::rpc::detail::reference_at(in));
      return in;
    }
  };

  }  // namespace adaptor
}
}  // namespace msgpack
