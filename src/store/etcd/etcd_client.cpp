#include "store/etcd/etcd_client.h"

#include <poll.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "store/etcd/etcd_answers.h"

namespace muster::store {
namespace {

using std::chrono::milliseconds;
using Json = nlohmann::json;
using End = Http::Answer::End;

constexpr milliseconds kAttempt{3000};    // for one endpoint's answer; a second more per megabyte
constexpr milliseconds kWatchTurn{8000};  // then the caller reads the key: the endpoint may be cut off
constexpr milliseconds kMaxPause{100};
constexpr int kInvalidArgument = 3, kResourceExhausted = 8;  // gRPC's codes

// The first key after all keys that begin with `prefix`. A prefix is text, so its last byte is below 0xff.
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
    for (size_t tried = 0; tried < endpoints_.size(); ++tried) {  // asks each endpoint once; then comes a pause
      const size_t endpoint = current_.load();
      const auto left = endpoints_.size() - tried;
      // If an endpoint hangs, the others still have their share of the time.
      const auto mine = Deadline::after(std::min<std::chrono::nanoseconds>(patience, deadline.left() / left));
      auto answer = http_.post(url(endpoint, path), body, endpoints_.size() == 1 ? deadline : mine);
      if (answer.end == End::kWhole && answer.status == 200) {
        called.surely_once = called.surely_once && !answer.perhaps_twice;
        called.body = std::move(answer.body);
        silent_ = false;
        return called;
      }
      if (answer.end == End::kWhole) {
        const auto refusal = etcd::refusal_of(answer.body, text("HTTP status ", answer.status));
        if (refusal.code == kInvalidArgument ||
            (refusal.code == kResourceExhausted && refusal.words.find("larger than max") != std::string::npos))
          throw InvalidArgument(text("etcd refuses a request: ", refusal.words),
                                "Keep values below etcd's limit, which is 1.5 MB unless it was started with another");
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
  const auto called = call("/v3/kv/range", Json{{"key", etcd::to_base64(key)}}.dump(), deadline);
  return etcd::looked(called.body);
}

void EtcdClient::put(std::string_view key, std::string_view value, Deadline deadline) {
  call("/v3/kv/put", Json{{"key", etcd::to_base64(key)}, {"value", etcd::to_base64(value)}}.dump(), deadline);
}

EtcdClient::Swapped EtcdClient::swap(std::string_view key, int64_t revision, std::string_view value,
                                     Deadline deadline) {
  const std::string name = etcd::to_base64(key);
  const Json request = {
      {"compare",
       {{{"key", name}, {"target", "MOD"}, {"result", "EQUAL"}, {"mod_revision", std::to_string(revision)}}}},
      {"success", {{{"request_put", {{"key", name}, {"value", etcd::to_base64(value)}}}}}},
      {"failure", {{{"request_range", {{"key", name}}}}}}};
  const auto called = call("/v3/kv/txn", request.dump(), deadline);
  Swapped swapped = etcd::swapped(called.body);
  swapped.surely_once = called.surely_once;
  return swapped;
}

bool EtcdClient::erase(std::string_view key, Deadline deadline) {
  const auto called = call("/v3/kv/deleterange", Json{{"key", etcd::to_base64(key)}}.dump(), deadline);
  return etcd::number_in(called.body, "deleted") > 0;
}

void EtcdClient::erase_all(std::string_view prefix, Deadline deadline) {
  const Json request = {{"key", etcd::to_base64(prefix)}, {"range_end", etcd::to_base64(end_of(prefix))}};
  call("/v3/kv/deleterange", request.dump(), deadline);
}

int64_t EtcdClient::count(std::string_view prefix, Deadline deadline) {
  const Json request = {
      {"key", etcd::to_base64(prefix)}, {"range_end", etcd::to_base64(end_of(prefix))}, {"count_only", true}};
  const auto called = call("/v3/kv/range", request.dump(), deadline);
  return etcd::number_in(called.body, "count");
}

EtcdClient::Watched EtcdClient::watch(std::string_view key, int64_t from, Deadline deadline) {
  const size_t endpoint = current_.load();
  const Json request = {{"create_request", {{"key", etcd::to_base64(key)}, {"start_revision", std::to_string(from)}}}};
  Watched watched;
  std::string line;  // messages are lines
  std::exception_ptr trouble;
  const auto on_bytes = [&](std::string_view bytes) {
    try {
      for (size_t end; (end = bytes.find('\n')) != std::string_view::npos; bytes.remove_prefix(end + 1)) {
        line.append(bytes.substr(0, end));
        if (!etcd::read_event(line, watched)) return false;
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
  if (answer.end != End::kStopped && answer.end != End::kLate) {  // the endpoint is gone, or refuses the watch
    leave(endpoint);
    ::poll(nullptr, 0, deadline.poll_ms(milliseconds(5)));
  }
  return watched;
}

}  // namespace muster::store
