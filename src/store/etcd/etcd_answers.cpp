#include "store/etcd/etcd_answers.h"

#include <openssl/evp.h>

#include <charconv>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::store::etcd {

std::string to_base64(std::string_view bytes) {
  std::string text(4 * ((bytes.size() + 2) / 3) + 1, '\0');  // EVP_EncodeBlock adds a zero byte
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
  if (size < 0 || text.size() % 4 != 0) throw CorruptError("etcd sent a value that is not base64");
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with("=") ? 1 : 0;
  bytes.resize(static_cast<size_t>(size) - padding);
  return bytes;
}

namespace {

using Json = nlohmann::json;

// Runs `read`; JSON that is not as expected becomes a CorruptError.
template <typename Read>
auto reading(Read read) {
  try {
    return read();
  } catch (const Json::exception& error) {
    throw CorruptError(text("an answer does not have etcd's format: ", error.what()),
                       "Look whether an etcd of version 3.4 or later "
                       "serves at that address");
  }
}

// etcd writes numbers of 64 bits as strings, and leaves out those that are 0.
int64_t number(const Json& object, const char* name) {
  const std::string digits = object.value(name, "0");
  int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size())
    throw CorruptError(text("etcd's ", name, " is '", digits, "', not a number"));
  return value;
}

EtcdClient::Looked looked_in(const Json& range, int64_t revision) {
  EtcdClient::Looked result;
  result.revision = revision;
  if (const auto found = range.find("kvs"); found != range.end() && !found->empty())
    result.entry =
        EtcdClient::Entry{from_base64(found->at(0).value("value", "")), number(found->at(0), "mod_revision")};
  return result;
}

}  // namespace

EtcdClient::Looked looked(const std::string& body) {
  return reading([&] {
    const auto json = Json::parse(body);
    return looked_in(json, number(json.at("header"), "revision"));
  });
}

EtcdClient::Swapped swapped(const std::string& body) {
  return reading([&] {
    const auto json = Json::parse(body);
    EtcdClient::Swapped swapped;
    swapped.stored = json.value("succeeded", false);
    if (!swapped.stored)
      swapped.now = looked_in(json.at("responses").at(0).at("response_range"), number(json.at("header"), "revision"));
    return swapped;
  });
}

int64_t number_in(const std::string& body, const char* name) {
  return reading([&] { return number(Json::parse(body), name); });
}

bool read_event(const std::string& line, EtcdClient::Watched& watched) {
  using End = EtcdClient::Watched::End;
  return reading([&] {
    const auto json = Json::parse(line);
    const auto result = json.find("result");
    if (result == json.end()) return false;  // etcd reports an error: the caller reads the key again
    if (result->value("canceled", false)) {
      watched.compacted_to = number(*result, "compact_revision");
      if (watched.compacted_to > 0) watched.end = End::kCompacted;
      return false;
    }
    const auto events = result->find("events");
    if (events == result->end() || events->empty()) return true;
    const Json& first = events->at(0);
    const Json& entry = first.at("kv");
    EtcdClient::Event event{.revision = number(entry, "mod_revision")};
    if (first.value("type", "PUT") == "PUT") event.value = from_base64(entry.value("value", ""));
    watched.event = std::move(event);
    watched.end = End::kEvent;
    return false;
  });
}

Refusal refusal_of(const std::string& body, const std::string& otherwise) {
  Refusal refusal{.words = otherwise};
  const auto json = Json::parse(body, nullptr, false);
  if (!json.is_object()) return refusal;
  for (const char* name : {"message", "error"}) {
    const auto words = json.find(name);
    if (words == json.end() || !words->is_string()) continue;
    refusal.words = words->get<std::string>();
    break;
  }
  if (const auto code = json.find("code"); code != json.end() && code->is_number_integer())
    refusal.code = code->get<int64_t>();
  return refusal;
}

}  // namespace muster::store::etcd
