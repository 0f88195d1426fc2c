// The items of a snapshot. Each converts an object to entries and back.
//
// An item may be *spread*: it is stored once, but no rank has all of it, as the parameters of a
// FullyShardedDataParallel and their optimizer's states. Then each rank stores what it has, and gets what it needs.
//
// Thread-safety: none. Items refer to objects that the user owns.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/archive.h"
#include "checkpoint/entry.h"

namespace muster::checkpoint {

// Who needs an entry's values.
struct Need {
  int owner = kEveryRank;      // a rank of the World: the only one on this host, if all of its ranks do not
  bool is_only_owner = false;  // no rank on another host does; the same on all ranks
  bool here = true;            // whether this rank does
};
Need need_of(const at::Tensor& parameter);  // of its values, or of an optimizer's state of it

// kUnlikely: of an object that can be put back.
enum class Refusal { kLikely, kUnlikely, kNever };

class Item {
 public:
  virtual ~Item() = default;
  // Sets the entries' names, kinds, orders, tensors and `only`. The tensors may share memory with the object.
  virtual Entries save() = 0;
  // By entry.
  virtual std::vector<Need> needs(const Entries& entries) const { return std::vector<Need>(entries.size()); }
  // Whether the entry is one for load_part(). Depends on its name and kind only.
  virtual bool comes_in_parts(const Entry&) const { return false; }
  // Throws InvalidArgument if these entries cannot be loaded. Changes nothing. The tensors of entries that come in
  // parts, or that this rank does not need, are on the device "meta".
  virtual void check(const Entries&) const {}
  // A snapshot may be restored in part: without the entries that accepts() refuses, and with check_part() instead of
  // check() for the others. lacking(): the names, within the item, of what none of them is for.
  virtual std::function<bool(const Entry&)> accepts() const {
    return [](const Entry&) { return true; };
  }
  virtual void check_part(const Entries& entries) const { check(entries); }
  virtual std::vector<std::string> lacking(const Entries&) const { return {}; }
  // Gets the entries that do not come in parts.
  virtual void load(const Entries& entries) = 0;
  // After load(): memory for the values of one of the others, with its shape and dtype, contiguous, on the CPU. They
  // will be written there, and load_part() gets this tensor in an entry that is `in_place`. Undefined if there is none:
  // then load_part() gets a tensor whose memory it must not keep.
  virtual at::Tensor memory_for(const Entry&) { return {}; }
  // After load(): gets some of the others that this rank needs; may be called several times.
  virtual void load_part(const Entries&) {}
  // Nothing more comes. If it `is_whole`, everything has come; if not, what can be put back is to be as before load().
  virtual void end_load(bool /*is_whole*/) {}
  // Whether load() may throw although check() has accepted the entries. The likelier, the earlier an item is loaded.
  virtual Refusal refusal() const { return Refusal::kNever; }
  // An item is stored once only if this is the same on all ranks. Otherwise it is stored for each rank, if it may
  // differ and the user has left that open. Both may change when training begins. If it `saves`, states count: before
  // restore(), ranks may have different ones.
  virtual std::string what_is_equal(bool saves) const { return ""; }
  virtual bool may_differ() const { return false; }
  // The ranks of the World that have parts of the item, if it is spread.
  virtual std::set<int> spread_over() const { return {}; }
};

std::unique_ptr<Item> make_item(torch::nn::Module& module);
std::unique_ptr<Item> make_item(torch::optim::Optimizer& optimizer);
std::unique_ptr<Item> make_item(at::Generator generator);
std::unique_ptr<Item> make_item(at::Tensor& tensor);
std::unique_ptr<Item> make_item(void* number, at::ScalarType dtype);
std::unique_ptr<Item> make_item(std::string& string);
std::unique_ptr<Item> make_item(std::map<std::string, int64_t>& numbers);
std::unique_ptr<Item> make_item(std::map<std::string, double>& numbers);
std::unique_ptr<Item> make_item(SaveFn save, LoadFn load);

}  // namespace muster::checkpoint
