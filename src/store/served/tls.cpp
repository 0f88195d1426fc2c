#include "store/served/tls.h"

#include <openssl/err.h>

#include <cstring>
#include <string_view>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::store {
namespace {

constexpr const char* kSuite = "TLS_AES_128_GCM_SHA256";
constexpr unsigned char kSuiteId[] = {0x13, 0x01};
constexpr std::string_view kLabel = "store tls psk", kIdentity = "muster store 1";

[[noreturn]] void throw_tls() {
  throw Unavailable(text("OpenSSL cannot do TLS 1.3 here: ", tls_error()), "Look at its configuration, openssl.cnf");
}

// A copy of the key for one connection, because OpenSSL writes into it. Null if memory has run out.
SSL_SESSION* key_of(SSL* connection) {
  auto* key = static_cast<SSL_SESSION*>(SSL_CTX_get_app_data(::SSL_get_SSL_CTX(connection)));
  return ::SSL_SESSION_dup(key);
}

// OpenSSL's callback for the key that a client offers. OpenSSL may ask again for a key of a certain hash (the unnamed
// argument); our suite has it.
int offer_key(SSL* connection, const EVP_MD*, const unsigned char** identity, size_t* size, SSL_SESSION** key) {
  *identity = reinterpret_cast<const unsigned char*>(kIdentity.data());
  *size = kIdentity.size();
  *key = key_of(connection);
  return *key ? 1 : 0;
}

// OpenSSL's callback for the key that a client has named. For an unknown identity there is no key, and the handshake
// fails, because the server has no certificate either.
int find_key(SSL* connection, const unsigned char* identity, size_t size, SSL_SESSION** key) {
  *key = nullptr;
  if (std::string_view(reinterpret_cast<const char*>(identity), size) != kIdentity) return 1;
  *key = key_of(connection);
  return *key ? 1 : 0;
}

// Called before OpenSSL's first use. OpenSSL must not clean itself up at exit, because a thread of ours, or a static
// object that is destroyed later, may still use it.
void prepare_openssl() {
  static const bool prepared = ::OPENSSL_init_ssl(OPENSSL_INIT_NO_ATEXIT, nullptr) == 1;
  if (!prepared) throw_tls();
}

}  // namespace

TlsContext::TlsContext(const Secret& secret, Side side) {
  prepare_openssl();
  const bool server = side == Side::kServer;
  context_.reset(::SSL_CTX_new(server ? ::TLS_server_method() : ::TLS_client_method()));
  if (!context_) throw_tls();
  SSL_CTX* context = context_.get();
  if (::SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) != 1 ||
      ::SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION) != 1 || ::SSL_CTX_set_ciphersuites(context, kSuite) != 1)
    throw_tls();
  // Only handshakes with the key and a fresh key exchange are allowed. A configuration file may have allowed others.
  ::SSL_CTX_clear_options(context, SSL_OP_ALLOW_NO_DHE_KEX | SSL_OP_ALLOW_CLIENT_RENEGOTIATION);
  ::SSL_CTX_set_options(context, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION);
  ::SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  ::SSL_CTX_set_num_tickets(context, 0);
  ::SSL_CTX_set_max_early_data(context, 0);
  ::SSL_CTX_set_mode(context,
                     SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_RELEASE_BUFFERS);
  // If a server answers with a certificate instead, nothing proves that the certificate is right.
  ::SSL_CTX_set_verify(context, server ? SSL_VERIFY_NONE : SSL_VERIFY_PEER, nullptr);
  if (server) {
    ::SSL_CTX_set_psk_find_session_callback(context, find_key);
  } else {
    ::SSL_CTX_set_psk_use_session_callback(context, offer_key);
  }

  const TlsPtr any(::SSL_new(context));  // to find the suite by its number
  const SSL_CIPHER* suite = any ? ::SSL_CIPHER_find(any.get(), kSuiteId) : nullptr;
  const Secret key = secret.derive(kLabel);
  key_.reset(::SSL_SESSION_new());
  if (!suite || !key_ || ::SSL_SESSION_set1_master_key(key_.get(), key.bytes().data(), Secret::kBytes) != 1 ||
      ::SSL_SESSION_set_cipher(key_.get(), suite) != 1 ||
      ::SSL_SESSION_set_protocol_version(key_.get(), TLS1_3_VERSION) != 1)
    throw_tls();
  SSL_CTX_set_app_data(context, key_.get());
}

TlsPtr TlsContext::make_connection() const {
  TlsPtr connection(::SSL_new(context_.get()));
  if (!connection) throw_tls();
  return connection;
}

bool TlsContext::is_proved(SSL* connection) {
  return ::SSL_is_init_finished(connection) && ::SSL_session_reused(connection) == 1 &&
         ::SSL_version(connection) == TLS1_3_VERSION;
}

std::string tls_error() {
  const unsigned long error = ::ERR_peek_last_error();
  ::ERR_clear_error();
  const char* reason = error ? ::ERR_reason_error_string(error) : nullptr;
  return reason ? reason : "unknown error";
}

}  // namespace muster::store
