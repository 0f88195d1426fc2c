#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <random>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/parallel/comm_hooks.h"
#include "parallel/hooks/hook_state.h"

namespace muster::comm_hooks {

struct PowerSgd::State {
  PowerSgdOptions options;
  std::mt19937 random;
  int64_t iter = 0;
  Statistics compression;
  StateTensors errors;   // by parameter: what this rank's gradient has lost
  StateTensors factors;  // by parameter: Q of the last step, the same on all ranks
};

namespace {

// A matrix M of gradients, whose average becomes P Q^T.
struct Part {
  std::vector<std::string> names;     // of the gradients
  at::Tensor matrix;                  // (n, m)
  std::vector<at::Tensor> gradients;  // what it consists of: one whose memory it may be, or more, with zeros after them
  at::Tensor before;                  // the matrix; undefined without feedback
  at::Tensor p, q;                    // (n, rank), (m, rank)
};

struct Bucket {
  std::vector<Part> parts;
  std::vector<at::Tensor> uncompressed;
  at::Tensor flat;  // of `uncompressed`
  at::Tensor buffer;
};

bool is_finite(const at::Tensor& tensor) { return tensor.isfinite().all().item<bool>(); }

// Whether it is a factor to begin with: a column of zeros would stay one for ever.
bool is_usable(const at::Tensor& q, const at::Tensor& like, int64_t rank) {
  return q.defined() && q.size(0) == like.size(1) && q.size(1) == rank && q.scalar_type() == like.scalar_type() &&
         q.any(0).all().item<bool>();
}

// Makes the columns orthogonal, each of length 1. A column of zeros stays one.
void orthogonalize(const at::Tensor& matrix, double epsilon) {
  const int64_t columns = matrix.size(1);
  if (columns > 2 && c10::elementSize(matrix.scalar_type()) > 2) {
    matrix.copy_(std::get<0>(at::linalg_qr(matrix)));
    return;
  }
  for (int64_t i = 0; i < columns; ++i) {
    const at::Tensor column = matrix.narrow(1, i, 1);
    const at::Tensor norm = column.norm(2, 0, /*keepdim=*/true).add_(epsilon);
    column.div_(norm.masked_fill_(norm == 0, 1));
    if (i + 1 == columns) break;
    const at::Tensor rest = matrix.narrow(1, i + 1, columns - i - 1);
    rest.sub_((column * rest).sum(0, /*keepdim=*/true) * column);
  }
}

// The next of numpy's RandomState(seed).randint(1'000'000'000), so that the factors begin as torch's.
uint64_t next_seed(std::mt19937& random) {
  constexpr uint32_t kMask = (1U << 30) - 1;
  uint32_t number = 0;
  do {
    number = static_cast<uint32_t>(random()) & kMask;
  } while (number >= 1'000'000'000);
  return number;
}

// Views of one tensor on the heap, which travels as a whole: a matrix of the part's rank for each part.
at::Tensor lay_out(const GradBucket& bucket, std::vector<Part>& parts, at::Tensor Part::*factor, int64_t dimension,
                   const PowerSgdOptions& options) {
  const auto rank = [&](const Part& part) {
    return std::min({part.matrix.size(0), part.matrix.size(1), options.matrix_approximation_rank});
  };
  int64_t total = 0;
  for (const Part& part : parts) total += part.matrix.size(dimension) * rank(part);
  const at::Tensor flat = bucket.empty(total, bucket.buffer().scalar_type());
  int64_t offset = 0;
  for (Part& part : parts) {
    const int64_t rows = part.matrix.size(dimension);
    part.*factor = flat.narrow(0, offset, rows * rank(part)).view({rows, rank(part)});
    offset += rows * rank(part);
  }
  return flat;
}

Bucket divide(const GradBucket& bucket, const PowerSgdOptions& options, PowerSgd::Statistics& compression) {
  Bucket divided{.buffer = bucket.buffer()};
  std::vector<at::Tensor> gradients = bucket.gradients();
  if (options.batched) {
    std::vector<at::Tensor> flat;
    for (const at::Tensor& gradient : gradients) flat.push_back(gradient.reshape({-1}));
    std::vector<std::string> names;
    for (const GradBucket::Place& place : bucket.places()) names.push_back(place.name);
    const at::Tensor all = at::cat(flat);
    const auto side = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(all.numel()))));
    const at::Tensor square = at::zeros({side * side}, all.options());
    square.narrow(0, 0, all.numel()).copy_(all);
    compression.before += all.numel();
    compression.after += 2 * side * std::min(side, options.matrix_approximation_rank);
    divided.parts.push_back(
        {.names = std::move(names), .matrix = square.view({side, side}), .gradients = std::move(gradients)});
    return divided;
  }
  for (size_t i = 0; i < gradients.size(); ++i) {
    const at::Tensor& gradient = gradients[i];
    const int64_t n = gradient.dim() == 0 ? 1 : gradient.size(0), m = n == 0 ? 0 : gradient.numel() / n;
    const int64_t small = (n + m) * std::min({n, m, options.matrix_approximation_rank});
    const bool pays = static_cast<double>(small) * options.min_compression_rate < static_cast<double>(n * m);
    compression.before += n * m;
    compression.after += pays ? small : n * m;
    if (pays)
      divided.parts.push_back(
          {.names = {bucket.places()[i].name}, .matrix = gradient.reshape({n, m}), .gradients = {gradient}});
    else
      divided.uncompressed.push_back(gradient);
  }
  return divided;
}

void add_errors(const GradBucket& bucket, const StateTensors& errors) {
  const std::vector<at::Tensor> gradients = bucket.gradients();
  for (size_t i = 0; i < gradients.size(); ++i)
    if (const auto error = errors.find(bucket.places()[i].name); error != errors.end())
      gradients[i].add_(error->second.to(gradients[i].device()));  // it may come from a snapshot
}

// The piece of a matrix of this part that belongs to each of its gradients.
void for_each_gradient(const Part& part, const at::Tensor& matrix, const auto& fn) {
  const at::Tensor flat = matrix.reshape({-1});
  int64_t offset = 0;
  for (size_t i = 0; i < part.gradients.size(); ++i) {
    const at::Tensor& gradient = part.gradients[i];
    fn(i, flat.narrow(0, offset, gradient.numel()).view(gradient.sizes()));
    offset += gradient.numel();
  }
}

void give_back(const Part& part) {
  if (part.gradients[0].is_alias_of(part.matrix)) return;
  for_each_gradient(part, part.matrix, [&](size_t i, const at::Tensor& piece) { part.gradients[i].copy_(piece); });
}

HookFuture compress(const GradBucket& bucket, const std::shared_ptr<PowerSgd::State>& state) {
  const at::NoGradGuard no_grad;
  const PowerSgdOptions& options = state->options;
  const Group group = bucket.group();
  if (options.use_error_feedback) add_errors(bucket, state->errors);
  const auto divided = std::make_shared<Bucket>(divide(bucket, options, state->compression));
  std::vector<Part>& parts = divided->parts;
  if (options.use_error_feedback)
    for (Part& part : parts) part.before = part.matrix.clone();

  std::vector<Work> works;
  if (!divided->uncompressed.empty()) {
    std::vector<at::Tensor> flat;
    for (const at::Tensor& gradient : divided->uncompressed) flat.push_back(gradient.reshape({-1}));
    divided->flat = at::cat(flat);
    works.push_back(all_reduce_async(divided->flat, {.op = ReduceOp::AVG, .group = group}));
  }
  if (!parts.empty()) {
    std::optional<at::Generator> random;
    const at::Tensor ps = lay_out(bucket, parts, &Part::p, 0, options);
    for (Part& part : parts) {
      const int64_t m = part.matrix.size(1), rank = part.p.size(1);
      at::Tensor& q = state->factors[part.names[0]];
      if (q.defined()) q = q.to(part.matrix.device());
      if (!options.warm_start || !is_usable(q, part.matrix, rank)) {
        if (!random) random = at::detail::createCPUGenerator(next_seed(state->random));
        q = at::randn({m, rank}, random, at::TensorOptions(part.matrix.scalar_type())).to(part.matrix.device());
      }
      orthogonalize(q, options.orthogonalization_epsilon);
      at::mm_out(part.p, part.matrix, q);
    }
    works.push_back(all_reduce_async(ps, {.group = group}));
  }

  return HookFuture(std::move(works), {})
      .then([=, bucket = bucket](const at::Tensor&) -> HookFuture {
        const at::NoGradGuard no_grad;
        int64_t offset = 0;
        for (const at::Tensor& gradient : divided->uncompressed) {
          gradient.copy_(divided->flat.narrow(0, offset, gradient.numel()).view(gradient.sizes()));
          offset += gradient.numel();
        }
        if (divided->parts.empty()) return divided->buffer;
        const at::Tensor qs = lay_out(bucket, divided->parts, &Part::q, 1, state->options);
        for (Part& part : divided->parts) {
          if (is_finite(part.p)) orthogonalize(part.p, state->options.orthogonalization_epsilon);
          at::mm_out(part.q, part.matrix.t(), part.p);
        }
        return {all_reduce_async(qs, {.op = ReduceOp::AVG, .group = group}), divided->buffer};
      })
      .then([=](const at::Tensor& buffer) {
        const at::NoGradGuard no_grad;
        for (Part& part : divided->parts) {
          at::mm_out(part.matrix, part.p, part.q.t());
          give_back(part);
          if (!is_finite(part.q)) continue;  // a step that a GradScaler will skip: the state stays as it was
          if (part.before.defined())
            for_each_gradient(part, part.before.sub_(part.matrix),
                              [&](size_t i, const at::Tensor& piece) { state->errors[part.names[i]] = piece; });
          if (state->options.warm_start) state->factors[part.names[0]] = part.q;
        }
        return buffer;
      });
}

}  // namespace

PowerSgd::PowerSgd(PowerSgdOptions options)
    : state_(std::make_shared<State>(State{.options = options, .random = std::mt19937(options.random_seed)})) {
  if (options.matrix_approximation_rank < 1)
    throw InvalidArgument(
        text("PowerSgdOptions::matrix_approximation_rank: expected 1 or more, got ", options.matrix_approximation_rank),
        "Use 1 or more");
}

HookFuture PowerSgd::operator()(GradBucket& bucket) const {
  const bool compresses = state_->iter >= state_->options.start_iter;
  count(state_->iter, bucket);
  return compresses ? compress(bucket, state_) : all_reduce(bucket);
}

PowerSgd::Statistics PowerSgd::compression() const { return state_->compression; }
int64_t PowerSgd::iter() const { return state_->iter; }

void PowerSgd::save(torch::serialize::OutputArchive& archive) const {
  PlainOutput random;
  random << state_->random;
  archive.write("random", c10::IValue(std::move(random).str()));
  comm_hooks::save(archive, state_->iter);
  comm_hooks::save(archive, "error", state_->errors);
  comm_hooks::save(archive, "factor", state_->factors);
}

void PowerSgd::load(torch::serialize::InputArchive& archive) {
  c10::IValue random;
  archive.read("random", random);
  PlainInput text(random.toStringRef());
  if (!(text >> state_->random)) throw CorruptError("the archive has no state of a PowerSgd");
  state_->iter = load_iter(archive);
  state_->errors = comm_hooks::load(archive, "error");
  state_->factors = comm_hooks::load(archive, "factor");
}

}  // namespace muster::comm_hooks
