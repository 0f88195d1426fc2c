// Contexts: gradients of one step, kept apart from .grad and from the gradients of other steps.
//
// Gradients flow through remote calls without a Context: y = rpc::sync<&forward>("ps", x); loss.backward() fills .grad
// here and on "ps" (docs/autograd.md). If several trainers use one parameter server at the same time, each step needs
// its own gradients:
//
//   {
//     autograd::Context context;             // for this thread's remote calls, and those that their handlers make
//     auto loss = rpc::sync<&forward>("ps", x).sum();
//     autograd::backward(context, {loss});   // gradients of all workers' parameters go to the context
//     context.gradients();                   // those of this worker
//     rpc::sync<&step>("ps");                // step() calls autograd::gradients(), of the context of the call
//   }                                        // frees all of it, on all workers
//
// Gradients of one parameter that come from several calls and workers are summed in the order of the calls in the
// program, not of their arrival: the bits are the same in every run, if one thread makes the calls of each handler.
// Each part is kept until the context ends.
//
// loss.backward() of a loss that was computed in a context adds to the context's gradients on other workers, but to
// .grad on this one, whose leaves libtorch itself fills: use autograd::backward().
//
// A context ends when its Context object is destroyed, or its worker dies: then every worker frees its part of the
// context, sub-graphs of calls too; a later backward() through what was computed in it throws Aborted.
//
// Thread-safety: all functions. A Context is current in the thread that made it, in handlers of calls made in it, and
// in threads with a Scope of it; it must be destroyed in the thread that made it, in any order with other contexts. The
// latest one that lives is current.
// Source: torch.distributed.autograd: context, backward, get_gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace muster::autograd {

class ContextState;

struct Gradient {
  at::Tensor parameter, gradient;
};

class Context {
 public:
  Context();   // Aborted if RPC is not running
  ~Context();  // ends it; does not wait until the other workers know
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  uint64_t id() const;
  std::vector<Gradient> gradients() const;                 // of this worker's parameters
  at::Tensor gradient(const at::Tensor& parameter) const;  // undefined if the parameter has none
  // Ends the context, which is not current any more, and returns when all living workers have freed their parts. After
  // a TimeoutError they still free them, later.
  void end(std::chrono::milliseconds timeout = std::chrono::milliseconds(60'000));

  const std::shared_ptr<ContextState>& state() const { return state_; }

  // Makes a context the current one of another thread.
  class Scope {
   public:
    explicit Scope(const Context& context) : Scope(context.state()) {}
    explicit Scope(std::shared_ptr<ContextState> context);  // null: none
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };

 private:
  std::shared_ptr<ContextState> state_;
  std::optional<Scope> scope_;
};

// This worker's gradients of the current context. InvalidArgument if there is no current context.
std::vector<Gradient> gradients();
at::Tensor gradient(const at::Tensor& parameter);

// As torch::autograd::backward, but the gradients go to the context: no .grad is touched, on any worker. `gradients`
// are those of the roots: a missing or undefined one is 1, for a root of one element; of the others the context takes
// copies. Errors: RemoteError, PeerLost, TimeoutError, and those of libtorch; InvalidArgument for a root of several
// elements without a gradient; Aborted if the context has ended.
void backward(const Context& context, const std::vector<at::Tensor>& roots, std::vector<at::Tensor> gradients = {},
              std::optional<bool> retain_graph = {}, bool create_graph = false);
// As torch::autograd::grad, but for graphs that were computed in a context: no gradient is accumulated anywhere.
std::vector<at::Tensor> grad(const Context& context, const std::vector<at::Tensor>& outputs,
                             const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& grad_outputs = {},
                             std::optional<bool> retain_graph = {}, bool create_graph = false,
                             bool allow_unused = false);

// What this worker keeps for the gradients of other workers; for tests and for inspecting a job.
struct Census {
  size_t sub_graphs = 0;  // of calls that this worker served
  size_t arguments = 0;   // lists of arguments of calls that this worker made
  size_t contexts = 0;
};
Census census();

}  // namespace muster::autograd
