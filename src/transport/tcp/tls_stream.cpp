// TLS over a SocketStream. socket_stream.h describes the locking.

#include <openssl/bio.h>
#include <openssl/err.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "base/copy.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "transport/tcp/socket_stream.h"

namespace muster::transport {
namespace {

using store::TlsContext;

constexpr size_t kRecord = 16'384;      // the most that a TLS record carries
constexpr size_t kGathered = 4096;      // parts below this share a record
constexpr size_t kBatch = 8 * kRecord;  // sealed before it is sent
constexpr size_t kFetch = 256 * 1024;   // received before it is opened

class TlsStream final : public SocketStream {
 public:
  TlsStream(UniqueFd socket, const TlsContext& context, TlsContext::Side side, size_t records_per_key)
      : SocketStream(std::move(socket)), tls_(context.make_connection()), records_per_key_(records_per_key) {
    BIO* bio = make_bio();
    ::SSL_set_bio(tls_.get(), bio, bio);
    side == TlsContext::Side::kClient ? ::SSL_set_connect_state(tls_.get()) : ::SSL_set_accept_state(tls_.get());
  }

  bool shake_hands() override;
  ssize_t write(std::span<const iovec> parts, size_t enough) override;
  size_t unsent() const override { return out_.size() - sent_; }
  bool flush() override;
  ssize_t read(std::span<std::byte> first, std::span<std::byte> second, bool fetch) override;
  void keep() override;

 private:
  static int bio_write(BIO* bio, const char* bytes, int size);
  static int bio_read(BIO* bio, char* to, int size);
  static BIO_METHOD* method();
  BIO* make_bio();

  size_t seal(std::span<const iovec> parts);
  bool seal_record(const void* data, size_t size);
  bool send_out();
  ssize_t fetch_some();
  // The result of an SSL_… function that did not succeed: 0 if it wants more bytes, else kGone.
  ssize_t not_done(int result);

  std::mutex mutex_;  // guards tls_, and what its BIO appends to
  store::TlsPtr tls_;
  std::string sealed_;
  bool failed_ = false;
  const size_t records_per_key_;
  size_t records_ = 0;

  std::string out_;  // used by the writer: taken from sealed_, in order
  size_t sent_ = 0;

  std::span<const std::byte> in_;  // used by the reader: received and not yet opened
  std::vector<std::byte> kept_;
};

int TlsStream::bio_write(BIO* bio, const char* bytes, int size) {
  static_cast<TlsStream*>(::BIO_get_data(bio))->sealed_.append(bytes, static_cast<size_t>(size));
  return size;
}

int TlsStream::bio_read(BIO* bio, char* to, int size) {
  BIO_clear_retry_flags(bio);
  auto& in = static_cast<TlsStream*>(::BIO_get_data(bio))->in_;
  const size_t n = std::min(in.size(), static_cast<size_t>(size));
  if (n == 0) {
    BIO_set_retry_read(bio);
    return -1;
  }
  copy_bytes(to, in.data(), n);
  in = in.subspan(n);
  return static_cast<int>(n);
}

BIO_METHOD* TlsStream::method() {
  static BIO_METHOD* const made = [] {
    BIO_METHOD* method = ::BIO_meth_new(::BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "muster stream");
    if (method) {
      ::BIO_meth_set_write(method, bio_write);
      ::BIO_meth_set_read(method, bio_read);
      ::BIO_meth_set_ctrl(method, [](BIO*, int command, long, void*) -> long { return command == BIO_CTRL_FLUSH; });
    }
    return method;
  }();
  return made;
}

BIO* TlsStream::make_bio() {
  BIO* bio = method() ? ::BIO_new(method()) : nullptr;
  if (!bio) throw Unavailable("there is no memory for a connection");
  ::BIO_set_data(bio, this);
  ::BIO_set_init(bio, 1);
  return bio;
}

ssize_t TlsStream::not_done(int result) {
  const int error = ::SSL_get_error(tls_.get(), result);
  if (error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE) return 0;
  why_ = error == SSL_ERROR_ZERO_RETURN ? "was closed" : text("broke TLS: ", store::tls_error());
  return kGone;
}

bool TlsStream::shake_hands() {
  ssize_t fetched = 1;
  while (fetched > 0) {
    int result = 0;
    ssize_t state = 1;
    std::string refusal;
    {
      const std::lock_guard lock(mutex_);
      ::ERR_clear_error();
      result = ::SSL_do_handshake(tls_.get());
      if (result != 1) state = not_done(result);
    }
    refusal = why_;
    if (!send_out() && state >= 0) throw Unavailable("the connection was closed");
    if (state == kGone) throw Unauthorized(text("the connection ", refusal));
    if (result == 1) {
      if (!TlsContext::is_proved(tls_.get())) throw Unauthorized("it did not prove that it knows the secret");
      keep();
      return true;
    }
    fetched = fetch_some();
  }
  if (fetched == kGone) throw Unavailable(text("the connection ", why_));
  return false;
}

bool TlsStream::seal_record(const void* data, size_t size) {
  if (++records_ >= records_per_key_) {
    ::SSL_key_update(tls_.get(), SSL_KEY_UPDATE_NOT_REQUESTED);
    records_ = 0;
  }
  ::ERR_clear_error();
  // The BIO takes everything, so a record is sealed completely or not at all.
  if (::SSL_write(tls_.get(), data, static_cast<int>(size)) == static_cast<int>(size)) return true;
  failed_ = true;
  return false;
}

// Seals records from the front of `parts` until there is a batch; returns how many bytes they hold.
size_t TlsStream::seal(std::span<const iovec> parts) {
  char gathered[kRecord];
  size_t done = 0, at = 0;  // `at` in the first of parts
  while (!parts.empty() && sealed_.size() < kBatch) {
    const char* data = static_cast<const char*>(parts[0].iov_base) + at;
    size_t size = std::min(parts[0].iov_len - at, kRecord);
    if (size == parts[0].iov_len - at && size < kGathered && parts.size() > 1) {
      size = 0;
      while (!parts.empty() && size < kRecord) {
        const size_t n = std::min(parts[0].iov_len - at, kRecord - size);
        if (n >= kGathered) break;
        copy_bytes(gathered + size, static_cast<const char*>(parts[0].iov_base) + at, n);
        size += n;
        at += n;
        if (at == parts[0].iov_len) parts = parts.subspan(1), at = 0;
      }
      data = gathered;
    } else if ((at += size) == parts[0].iov_len) {
      parts = parts.subspan(1), at = 0;
    }
    if (size > 0 && !seal_record(data, size)) break;
    done += size;
  }
  return done;
}

bool TlsStream::send_out() {
  if (sent_ == out_.size()) {
    out_.clear();
    sent_ = 0;
  }
  {
    const std::lock_guard lock(mutex_);
    if (failed_) return false;
    if (out_.empty()) {
      out_.swap(sealed_);
    } else {
      out_ += sealed_;
    }
    sealed_.clear();
  }
  while (sent_ < out_.size()) {
    const iovec rest{out_.data() + sent_, out_.size() - sent_};
    const ssize_t n = send({&rest, 1});
    if (n == kGone) return false;
    if (n == 0) return true;
    sent_ += static_cast<size_t>(n);
  }
  out_.clear();
  sent_ = 0;
  return true;
}

bool TlsStream::flush() {
  if (!send_out()) return false;
  if (unsent() == 0 && out_.capacity() > kBatch / 8) {  // idle: free the memory that a large message needed
    out_ = std::string();
    const std::lock_guard lock(mutex_);
    if (sealed_.empty()) sealed_ = std::string();
  }
  return true;
}

ssize_t TlsStream::write(std::span<const iovec> parts, size_t enough) {
  size_t taken = 0;
  std::vector<iovec> rest;
  while (unsent() == 0 && !parts.empty() && taken < enough) {
    size_t done = 0;
    {
      const std::lock_guard lock(mutex_);
      done = seal(parts);
    }
    if (!send_out()) return kGone;
    taken += done;
    while (!parts.empty() && done >= parts[0].iov_len) {
      done -= parts[0].iov_len;
      parts = parts.subspan(1);
    }
    if (done > 0) {  // in the middle of a part: go on in a copy of the list
      rest.assign(parts.begin(), parts.end());
      rest[0].iov_base = static_cast<char*>(rest[0].iov_base) + done;
      rest[0].iov_len -= done;
      parts = rest;
    }
  }
  return static_cast<ssize_t>(taken);
}

ssize_t TlsStream::fetch_some() {
  // One buffer for each thread that reads: nothing is left in it between two streams (keep()).
  thread_local const auto buffer = std::make_unique_for_overwrite<std::byte[]>(kFetch);
  const iovec part{buffer.get(), kFetch};
  const ssize_t n = receive({&part, 1});
  if (n > 0) in_ = {buffer.get(), static_cast<size_t>(n)};
  return n;
}

void TlsStream::keep() {
  if (in_.empty()) return;
  std::vector<std::byte> rest(in_.begin(), in_.end());  // in_ may lie in kept_
  kept_ = std::move(rest);
  in_ = kept_;
}

ssize_t TlsStream::read(std::span<std::byte> first, std::span<std::byte> second, bool fetch) {
  const auto to = first.empty() ? second : first;
  for (;;) {
    ssize_t state = 0;
    {
      const std::lock_guard lock(mutex_);
      ::ERR_clear_error();
      const int n = ::SSL_read(tls_.get(), to.data(), static_cast<int>(std::min(to.size(), kRecord)));
      if (n > 0) return n;
      state = not_done(n);
    }
    if (state == kGone || !fetch) return state;
    const ssize_t fetched = fetch_some();
    if (fetched <= 0) return fetched;
    fetch = false;
  }
}

}  // namespace

std::unique_ptr<SocketStream> make_tls_stream(UniqueFd socket, const TlsContext& context, TlsContext::Side side,
                                              size_t records_per_key) {
  return std::make_unique<TlsStream>(std::move(socket), context, side, records_per_key);
}

}  // namespace muster::transport
