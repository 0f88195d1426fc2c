// What muster::LBFGS keeps, as tensors and in archives.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/optim/lbfgs.h"

namespace muster::optim {
namespace {

using at::Tensor;
using NamedTensors = std::map<std::string, Tensor>;

constexpr std::array kStateNames{"func_evals", "n_iter",         "d",        "t", "old_dirs", "old_stps", "ro",
                                 "H_diag",     "prev_flat_grad", "prev_loss"};
constexpr std::array kCounts{"func_evals", "n_iter"};  // before the first direction there is nothing else

Tensor as_rows(const std::deque<Tensor>& vectors, const Tensor& like) {
  if (vectors.empty()) return at::empty({0, like.numel()}, like.options());
  return at::stack(std::vector<Tensor>(vectors.begin(), vectors.end()));
}

// The tensors of a state, each of which is asked for by its name and its shape.
class StateReader {
 public:
  explicit StateReader(const NamedTensors& tensors) : tensors_(tensors) {}

  const Tensor& any(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end() || !found->second.defined())
      throw InvalidArgument(text("the state of LBFGS has no ", name), "Load all of what LBFGS has saved");
    return found->second;
  }
  const Tensor& shaped(const std::string& name, at::IntArrayRef sizes) const {
    const Tensor& tensor = any(name);
    if (tensor.sizes() != sizes)
      throw InvalidArgument(text(name, " in the state of LBFGS: expected shape ", sizes, ", got ", tensor.sizes()),
                            "Load what an LBFGS of the same parameters has saved");
    return tensor;
  }
  double number(const std::string& name) const { return shaped(name, {}).to(at::kDouble).item<double>(); }
  int64_t count(const std::string& name) const {
    const auto value = shaped(name, {}).to(at::kLong).item<int64_t>();
    if (value < 0) throw InvalidArgument(text(name, " in the state of LBFGS: expected 0 or more, got ", value));
    return value;
  }
  // Copies, so that a vector that is forgotten does not keep the memory of all others.
  std::deque<Tensor> rows(const std::string& name, at::IntArrayRef sizes) const {
    std::deque<Tensor> all;
    for (const Tensor& row : shaped(name, sizes).unbind()) all.push_back(row.clone());
    return all;
  }

 private:
  const NamedTensors& tensors_;
};

}  // namespace

NamedTensors LBFGSState::tensors() const {
  const at::NoGradGuard no_grad;
  NamedTensors all{{"func_evals", at::scalar_tensor(func_evals, at::kLong)},
                   {"n_iter", at::scalar_tensor(n_iter, at::kLong)}};
  if (!d.defined()) return all;
  const auto dtype = d.scalar_type();
  all["d"] = d.clone();
  all["t"] = at::scalar_tensor(t, at::kDouble);
  all["old_dirs"] = as_rows(old_dirs, d);
  all["old_stps"] = as_rows(old_stps, d);
  all["ro"] = at::tensor(std::vector<double>(ro.begin(), ro.end()), at::kDouble).to(dtype);
  all["H_diag"] = at::scalar_tensor(h_diag, dtype);
  all["prev_flat_grad"] = prev_flat_grad.clone();
  all["prev_loss"] = at::scalar_tensor(prev_loss, at::kDouble);
  return all;
}

void LBFGSState::set_tensors(const NamedTensors& tensors) {
  const at::NoGradGuard no_grad;
  const StateReader reader(tensors);
  LBFGSState read;
  read.func_evals = reader.count("func_evals");
  read.n_iter = reader.count("n_iter");
  if (read.n_iter > 0) {
    read.d = reader.any("d").clone();
    const std::vector<int64_t> flat{read.d.numel()};
    reader.shaped("d", flat);
    read.prev_flat_grad = reader.shaped("prev_flat_grad", flat).clone();
    const int64_t pairs = reader.any("ro").numel();
    const Tensor factors = reader.shaped("ro", {pairs}).to(at::kCPU, at::kDouble).contiguous();
    read.ro.assign(factors.const_data_ptr<double>(), factors.const_data_ptr<double>() + pairs);
    read.old_dirs = reader.rows("old_dirs", {pairs, flat[0]});
    read.old_stps = reader.rows("old_stps", {pairs, flat[0]});
    read.t = reader.number("t");
    read.h_diag = reader.number("H_diag");
    read.prev_loss = reader.number("prev_loss");
  }
  for (const auto& [name, tensor] : tensors) {
    const auto is_this = [&name = name](const char* known) { return name == known; };
    if (!(read.n_iter > 0 ? std::any_of(kStateNames.begin(), kStateNames.end(), is_this)
                          : std::any_of(kCounts.begin(), kCounts.end(), is_this)))
      throw InvalidArgument(text("the state of an LBFGS after ", read.n_iter, " directions has no '", name, "'"),
                            "Load what LBFGS has saved");
  }
  *this = std::move(read);
}

void LBFGSState::serialize(torch::serialize::OutputArchive& archive) const {
  for (const auto& [name, tensor] : tensors()) archive.write(name, tensor, /*is_buffer=*/true);
}

void LBFGSState::serialize(torch::serialize::InputArchive& archive) {
  NamedTensors tensors;
  for (const char* const name : kStateNames)
    if (Tensor tensor; archive.try_read(name, tensor, /*is_buffer=*/true)) tensors[name] = tensor;
  if (!tensors.contains("func_evals"))
    throw CorruptError("the archive does not hold the state of an LBFGS",
                       "Load what save() of the same class has written");
  set_tensors(tensors);
}

std::unique_ptr<torch::optim::OptimizerParamState> LBFGSState::clone() const {
  return std::make_unique<LBFGSState>(*this);
}

}  // namespace muster::optim
