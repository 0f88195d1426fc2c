#include "muster/checkpoint/safetensors.h"

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "base/atomic_file.h"
#include "base/text.h"
#include "base/utf8.h"
#include "checkpoint/item_values.h"
#include "checkpoint/tensor_header.h"
#include "muster/base/error.h"
#include "parallel/kit/shared_tensor.h"
#include "parallel/modules/same_module.h"
#include "shm/mapping.h"

namespace muster {

using checkpoint::StoredTensor;

struct SafetensorsFile::Impl {
  std::string path;
  std::shared_ptr<shm::Mapping> mapped;  // null if the file is empty
  size_t head_bytes = 0;
  std::vector<StoredTensor> tensors;  // in the file's order
  std::map<std::string, size_t> by_name;
  std::map<std::string, std::string> metadata;

  const StoredTensor& stored(const std::string& name) const {
    const auto found = by_name.find(name);
    if (found == by_name.end()) throw InvalidArgument(text(path, " has no tensor '", shortened(name), "'"));
    return tensors[found->second];
  }
};

namespace {

constexpr char kSameModule[] = "Load the file of this module, or set .prefix or .strict";

// The whole of a file. Pages that this process writes become its own.
std::shared_ptr<shm::Mapping> map_file(const std::filesystem::path& path) {
  uint64_t size = 0;
  const UniqueFd fd = checkpoint::open_to_read(path, "", size);
  if (size == 0) return nullptr;
  void* const data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd.get(), 0);
  if (data == MAP_FAILED) throw_errno(text("cannot map ", path.string()));
  return std::make_shared<shm::Mapping>(static_cast<std::byte*>(data), size);
}

std::map<std::string, at::Tensor> tensors_of(const torch::nn::Module& module) {
  std::map<std::string, at::Tensor> all;
  for (const auto& [name, tensor] : parallel::tensors_of(module).all)
    if (tensor.defined() && !all.emplace(name, tensor).second)
      throw InvalidArgument(text("a parameter and a buffer have the name '", name, "'"), "Rename one");
  return all;
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : impl_(std::make_unique<Impl>()) {
  Impl& file = *impl_;
  file.path = path.string();
  file.mapped = map_file(path);
  const std::string_view bytes =
      file.mapped ? std::string_view(reinterpret_cast<const char*>(file.mapped->data()), file.mapped->size())
                  : std::string_view();
  const checkpoint::FileErrors errors(file.path, "Use a safetensors file that is complete");
  const auto head = checkpoint::head_in(bytes, errors);
  file.head_bytes = head.size();
  const auto header = checkpoint::parsed_header(head, errors);
  errors.understood([&] {
    if (const auto found = header.find("__metadata__"); found != header.end() && !found->is_null())
      file.metadata = found->get<std::map<std::string, std::string>>();
    file.tensors = checkpoint::stored_tensors(header, bytes.size() - head.size(), errors);
  });
  for (size_t i = 0; i < file.tensors.size(); ++i) file.by_name[file.tensors[i].name] = i;
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;
SafetensorsFile::~SafetensorsFile() = default;

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  for (const StoredTensor& tensor : impl_->tensors) names.push_back(tensor.name);
  return names;
}

bool SafetensorsFile::contains(const std::string& name) const { return impl_->by_name.contains(name); }
const std::map<std::string, std::string>& SafetensorsFile::metadata() const { return impl_->metadata; }

SafetensorsFile::Form SafetensorsFile::form(const std::string& name) const {
  const StoredTensor& stored = impl_->stored(name);
  return {stored.dtype_in_file, stored.dtype, stored.sizes, stored.end - stored.begin};
}

at::Tensor SafetensorsFile::tensor(const std::string& name) const {
  const Impl& file = *impl_;
  const StoredTensor& stored = file.stored(name);
  if (stored.dtype == at::ScalarType::Undefined)
    throw InvalidArgument(text("tensor '", shortened(name), "' of ", file.path, " is of dtype ", stored.dtype_in_file,
                               ", which libtorch lacks"));
  const uint64_t begin = file.head_bytes + stored.begin;
  // A storage of its own: tensors of one storage would share a version, and be saved together.
  const auto at = [&](at::ScalarType dtype, at::IntArrayRef sizes) {
    return at::from_blob(
        file.mapped->data() + begin, sizes, [mapped = file.mapped](void*) {}, dtype);
  };
  if (begin % c10::elementSize(stored.dtype) == 0) return at(stored.dtype, stored.sizes);
  // The format does not say that tensors are aligned.
  const auto bytes = at(at::kByte, {static_cast<int64_t>(stored.end - stored.begin)}).clone();
  return checkpoint::view_of(bytes, 0, stored.dtype, stored.sizes);
}

void SafetensorsFile::load_into(torch::nn::Module& module, const SafetensorsLoadOptions& options) const {
  const auto here = tensors_of(module);
  std::vector<std::string> missing, unexpected, differing;
  std::set<const void*> filled;  // tensors: one that a module has under two names may be there once
  for (const auto& [name, to] : here) {
    if (to.is_meta())
      throw InvalidArgument(text(name, " has no values, because it was made on the device meta"),
                            "Let FsdpOptions::init fill it, with tensor()");
    const auto found = impl_->by_name.find(options.prefix + name);
    if (found == impl_->by_name.end()) continue;
    filled.insert(to.unsafeGetTensorImpl());
    const StoredTensor& stored = impl_->tensors[found->second];
    const at::IntArrayRef sizes = stored.sizes;
    if (stored.dtype == at::ScalarType::Undefined)
      differing.push_back(text(name, " of dtype ", stored.dtype_in_file, ", which libtorch lacks"));
    else if (sizes != to.sizes())
      differing.push_back(text(name, " [", join(sizes, " x "), "] for [", join(to.sizes(), " x "), "]"));
  }
  for (const auto& [name, to] : here)
    if (!filled.contains(to.unsafeGetTensorImpl())) missing.push_back(name);
  for (const StoredTensor& stored : impl_->tensors)
    if (stored.name.starts_with(options.prefix) && !here.contains(stored.name.substr(options.prefix.size())))
      unexpected.push_back(stored.name);
  std::vector<std::string> problems;
  if (filled.empty() && !here.empty()) problems.push_back("has none of the module's tensors");
  if (options.strict && !missing.empty()) problems.push_back("lacks " + join(missing));
  if (options.strict && !unexpected.empty()) problems.push_back("has, and the module has not, " + join(unexpected));
  if (!differing.empty()) problems.push_back("does not fit: " + join(differing));
  if (!problems.empty()) throw InvalidArgument(text(impl_->path, " ", join(problems, "; it ")), kSameModule);
  for (const auto& [name, to] : here)
    if (contains(options.prefix + name) && !parallel::belongs_to_another_rank(to))
      checkpoint::put_values(to, tensor(options.prefix + name));
}

void save_safetensors(const std::filesystem::path& path, const std::map<std::string, at::Tensor>& tensors,
                      const std::map<std::string, std::string>& metadata) {
  std::vector<std::pair<std::string, at::Tensor>> all(tensors.begin(), tensors.end());
  for (const auto& [name, tensor] : all) {
    checkpoint::require_storable(tensor, name);
    if (!checkpoint::has_name_in_files(tensor.scalar_type()))
      throw InvalidArgument(text("tensor '", name, "' is of dtype ", c10::toString(tensor.scalar_type()),
                                 ", which safetensors files lack"),
                            "Convert it");
    if (name == "__metadata__") throw InvalidArgument("a tensor must not be named '__metadata__'", "Rename it");
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const auto& a, const auto& b) { return checkpoint::comes_first(a.second, b.second); });
  nlohmann::json header = nlohmann::json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t offset = 0;
  for (const auto& [name, tensor] : all) {
    header[name] = checkpoint::description_of(tensor, offset);
    offset += tensor.nbytes();
  }
  const std::string head = checkpoint::head_from(checkpoint::dump(header));
  AtomicFile file(path);
  file.write(head);
  for (const auto& [name, tensor] : all) {
    const at::Tensor stored = checkpoint::on_host(checkpoint::storable(tensor, name));  // one copy at a time
    file.write(checkpoint::bytes_of(stored));
  }
  file.commit(true);
}

void save_safetensors(const std::filesystem::path& path, const torch::nn::Module& module,
                      const std::map<std::string, std::string>& metadata) {
  save_safetensors(path, tensors_of(module), metadata);
}

}  // namespace muster
