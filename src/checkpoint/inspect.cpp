#include "checkpoint/inspect.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <new>
#include <string_view>
#include <utility>

#include "base/atomic_file.h"
#include "base/file_text.h"
#include "base/text.h"
#include "base/utf8.h"
#include "checkpoint/container.h"
#include "checkpoint/folder.h"
#include "checkpoint/problem.h"
#include "checkpoint/reading.h"
#include "checkpoint/torch_file.h"
#include "launch/kit/text_table.h"
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

// The newest first; at least one.
std::vector<int64_t> snapshots_in(const Folder& folder) {
  auto all = folder.snapshots();
  if (all.empty())
    throw InvalidArgument(text("there are no snapshots in ", folder.path().string()),
                          "Name a file, or the folder of a Snapshot");
  return all;
}

// The newest snapshot, if it is a folder.
std::string file_at(const std::string& path) {
  std::error_code error;
  const fs::file_type type = fs::status(path, error).type();
  if (type == fs::file_type::not_found) throw Unavailable(text(path, " does not exist"));
  if (error) throw Unavailable(text("cannot read ", path, ": ", error.message()));
  if (type != fs::file_type::directory) return path;
  const Folder folder(path);
  return folder.snapshot(snapshots_in(folder).front()).string();
}

// The files of a snapshot: the only one, or the shards.
std::vector<Container> files_of_snapshot(const std::string& path) {
  std::vector<Container> files;
  Container first = Container::open(path);
  const About about = first.about();
  const fs::path folder = fs::path(path).parent_path();
  for (size_t i = 0; i < about.shards.size(); ++i) {
    files.push_back(open_shard(folder, about, i));
    files.back().open_for_each_read();
  }
  if (files.empty()) files.push_back(std::move(first));
  return files;
}

// By name. A parameter and a buffer may have the same; the second is then called by its kind, too, and perhaps by a
// number.
enum class With { kValues, kShapes };
Tensors tensors_in_snapshot(const std::string& path, With with) {
  Tensors all;
  for (const Container& file : files_of_snapshot(path))
    for (size_t i = 0; i < file.entries().size(); ++i) {
      const Entry entry = with == With::kValues ? file.read(i) : file.entries()[i];
      std::string name = entry.full_name();
      for (int number = 1; !all.emplace(name, entry.tensor).second; ++number)
        name = text(entry.full_name(), " (", entry.kind, number == 1 ? "" : text(" ", number), ")");
    }
  return all;
}

Tensors tensors_in(const std::string& given) {
  const std::string path = file_at(given);
  if (is_torch_file(path)) return tensors_of_torch_file(path);
  const SafetensorsFile file(path);
  if (is_snapshot(file)) return tensors_in_snapshot(path, With::kValues);
  Tensors all;
  for (const std::string& name : file.names()) all.emplace(name, file.tensor(name));
  return all;
}

template <typename T>
double farthest_integers(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  const T *const ours = x.const_data_ptr<T>(), *const theirs = y.const_data_ptr<T>();
  uint64_t most = 0;  // doubles cannot tell large ones apart
  for (int64_t i = 0; i < x.numel(); ++i) {
    const auto [less, more] = std::minmax(ours[i], theirs[i]);
    most = std::max(most, static_cast<uint64_t>(more) - static_cast<uint64_t>(less));
  }
  return static_cast<double>(most);
}

// The largest difference of two tensors' values, and of the parts of complex ones; infinity if one has a NaN where the
// other has none.
double distance(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0) return 0;
  if (a.scalar_type() == at::kUInt64) return farthest_integers<uint64_t>(a, b);
  if (at::isIntegralType(a.scalar_type(), true)) return farthest_integers<int64_t>(a.to(at::kLong), b.to(at::kLong));
  const auto wide = [](const at::Tensor& of) {
    return of.is_complex() ? at::view_as_real(of.to(at::kComplexDouble).resolve_conj()) : of.to(at::kDouble);
  };
  const at::Tensor x = wide(a), y = wide(b);
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
  for (const int64_t steps : snapshots_in(folder)) {
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
  return {.words = launch::aligned(rows, {false, true, true, false})};
}

bool is_for_torch(const std::string& path) { return !path.ends_with(".safetensors"); }

// Whether its header begins where that of a safetensors file does.
bool has_safetensors_header(const std::string& path) {
  if (!fs::is_regular_file(path)) return false;  // to open a pipe would be to wait for its writer
  std::error_code ignored;
  const std::string first = first_bytes(path, 9, ignored);
  return first.size() == 9 && first.back() == '{';
}

}  // namespace

Inspection list(const std::string& path) {
  if (fs::is_directory(path)) return list_folder(path);
  std::map<std::string, SafetensorsFile::Form> forms;
  const auto add = [&](const Tensors& tensors) {
    for (const auto& [name, tensor] : tensors)
      forms[name] = {.dtype = tensor.scalar_type(), .sizes = tensor.sizes().vec(), .bytes = tensor.nbytes()};
  };
  if (is_torch_file(file_at(path))) {
    add(tensors_of_torch_file(path));
  } else if (const SafetensorsFile file(path); is_snapshot(file)) {
    add(tensors_in_snapshot(path, With::kShapes));
  } else {
    for (const std::string& name : file.names()) forms[name] = file.form(name);
  }
  std::vector<std::vector<std::string>> rows;
  uint64_t bytes = 0;
  for (const auto& [name, form] : forms) {
    const bool is_known = form.dtype != at::ScalarType::Undefined;
    rows.push_back({launch::printable(name),
                    is_known ? std::string(c10::toString(form.dtype)) : launch::printable(form.dtype_in_file),
                    text("[", join(form.sizes), "]"), size_of(form.bytes)});
    bytes += form.bytes;
  }
  return {.words = text(rows.empty() ? "" : launch::aligned(rows, {false, false, false, true}), rows.size(),
                        rows.size() == 1 ? " tensor, " : " tensors, ", size_of(bytes), "\n")};
}

Inspection verify(const std::vector<std::string>& paths) {
  Inspection result;
  PlainOutput words;
  // What is wrong with one path does not hide what is wrong with the others.
  const auto noting = [&](const std::string& path, const auto& look) {
    try {
      look();
    } catch (const Error& error) {
      words << words_for_error(error) << "\n";
      result.good = false;
    } catch (const std::exception& error) {
      words << path << ": " << words_for_error(error) << "\n";
      result.good = false;
    }
  };
  const auto one = [&](const std::string& path) {
    const bool is_torchs = is_torch_file(path);
    if (is_torchs) tensors_of_torch_file(path);
    if (is_torchs || !is_snapshot(SafetensorsFile(path))) {
      words << path << ": can be read; it has no checksums\n";
      return;
    }
    const auto files = files_of_snapshot(path);
    for (const Container& file : files) file.verify();
    words << path << ": good" << (files.size() > 1 ? text(", with ", files.size(), " shards") : "") << "\n";
  };
  for (const std::string& path : paths)
    noting(path, [&] {
      if (!fs::is_directory(path)) return one(path);
      const Folder folder(path);
      for (const int64_t steps : snapshots_in(folder)) {
        const std::string snapshot = folder.snapshot(steps).string();
        noting(snapshot, [&] { one(snapshot); });
      }
    });
  result.words = words.str();
  return result;
}

Inspection diff(const std::string& a, const std::string& b, double tolerance) {
  const Tensors ours = tensors_in(a), theirs = tensors_in(b);
  PlainOutput words;
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
  if (fs::exists(target) && !fs::is_regular_file(target))
    throw InvalidArgument(text(target, " is not a regular file"), "Choose another name");
  Tensors all;
  for (const std::string& source : sources) {
    const bool is_torchs = is_for_torch(source) && !fs::is_directory(source) && !has_safetensors_header(source);
    for (auto& [name, tensor] : is_torchs ? tensors_of_torch_file(source) : tensors_in(source)) {
      if (!name.starts_with(options.prefix)) continue;
      const std::string kept = name.substr(options.prefix.size());
      if (!all.emplace(kept, tensor).second)
        throw InvalidArgument(text("two of the sources have a tensor '", shortened(kept), "'"),
                              "Convert them one by one");
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

std::string words_for_error(const std::exception& error) {
  std::string_view what = error.what();
  if (const auto* const ours = dynamic_cast<const Error*>(&error)) return launch::printable(ours->message());
  if (const auto* const torchs = dynamic_cast<const c10::Error*>(&error)) {
    what = torchs->what_without_backtrace();
    what = what.substr(0, what.find('\n'));
  }
  if (is_lack_of_memory(error)) return "not enough memory";
  return launch::printable(what);
}

namespace {

Inspection inspect(std::vector<std::string> words) {
  const std::string command = words.empty() ? "" : words.front();
  if (!words.empty()) words.erase(words.begin());
  if (command == "ls" && words.size() == 1)
    return checkpoint::list(words[0]);  // another file of this unit may have a list()
  if (command == "verify" && !words.empty()) return verify(words);
  if (command == "diff" && words.size() == 3) return diff(words[1], words[2], std::strtod(words[0].c_str(), nullptr));
  if (command == "convert" && words.size() >= 4)
    return convert({words.begin() + 3, words.end()}, words[2], {.prefix = words[0], .overwrites = words[1] == "1"});
  throw InvalidArgument("muster-checkpoint is called by muster checkpoint", "See muster checkpoint --help");
}

}  // namespace

Answer answer(std::vector<std::string> words) {
  const auto failed = [](int status, const std::string& why) {
    return Answer{.status = status, .err = "muster: " + why + "\n"};
  };
  try {
    const Inspection result = inspect(std::move(words));
    return {.status = result.good ? 0 : 1, .out = result.words};
  } catch (const InvalidArgument& error) {
    return failed(2, launch::printable(error.what()));
  } catch (const Error& error) {
    return failed(1, launch::printable(error.what()));
  } catch (const std::exception& error) {
    return failed(1, words_for_error(error));
  }
}

}  // namespace muster::checkpoint
