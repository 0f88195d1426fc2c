// What save() of a sampler, a stream or a loader writes, as bytes, and load() of these.
#pragma once

#include <torch/serialize/archive.h>

#include <sstream>
#include <string>

namespace muster::test {

inline std::string bytes_of(torch::serialize::OutputArchive& archive) {
  std::ostringstream out;
  archive.save_to(out);
  return out.str();
}

template <typename T>
std::string saved(const T& item) {
  torch::serialize::OutputArchive archive;
  item.save(archive);
  return bytes_of(archive);
}

template <typename T>
void load(T& item, const std::string& bytes) {
  std::istringstream in(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(in);
  item.load(archive);
}

}  // namespace muster::test
