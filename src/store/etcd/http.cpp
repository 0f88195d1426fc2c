#include "store/etcd/http.h"

#define CURL_DISABLE_TYPECHECK  // its macros know only the functions' names; here calls go through pointers
#include <curl/curl.h>
#include <dlfcn.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "base/text.h"
#include "muster/base/error.h"
#include "store/address/tcp_address.h"

namespace muster::store {
namespace {

// The functions of libcurl, whose binary interface has been the same since 2006.
struct Curl {
  Curl() {
    void* const library = ::dlopen("libcurl.so.4", RTLD_NOW | RTLD_LOCAL);  // never closed: its threads may run
    if (!library)
      throw Unavailable(text("HTTP needs libcurl, which cannot be loaded: ", ::dlerror()), "apt-get install libcurl4");
    load(library, "curl_global_init", global_init);
    load(library, "curl_easy_init", init);
    load(library, "curl_easy_setopt", setopt);
    load(library, "curl_easy_perform", perform);
    load(library, "curl_easy_getinfo", getinfo);
    load(library, "curl_easy_strerror", strerror);
    load(library, "curl_easy_cleanup", cleanup);
    load(library, "curl_slist_append", append);
    load(library, "curl_slist_free_all", free_all);
    if (global_init(CURL_GLOBAL_ALL) != CURLE_OK) throw Unavailable("libcurl cannot be used here");
  }

  decltype(&::curl_global_init) global_init;
  decltype(&::curl_easy_init) init;
  decltype(&::curl_easy_setopt) setopt;
  decltype(&::curl_easy_perform) perform;
  decltype(&::curl_easy_getinfo) getinfo;
  decltype(&::curl_easy_strerror) strerror;
  decltype(&::curl_easy_cleanup) cleanup;
  decltype(&::curl_slist_append) append;
  decltype(&::curl_slist_free_all) free_all;

 private:
  template <typename Function>
  static void load(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(::dlsym(library, name));
    if (!function) throw Unavailable(text("libcurl.so.4 has no ", name), "Look whether it is a whole libcurl");
  }
};

const Curl& curl() {
  static const Curl loaded;
  return loaded;
}

curl_socket_t open_socket(void*, curlsocktype, curl_sockaddr* where) {
  const int socket = ::socket(where->family, where->socktype | SOCK_CLOEXEC, where->protocol);
  if (socket < 0) return CURL_SOCKET_BAD;
  set_tcp_options(socket);
  return socket;
}

struct Receiver {
  std::string* body;
  const std::function<bool(std::string_view)>* on_bytes;
  bool stopped = false;
};

size_t receive(char* bytes, size_t one, size_t size, void* to) {
  auto& receiver = *static_cast<Receiver*>(to);
  const std::string_view got(bytes, one * size);
  try {
    if (!*receiver.on_bytes) {
      receiver.body->append(got);
    } else if (!(*receiver.on_bytes)(got)) {
      receiver.stopped = true;
    }
  } catch (...) {  // no memory, or a malformed answer; libcurl is C, which no exception may pass through
    return 0;
  }
  return receiver.stopped ? 0 : got.size();
}

}  // namespace

// One of libcurl's easy handles, and the process that made it.
class Http::Handle {
 public:
  Handle() : easy_(curl().init()) {
    if (!easy_) throw Unavailable("there is no memory for an HTTP request");
    // Without "Expect: 100-continue": if a server does not answer that header, libcurl waits for a second.
    for (const char* header : {"Content-Type: application/json", "Expect:"}) headers_ = curl().append(headers_, header);
    set(CURLOPT_HTTPHEADER, headers_);
    set(CURLOPT_POST, 1L);
    set(CURLOPT_NOSIGNAL, 1L);
    set(CURLOPT_PROXY, "");
    set(CURLOPT_FOLLOWLOCATION, 0L);
    set(CURLOPT_OPENSOCKETFUNCTION, open_socket);
    set(CURLOPT_WRITEFUNCTION, receive);
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() {
    curl().cleanup(easy_);
    curl().free_all(headers_);
  }

  bool is_mine() const { return pid_ == ::getpid(); }

  Answer post(const std::string& url, std::string_view body, Deadline deadline,
              const std::function<bool(std::string_view)>& on_bytes) {
    Answer answer;
    Receiver receiver{&answer.body, &on_bytes};
    set(CURLOPT_URL, url.c_str());
    set(CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(body.size()));
    set(CURLOPT_POSTFIELDS, body.data());
    set(CURLOPT_TIMEOUT_MS, left_ms(deadline));
    set(CURLOPT_WRITEDATA, &receiver);
    const CURLcode code = curl().perform(easy_);
    curl().getinfo(easy_, CURLINFO_RESPONSE_CODE, &answer.status);
    long connects = 0;
    curl().getinfo(easy_, CURLINFO_NUM_CONNECTS, &connects);
    answer.perhaps_twice = is_used_ && connects > 0;
    is_used_ = true;
    using End = Answer::End;
    if (receiver.stopped) {
      answer.end = End::kStopped;
    } else if (code == CURLE_OPERATION_TIMEDOUT) {
      answer.end = End::kLate;
    } else if (code == CURLE_COULDNT_CONNECT || code == CURLE_COULDNT_RESOLVE_HOST) {
      answer.end = answer.perhaps_twice ? End::kBroken : End::kRefused;
    } else if (code != CURLE_OK) {
      answer.end = End::kBroken;
    }
    answer.reason = curl().strerror(code);
    return answer;
  }

 private:
  template <typename Value>
  void set(CURLoption option, Value value) {
    if (curl().setopt(easy_, option, value) != CURLE_OK)
      throw Unavailable("libcurl cannot do what an HTTP request needs");
  }
  // To libcurl, 0 means no timeout, and a number of more than 32 bits is an error.
  static long left_ms(Deadline deadline) {
    if (deadline.is_never()) return 0;
    using std::chrono::milliseconds;
    const auto left = std::chrono::ceil<milliseconds>(deadline.left()).count();
    return static_cast<long>(std::clamp<int64_t>(left, 1, std::numeric_limits<int32_t>::max()));
  }

  CURL* easy_;
  curl_slist* headers_ = nullptr;
  bool is_used_ = false;  // it may have a connection from an earlier request
  pid_t pid_ = ::getpid();
};

Http::Http() { curl(); }
Http::~Http() = default;

Http::Answer Http::post(const std::string& url, std::string_view body, Deadline deadline,
                        const std::function<bool(std::string_view)>& on_bytes) {
  auto handle = idle_.take();
  if (!handle) handle = std::make_unique<Handle>();
  auto answer = handle->post(url, body, deadline, on_bytes);
  idle_.give(std::move(handle));  // libcurl itself closes connections that cannot be used again
  return answer;
}

}  // namespace muster::store
