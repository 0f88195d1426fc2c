// Fabric: what the ucx transport needs of UCX, and nothing more. Its only implementation, ucx_fabric.cpp, is a library
// of its own, libmuster_ucx.so, linked with UCX and with nothing of Muster; both sides include this header. Tests put a
// fabric of their own in its place.
//
// A fabric sends packets: a header of at most kMaxHeader bytes, and data. Data is sent eagerly (it comes with the
// header, in memory of the fabric's) or offered (the header comes alone, and the receiver fetches the data to where it
// wants it, or refuses it). Nothing is promised about the order in which packets arrive; packet.h numbers them.
//
//   send() ──────────── eager ─────────> on_arrival(header, data)
//   send() ──────────── offered ───────> on_offer(header, bytes, offer)
//   Transfer::on_done()  <── taken ────  fetch(offer, …) ─> Transfer::on_done()
//
// Errors: functions that can fail return why, in words; null: they have not. They throw nothing but std::bad_alloc.
// Thread-safety: none; the caller has a lock around all calls. Events come from within progress() and disconnect()
// only, and may not call the fabric.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace muster::transport::ucx {

inline constexpr size_t kMaxHeader = 80;  // what every way of UCX takes

struct Offer;  // data that a peer has announced; the fabric's

// Data that is being sent or fetched.
class Transfer {
 public:
  // It is over. `error`: null, or why it was in vain; header and data are not used any more.
  virtual void on_done(const char* error) = 0;

 protected:
  ~Transfer() = default;
};

class FabricEvents {
 public:
  // Both spans are valid during the call.
  virtual void on_arrival(std::span<const std::byte> header, std::span<const std::byte> data) = 0;
  // To be fetched or refused, now or later.
  virtual void on_offer(std::span<const std::byte> header, size_t bytes, Offer* offer) = 0;
  // The way to a peer is broken. Comes once; disconnect() is still to be called.
  virtual void on_broken(int peer, const char* error) = 0;

 protected:
  ~FabricEvents() = default;
};

enum class State { kDone, kUnderWay };

class Fabric {
 public:
  virtual ~Fabric() = default;  // cancels all; memory that is under way may go after it, and not before

  virtual std::string address() const = 0;  // by which others connect with this one: bytes
  virtual const char* connect(int peer, const std::string& address) = 0;
  // Cancels what is under way to the peer, whose events come from here or from progress().
  virtual void disconnect(int peer) = 0;

  // `header` and `data` must stay until the data is sent: when this returns with kDone, or at transfer.on_done(), which
  // comes only after kUnderWay. After an error they are not used, and nothing comes.
  virtual const char* send(int peer, std::span<const std::byte> header, std::span<const std::byte> data, bool offered,
                           Transfer& transfer, State& state) = 0;
  // `into` has as many bytes as were offered, and must stay as long. The offer is gone, also after an error.
  virtual const char* fetch(Offer* offer, std::span<std::byte> into, Transfer& transfer, State& state) = 0;
  virtual void refuse(Offer* offer) = 0;
  // Over when all that was sent before, also by the fabric itself to make its ways, is out of its hands.
  virtual const char* flush(Transfer& transfer, State& state) = 0;

  virtual bool progress() = 0;  // whether there was anything to do
  // Sleeping: the descriptor becomes readable when progress() has something to do again. Before each sleep; false where
  // it has already. Who sends while another thread sleeps, and has not kDone, wakes it.
  virtual int event_fd() const = 0;
  virtual bool arm() = 0;

  virtual std::string version() const = 0;  // of the library, to print
};

// What libmuster_ucx.so gives: a function by this name, found with dlsym(). `settings`: of UCX, over those of the
// environment (UCX_TLS …), without the prefix UCX_. Null and `error` where UCX cannot serve.
inline constexpr const char* kMakeFabric = "muster_make_ucx_fabric_1";
using Settings = std::vector<std::pair<std::string, std::string>>;
using MakeFabric = Fabric* (*)(const Settings& settings, FabricEvents& events, std::string& error);

}  // namespace muster::transport::ucx
