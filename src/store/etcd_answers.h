// What etcd says (etcd_client.h): JSON, of which nothing is believed.
//
// Errors: Corrupt where an answer is none of etcd's, whatever it is. Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "store/etcd_client.h"

namespace muster::store::etcd {

std::string to_base64(std::string_view bytes);
std::string from_base64(const std::string& text);

EtcdClient::Looked looked(const std::string& body);    // of a range request
EtcdClient::Swapped swapped(const std::string& body);  // of a transaction; surely_once is the caller's
// A number of 64 bits at the top of an answer; 0 where it is left out.
int64_t number_in(const std::string& body, const char* name);
// One message of a watch, into `watched`. False: it is the last that the caller wants to see.
bool read_event(const std::string& line, EtcdClient::Watched& watched);

struct Refusal {
  std::string words;
  int64_t code = 0;  // gRPC's; 0: none
};
// Why etcd refused a request; `otherwise`, where `body` does not say.
Refusal refusal_of(const std::string& body, const std::string& otherwise);

}  // namespace muster::store::etcd
