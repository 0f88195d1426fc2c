#include "muster/comm/functional.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::functional {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// The options for backward. They are kept beside autograd's context, which holds only types that TorchScript knows.
template <typename Options>
Options with_group(Options options) {
  options.group = options.group.resolved();  // backward may run in another thread
  return options;
}

void require_linear(const char* name, ReduceOp op) {
  if (op != ReduceOp::SUM && op != ReduceOp::AVG)
    throw InvalidArgument(text("functional::", name, " with ", to_string(op), " is not differentiable here"),
                          "Use SUM or AVG");
}

at::Tensor own_copy(const at::Tensor& tensor) { return tensor.detach().clone(at::MemoryFormat::Contiguous); }

// A function of one tensor that autograd records. `forward` works on plain tensors. `backward` takes the gradient and,
// if wants_input, the input; it is itself recorded if the caller wants a graph of it.
using Map = std::function<at::Tensor(const at::Tensor&)>;
using BackMap = std::function<at::Tensor(const at::Tensor& gradient, const at::Tensor& input)>;

struct Recorded final : Function<Recorded> {
  struct Maps : torch::CustomClassHolder {
    Map forward;
    BackMap backward;
    bool wants_input;
  };
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const c10::intrusive_ptr<Maps>& maps) {
    context->saved_data["maps"] = c10::IValue::make_capsule(maps);
    if (maps->wants_input) context->save_for_backward({input});
    return maps->forward(input);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto maps = c10::static_intrusive_pointer_cast<Maps>(context->saved_data["maps"].toCapsule());
    const at::Tensor input = maps->wants_input ? context->get_saved_variables()[0] : at::Tensor();
    return {maps->backward(gradients[0], input), at::Tensor()};
  }
};

at::Tensor record(const at::Tensor& input, Map forward, BackMap backward, bool wants_input) {
  auto maps = c10::make_intrusive<Recorded::Maps>();
  maps->forward = std::move(forward);
  maps->backward = std::move(backward);
  maps->wants_input = wants_input;
  return Recorded::apply(input, maps);
}

at::Tensor record(const at::Tensor& input, Map forward, Map backward) {
  return record(
      input, std::move(forward),
      [backward = std::move(backward)](const at::Tensor& gradient, const at::Tensor&) { return backward(gradient); },
      false);
}

// Also of a tensor that is conjugated or negated only when it is read, as gradients of complex functions are.
at::Tensor values_of(const at::Tensor& tensor) { return tensor.detach().resolve_conj().resolve_neg(); }

std::vector<int64_t> with_rows(const at::Tensor& tensor, int64_t rows) {
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes.at(0) = rows;
  return sizes;
}

void require_rows(const char* name, const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.dim() == 0)
    throw InvalidArgument(text("functional::", name, " needs a tensor with at least one dimension"),
                          "Use .unsqueeze(0)");
}

}  // namespace

at::Tensor all_reduce(const at::Tensor& input, const ReduceOptions& given, const Site& site) {
  const auto options = with_group(given);
  const auto forward = [options, site](const at::Tensor& x) {
    const at::Tensor sum = own_copy(x);
    muster::all_reduce(sum, options, site);
    return sum;
  };
  if (options.op != ReduceOp::MIN && options.op != ReduceOp::MAX) {
    require_linear("all_reduce", options.op);
    return record(input, forward, [options, site](const at::Tensor& gradient) {
      return functional::all_reduce(gradient, options, site);
    });
  }
  const auto extreme = std::make_shared<at::Tensor>();
  auto back = options;
  back.op = ReduceOp::SUM;
  return record(
      input,
      [forward, extreme](const at::Tensor& x) {
        const at::Tensor result = forward(x);
        *extreme = x.detach().eq(result);
        return result;
      },
      [back, extreme, site](const at::Tensor& gradient) {
        return functional::all_reduce(gradient, back, site) * *extreme;
      });
}

at::Tensor broadcast(const at::Tensor& input, int src, const CollectiveOptions& given, const Site& site) {
  const auto options = with_group(given);
  return record(
      input,
      [=](const at::Tensor& x) {
        const at::Tensor copy = own_copy(x);
        muster::broadcast(copy, src, options, site);
        return copy;
      },
      [=](const at::Tensor& gradient) {
        return functional::reduce(gradient, src, {.group = options.group, .timeout = options.timeout}, site);
      });
}

at::Tensor reduce(const at::Tensor& input, int dst, const ReduceOptions& given, const Site& site) {
  const auto options = with_group(given);
  require_linear("reduce", options.op);
  return record(
      input,
      [=](const at::Tensor& x) {
        const at::Tensor sum = own_copy(x);
        muster::reduce(sum, dst, options, site);
        return options.group.rank() == dst ? sum : at::zeros_like(sum);
      },
      [=](const at::Tensor& gradient) {
        const at::Tensor back =
            functional::broadcast(gradient, dst, {.group = options.group, .timeout = options.timeout}, site);
        return options.op == ReduceOp::AVG ? back / options.group.size() : back;
      });
}

at::Tensor all_gather(const at::Tensor& input, const CollectiveOptions& given, const Site& site) {
  require_rows("all_gather", input);
  const auto options = with_group(given);
  return record(
      input,
      [=](const at::Tensor& x) {
        const at::Tensor all = at::empty(with_rows(x, x.size(0) * options.group.size()), x.options());
        muster::all_gather_into_tensor(all, values_of(x), options, site);
        return all;
      },
      [=](const at::Tensor& gradient) {
        return functional::reduce_scatter(gradient, {.group = options.group, .timeout = options.timeout}, site);
      });
}

at::Tensor reduce_scatter(const at::Tensor& input, const ReduceOptions& given, const Site& site) {
  require_rows("reduce_scatter", input);
  const auto options = with_group(given);
  require_linear("reduce_scatter", options.op);
  if (input.size(0) % options.group.size() != 0)
    throw InvalidArgument(text("functional::reduce_scatter: ", input.size(0), " rows cannot be divided among ",
                               options.group.size(), " ranks"),
                          "Pad dimension 0");
  return record(
      input,
      [=](const at::Tensor& x) {
        const at::Tensor mine = at::empty(with_rows(x, x.size(0) / options.group.size()), x.options());
        muster::reduce_scatter_tensor(mine, values_of(x).contiguous(), options, site);
        return mine;
      },
      [=](const at::Tensor& gradient) {
        const at::Tensor back =
            functional::all_gather(gradient, {.group = options.group, .timeout = options.timeout}, site);
        return options.op == ReduceOp::AVG ? back / options.group.size() : back;
      });
}

at::Tensor all_to_all(const at::Tensor& input, const AllToAllOptions& given, const Site& site) {
  require_rows("all_to_all", input);
  const auto options = with_group(given);
  auto back = options;
  std::swap(back.input_splits, back.output_splits);
  return record(
      input,
      [=](const at::Tensor& x) {
        int64_t rows = options.output_splits.empty() ? x.size(0) : 0;
        for (const int64_t split : options.output_splits) rows += split;
        const at::Tensor output = at::empty(with_rows(x, rows), x.options());
        muster::all_to_all_single(output, values_of(x).contiguous(), options, site);
        return output;
      },
      [back, site](const at::Tensor& gradient) { return functional::all_to_all(gradient, back, site); });
}

at::Tensor send(const at::Tensor& input, int dst, const MessageOptions& given, const Site& site) {
  const auto options = with_group(given);
  return record(
      input,
      [=](const at::Tensor& x) {
        muster::send(values_of(x), dst, options, site);
        return at::zeros({}, x.options());
      },
      // The gradient that comes back depends on `x`, on the other rank. Autograd must know that for higher orders.
      [=](const at::Tensor& gradient, const at::Tensor& x) {
        return functional::recv(x * 0 * gradient, dst, options, site);
      },
      true);
}

at::Tensor recv(const at::Tensor& like, int src, const MessageOptions& given, const Site& site) {
  const auto options = with_group(given);
  return record(
      like,
      [=](const at::Tensor& x) {
        const at::Tensor received = at::empty_like(x, at::MemoryFormat::Contiguous);
        muster::recv(received, src, options, site);
        return received;
      },
      [=](const at::Tensor& gradient) {
        const at::Tensor token = functional::send(gradient.contiguous(), src, options, site);
        return at::zeros_like(gradient) + token;
      });
}

}  // namespace muster::functional
