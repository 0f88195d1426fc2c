#include "store/etcd_client.h"

#include <openssl/evp.h>
#include <poll.h>

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::store {
namespace {

using std::chrono::milliseconds;
using Json = nlohmann::json;
using End = Http::Answer::End;

constexpr milliseconds kAttempt{3000};    // for one endpoint's answer, and a second for each megabyte
constexpr milliseconds kWatchTurn{8000};  // then look whether the endpoint still belongs to the cluster
constexpr milliseconds kMaxPause{100};
constexpr int kInvalidArgument = 3, kResourceExhausted = 8;  // of gRPC's codes

std::string to_base64(std::string_view bytes) {
  std::string text(4 * ((bytes.size() + 2) / 3) + 1, '\0');  // and a zero
  const int size =
      ::EVP_EncodeBlock(reinterpret_cast<unsigned char*>(text.data()),
                        reinterpret_cast<const unsigned char*>(bytes.data()), static_cast<int>(bytes.size()));
  text.resize(static_cast<size_t>(size));
  return text;
}

std::string from_base64(const std::string& text) {
  if (text.empty()) return {};
  std::string bytes(3 * (text.size() / 4 + 1), '\0');
  const int size =
      ::EVP_DecodeBlock(reinterpret_cast<unsigned char*>(bytes.data()),
                        reinterpret_cast<const unsigned char*>(text.data()), static_cast<int>(text.size()));
  if (size < 0 || text.size() % 4 != 0) throw Corrupt("etcd sent a value that is no base64");
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with("=") ? 1 : 0;
  bytes.resize(static_cast<size_t>(size) - padding);
  return bytes;
}

// Runs `read`; JSON that is not as expected becomes Corrupt.
template <typename Read>
auto reading(Read read) {
  try {
    return read();
  } catch (const Json::exception& error) {
    throw Corrupt(text("an answer is none of etcd's: ", error.what()),
                  "Look whether an etcd of version 3.4 or later "
                  "serves at that address");
  }
}

// Numbers of 64 bits are strings, and are left out where they are 0.
int64_t number(const Json& object, const char* name) {
  const std::string digits = object.value(name, "0");
  int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size())
    throw Corrupt(text("etcd's ", name, " is '", digits, "', not a number"));
  return value;
}

EtcdClient::Looked looked(const Json& range, int64_t revision) {
  EtcdClient::Looked result;
  result.revision = revision;
  if (const auto found = range.find("kvs"); found != range.end() && !found->empty())
    result.entry =
        EtcdClient::Entry{from_base64(found->at(0).value("value", "")), number(found->at(0), "mod_revision")};
  return result;
}

struct Refusal {
  std::string words;
  int code = 0;
};

Refusal refusal_of(const Http::Answer& answer) {
  const auto json = Json::parse(answer.body, nullptr, false);
  if (!json.is_object()) return {text("HTTP status ", answer.status), 0};
  return {json.value("message", json.value("error", text("HTTP status ", answer.status))), json.value("code", 0)};
}

// The first key that does not begin so; a prefix is text, whose last byte is not the greatest.
std::string end_of(std::string_view prefix) {
  std::string end(prefix);
  end.back() = static_cast<char>(end.back() + 1);
  return end;
}

}  // namespace

EtcdClient::EtcdClient(std::vector<TcpAddress> endpoints) : endpoints_(std::move(endpoints)) {}

std::string EtcdClient::names() const {
  std::vector<std::string> names;
  for (const auto& endpoint : endpoints_) names.push_back(endpoint.text());
  return join(names, ",");
}

std::string EtcdClient::url(size_t endpoint, const char* path) const {
  return text("http://", endpoints_[endpoint].text(), path);
}

void EtcdClient::leave(size_t endpoint) {
  current_.compare_exchange_strong(endpoint, (endpoint + 1) % endpoints_.size());
}

EtcdClient::Called EtcdClient::call(const char* path, const std::string& body, Deadline deadline) {
  const auto patience = kAttempt + milliseconds(body.size() / 1000);
  std::string reason;
  Called called;
  for (auto pause = milliseconds(1);; pause = std::min(2 * pause, kMaxPause)) {
    for (size_t tried = 0; tried < endpoints_.size(); ++tried) {  // each once, then a pause
      const size_t endpoint = current_.load();
      const auto left = endpoints_.size() - tried;
      // One that hangs leaves their time to the others.
      const auto mine = Deadline::after(std::min<std::chrono::nanoseconds>(patience, deadline.left() / left));
      auto answer = http_.post(url(endpoint, path), body, endpoints_.size() == 1 ? deadline : mine);
      if (answer.end == End::kWhole && answer.status == 200) {
        called.surely_once = called.surely_once && !answer.perhaps_twice;
        called.body = std::move(answer.body);
        silent_ = false;
        return called;
      }
      if (answer.end == End::kWhole) {
        const auto refusal = refusal_of(answer);
        if (refusal.code == kInvalidArgument ||
            (refusal.code == kResourceExhausted && refusal.words.find("larger than max") != std::string::npos))
          throw InvalidArgument(text("etcd refuses a request: ", refusal.words),
                                "Keep values small; etcd's limit is 1.5 MB unless it was started with another");
        reason = refusal.words;
      } else {
        reason = answer.end == End::kLate ? "no answer in time" : answer.reason;
      }
      if (answer.end != End::kRefused) called.surely_once = false;
      leave(endpoint);
      if (deadline.passed()) {
        silent_ = true;
        throw Unavailable(text("no etcd at ", names(), " answers: ", reason),
                          "Look whether a majority of its members run and can be reached");
      }
    }
    ::poll(nullptr, 0, deadline.poll_ms(pause));
  }
}

EtcdClient::Looked EtcdClient::look(std::string_view key, Deadline deadline) {
  const auto called = call("/v3/kv/range", Json{{"key", to_base64(key)}}.dump(), deadline);
  return reading([&] {
    const auto json = Json::parse(called.body);
    return looked(json, number(json.at("header"), "revision"));
  });
}

void EtcdClient::put(std::string_view key, std::string_view value, Deadline deadline) {
  call("/v3/kv/put", Json{{"key", to_base64(key)}, {"value", to_base64(value)}}.dump(), deadline);
}

EtcdClient::Swapped EtcdClient::swap(std::string_view key, int64_t revision, std::string_view value,
                                     Deadline deadline) {
  const std::string name = to_base64(key);
  const Json request = {
      {"compare",
       {{{"key", name}, {"target", "MOD"}, {"result", "EQUAL"}, {"mod_revision", std::to_string(revision)}}}},
      {"success", {{{"request_put", {{"key", name}, {"value", to_base64(value)}}}}}},
      {"failure", {{{"request_range", {{"key", name}}}}}}};
  const auto called = call("/v3/kv/txn", request.dump(), deadline);
  return reading([&] {
    const auto json = Json::parse(called.body);
    Swapped swapped;
    swapped.stored = json.value("succeeded", false);
    swapped.surely_once = called.surely_once;
    if (!swapped.stored)
      swapped.now = looked(json.at("responses").at(0).at("response_range"), number(json.at("header"), "revision"));
    return swapped;
  });
}

bool EtcdClient::erase(std::string_view key, Deadline deadline) {
  const auto called = call("/v3/kv/deleterange", Json{{"key", to_base64(key)}}.dump(), deadline);
  return reading([&] { return number(Json::parse(called.body), "deleted") > 0; });
}

void EtcdClient::erase_all(std::string_view prefix, Deadline deadline) {
  const Json request = {{"key", to_base64(prefix)}, {"range_end", to_base64(end_of(prefix))}};
  call("/v3/kv/deleterange", request.dump(), deadline);
}

int64_t EtcdClient::count(std::string_view prefix, Deadline deadline) {
  const Json request = {{"key", to_base64(prefix)}, {"range_end", to_base64(end_of(prefix))}, {"count_only", true}};
  const auto called = call("/v3/kv/range", request.dump(), deadline);
  return reading([&] { return number(Json::parse(called.body), "count"); });
}

EtcdClient::Watched EtcdClient::watch(std::string_view key, int64_t from, Deadline deadline) {
  const size_t endpoint = current_.load();
  const Json request = {{"create_request", {{"key", to_base64(key)}, {"start_revision", std::to_string(from)}}}};
  Watched watched;
  std::string line;  // messages are lines
  std::exception_ptr trouble;
  const auto on_line = [&] {
    const auto json = Json::parse(line);
    const auto result = json.find("result");
    if (result == json.end()) return false;  // an error of etcd's; look again
    if (result->value("canceled", false)) {
      watched.compacted_to = number(*result, "compact_revision");
      if (watched.compacted_to > 0) watched.end = Watched::End::kCompacted;
      return false;
    }
    const auto events = result->find("events");
    if (events == result->end() || events->empty()) return true;
    const Json& first = events->at(0);
    const Json& entry = first.at("kv");
    watched.end = Watched::End::kEvent;
    watched.event.revision = number(entry, "mod_revision");
    if (first.value("type", "PUT") == "PUT") watched.event.value = from_base64(entry.value("value", ""));
    return false;
  };
  const auto on_bytes = [&](std::string_view bytes) {
    try {
      for (size_t end; (end = bytes.find('\n')) != std::string_view::npos; bytes.remove_prefix(end + 1)) {
        line.append(bytes.substr(0, end));
        if (!reading(on_line)) return false;
        line.clear();
      }
      line.append(bytes);
      return true;
    } catch (...) {
      trouble = std::current_exception();
      return false;
    }
  };
  const auto turn = Deadline::after(kWatchTurn);
  const auto answer = http_.post(url(endpoint, "/v3/watch"), request.dump(),
                                 std::min(turn.when(), deadline.when()) == turn.when() ? turn : deadline, on_bytes);
  if (trouble) std::rethrow_exception(trouble);
  if (answer.end != End::kStopped && answer.end != End::kLate) {  // the endpoint is gone, or does not like it
    leave(endpoint);
    ::poll(nullptr, 0, deadline.poll_ms(milliseconds(5)));
  }
  return watched;
}

}  // namespace muster::store
