// The Wire on MPI: libmuster_mpi.so. A group has one communicator per kind of message. MPI gets the tags unchanged.
#include "comm/backends/mpi/mpi_wire.h"

#include <limits>
#include <type_traits>

#include "comm/backends/mpi/engine.h"

namespace muster::comm::mpi_backend {
namespace {

// A number of bytes as a count and a type for MPI, which counts in ints. If the number does not fit into an int, the
// bytes are one item of a derived type.
class Extent {
 public:
  explicit Extent(size_t bytes) {
    if (bytes <= static_cast<size_t>(std::numeric_limits<int>::max())) {
      count_ = static_cast<int>(bytes);
      return;
    }
    constexpr size_t kBlock = size_t{1} << 20;
    MPI_Datatype blocks = MPI_DATATYPE_NULL;
    MPI_Type_vector(static_cast<int>(bytes / kBlock), kBlock, kBlock, MPI_BYTE, &blocks);
    const int lengths[] = {1, static_cast<int>(bytes % kBlock)};
    const MPI_Aint places[] = {0, static_cast<MPI_Aint>(bytes - bytes % kBlock)};
    const MPI_Datatype types[] = {blocks, MPI_BYTE};
    MPI_Type_create_struct(2, lengths, places, types, &type_);
    MPI_Type_free(&blocks);
    MPI_Type_commit(&type_);
  }
  ~Extent() {
    if (type_ != MPI_BYTE) MPI_Type_free(&type_);  // MPI keeps it for transfers under way
  }
  Extent(const Extent&) = delete;
  Extent& operator=(const Extent&) = delete;
  MPI_Datatype type() const { return type_; }
  int count() const { return count_; }

 private:
  MPI_Datatype type_ = MPI_BYTE;
  int count_ = 1;
};

}  // namespace

class MpiWire final : public Wire {
 public:
  explicit MpiWire(const WireContext& site) : engine_(Engine::get(site)), group_(engine_.join(site)) {}
  ~MpiWire() override { close(); }
  Keys keys() const override { return {.own = {}, .of_all = group_->keys}; }

  std::unique_ptr<Transfer> send(int peer, WireTag tag, const std::byte* data, size_t bytes) override {
    return post(true, peer, tag, [&](MPI_Comm comm, MPI_Request* request) {
      const Extent extent(bytes);
      return MPI_Isend(data, extent.count(), extent.type(), peer, static_cast<int>(tag.value), comm, request);
    });
  }

  std::unique_ptr<Transfer> receive(int peer, WireTag tag, std::byte* data, size_t bytes) override {
    return post(false, peer, tag, [&](MPI_Comm comm, MPI_Request* request) {
      const Extent extent(bytes);
      return MPI_Irecv(data, extent.count(), extent.type(), peer < 0 ? MPI_ANY_SOURCE : peer,
                       static_cast<int>(tag.value), comm, request);
    });
  }

  void on_gone(std::function<void(int)> fn) override {
    const Lock lock = engine_.lock();
    group_->on_gone = std::move(fn);
    for (int r = 0; r < group_->size; ++r)
      if (group_->peers[static_cast<size_t>(r)].gone) group_->on_gone(r);
  }

  int take(WireTag tag, std::byte* data, size_t bytes) override {
    Lock lock = engine_.lock();
    return engine_.take(lock, *group_, tag, data, bytes);
  }

  std::vector<int> gone() override {
    const Lock lock = engine_.lock();
    return group_->gone();
  }

  void close() override {
    if (!engine_.owns()) return;
    Lock lock = engine_.lock();
    group_->on_gone = {};
    engine_.close(lock, *group_);
  }

 private:
  template <typename Call>
  std::unique_ptr<Transfer> post(bool sending, int peer, WireTag tag, Call call) {
    auto request = std::make_unique<Request>(engine_, group_, sending, peer, tag);
    const Lock lock = engine_.lock();
    if (const char* const why = request->refused()) throw WireBroken(why);
    const int error = call(group_->comms[static_cast<size_t>(tag.kind)], &request->handle_);
    if (error != MPI_SUCCESS) throw WireBroken(describe(error));
    request->posted_ = true;
    group_->unfinished.insert(request.get());
    engine_.posted();
    return request;
  }

  Engine& engine_;
  const std::shared_ptr<MpiGroup> group_;
};

}  // namespace muster::comm::mpi_backend

extern "C" __attribute__((visibility("default"))) muster::comm::Wire* muster_make_mpi_wire_2(
    const muster::comm::mpi_backend::WireContext& site) {
  return new muster::comm::mpi_backend::MpiWire(site);
}
static_assert(std::is_same_v<decltype(&muster_make_mpi_wire_2), muster::comm::mpi_backend::MakeWire>);
