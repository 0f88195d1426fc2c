#include "parallel/fsdp/parameter_layout.h"

#include <algorithm>
#include <numeric>

#include "shm/mapping.h"

namespace muster::fsdp {
namespace {

constexpr size_t kLine = 128;  // two cache lines: what adjacent-line prefetch fetches together

// Each piece of a unit begins and ends with a page.
void lay_out_units(ParameterLayout& layout, const std::vector<parallel::NamedTensor>& parameters,
                   const std::vector<Owner>& owners, const parallel::Hosts& hosts, const std::vector<Unit>& units,
                   size_t most) {
  const size_t places = layout.bytes.size(), count = hosts.ranks.size();
  layout.pieces.assign(places, std::vector<std::vector<Gatherer::Piece>>(units.size()));
  std::vector<size_t> at_home(count);
  std::vector<std::vector<size_t>> elsewhere(count);  // by host and unit
  for (size_t u = 0; u < units.size(); ++u) {
    std::vector<size_t> of_host(count);
    for (size_t place = 0; place < places; ++place)
      for (size_t host = 0; host < count; ++host) {
        size_t& end = layout.bytes[place];
        const size_t begin = end;
        for (const size_t i : units[u]) {
          if (owners[i].place != static_cast<int>(place) || owners[i].host != static_cast<int>(host)) continue;
          layout.offsets[i] = end;
          end += room_for(parameters[i].tensor);
        }
        if (end == begin) continue;
        end = shm::round_up(end + Gatherer::kLabelBytes, shm::page_size());
        layout.pieces[place][u].push_back({.host = static_cast<int>(host), .offset = begin, .bytes = end - begin});
        of_host[host] += end - begin;
      }
    const size_t bytes = std::accumulate(of_host.begin(), of_host.end(), size_t{0});
    for (size_t host = 0; host < count; ++host) {
      at_home[host] += of_host[host];
      elsewhere[host].push_back(bytes - of_host[host]);
    }
  }
  for (size_t host = 0; host < count; ++host) {
    auto& units_of = elsewhere[host];
    std::sort(units_of.rbegin(), units_of.rend());
    units_of.resize(std::min(units_of.size(), most));
    layout.at_most = std::max(layout.at_most, std::accumulate(units_of.begin(), units_of.end(), at_home[host]));
  }
}

}  // namespace

size_t room_for(const at::Tensor& tensor) { return shm::round_up(tensor.nbytes(), kLine); }

std::vector<std::vector<std::span<std::byte>>> ParameterLayout::elsewhere(int host,
                                                                          const std::vector<std::byte*>& memory) const {
  std::vector<std::vector<std::span<std::byte>>> all(pieces.empty() ? 0 : pieces[0].size());
  for (size_t place = 0; place < pieces.size(); ++place)
    for (size_t unit = 0; unit < all.size(); ++unit)
      for (const auto& piece : pieces[place][unit]) {
        if (piece.host == host) continue;
        std::byte* const begin = memory[place] + piece.offset;
        auto& spans = all[unit];
        if (!spans.empty() && spans.back().data() + spans.back().size() == begin)  // one system call for neighbours
          spans.back() = {spans.back().data(), spans.back().size() + piece.bytes};
        else
          spans.emplace_back(begin, piece.bytes);
      }
  return all;
}

ParameterLayout lay_out(const std::vector<parallel::NamedTensor>& parameters, const std::vector<Owner>& owners,
                        const parallel::Hosts& hosts, const std::vector<Unit>& units, size_t most) {
  ParameterLayout layout{.offsets = std::vector<size_t>(parameters.size()),
                         .bytes = std::vector<size_t>(static_cast<size_t>(hosts.owners))};
  if (!units.empty()) {
    lay_out_units(layout, parameters, owners, hosts, units, most);
    return layout;
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    size_t& end = layout.bytes[static_cast<size_t>(owners[i].place)];
    layout.offsets[i] = end;
    end += room_for(parameters[i].tensor);
    layout.at_most += room_for(parameters[i].tensor);
  }
  return layout;
}

}  // namespace muster::fsdp
