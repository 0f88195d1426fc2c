// The items of a snapshot. Each converts an object to entries and back.
//
// Thread-safety: none. Items refer to objects that the user owns.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "checkpoint/archive.h"
#include "checkpoint/entry.h"

namespace muster::checkpoint {

class Item {
 public:
  virtual ~Item() = default;
  // Sets the entries' names, kinds, orders and tensors. The tensors may share memory with the object.
  virtual Entries save() = 0;
  // Throws InvalidArgument if load() cannot accept these entries. Changes nothing.
  virtual void check(const Entries&) const {}
  virtual void load(const Entries& entries) = 0;
  // True if load() may throw although check() has accepted the entries. Such items are loaded before the others.
  virtual bool may_refuse() const { return false; }
  // Whether the item must be stored for each rank. It may become true when training begins.
  virtual bool differs_between_ranks() const { return false; }
  // Whether some entries' values are on one rank only, although the item is stored once.
  virtual bool is_spread() const { return false; }
};

std::unique_ptr<Item> make_item(torch::nn::Module& module);
std::unique_ptr<Item> make_item(torch::optim::Optimizer& optimizer);
std::unique_ptr<Item> make_item(at::Generator generator);
std::unique_ptr<Item> make_item(at::Tensor& tensor);
std::unique_ptr<Item> make_item(int64_t& number);
std::unique_ptr<Item> make_item(double& number);
std::unique_ptr<Item> make_item(std::map<std::string, int64_t>& numbers);
std::unique_ptr<Item> make_item(std::map<std::string, double>& numbers);
std::unique_ptr<Item> make_item(SaveFn save, LoadFn load);

}  // namespace muster::checkpoint
