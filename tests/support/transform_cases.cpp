#include "support/transform_cases.h"

#include <iomanip>
#include <sstream>

namespace muster::test {
namespace {

using optim::GradientTransformation;

// Draws numbers, and writes them down as Python has them.
class Options {
 public:
  explicit Options(uint64_t seed) : dice_(seed) {}

  double between(const char* name, double low, double high) {
    const double value = drawn(low, high);
    add(name, number(value));
    return value;
  }
  std::pair<double, double> betas() {
    const std::pair<double, double> value(drawn(0.5, 0.95), drawn(0.7, 0.999));
    add("betas", "(" + number(value.first) + ", " + number(value.second) + ")");
    return value;
  }
  bool flag(const char* name, bool possible = true) {
    const bool value = possible && dice_.one_in(2);
    add(name, value ? "True" : "False");
    return value;
  }
  double sometimes(const char* name, double low, double high) { return dice_.one_in(2) ? 0 : between(name, low, high); }
  std::string text() const { return "(" + text_ + ")"; }

 private:
  double drawn(double low, double high) {
    return low + (high - low) * static_cast<double>(dice_.below(1 << 20)) / (1 << 20);
  }
  static std::string number(double value) {
    std::ostringstream out;
    out << std::setprecision(17) << value;
    return out.str();
  }
  void add(const std::string& name, const std::string& value) {
    text_ += (text_.empty() ? "" : ", ") + name + "=" + value;
  }

  Dice dice_;
  std::string text_;
};

TransformCase drawn(const std::string& name, uint64_t seed) {
  Options draw(seed);
  const double lr = draw.between("lr", 0.001, 0.1);
  const double decay = draw.sometimes("weight_decay", 0.001, 0.1);
  std::function<GradientTransformation()> make;
  if (name == "sgd") {
    optim::FuncSGDOptions o{.lr = lr, .weight_decay = decay};
    o.momentum = draw.sometimes("momentum", 0.1, 0.95);
    o.nesterov = draw.flag("nesterov", o.momentum != 0);
    if (!o.nesterov) o.dampening = draw.between("dampening", 0, 0.5);
    o.maximize = draw.flag("maximize");
    make = [o] { return optim::sgd(o); };
  } else if (name == "adam") {
    optim::FuncAdamOptions o{
        .lr = lr, .betas = draw.betas(), .eps = draw.between("eps", 1e-9, 1e-4), .weight_decay = decay};
    o.eps_root = draw.between("eps_root", 1e-9, 1e-5);
    o.maximize = draw.flag("maximize");
    o.fused = seed % 3 != 0;
    make = [o] { return optim::adam(o); };
  } else if (name == "adamw") {
    optim::FuncAdamWOptions o{
        .lr = lr, .betas = draw.betas(), .eps = draw.between("eps", 1e-9, 1e-4), .weight_decay = decay};
    if (decay == 0) o.weight_decay = 1e-2;
    o.eps_root = draw.between("eps_root", 1e-9, 1e-5);
    o.maximize = draw.flag("maximize");
    o.fused = seed % 3 != 0;
    make = [o] { return optim::adamw(o); };
  } else if (name == "adagrad") {
    optim::FuncAdagradOptions o{.lr = lr, .weight_decay = decay};
    o.lr_decay = draw.sometimes("lr_decay", 0.001, 0.1);
    o.initial_accumulator_value = draw.sometimes("initial_accumulator_value", 0.01, 1);
    o.eps = draw.between("eps", 1e-10, 1e-6);
    o.maximize = draw.flag("maximize");
    make = [o] { return optim::adagrad(o); };
  } else if (name == "rmsprop") {
    optim::FuncRMSpropOptions o{.lr = lr,
                                .alpha = draw.between("alpha", 0.5, 0.99),
                                .eps = draw.between("eps", 1e-8, 1e-4),
                                .weight_decay = decay};
    o.momentum = draw.sometimes("momentum", 0.1, 0.9);
    o.nesterov = draw.flag("nesterov", o.momentum != 0);
    o.centered = draw.flag("centered");
    o.initial_scale = o.centered ? draw.between("initial_scale", 1, 2) : draw.sometimes("initial_scale", 0.1, 1);
    o.maximize = draw.flag("maximize");
    make = [o] { return optim::rmsprop(o); };
  } else if (name == "adadelta") {
    const optim::FuncAdadeltaOptions o{
        .lr = lr, .rho = draw.between("rho", 0.5, 0.95), .eps = draw.between("eps", 1e-7, 1e-4), .weight_decay = decay};
    make = [o] { return optim::adadelta(o); };
  } else {
    const optim::FuncAdamaxOptions o{
        .lr = lr, .betas = draw.betas(), .eps = draw.between("eps", 1e-8, 1e-4), .weight_decay = decay};
    make = name == "adamax" ? std::function<GradientTransformation()>([o] { return optim::adamax(o); })
                            : std::function<GradientTransformation()>([o] { return optim::radam(o); });
  }
  return {name + draw.text(), name, make};
}

}  // namespace

std::vector<TransformCase> transform_cases() {
  std::vector<TransformCase> all;
  for (const char* const name : {"sgd", "adam", "adamw", "adagrad", "rmsprop", "adadelta", "adamax", "radam"})
    for (uint64_t seed = 1; seed <= 4; ++seed) all.push_back(drawn(name, seed));
  return all;
}

std::vector<double> numbers(const std::vector<at::Tensor>& tensors) {
  std::vector<double> all;
  for (const at::Tensor& one : tensors) {
    const at::Tensor values = one.detach().to(at::kDouble).contiguous();
    all.insert(all.end(), values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel());
  }
  return all;
}

}  // namespace muster::test
