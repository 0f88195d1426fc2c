// TLS 1.3 (RFC 8446) between processes that share a secret, for stores.
//
// The key of the handshake is an external pre-shared key that both sides derive from the job's secret; there are no
// certificates. Each handshake also makes fresh keys (psk_dhe_ke), so a secret that becomes known later does not
// decrypt recorded connections. One version, one cipher suite, no tickets, no resumption, no early data: there is
// nothing to fall back to. A client without the key fails at the binder of its first message, a server without it at
// its Finished message. By then neither side has read or sent a byte of the store's protocol.
//
// OpenSSL is first used when the first TlsContext is made, never at program start.
//
// Thread-safety: a TlsContext is immutable, and its functions may be called from any thread; a connection belongs to
// one thread at a time.
#pragma once

#include <openssl/ssl.h>

#include <memory>
#include <string>

#include "muster/base/secret.h"

namespace muster::store {

struct TlsFree {
  void operator()(SSL_CTX* context) const { ::SSL_CTX_free(context); }
  void operator()(SSL* connection) const { ::SSL_free(connection); }
  void operator()(SSL_SESSION* session) const { ::SSL_SESSION_free(session); }
};
using TlsPtr = std::unique_ptr<SSL, TlsFree>;

class TlsContext {
 public:
  enum class Side { kClient, kServer };

  // Unavailable if this OpenSSL does not support TLS 1.3.
  TlsContext(const Secret& secret, Side side);
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  // For one connection, which must end before this object does.
  TlsPtr make_connection() const;

  // Whether a finished handshake has proved that the other side knows the key.
  static bool is_proved(SSL* connection);

 private:
  std::unique_ptr<SSL_SESSION, TlsFree> key_;  // the pre-shared key, in the form that OpenSSL's callbacks return
  std::unique_ptr<SSL_CTX, TlsFree> context_;
};

// Returns the last of OpenSSL's errors in this thread, in words, and clears them all.
std::string tls_error();

}  // namespace muster::store
