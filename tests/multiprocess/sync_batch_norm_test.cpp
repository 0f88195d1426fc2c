// SyncBatchNorm and convert_sync_batchnorm(): ranks with parts of a batch do what BatchNorm does with the whole batch.
// Nets are in sync_batch_norm_nets_test.cpp; what is synchronized, and what not, is in sync_batch_norm_use_test.cpp.
#include "muster/parallel/sync_batch_norm.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd.h>

#include <string>
#include <utility>

#include "multiprocess/sync_batch_norm_fixture.h"

namespace muster::test::batch_norms {
namespace {

double tolerance(at::ScalarType dtype) { return dtype == torch::kDouble ? 1e-12 : 1e-6; }

// Two steps of `part` on this rank's part of a batch, and of `whole` on all of it.
template <typename PartNorm, typename WholeNorm>
void expect_as_whole(PartNorm part, WholeNorm whole, const Shape& shape, const Parts& parts, at::ScalarType dtype,
                     const World& world, double apart) {
  for (int step = 0; step < 2; ++step) {
    const Tensor x = (shape.drawn(parts.whole(), step, dtype) * 2 + 1).requires_grad_();
    const Tensor factor = shape.drawn(parts.whole(), step + 10, dtype);
    whole->zero_grad();
    const Tensor expected = whole->forward(x);
    (expected * factor).sum().backward();

    const Tensor own_x = parts.of(x.detach(), world.rank()).clone().requires_grad_();
    part->zero_grad();
    const uint64_t before = collectives();
    const Tensor y = part->forward(own_x);
    (y * parts.of(factor, world.rank())).sum().backward();
    EXPECT_EQ(collectives() - before, world.world_size() == 1 ? 0 : 2);
    expect_close(y, parts.of(expected, world.rank()), apart, "output");
    expect_close(own_x.grad(), parts.of(x.grad(), world.rank()), apart, "gradient of the input");
    const auto whole_parameters = whole->named_parameters();
    for (const auto& item : part->named_parameters())
      expect_close(sum_over_ranks(item.value().grad()), whole_parameters[item.key()].grad(), apart, item.key().c_str());
  }
  const auto buffers = whole->named_buffers();
  ASSERT_EQ(part->named_buffers().size(), buffers.size());
  for (const auto& item : part->named_buffers()) {
    expect_close(item.value().to(torch::kDouble), buffers[item.key()].to(torch::kDouble), apart, item.key().c_str());
    expect_same_bits_on_all_ranks(item.value().reshape({-1}), world);
  }
}

std::vector<nn::BatchNormOptions> every_option() {
  std::vector<nn::BatchNormOptions> all;
  for (const bool affine : {true, false})
    for (const bool tracks : {true, false})
      all.push_back(nn::BatchNormOptions(kChannels).affine(affine).track_running_stats(tracks).eps(1e-3));
  all.push_back(nn::BatchNormOptions(kChannels).momentum(std::nullopt));
  return all;
}

template <typename Norm>
void every_case(const Shape& shape, const Parts& parts, const World& world) {
  for (const auto& options : every_option())
    for (const auto dtype : {torch::kDouble, torch::kFloat}) {
      SCOPED_TRACE(testing::Message() << "affine " << options.affine() << " tracks " << options.track_running_stats()
                                      << " " << dtype);
      const Norm converted = with_values(Norm(options), dtype);
      EXPECT_EQ(convert_sync_batchnorm(converted), 1u);
      expect_as_whole(converted, with_values(Norm(options), dtype), shape, parts, dtype, world, tolerance(dtype));
      expect_as_whole(with_values(SyncBatchNorm(options), dtype), with_values(Norm(options), dtype), shape, parts,
                      dtype, world, tolerance(dtype));
    }
}

// First, because nothing takes the kernel away again. Ranks are processes.
TEST(SyncBatchNormProcess, OnlyAConversionChangesAnOperator) {
  const auto is_changed = [] {
    const auto op = c10::Dispatcher::singleton().findSchema({"aten::batch_norm", ""});
    return contains(op->dumpState(), "sync_batch_norm.cpp");
  };
  if (is_changed()) GTEST_SKIP() << "an earlier test of this process has converted a module";
  const auto ends = in_processes({"a", "a"}, [&](World& world) {
    const Parts parts{{2, 5}};
    const auto run = [&](auto norm) {
      expect_as_whole(norm, with_values(nn::BatchNorm2d(kChannels), torch::kDouble), {{3, 3}}, parts, torch::kDouble,
                      world, 1e-12);
    };
    run(with_values(SyncBatchNorm(kChannels), torch::kDouble));
    EXPECT_FALSE(is_changed());
    auto norm = with_values(nn::BatchNorm2d(kChannels), torch::kDouble);
    convert_sync_batchnorm(norm);
    EXPECT_TRUE(is_changed());
    run(norm);
    return std::string();
  });
  for (const auto& end : ends) EXPECT_EQ(end.status, 0) << end.said;
  EXPECT_FALSE(is_changed());
}

TEST(SyncBatchNorm, IsBatchNormOfTheWholeBatch) {
  for (const Parts& parts : {Parts{{4}}, Parts{{3, 5}}, Parts{{4, 0, 2}}, Parts{{2, 3, 2, 7}}}) {
    SCOPED_TRACE(testing::PrintToString(parts.rows));
    on_ranks(static_cast<int>(parts.rows.size()), [&](World& world) {
      every_case<nn::BatchNorm1d>({{}}, parts, world);
      every_case<nn::BatchNorm1d>({{7}}, parts, world);
      every_case<nn::BatchNorm2d>({{3, 4}}, parts, world);
      every_case<nn::BatchNorm3d>({{2, 3, 2}}, parts, world);
    });
  }
}

TEST(SyncBatchNorm, MemoryFormatsAndStrides) {
  on_ranks(2, [](World& world) {
    const Parts parts{{2, 3}};
    const Shape shape{{4, 6}};
    const Tensor x = shape.drawn(5, 0, torch::kDouble), factor = shape.drawn(5, 1, torch::kDouble);
    const auto gradient = [&](nn::BatchNorm2d norm, const Tensor& at, const Tensor& by) {
      const Tensor of = at.detach().requires_grad_();
      const Tensor y = norm(of);
      return std::pair(y.detach(), torch::autograd::grad({(y * by).sum()}, {of})[0]);
    };
    const auto [y, expected] = gradient(with_values(nn::BatchNorm2d(kChannels), torch::kDouble), x, factor);
    auto norm = with_values(nn::BatchNorm2d(kChannels), torch::kDouble);
    convert_sync_batchnorm(norm);
    const Tensor own = parts.of(x, world.rank()).clone(), by = parts.of(factor, world.rank());
    for (const Tensor& of :
         {own.contiguous(torch::MemoryFormat::ChannelsLast), own.transpose(2, 3).contiguous().transpose(2, 3),
          torch::stack({own, own}, -1).select(-1, 0)}) {
      ASSERT_FALSE(of.is_contiguous());
      for (const Tensor& each : {by, by.contiguous(torch::MemoryFormat::ChannelsLast)}) {
        const auto [own_y, own_gradient] = gradient(norm, of, each);
        expect_close(own_y, parts.of(y, world.rank()), 1e-12, "output");
        expect_close(own_gradient, parts.of(expected, world.rank()), 1e-12, "gradient of the input");
      }
    }
  });
}

// By its definition, of operators. (The third derivative of libtorch's takes mean and variance for constants.)
struct Written : nn::BatchNorm1dImpl {
  using nn::BatchNorm1dImpl::BatchNorm1dImpl;
  Tensor forward(const Tensor& x) {
    const auto [variance, mean] = torch::var_mean(x, {0, 2}, /*unbiased=*/false, /*keepdim=*/true);
    const Tensor y = (x - mean) / (variance + options.eps()).sqrt();
    return weight.defined() ? y * weight.view({1, -1, 1}) + bias.view({1, -1, 1}) : y;
  }
};

// Of x and the parameters, of a value that is made of gradients of x.
template <typename Norm>
std::vector<Tensor> gradients_of_gradients(Norm& norm, const Tensor& x, const Tensor& factor, int order) {
  Tensor value = (norm->forward(x).tanh() * factor).sum();
  for (int i = 1; i < order; ++i)
    value = torch::autograd::grad({value}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0].pow(2).sum();
  std::vector<Tensor> of = norm->parameters();
  of.insert(of.begin(), x);
  return torch::autograd::grad({value}, of, {}, /*retain_graph=*/false, /*create_graph=*/false, /*allow_unused=*/true);
}

TEST(SyncBatchNorm, GradientsOfGradients) {
  for (const Parts& parts : {Parts{{3, 4}}, Parts{{3, 0, 2}}})
    on_ranks(static_cast<int>(parts.rows.size()), [&](World& world) {
      for (const auto& options : every_option())
        for (const auto dtype : {torch::kDouble, torch::kFloat})
          for (const int order : {2, 3}) {
            SCOPED_TRACE(testing::Message() << order << " affine " << options.affine() << " " << dtype);
            const Shape shape{{3}};
            auto whole = with_values(nn::BatchNorm1d(options), dtype),
                 part = with_values(nn::BatchNorm1d(options), dtype);
            auto written = with_values(std::make_shared<Written>(options), dtype);
            convert_sync_batchnorm(part);
            const Tensor x = shape.drawn(parts.whole(), 0, dtype).requires_grad_();
            const Tensor factor = shape.drawn(parts.whole(), 1, dtype);
            const Tensor own = parts.of(x.detach(), world.rank()).clone().requires_grad_();
            const auto expected = order == 2 ? gradients_of_gradients(whole, x, factor, order)
                                             : gradients_of_gradients(written, x, factor, order);
            const auto got = gradients_of_gradients(part, own, parts.of(factor, world.rank()), order);
            const double apart = (dtype == torch::kDouble ? 1e-12 : 1e-5) * (order == 2 ? 1 : 10);
            expect_close(got[0], parts.of(expected[0], world.rank()), apart, "input");
            for (size_t i = 1; i < got.size(); ++i)
              if (expected[i].defined()) expect_close(sum_over_ranks(got[i]), expected[i], apart, "parameter");
          }
    });
}

// --- dtypes ---

TEST(SyncBatchNorm, BFloat16AndFloat16) {
  on_ranks(2, [](World& world) {
    const Parts parts{{3, 5}};
    const Shape shape{{4, 4}};
    for (const auto dtype : {torch::kBFloat16, torch::kHalf})
      for (const bool all_low : {false, true})
        for (const bool affine : {true, false}) {
          SCOPED_TRACE(testing::Message() << dtype << all_low << affine);
          const nn::BatchNormOptions options =
              nn::BatchNormOptions(kChannels).affine(affine).track_running_stats(!all_low);
          auto whole = with_values(nn::BatchNorm2d(options), torch::kFloat),
               part = with_values(nn::BatchNorm2d(options), all_low ? dtype : torch::kFloat);
          convert_sync_batchnorm(part);
          const Tensor x = shape.drawn(8, 0, dtype), factor = shape.drawn(8, 1, dtype);
          const Tensor all_x = x.to(torch::kFloat).requires_grad_();
          const Tensor expected = whole(all_x);
          (expected * factor.to(torch::kFloat)).sum().backward();
          const Tensor own_x = parts.of(x, world.rank()).clone().requires_grad_();
          const Tensor y = part(own_x);
          EXPECT_EQ(y.scalar_type(), dtype);
          (y * parts.of(factor, world.rank())).sum().backward();
          EXPECT_EQ(own_x.grad().scalar_type(), dtype);
          const double rounding = dtype == torch::kHalf ? 1e-3 : 8e-3;
          expect_close(y.to(torch::kFloat), parts.of(expected, world.rank()), rounding, "output");
          expect_close(own_x.grad().to(torch::kFloat), parts.of(all_x.grad(), world.rank()), rounding, "gradient");
          if (affine) {
            EXPECT_EQ(part->weight.grad().scalar_type(), part->weight.scalar_type());
          }
          if (all_low) continue;
          // float32 in spite of the input
          expect_close(part->running_mean, whole->running_mean, 1e-6, "running_mean");
          expect_close(part->running_var, whole->running_var, 1e-6, "running_var");
        }
  });
}

}  // namespace
}  // namespace muster::test::batch_norms
