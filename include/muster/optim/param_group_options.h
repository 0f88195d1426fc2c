// The options of a group of parameters, for libtorch: a struct of numbers that lists its fields, as the Options of
// functional_optimizer.h and lbfgs.h do, becomes a torch::optim::OptimizerOptions that archives can hold.
//
// Errors: CorruptError from serialize(), if an archive lacks one of the options. Thread-safety: none.
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace muster::optim {

namespace detail {
// One number, or those of a pair or an array. A bool is 0 or 1, and an enum is its value.
using OptionValue = std::vector<double>;
void write_option(torch::serialize::OutputArchive& archive, const char* name, const OptionValue& value);
OptionValue read_option(torch::serialize::InputArchive& archive, const char* name, size_t size);

// Calls fn(name, numbers, set), where set(numbers) changes the option.
template <typename Options, typename Fn>
void for_each_option(Options& options, const Fn& fn) {
  const auto one = [&](const char* name, auto& field) {
    using Field = std::remove_cvref_t<decltype(field)>;
    if constexpr (std::is_arithmetic_v<Field> || std::is_enum_v<Field>) {
      fn(name, OptionValue{static_cast<double>(field)},
         [&](const OptionValue& to) { field = static_cast<Field>(to[0]); });
    } else {
      OptionValue value;
      std::apply([&](const auto&... numbers) { (value.push_back(static_cast<double>(numbers)), ...); }, field);
      fn(name, value, [&](const OptionValue& to) {
        size_t i = 0;
        std::apply(
            [&](auto&... numbers) { ((numbers = static_cast<std::remove_cvref_t<decltype(numbers)>>(to[i++])), ...); },
            field);
      });
    }
  };
  [&]<size_t... kIndices>(std::index_sequence<kIndices...>) {
    (one(Options::kNames[kIndices], options.*std::get<kIndices>(Options::kFields)), ...);
  }
  (std::make_index_sequence<std::tuple_size_v<std::remove_cvref_t<decltype(Options::kFields)>>>());
}
}  // namespace detail

// The options of a group of parameters.
template <typename Values>
class ParamGroupOptions final : public torch::optim::OptimizerOptions {
 public:
  Values values;

  explicit ParamGroupOptions(Values some) : values(std::move(some)) {}
  explicit ParamGroupOptions(double lr) { values.lr = lr; }
  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override {
    return std::make_unique<ParamGroupOptions>(*this);
  }
  double get_lr() const override { return values.lr; }
  void set_lr(double lr) override { values.lr = lr; }
  void serialize(torch::serialize::InputArchive& archive) override {
    detail::for_each_option(values, [&](const char* name, const detail::OptionValue& now, const auto& set) {
      set(detail::read_option(archive, name, now.size()));
    });
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    Values copy = values;
    detail::for_each_option(copy, [&](const char* name, const detail::OptionValue& value, const auto&) {
      detail::write_option(archive, name, value);
    });
  }
};

}  // namespace muster::optim
