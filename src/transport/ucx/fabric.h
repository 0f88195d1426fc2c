// Fabric: what the ucx transport needs of UCX, and nothing more. Its only implementation, ucx_fabric.cpp, is the
// separate library libmuster_ucx.so, which is linked with UCX and not with Muster; both sides include this header.
// Tests use their own fabric in its place.
//
// A fabric sends packets: a header of at most kMaxHeader bytes, and data. Data is sent eagerly (it comes with the
// header, in memory that belongs to the fabric) or offered (the header comes alone; the receiver fetches the data to
// where it wants it, or refuses it). Packets may arrive in any order; packet.h numbers them.
//
//   send() ──────────── eager ─────────> on_arrival(header, data)
//   send() ──────────── offered ───────> on_offer(header, bytes, offer)
//   Transfer::on_done()  <── taken ────  fetch(offer, …) ─> Transfer::on_done()
//
// Errors: functions that can fail return the reason as text, or null if they succeed. They throw nothing but
// std::bad_alloc.
// Thread-safety: none; the caller has a lock around all calls. Events come only from within progress() and
// disconnect(), and must not call the fabric.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace muster::transport::ucx {

inline constexpr size_t kMaxHeader = 80;  // what every way of UCX takes

struct Offer;  // data that a peer has announced; defined by the fabric

// Data that is being sent or fetched.
class Transfer {
 public:
  // The transfer is over. `error`: null, or why it failed. Header and data are no longer used.
  virtual void on_done(const char* error) = 0;

 protected:
  ~Transfer() = default;
};

class FabricEvents {
 public:
  // Both spans are valid during the call.
  virtual void on_arrival(std::span<const std::byte> header, std::span<const std::byte> data) = 0;
  // The receiver must fetch or refuse the offer, now or later.
  virtual void on_offer(std::span<const std::byte> header, size_t bytes, Offer* offer) = 0;
  // The way to a peer is broken. Comes once; disconnect() is still to be called.
  virtual void on_broken(int peer, const char* error) = 0;

 protected:
  ~FabricEvents() = default;
};

enum class State { kDone, kUnderWay };

class Fabric {
 public:
  virtual ~Fabric() = default;  // cancels everything; memory of transfers under way must not be freed before it

  virtual std::string address() const = 0;  // by which others connect with this one: bytes
  virtual const char* connect(int peer, const std::string& address) = 0;
  // Cancels what is under way to the peer. Its events come from here or from progress().
  virtual void disconnect(int peer) = 0;

  // `header` and `data` must stay until the data is sent: until this returns with kDone, or until transfer.on_done(),
  // which is called only after kUnderWay. After an error they are not used, and on_done() is not called.
  virtual const char* send(int peer, std::span<const std::byte> header, std::span<const std::byte> data, bool offered,
                           Transfer& transfer, State& state) = 0;
  // `into` has as many bytes as were offered, and must stay for as long as a sender's data. The offer is used up, even
  // after an error.
  virtual const char* fetch(Offer* offer, std::span<std::byte> into, Transfer& transfer, State& state) = 0;
  virtual void refuse(Offer* offer) = 0;
  // Done when everything that was sent before has left the fabric, including what it sent itself to set up connections.
  virtual const char* flush(Transfer& transfer, State& state) = 0;

  virtual bool progress() = 0;  // true if there was anything to do
  // For sleeping: the descriptor becomes readable when progress() has something to do again. Call arm() before each
  // sleep; it returns false if there is something to do already. A thread that sends while another one sleeps, and does
  // not get kDone, must wake it.
  virtual int event_fd() const = 0;
  virtual bool arm() = 0;

  virtual std::string version() const = 0;  // of the library, to print
};

// libmuster_ucx.so exports a function by this name, to be found with dlsym(). `settings` are settings of UCX without
// the prefix UCX_; they override those of the environment (UCX_TLS …). Returns null and sets `error` if UCX cannot be
// used.
inline constexpr const char* kMakeFabric = "muster_make_ucx_fabric_1";
using Settings = std::vector<std::pair<std::string, std::string>>;
using MakeFabric = Fabric* (*)(const Settings& settings, FabricEvents& events, std::string& error);

}  // namespace muster::transport::ucx
