// Parses etcd's answers (etcd_client.h), which are JSON, and checks everything in them.
//
// Errors: CorruptError for any bytes that are not such an answer. Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "store/etcd/etcd_client.h"

namespace muster::store::etcd {

std::string to_base64(std::string_view bytes);
std::string from_base64(const std::string& text);

EtcdClient::Looked looked(const std::string& body);    // of a range request
EtcdClient::Swapped swapped(const std::string& body);  // of a transaction; the caller sets surely_once
// A 64-bit number at the top level of an answer; 0 if it is absent.
int64_t number_in(const std::string& body, const char* name);
// Reads one message of a watch into `watched`. Returns false if the caller needs no further message.
bool read_event(const std::string& line, EtcdClient::Watched& watched);

struct Refusal {
  std::string words;
  int64_t code = 0;  // gRPC's; 0: none
};
// Why etcd refused a request; `otherwise` if `body` does not say why.
Refusal refusal_of(const std::string& body, const std::string& otherwise);

}  // namespace muster::store::etcd
