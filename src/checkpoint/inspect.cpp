#include "checkpoint/inspect.h"

#include <ATen/core/Tensor.h>

#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <sstream>
#include <utility>

#include "base/atomic_file.h"
#include "base/text.h"
#include "checkpoint/container.h"
#include "checkpoint/folder.h"
#include "checkpoint/reading.h"
#include "checkpoint/torch_file.h"
#include "launch/text_table.h"
#include "muster/base/error.h"
#include "muster/checkpoint/safetensors.h"

namespace muster::checkpoint {
namespace {

namespace fs = std::filesystem;
using Tensors = std::map<std::string, at::Tensor>;

std::string size_of(uint64_t bytes) {
  for (const auto& [unit, name] : {std::pair{1e9, "GB"}, std::pair{1e6, "MB"}, std::pair{1e3, "kB"}})
    if (static_cast<double>(bytes) >= unit) return text(launch::fixed(static_cast<double>(bytes) / unit, 1), " ", name);
  return text(bytes, " B");
}

std::string form_of(const at::Tensor& tensor) {
  return text(c10::toString(tensor.scalar_type()), " [", join(tensor.sizes()), "]");
}

bool is_snapshot(const SafetensorsFile& file) { return file.metadata().contains("muster"); }

// The newest snapshot, if it is a folder.
std::string file_at(const std::string& path) {
  if (!fs::exists(path)) throw Unavailable(text(path, " does not exist"));
  if (!fs::is_directory(path)) return path;
  const Folder folder(path);
  const auto steps = folder.snapshots();
  if (steps.empty())
    throw InvalidArgument(text("there are no snapshots in ", path), "Name a file, or the folder of a Snapshot");
  return folder.snapshot(steps.front()).string();
}

// The files of a snapshot, verified: the only one, or the shards.
std::vector<Container> read_snapshot(const std::string& path) {
  std::vector<Container> files;
  Container first = Container::read(path);
  const About about = first.about();
  for (size_t i = 0; i < about.shards.size(); ++i) files.push_back(read_shard(fs::path(path).parent_path(), about, i));
  if (files.empty()) files.push_back(std::move(first));
  return files;
}

Tensors tensors_in(const std::string& given) {
  const std::string path = file_at(given);
  Tensors all;
  const SafetensorsFile file(path);
  if (!is_snapshot(file)) {
    for (const std::string& name : file.names()) all.emplace(name, file.tensor(name));
    return all;
  }
  for (const Container& each : read_snapshot(path))
    for (const Entry& entry : each.entries())
      if (!all.emplace(entry.full_name(), entry.tensor).second)  // a parameter and a buffer may have one name
        all.emplace(text(entry.full_name(), " (", entry.kind, ")"), entry.tensor);
  return all;
}

// The largest difference of two tensors' values; infinity if one has a NaN where the other has none.
double distance(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0) return 0;
  const auto wide = a.is_complex() ? at::kComplexDouble : at::kDouble;
  const at::Tensor x = a.to(wide), y = b.to(wide);
  const at::Tensor apart = (x - y).abs().masked_fill(x.eq(y), 0);  // equal infinities
  const at::Tensor nans = x.isnan().logical_and(y.isnan());
  return apart.masked_fill(nans, 0)
      .nan_to_num(std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity())
      .max()
      .item<double>();
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const auto plain = [](const at::Tensor& of) { return of.contiguous().resolve_conj().resolve_neg(); };
  const at::Tensor x = plain(a), y = plain(b);
  return x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

Inspection list_folder(const std::string& path) {
  const Folder folder(path);
  std::vector<std::vector<std::string>> rows;
  for (const int64_t steps : folder.snapshots()) {
    const auto file = folder.snapshot(steps);
    try {
      const About about = read_about(file);
      uint64_t bytes = fs::file_size(file);
      for (const Shard& shard : about.shards) bytes += shard.bytes;
      rows.push_back({text("step ", steps), size_of(bytes),
                      text(about.world_size, about.world_size == 1 ? " rank" : " ranks"),
                      about.shards.empty() ? "1 file" : text(about.shards.size() + 1, " files")});
    } catch (const Error& error) {
      rows.push_back({text("step ", steps), "", "", launch::printable(error.message())});
    }
  }
  if (rows.empty())
    throw InvalidArgument(text("there are no snapshots in ", path), "Name a file, or the folder of a Snapshot");
  return {.words = launch::aligned(rows, {false, true, true, false})};
}

bool is_for_torch(const std::string& path) { return !path.ends_with(".safetensors"); }

}  // namespace

Inspection list(const std::string& path) {
  if (fs::is_directory(path)) return list_folder(path);
  Tensors tensors = tensors_in(path);
  std::vector<std::vector<std::string>> rows;
  uint64_t bytes = 0;
  for (const auto& [name, tensor] : tensors) {
    rows.push_back({launch::printable(name), std::string(c10::toString(tensor.scalar_type())),
                    text("[", join(tensor.sizes()), "]"), size_of(tensor.nbytes())});
    bytes += tensor.nbytes();
  }
  return {.words = text(rows.empty() ? "" : launch::aligned(rows, {false, false, false, true}), tensors.size(),
                        tensors.size() == 1 ? " tensor, " : " tensors, ", size_of(bytes), "\n")};
}

Inspection verify(const std::vector<std::string>& paths) {
  Inspection result;
  std::ostringstream words;
  const auto one = [&](const std::string& path) {
    try {
      if (!is_snapshot(SafetensorsFile(path))) {
        words << path << ": can be read; it has no checksums\n";
        return;
      }
      const auto files = read_snapshot(path);
      words << path << ": good" << (files.size() > 1 ? text(", with ", files.size(), " shards") : "") << "\n";
    } catch (const Error& error) {
      words << launch::printable(error.message()) << "\n";
      result.good = false;
    } catch (const std::exception& error) {
      words << path << ": " << launch::printable(error.what()) << "\n";
      result.good = false;
    }
  };
  for (const std::string& path : paths) {
    if (!fs::is_directory(path)) {
      one(path);
      continue;
    }
    const Folder folder(path);
    const auto all = folder.snapshots();
    if (all.empty())
      throw InvalidArgument(text("there are no snapshots in ", path), "Name a file, or the folder of a Snapshot");
    for (const int64_t steps : all) one(folder.snapshot(steps).string());
  }
  result.words = words.str();
  return result;
}

Inspection diff(const std::string& a, const std::string& b, double tolerance) {
  const Tensors ours = tensors_in(a), theirs = tensors_in(b);
  std::ostringstream words;
  size_t equal = 0, differences = 0;
  const auto differs = [&](const std::string& name, const std::string& how) {
    words << launch::printable(name) << ": " << how << "\n";
    ++differences;
  };
  for (const auto& [name, tensor] : ours) {
    const auto found = theirs.find(name);
    if (found == theirs.end()) {
      differs(name, "only in " + a);
    } else if (form_of(tensor) != form_of(found->second)) {
      differs(name, text(form_of(tensor), " and ", form_of(found->second)));
    } else if (same_bits(tensor, found->second)) {
      ++equal;
    } else if (const double apart = distance(tensor, found->second); !(tolerance > 0 && apart <= tolerance)) {
      differs(name, text(form_of(tensor), ", values differ by up to ", apart));
    } else {
      ++equal;
    }
  }
  for (const auto& [name, tensor] : theirs)
    if (!ours.contains(name)) differs(name, "only in " + b);
  words << equal << (equal == 1 ? " tensor is" : " tensors are") << " equal"
        << (differences > 0 ? text(", ", differences, differences == 1 ? " differs" : " differ") : "") << "\n";
  return {.good = differences == 0, .words = words.str()};
}

Inspection convert(const std::vector<std::string>& sources, const std::string& target, const ConvertOptions& options) {
  if (fs::exists(target) && !options.overwrites)
    throw InvalidArgument(text(target, " exists already"), "Choose another name, or use --force");
  Tensors all;
  for (const std::string& source : sources) {
    const bool is_torchs = !fs::is_directory(source) && is_for_torch(source);
    for (auto& [name, tensor] : is_torchs ? tensors_of_torch_file(source) : tensors_in(source)) {
      if (!name.starts_with(options.prefix)) continue;
      const std::string kept = name.substr(options.prefix.size());
      if (!all.emplace(kept, tensor).second)
        throw InvalidArgument(text("two of the sources have a tensor '", kept, "'"), "Convert them one by one");
    }
  }
  if (all.empty())
    throw InvalidArgument(options.prefix.empty() ? std::string("there are no tensors to convert")
                                                 : text("no tensor's name begins with '", options.prefix, "'"));
  if (is_for_torch(target)) {
    write_torch_file(target, all);
  } else {
    save_safetensors(target, all, {{"format", "pt"}});
  }
  return {.words = text(target, ": ", all.size(), all.size() == 1 ? " tensor\n" : " tensors\n")};
}

}  // namespace muster::checkpoint
