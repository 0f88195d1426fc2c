// Contexts: gradients of one step, kept apart from .grad and from those of other steps.
//
// Gradients flow through remote calls without any of this: y = rpc::sync<&forward>("ps", x); loss.backward() fills
// .grad here and on "ps" (docs/autograd.md). Where several trainers use one parameter server at the same time, each
// step wants its own:
//
//   autograd::Context context;                             // this thread's calls are made in it, and what they call
//   auto loss = rpc::sync<&forward>("ps", x).sum();
//   autograd::backward(context, {loss});                   // gradients of all workers' parameters go to the context
//   context.gradients();                                   // those of this worker
//   rpc::sync<&step>("ps");                                // there: autograd::gradients(), of the context of the call
//                                                          // its end frees all of it, on all workers
//
// Gradients of one parameter that come from several calls, workers and threads are summed in the order of the calls in
// the program, not of their arrival: the bits are the same in every run. Each part is kept until the context ends.
//
// loss.backward() of what was computed in a context also goes to its map on other workers, but to .grad on this one,
// whose leaves libtorch itself fills: use autograd::backward().
//
// A context ends when its Context does, or its worker dies: then every worker lets go of what it had of it, sub-graphs
// of calls too; backward() of what was computed in it is Aborted afterwards.
//
// Thread-safety: all functions. A Context is current in the thread that made it, in handlers of calls made in it, and
// where Scope says so; it must be destroyed in the thread that made it.
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
  Context();   // Aborted where RPC is not running
  ~Context();  // ends it, and does not wait until others have heard of it
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  uint64_t id() const;
  std::vector<Gradient> gradients() const;                 // of this worker's parameters
  at::Tensor gradient(const at::Tensor& parameter) const;  // undefined: it has none
  // Ends it, and returns when all living workers have let go, or throws Timeout: they still will. It is current no
  // more.
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

   private:
    bool open_before_;
    std::shared_ptr<ContextState> context_before_;
    std::shared_ptr<void> call_before_;
  };

 private:
  std::shared_ptr<ContextState> state_;
  std::optional<Scope> scope_;
};

// Of the current context, this worker's. InvalidArgument where there is none.
std::vector<Gradient> gradients();
at::Tensor gradient(const at::Tensor& parameter);

// As torch::autograd::backward, but into the context: no .grad is touched, on any worker. `gradients`: of the roots;
// those that are missing or undefined are 1, for roots of one element; of the others the context takes copies. Errors:
// RemoteError, PeerLost, Timeout, and libtorch's own; InvalidArgument for a root of more elements without a gradient;
// Aborted if the context has ended.
void backward(const Context& context, const std::vector<at::Tensor>& roots, std::vector<at::Tensor> gradients = {},
              std::optional<bool> retain_graph = {}, bool create_graph = false);
// As torch::autograd::grad, which does the same for graphs without a context: nothing is accumulated anywhere.
std::vector<at::Tensor> grad(const Context& context, const std::vector<at::Tensor>& outputs,
                             const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& grad_outputs = {},
                             std::optional<bool> retain_graph = {}, bool create_graph = false,
                             bool allow_unused = false);

// What this worker holds for others' gradients; for tests and for looking at a job.
struct Census {
  size_t sub_graphs = 0;  // of calls that it served
  size_t arguments = 0;   // lists of arguments of calls that it made
  size_t contexts = 0;
};
Census census();

}  // namespace muster::autograd
