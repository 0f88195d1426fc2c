#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/text.h"
#include "checkpoint/container.h"
#include "checkpoint/torch_pickle.h"
#include "comm/core/members.h"
#include "comm/kit/failure_note.h"
#include "comm/world/meeting.h"
#include "fuzz/memory_file.h"
#include "fuzz/parsers.h"
#include "fuzz/pickles.h"
#include "muster/base/error.h"
#include "muster/checkpoint/safetensors.h"
#include "muster/comm/objects.h"
#include "muster/comm/tensor_msgpack.h"
#include "muster/data/idx.h"
#include "muster/store/store.h"
#include "support/patience.h"

namespace muster::test {
namespace {

using Bytes = std::string_view;
using Seeds = std::vector<std::string>;

// --- what the ranks of a group read from each other in the store ---

constexpr int kSize = 3;

void parse_members(Bytes bytes) {
  try {
    const auto members = comm::read_members(std::string(bytes), 1, kSize);
    if (members.size() != kSize) std::abort();
    for (const auto& member : members)
      if (member.host < 0 || member.host >= kSize) std::abort();
    comm::cores_of_host(members, 1);
  } catch (const CorruptError&) {
  } catch (const Mismatch&) {
  } catch (const TimeoutError&) {
  }
}

// The first is what rank 0 posts when all have come: two ranks of one host, and one of another.
Seeds members_seeds() {
  const auto store = make_memory_store();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kSize; ++rank)
    ranks.emplace_back(
        [&, rank] { comm::meet_members(*store, "group", rank, kSize, rank < 2 ? "a" : "b", patience()); });
  for (auto& rank : ranks) rank.join();
  return {*store->try_get("group/members"), "missing 1 2", "mismatch rank 1 expects a group of 4 ranks"};
}

void parse_failure_note(Bytes bytes) {
  try {
    std::rethrow_exception(comm::read_failure(std::string(bytes), 0, "barrier #1"));
  } catch (const Error& error) {
    // What has been read can be written, and says the same again.
    try {
      std::rethrow_exception(comm::read_failure(comm::write_failure(comm::failure_of(error, 2)), 0, "barrier #1"));
    } catch (const Error& again) {
      if (again.code() != error.code() || again.message() != error.message()) std::abort();
    }
  }
}

Seeds failure_note_seeds() {
  return {comm::write_failure(comm::failure_of(PeerLost(1, 4711, "killed by signal 9"), 0)),
          comm::write_failure(comm::failure_of(TimeoutError("all_reduce timed out", {1, 2}, "Look at them"), 3)),
          comm::write_failure(comm::failure_of(Mismatch("ranks disagree", "Call the same"), 1)),
          comm::write_failure(comm::failure_of(Aborted("closed"), 0))};
}

// --- objects ---

struct Tree {
  int value = 0;
  std::vector<Tree> below;
  MSGPACK_DEFINE(value, below)
};

template <typename T>
void unpack(Bytes bytes) {
  const at::Tensor tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  if (!bytes.empty()) std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  detail::unpack_object<T>({.bytes = tensor, .from = 1});
}

void parse_object(Bytes bytes) {
  if (bytes.empty()) return;
  const auto choice = static_cast<uint8_t>(bytes[0]);
  bytes.remove_prefix(1);
  try {
    switch (choice % 4) {
      case 0:
        return unpack<std::map<std::string, std::vector<double>>>(bytes);
      case 1:
        return unpack<at::Tensor>(bytes);
      case 2:
        return unpack<Tree>(bytes);
      default:
        return unpack<std::vector<std::pair<std::string, at::Tensor>>>(bytes);
    }
  } catch (const CorruptError&) {
  }
}

Seeds object_seeds() {
  const auto packed = [](char choice, const auto& object) { return choice + detail::pack_object(object).bytes(); };
  const at::Tensor tensor = at::arange(6, at::kFloat).reshape({2, 3});
  return {packed('\0', std::map<std::string, std::vector<double>>{{"loss", {0.5, 0.25}}, {"", {}}}),
          packed('\1', tensor), packed('\1', at::Tensor()), packed('\2', Tree{1, {Tree{2, {}}, Tree{3, {Tree{}}}}}),
          packed('\3', std::vector<std::pair<std::string, at::Tensor>>{{"a", tensor}, {"b", at::Tensor()}})};
}

// --- files ---

void parse_idx(Bytes bytes) {
  try {
    read_idx(MemoryFile(bytes).path());
  } catch (const CorruptError&) {
  }
}

Seeds idx_seeds() {
  using namespace std::string_literals;
  return {"\0\0\10\1\0\0\0\5hello"s, "\0\0\10\3\0\0\0\2\0\0\0\2\0\0\0\1abcd"s};
}

// The first byte says whether the checksums are made right again. Without that, almost no mutant gets past them.
void parse_snapshot(Bytes bytes) {
  if (bytes.empty()) return;
  const bool repair = bytes[0] == 1;
  std::string file(bytes.substr(1));
  if (uint64_t length = 0; repair && file.size() >= sizeof length) {
    std::memcpy(&length, file.data(), sizeof length);
    const size_t head_bytes = std::min<uint64_t>(length, file.size() - sizeof length) + sizeof length;
    std::string head = file.substr(0, head_bytes);
    checkpoint::set_checksum(head);
    file.replace(0, head_bytes, head);
  }
  const MemoryFile on_disk(file);
  try {
    checkpoint::read_about(on_disk.path());
    const auto file = checkpoint::Container::open(on_disk.path());
    for (uint64_t part = 0; part < 3; ++part) file.verify(part, 3);
    for (size_t i = 0; i < file.entries().size(); ++i) file.read(i);
  } catch (const CorruptError&) {
  } catch (const Unavailable&) {  // of another format
  }
}

void parse_safetensors(Bytes bytes) {
  const MemoryFile on_disk(bytes);
  try {
    const SafetensorsFile file(on_disk.path());
    for (const auto& name : file.names()) try {
        file.tensor(name).clone();
      } catch (const InvalidArgument&) {  // of a dtype that libtorch lacks
      }
  } catch (const CorruptError&) {
  }
}

Seeds safetensors_seeds() {
  using namespace std::string_literals;
  const std::string header =
      R"({"__metadata__":{"a":"b"},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
      R"("i":{"dtype":"U8","shape":[1],"data_offsets":[8,9]},"h":{"dtype":"BF16","shape":[1,1],"data_offsets":[9,11]}})";
  return {std::string(1, static_cast<char>(header.size())) + std::string(7, 0) + header + std::string(11, 1),
          "\2\0\0\0\0\0\0\0{}"s};
}

Seeds snapshot_seeds() {
  const checkpoint::Entry weight{
      .item = "model", .name = "weight", .kind = "tensor", .order = 0, .tensor = at::arange(10, at::kFloat)};
  const checkpoint::Entry own{
      .item = "model", .name = "own", .kind = "tensor", .rank = 1, .order = 1, .tensor = at::arange(3, at::kByte)};
  std::string folder = (std::filesystem::temp_directory_path() / "snapshot-seeds-XXXXXX").string();
  if (!::mkdtemp(folder.data())) throw_errno("making a folder");
  Seeds seeds;
  for (const auto& about :
       {checkpoint::About{.steps = 7, .world_size = 2, .rank = 1},
        checkpoint::About{.steps = 7, .world_size = 1, .shards = {{.file = "step-7.rank-0", .bytes = 640, .sum = 99}}}})
    for (const char repair : {'\0', '\1'}) {
      const auto path = std::filesystem::path(folder) / "seed";
      checkpoint::write_container(path, about, {weight, own});
      std::ifstream in(path, std::ios::binary);
      seeds.push_back(repair + std::string(std::istreambuf_iterator<char>(in), {}));
    }
  std::filesystem::remove_all(folder);
  return seeds;
}

// --- the pickle in a file of torch.save() ---

// Storages 0 and 1 are there. Every tensor lies in one of them.
void parse_pickle(Bytes bytes) {
  try {
    const auto tensors = checkpoint::tensors_in_pickle(bytes, "file", [](const std::string& key) {
      return key == "0" || key == "1" ? std::optional(at::arange(key == "0" ? 64 : 8, at::kByte)) : std::nullopt;
    });
    for (const auto& [name, tensor] : tensors)
      if (tensor.numel() > 0 && tensor.numel() < 4096) tensor.clone();  // a sanitizer sees what is outside
  } catch (const CorruptError&) {
  } catch (const InvalidArgument&) {
  }
}

// What Python writes for {"w": a matrix of floats, "half": …}, for an OrderedDict with attributes, with protocols 2 and
// 4, and for what has a function of its own: parameters, a conjugated tensor, a newer dtype, and a tensor with
// attributes.
Seeds pickle_seeds() {
  using namespace std::string_literals;
  const auto word = pickled_string;
  const std::string matrix = PickledTensor().str();
  const std::string row =
      PickledTensor{
          .kind = "torch\nBFloat16Storage", .key = "1", .elements = 4, .shape = "K\x03\x85", .strides = "K\x01\x85"}
          .str();
  const std::string conjugated =
      PickledTensor{.kind = "torch\nComplexFloatStorage", .elements = 8, .more = "}" + word("conj") + "\x88s"}.str();
  const std::string newer = PickledTensor{.kind = "torch.storage\nUntypedStorage",
                                          .elements = 64,
                                          .more = "ctorch\nuint16\n",
                                          .function = "_rebuild_tensor_v3"}
                                .str();
  std::string arguments = matrix.substr(matrix.find('('));
  arguments.pop_back();  // the call
  const std::string two = "\x80\x02", four = "\x80\x04";
  return {two + "}q\0("s + word("w") + matrix + word("h") + row + "u.",
          two + "ccollections\nOrderedDict\n)Rq\x01(" + word("w") + matrix + "u}" + word("a") + "K\x01sb.",
          four + "\x8c\x01w\x94" + matrix + "\x94}\x94h\0h\x01s."s,
          two + "ctorch._utils\n_rebuild_parameter\n(" + row + "\x88NtR.",
          two + "}(" + word("c") + conjugated + "}" + word("n") + newer + "su.",
          two + "ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\nctorch\nTensor\n" +
              arguments + "}tR."};
}

}  // namespace

const std::vector<Parser>& torch_parsers() {
  static const std::vector<Parser> parsers{
      {"members", parse_members, members_seeds},    {"failure_note", parse_failure_note, failure_note_seeds},
      {"object", parse_object, object_seeds},       {"idx", parse_idx, idx_seeds},
      {"snapshot", parse_snapshot, snapshot_seeds}, {"safetensors", parse_safetensors, safetensors_seeds},
      {"torch_pickle", parse_pickle, pickle_seeds}, wire_parser()};
  return parsers;
}

}  // namespace muster::test
