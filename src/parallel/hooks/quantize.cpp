#include <ATen/core/grad_mode.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/parallel/comm_hooks.h"

namespace muster::comm_hooks {
namespace {

constexpr double kLevels = 255;

// What a rank sends: for each block its elements (bytes), then the zero points of all blocks (bytes), then their scales
// (float32).
struct Packet {
  int64_t blocks, elements;  // of each block
  int64_t offset_of_scales() const { return (blocks * elements + blocks + 3) / 4 * 4; }
  int64_t bytes() const { return offset_of_scales() + blocks * static_cast<int64_t>(sizeof(float)); }

  at::Tensor values_in(const at::Tensor& packet) const {
    return packet.slice(0, 0, blocks * elements).view({blocks, elements});
  }
  at::Tensor zero_points_in(const at::Tensor& packet) const {
    return packet.slice(0, blocks * elements, blocks * (elements + 1)).view({blocks, 1});
  }
  at::Tensor scales_in(const at::Tensor& packet) const {
    return packet.slice(0, offset_of_scales()).view(at::kFloat).view({blocks, 1});
  }
};

// Zero is a level, so that gradients of zeros stay zeros. Numbers that are not finite give scales that are not.
void quantize_into(const at::Tensor& packet, const Packet& form, const at::Tensor& gradients) {
  at::Tensor blocks = gradients.to(at::kFloat);
  if (const int64_t missing = form.blocks * form.elements - blocks.numel(); missing > 0)
    blocks = at::constant_pad_nd(blocks, {0, missing});
  blocks = blocks.view({form.blocks, form.elements});
  const auto [least, most] = at::aminmax(blocks, /*dim=*/1, /*keepdim=*/true);
  const at::Tensor low = least.clamp_max(0);
  const at::Tensor scales = ((most.clamp_min(0) - low) / kLevels).clamp_min(std::numeric_limits<float>::epsilon());
  const at::Tensor zero_points = (-(low / scales).round()).nan_to_num(0).clamp(0, kLevels);
  form.values_in(packet).copy_((blocks / scales).round_().add_(zero_points).nan_to_num_(0).clamp_(0, kLevels));
  form.zero_points_in(packet).copy_(zero_points);
  form.scales_in(packet).copy_(scales);
}

}  // namespace

CommHook quantize(QuantizeOptions options) {
  if (options.elements_per_scale < 0)
    throw InvalidArgument(
        text("QuantizeOptions::elements_per_scale: expected 0 or more, got ", options.elements_per_scale),
        "Use 1 or more, or 0 for one scale per bucket");
  return [options](GradBucket& bucket) -> HookFuture {
    const at::NoGradGuard no_grad;
    const at::Tensor to = bucket.buffer();
    if (to.numel() == 0) return to;
    const int64_t elements =
        options.elements_per_scale == 0 ? to.numel() : std::min(options.elements_per_scale, to.numel());
    const Packet form{.blocks = (to.numel() + elements - 1) / elements, .elements = elements};
    const at::Tensor mine = bucket.empty(form.bytes(), at::kByte);
    quantize_into(mine, form, to);
    const int n = bucket.group().size();
    const at::Tensor all = bucket.empty(n * form.bytes(), at::kByte);
    Work work = all_gather_into_tensor_async(all, mine, {.group = bucket.group()});
    return HookFuture(std::move(work), all).then([=](const at::Tensor& all) {
      const at::NoGradGuard no_grad;
      at::Tensor sum = at::zeros({form.blocks, form.elements}, to.options().dtype(at::kFloat));
      for (int r = 0; r < n; ++r) {
        const at::Tensor packet = all.slice(0, r * form.bytes(), (r + 1) * form.bytes());
        sum.add_((form.values_in(packet).to(at::kFloat) - form.zero_points_in(packet)).mul_(form.scales_in(packet)));
      }
      return to.copy_(sum.div_(n).view({-1}).slice(0, 0, to.numel()));
    });
  };
}

}  // namespace muster::comm_hooks
