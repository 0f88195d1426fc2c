#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/byte_stream.h"
#include "base/cores.h"
#include "base/hash.h"
#include "base/text.h"
#include "fuzz/memory_file.h"
#include "fuzz/parsers.h"
#include "launch/black_box/black_box_sources.h"
#include "launch/jobs/ledger_line.h"
#include "launch/ranks/error_file.h"
#include "launch/rendezvous/rendezvous_plan.h"
#include "muster/base/error.h"
#include "shm/black_box.h"
#include "shm/black_box_layout.h"
#include "shm/black_box_reader.h"
#include "shm/exchange_messages.h"
#include "store/etcd/etcd_answers.h"
#include "store/served/protocol.h"
#include "transport/tcp/hello.h"

namespace muster::test {
namespace {

using Bytes = std::string_view;
using Seeds = std::vector<std::string>;

void require(bool holds) {
  if (!holds) std::abort();
}

// The first byte, by which an input says which of several parsers it is for; 0 where there is none.
uint8_t take_choice(Bytes& bytes) {
  if (bytes.empty()) return 0;
  const auto choice = static_cast<uint8_t>(bytes[0]);
  bytes.remove_prefix(1);
  return choice;
}

// --- the store's protocol ---

void parse_store(Bytes bytes) {
  const uint8_t choice = take_choice(bytes);
  try {
    if (choice % 2 == 0) {
      const auto request = store::decode_request(bytes);
      const std::string again = encode(request);
      require(encode(store::decode_request(again)) == again);
    } else {
      const auto reply = store::decode_reply(bytes);
      const std::string again = encode(reply);
      require(encode(store::decode_reply(again)) == again);
      if (reply.error) store::throw_error(reply);
    }
  } catch (const Error&) {  // CorruptError, or what the reply says
  }
}

Seeds store_seeds() {
  Seeds seeds;
  for (auto op = store::Op::kSet; op <= store::kLastOp; op = static_cast<store::Op>(static_cast<int>(op) + 1)) {
    store::Request request{.op = op, .keys = {"some/key"}, .value = "some value", .number = 7, .wait_ms = 1000};
    if (op == store::Op::kWait) request.keys.push_back("another");
    if (op == store::Op::kNumKeys) request.keys.clear();
    if (op == store::Op::kCompareSet) request.expected = "what was there";
    seeds.push_back('\0' + encode(request));
  }
  seeds.push_back('\1' + encode(store::Reply{.value = "a value", .number = -1, .server = 77}));
  seeds.push_back('\1' + encode(store::error_reply(TimeoutError("nobody set the key", {1, 2}, "Look"))));
  return seeds;
}

// --- a group that comes together ---

constexpr int kRanks = 3;

void parse_exchange(Bytes bytes) {
  const uint8_t choice = take_choice(bytes);
  try {
    if (choice % 3 == 0) {
      require(shm::Invitation::parse(bytes).bytes() == bytes);
    } else if (choice % 3 == 1) {
      require(shm::Acceptance::parse(bytes).bytes() == bytes);
    } else {
      const auto answer = shm::Answer::parse(bytes, kRanks);
      require(answer.bytes() == bytes);
      if (answer.kind == shm::Answer::Kind::kWelcome) require(answer.ranks.size() == kRanks);
      for (const auto& rank : answer.ranks) require(rank.fds <= shm::kMaxFdsEach);
      for (const int rank : answer.missing) require(rank >= 0 && rank < kRanks);
    }
  } catch (const CorruptError&) {
  }
}

Seeds exchange_seeds() {
  using shm::Answer;
  using Kind = Answer::Kind;
  return {'\0' + shm::Invitation{"boot", "muster-0123456789", "nonce"}.bytes(),
          '\1' + shm::Acceptance{"nonce", 1, kRanks}.bytes(),
          '\2' + Answer{.kind = Kind::kWelcome, .ranks = {{10, 2}, {11, 0}, {12, 16}}}.bytes(),
          '\2' + Answer{.kind = Kind::kTimeout, .missing = {1, 2}}.bytes(),
          '\2' + Answer{.kind = Kind::kMismatch, .why = "two processes claim rank 1"}.bytes(),
          '\2' + Answer{.kind = Kind::kLost, .lost = 2, .pid = 12}.bytes(),
          '\2' + Answer{.kind = Kind::kGaveUp, .why = "the job has ended"}.bytes()};
}

// --- workers that find each other ---

void parse_workers(Bytes bytes) {
  const uint8_t choice = take_choice(bytes);
  try {
    if (choice % 2 == 0) {
      const auto entry = transport::Entry::parse(bytes);
      require(entry.addresses.size() <= transport::kMaxAddresses);
      require(transport::Entry::parse(entry.text()).text() == entry.text());
    } else {
      require(transport::Hello::parse(bytes).bytes() == bytes);
    }
  } catch (const CorruptError&) {
  }
}

Seeds workers_seeds() {
  transport::Entry entry{.port = 4711, .addresses = {"192.168.1.2", "fd00::1", "node-7"}};
  entry.key.fill(0xa5);
  transport::Hello hello{.rank = 1, .to = 2, .size = 4, .pid = 99, .heartbeat_ms = 1000, .key = entry.key};
  return {'\0' + entry.text(), '\1' + hello.bytes()};
}

// --- what ranks write about their CPUs ---

void parse_cpus(Bytes bytes) {
  try {
    const CpuSet cpus = cpus_from_text(bytes);
    require(cpus_from_text(to_text(cpus)) == cpus);
  } catch (const CorruptError&) {
  }
}

Seeds cpus_seeds() { return {"0", "3", "ff", "ffffffff00000001"}; }

// --- etcd ---

void parse_etcd(Bytes bytes) {
  const uint8_t choice = take_choice(bytes);
  const std::string body(bytes);
  try {
    switch (choice % 6) {
      case 0:
        store::etcd::looked(body);
        break;
      case 1:
        store::etcd::swapped(body);
        break;
      case 2:
        store::etcd::number_in(body, "deleted");
        break;
      case 3: {
        store::EtcdClient::Watched watched;
        store::etcd::read_event(body, watched);
        break;
      }
      case 4:
        store::etcd::refusal_of(body, "HTTP status 500");
        break;
      default:
        require(store::etcd::from_base64(store::etcd::to_base64(body)) == body);
        store::etcd::from_base64(body);
    }
  } catch (const CorruptError&) {
  }
}

Seeds etcd_seeds() {
  return {
      '\0' + std::string(R"({"header":{"revision":"12"},"kvs":[{"key":"YQ==","mod_revision":"5","value":"dg=="}]})"),
      '\1' + std::string(R"({"header":{"revision":"9"},"succeeded":true})"),
      '\1' + std::string(R"({"header":{"revision":"9"},"responses":[{"response_range":{"kvs":[)"
                         R"({"mod_revision":"5","value":"dmFsdWU="}]}}]})"),
      '\2' + std::string(R"({"header":{},"deleted":"1"})"),
      '\3' + std::string(R"({"result":{"events":[{"kv":{"mod_revision":"8","value":"dg=="}}]}})"),
      '\3' + std::string(R"({"result":{"events":[{"type":"DELETE","kv":{"mod_revision":"8"}}]}})"),
      '\3' + std::string(R"({"result":{"canceled":true,"compact_revision":"100"}})"),
      '\4' + std::string(R"({"error":"etcdserver: request is too large","code":3})"),
      '\5' + std::string("dmFsdWU=")};
}

// --- black boxes ---

// A box with a few operations, and a file of two boxes. Both are too large to be inputs: an input says what is changed
// in them, as (u32 word, u64 value) one after another.
std::vector<uint64_t> some_box() {
  const UniqueFd fd = shm::create_black_box(1, 4, "a-job");
  const auto box = shm::BlackBox::open(fd.get());
  const std::vector<std::string_view> operations{"all_reduce", "send"}, dtypes{"Float", "Double"};
  box->set_names(operations, dtypes);
  const int group = box->group("world", std::vector<int>{0, 1, 2, 3});
  for (uint64_t i = 0; i < 3; ++i) {
    const uint64_t ticket = box->begin({.group = group, .operation = 0, .dtype = 1, .bytes = 4096, .sequence = i});
    if (i < 2) box->end(ticket, shm::BlackBoxState::kDone);
  }
  box->report(10, 320);
  return shm::copy_black_box(fd.get());
}

void patch(std::span<uint64_t> words, Bytes patches) {
  for (; patches.size() >= 12; patches.remove_prefix(12)) {
    uint32_t at = 0;
    uint64_t value = 0;
    std::memcpy(&at, patches.data(), sizeof at);
    std::memcpy(&value, patches.data() + sizeof at, sizeof value);
    // Half of them into the header and the first records, where the rest is.
    words[at & 1 ? (at >> 1) % std::min<size_t>(words.size(), 1200) : (at >> 1) % words.size()] = value;
  }
}

void look_at(const shm::BlackBoxSnapshot& box) {
  require(box.operations.size() + box.unreadable <= shm::black_box::kRecords);
  require(box.groups.size() <= shm::black_box::kGroups);
  for (const auto& operation : box.operations)
    require(operation.group == -1 || static_cast<size_t>(operation.group) < box.groups.size());
}

void parse_black_box(Bytes bytes) {
  static const auto box = some_box();
  auto words = box;
  const bool is_short = take_choice(bytes) == 1;
  patch(words, bytes);
  if (is_short) words.resize(words.size() / 2);
  try {
    look_at(shm::read_black_box(std::as_bytes(std::span(words))));
  } catch (const CorruptError&) {
  }
}

std::string patch_of(uint32_t at, uint64_t value) { return WireWriter().put(at).put(value).take(); }

Seeds black_box_seeds() {
  return {std::string(1, '\0'), '\0' + patch_of(0, 1), '\0' + patch_of(2 * 40 + 1, UINT64_MAX) + patch_of(9, 1),
          '\1' + patch_of(4, 4)};
}

// The bytes of a file: its head, then for each rank its end and a segment, of which an input has only the length.
void parse_black_box_file(Bytes bytes) {
  try {
    for (const auto& rank : launch::read_black_boxes(MemoryFile(bytes).path()).ranks) look_at(rank.box);
  } catch (const CorruptError&) {
  }
}

Seeds black_box_file_seeds() {
  const auto head = [](uint64_t ranks) {
    return "MUSTERBX" + WireWriter().put(uint64_t{1}).put(uint64_t{12345}).put(ranks).take();
  };
  return {head(0), head(1) + WireWriter().put(Bytes("running")).put(uint32_t{16}).take() + std::string(16, 'x')};
}

// --- what launchers read: from each other in the store, from a rank's own file, and from a ledger ---

void parse_plan(Bytes bytes) {
  const bool is_end = take_choice(bytes) % 2 == 1;
  const std::string value(bytes);
  try {
    if (is_end) {
      const auto end = launch::parse("end", value, launch::end_in);
      require(to_string(launch::parse("end", to_string(end), launch::end_in)) == to_string(end));
      return;
    }
    launch::Plan plan{.agents = launch::parse("plan", value, launch::agents_of)};
    launch::put_in_order(plan.agents);
    require(plan.agents.size() > 1000 || plan.world_size() >= static_cast<int>(plan.agents.size()));
  } catch (const CorruptError&) {
  } catch (const InvalidArgument&) {  // two ask for one number
  }
}

Seeds plan_seeds() {
  launch::Agent one{.host = "a", .ranks = 2, .wish = 1, .identity = "x"}, other{.host = "b", .wish = 0};
  return {'\0' + launch::Json({launch::to_json(one), launch::to_json(other)}).dump(), std::string("\0[]", 3),
          '\1' + to_string(launch::EpochEnd{.kind = launch::EpochEnd::Kind::kLost, .node = 1, .cause = "gone"})};
}

void parse_error_file(Bytes bytes) {
  const bool is_message = take_choice(bytes) % 2 == 1;
  if (is_message) {
    launch::Outcome outcome;
    launch::take_rank_that_failed(std::string(bytes), outcome);
    launch::Outcome again;
    launch::take_rank_that_failed(launch::rank_that_failed(outcome), again);
    require(again.first_failed_rank == outcome.first_failed_rank);
    return;
  }
  const MemoryFile file(bytes);
  launch::rank_error(file.path());
  const std::string error = std::filesystem::temp_directory_path() / text("muster-test-error-", ::getpid());
  launch::write_error_file(error, {}, "job", file.path(), {});
  std::filesystem::remove(error);
}

Seeds error_file_seeds() {
  launch::Outcome outcome;
  outcome.first_failed_rank = 1;
  outcome.pid = 7;
  outcome.exception_type = "std::runtime_error";
  outcome.last_lines = {"a line"};
  return {'\0' + std::string(R"({"message": {"message": "RuntimeError: x", "extraInfo": {"timestamp": "1"}}})"),
          '\0' + std::string(R"({"message": "text"})"), '\0' + std::string(50'000, '[') + std::string(50'000, ']'),
          '\1' + launch::rank_that_failed(outcome)};
}

// The line of these words, with the right hash.
std::string ledger_line(Bytes words) {
  std::string line(words);
  line += " #";
  for (uint64_t hash = hash_of_bytes(words.data(), words.size()), digit = 0; digit < 8; ++digit, hash /= 16)
    line += "0123456789abcdef"[hash % 16];
  return line;
}

void parse_ledger(Bytes bytes) {
  launch::parse_ledger_line(bytes);
  if (const auto line = launch::parse_ledger_line(ledger_line(bytes))) {
    const std::string again = to_string(*line);  // with a line break before and behind it
    const auto parsed = launch::parse_ledger_line(Bytes(again).substr(1, again.size() - 2));
    require(parsed && to_string(*parsed) == again);
  }
}

Seeds ledger_seeds() {
  return {"attempt 2 rank 1 of 4 after 100 of 1000 samples in a training", "step 101 attempt 2 rank 1 epoch 3: 17 4 33",
          "made 101 attempt 2 rank 1"};
}

}  // namespace

const std::vector<Parser>& core_parsers() {
  static const std::vector<Parser> parsers{{"store", parse_store, store_seeds},
                                           {"exchange", parse_exchange, exchange_seeds},
                                           {"workers", parse_workers, workers_seeds},
                                           {"cpus", parse_cpus, cpus_seeds},
                                           {"etcd", parse_etcd, etcd_seeds},
                                           {"black_box", parse_black_box, black_box_seeds},
                                           {"black_box_file", parse_black_box_file, black_box_file_seeds},
                                           {"plan", parse_plan, plan_seeds},
                                           {"error_file", parse_error_file, error_file_seeds},
                                           {"ledger", parse_ledger, ledger_seeds}};
  return parsers;
}

}  // namespace muster::test
