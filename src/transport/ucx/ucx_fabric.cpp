// The fabric on UCX: UCP's active messages. See "Active Message" and "Communication routines" in ucp/api/ucp.h.
//
// There is one UCX worker, which any thread may use that holds the caller's lock (UCS_THREAD_MODE_SERIALIZED), and one
// endpoint for each peer, with UCP_ERR_HANDLING_MODE_PEER: if a peer is gone, the endpoint and everything under way on
// it fail.

#include <ucp/api/ucp.h>

#include <chrono>
#include <cstdlib>
#include <map>
#include <utility>

#include "transport/ucx/fabric.h"

namespace muster::transport::ucx {
namespace {

constexpr unsigned kActiveMessage = 1;
constexpr std::chrono::milliseconds kPatience{200};  // for endpoints to close, at the end

class UcxFabric final : public Fabric {
 public:
  explicit UcxFabric(FabricEvents& events) : events_(events) {}
  ~UcxFabric() override;
  UcxFabric(const UcxFabric&) = delete;
  UcxFabric& operator=(const UcxFabric&) = delete;
  ucs_status_t open(const Settings& settings, std::string& doing);

  std::string address() const override { return address_; }
  const char* connect(int peer, const std::string& address) override;
  void disconnect(int peer) override;
  const char* send(int peer, std::span<const std::byte> header, std::span<const std::byte> data, bool offered,
                   Transfer& transfer, State& state) override;
  const char* fetch(Offer* offer, std::span<std::byte> into, Transfer& transfer, State& state) override;
  void refuse(Offer* offer) override { ucp_am_data_release(worker_, offer); }
  const char* flush(Transfer& transfer, State& state) override;
  bool progress() override;
  int event_fd() const override { return event_fd_; }
  bool arm() override { return ucp_worker_arm(worker_) == UCS_OK; }
  std::string version() const override { return std::string("UCX ") + ucp_get_version_string(); }

 private:
  struct Peer {
    FabricEvents* events = nullptr;
    int rank = 0;
    ucp_ep_h endpoint = nullptr;
    bool is_broken = false;
  };

  static ucs_status_t on_message(void* fabric, const void* header, size_t header_bytes, void* data, size_t bytes,
                                 const ucp_am_recv_param_t* how);
  static void on_broken(void* peer, ucp_ep_h, ucs_status_t status);
  void collect_closed();

  FabricEvents& events_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;
  std::string address_;
  std::map<int, Peer> peers_;   // endpoints point to them
  std::vector<void*> closing_;  // requests of endpoints that close
};

const char* problem(ucs_status_t status) { return status == UCS_OK ? nullptr : ucs_status_string(status); }

// --- the events of UCX ---

ucs_status_t UcxFabric::on_message(void* fabric, const void* header, size_t header_bytes, void* data, size_t bytes,
                                   const ucp_am_recv_param_t* how) {
  FabricEvents& events = static_cast<UcxFabric*>(fabric)->events_;
  const std::span head(static_cast<const std::byte*>(header), header_bytes);
  if (how->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) {
    events.on_offer(head, bytes, static_cast<Offer*>(data));
    return UCS_INPROGRESS;  // tells UCX to keep the offer
  }
  events.on_arrival(head, {static_cast<const std::byte*>(data), bytes});
  return UCS_OK;
}

void UcxFabric::on_broken(void* peer, ucp_ep_h, ucs_status_t status) {
  Peer& broken = *static_cast<Peer*>(peer);
  if (broken.is_broken) return;
  broken.is_broken = true;
  broken.events->on_broken(broken.rank, ucs_status_string(status));
}

void on_sent(void* request, ucs_status_t status, void* transfer) {
  ucp_request_free(request);
  static_cast<Transfer*>(transfer)->on_done(problem(status));
}

void on_fetched(void* request, ucs_status_t status, size_t, void* transfer) {
  ucp_request_free(request);
  static_cast<Transfer*>(transfer)->on_done(problem(status));
}

// --- making and ending it ---

ucs_status_t UcxFabric::open(const Settings& settings, std::string& doing) {
  ucp_config_t* config = nullptr;
  doing = "reading its settings";
  ucs_status_t status = ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) return status;
  // Over TCP, UCX 1.13 completes a zero-copy send twice, and aborts the program, if the peer is lost meanwhile. Eager
  // data is small enough to be copied; offered data has its own protocols.
  if (!::getenv("UCX_ZCOPY_THRESH")) status = ucp_config_modify(config, "ZCOPY_THRESH", "inf");
  for (const auto& [name, value] : settings) {
    if (status != UCS_OK) break;
    doing = "setting " + name + " to \"" + value + '"';
    status = ucp_config_modify(config, name.c_str(), value.c_str());
  }
  if (status == UCS_OK) {
    doing = "starting";
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
    params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
    params.name = "muster";
    status = ucp_init(&params, config, &context_);
  }
  ucp_config_release(config);
  if (status != UCS_OK) return status;

  doing = "making a worker";
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  if ((status = ucp_worker_create(context_, &params, &worker_)) != UCS_OK) return status;
  ucp_worker_attr_t attributes{};
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_THREAD_MODE | UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER;
  if ((status = ucp_worker_query(worker_, &attributes)) != UCS_OK) return status;
  if (attributes.thread_mode < UCS_THREAD_MODE_SERIALIZED || attributes.max_am_header < kMaxHeader)
    return UCS_ERR_UNSUPPORTED;
  doing = "asking for its events";
  if ((status = ucp_worker_get_efd(worker_, &event_fd_)) != UCS_OK) return status;

  doing = "receiving active messages";
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                       UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kActiveMessage;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  handler.cb = &UcxFabric::on_message;
  handler.arg = this;
  if ((status = ucp_worker_set_am_recv_handler(worker_, &handler)) != UCS_OK) return status;

  doing = "asking for its address";
  ucp_address_t* address = nullptr;
  size_t bytes = 0;
  if ((status = ucp_worker_get_address(worker_, &address, &bytes)) != UCS_OK) return status;
  address_.assign(reinterpret_cast<const char*>(address), bytes);
  ucp_worker_release_address(worker_, address);
  return UCS_OK;
}

UcxFabric::~UcxFabric() {
  if (worker_) {
    for (auto& [rank, peer] : peers_) disconnect(rank);
    // What was under way ends within a few more rounds.
    const auto limit = std::chrono::steady_clock::now() + kPatience;
    for (int idle = 0; (idle < 16 || !closing_.empty()) && std::chrono::steady_clock::now() < limit; collect_closed())
      idle = ucp_worker_progress(worker_) ? 0 : idle + 1;
    for (void* request : closing_) ucp_request_free(request);
    ucp_worker_destroy(worker_);
  }
  if (context_) ucp_cleanup(context_);
}

void UcxFabric::collect_closed() {
  std::erase_if(closing_, [](void* request) {
    if (ucp_request_check_status(request) == UCS_INPROGRESS) return false;
    ucp_request_free(request);
    return true;
  });
}

// --- peers ---

const char* UcxFabric::connect(int rank, const std::string& address) {
  Peer& peer = peers_[rank];
  peer.events = &events_;
  peer.rank = rank;
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_USER_DATA;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = &UcxFabric::on_broken;
  params.user_data = params.err_handler.arg = &peer;
  return problem(ucp_ep_create(worker_, &params, &peer.endpoint));
}

void UcxFabric::disconnect(int rank) {
  const auto found = peers_.find(rank);
  if (found == peers_.end() || !found->second.endpoint) return;
  found->second.is_broken = true;  // no more events for it
  ucp_request_param_t how{};
  how.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  how.flags = UCP_EP_CLOSE_FLAG_FORCE;
  void* const request = ucp_ep_close_nbx(std::exchange(found->second.endpoint, nullptr), &how);
  if (UCS_PTR_IS_PTR(request)) closing_.push_back(request);
}

bool UcxFabric::progress() {
  if (!closing_.empty()) collect_closed();
  return ucp_worker_progress(worker_) != 0;
}

const char* UcxFabric::send(int rank, std::span<const std::byte> header, std::span<const std::byte> data, bool offered,
                            Transfer& transfer, State& state) {
  const auto found = peers_.find(rank);
  if (found == peers_.end() || found->second.is_broken || !found->second.endpoint)
    return ucs_status_string(UCS_ERR_NOT_CONNECTED);
  ucp_request_param_t how{};
  how.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  how.cb.send = &on_sent;
  how.user_data = &transfer;
  how.flags = offered ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER;
  void* const request = ucp_am_send_nbx(found->second.endpoint, kActiveMessage, header.data(), header.size(),
                                        data.data(), data.size(), &how);
  if (UCS_PTR_IS_ERR(request)) return ucs_status_string(UCS_PTR_STATUS(request));
  state = request ? State::kUnderWay : State::kDone;
  return nullptr;
}

const char* UcxFabric::fetch(Offer* offer, std::span<std::byte> into, Transfer& transfer, State& state) {
  ucp_request_param_t how{};
  how.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  how.cb.recv_am = &on_fetched;
  how.user_data = &transfer;
  how.memory_type = UCS_MEMORY_TYPE_HOST;
  void* const request = ucp_am_recv_data_nbx(worker_, offer, into.data(), into.size(), &how);
  if (UCS_PTR_IS_ERR(request)) return ucs_status_string(UCS_PTR_STATUS(request));
  state = request ? State::kUnderWay : State::kDone;
  return nullptr;
}

const char* UcxFabric::flush(Transfer& transfer, State& state) {
  ucp_request_param_t how{};
  how.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  how.cb.send = &on_sent;
  how.user_data = &transfer;
  void* const request = ucp_worker_flush_nbx(worker_, &how);
  if (UCS_PTR_IS_ERR(request)) return ucs_status_string(UCS_PTR_STATUS(request));
  state = request ? State::kUnderWay : State::kDone;
  return nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) Fabric* muster_make_ucx_fabric_1(const Settings& settings,
                                                                                   FabricEvents& events,
                                                                                   std::string& error) {
  auto fabric = std::make_unique<UcxFabric>(events);
  std::string doing;
  const ucs_status_t status = fabric->open(settings, doing);
  if (status == UCS_OK) return fabric.release();
  error = std::string(ucs_status_string(status)) + " (" + doing + ')';
  return nullptr;
}

}  // namespace muster::transport::ucx
