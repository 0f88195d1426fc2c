#include "muster/data/epoch_position.h"

#include <torch/serialize/archive.h>

#include <utility>

#include "base/hash.h"
#include "base/text.h"
#include "muster/base/error.h"

namespace muster::data {
namespace {

constexpr int64_t kPositionVersion = 1;

int64_t read_position_number(torch::serialize::InputArchive& archive, const char* type, const std::string& key) {
  c10::IValue value;
  if (!archive.try_read(key, value) || !value.isInt()) {
    throw CorruptError(text("the archive does not hold a ", type, ": its number \"", key, "\" is missing"),
                       text("Load the archive that ", type, "::save() wrote"));
  }
  return value.toInt();
}

}  // namespace

int64_t hash_of_names(const std::vector<std::string>& names) {
  uint64_t hash = names.size();
  for (const std::string& name : names) hash = hash_of_bytes(name.data(), name.size(), hash);
  return static_cast<int64_t>(hash >> 1);
}

void EpochPosition::begin(bool may_go_on) {
  const bool go_on = std::exchange(resumed_, false) && wanted_ == epoch_ && may_go_on;
  epoch_ = wanted_;
  if (!go_on) index_ = 0;
  begun_ = true;
}

void EpochPosition::resume(uint64_t epoch, size_t index) {
  epoch_ = wanted_ = epoch;
  index_ = index;
  begun_ = false;
  resumed_ = true;
}

void EpochPosition::save(torch::serialize::OutputArchive& archive, const ArchiveNames& names,
                         const Identity& identity) const {
  const bool under_way = begun_ || resumed_;
  save_at(archive, names, identity, under_way ? epoch_ : wanted_, under_way ? index_ : 0);
}

void EpochPosition::save_at(torch::serialize::OutputArchive& archive, const ArchiveNames& names,
                            const Identity& identity, uint64_t epoch, size_t index) {
  archive.write(names.key, c10::IValue(kPositionVersion));
  for (const auto& [name, value] : identity) archive.write(name, c10::IValue(value));
  archive.write("epoch", c10::IValue(static_cast<int64_t>(epoch)));
  archive.write("index", c10::IValue(static_cast<int64_t>(index)));
}

EpochPosition::Saved EpochPosition::read(torch::serialize::InputArchive& archive, const ArchiveNames& names,
                                         const Identity& identity, size_t most) {
  if (const auto version = read_position_number(archive, names.type, names.key); version != kPositionVersion) {
    throw CorruptError(
        text("the archive holds a ", names.type, " of version ", version, ", but this is version ", kPositionVersion));
  }
  for (const auto& [name, value] : identity) {
    if (c10::IValue any; name == kNamesOfShards && !archive.try_read(name, any)) continue;  // older archives lack it
    if (const auto saved = read_position_number(archive, names.type, name); saved != value) {
      throw InvalidArgument(
          text("the saved ", names.type, ": expected ", name, " ", value, ", as this one has, got ", saved),
          "A position in an epoch can only be resumed with the same dataset and options");
    }
  }
  const auto epoch = read_position_number(archive, names.type, "epoch");
  const auto index = read_position_number(archive, names.type, "index");
  if (index < 0 || static_cast<size_t>(index) > most)
    throw CorruptError(text("the saved ", names.type, " is at index ", index, " of ", most));
  return {.epoch = static_cast<uint64_t>(epoch), .index = static_cast<size_t>(index)};
}

}  // namespace muster::data
