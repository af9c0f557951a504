// Ops::linear and experts with quantised weights, compared with a product in double; and the guarantee that a row's
// result depends only on the row.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "base/text.h"
#include "charonia/error.h"
#include "errors.h"
#include "ops_support.h"
#include "quant_support.h"

namespace charonia::ops {
namespace {

class QuantLinearTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Device, QuantLinearTest, testing::ValuesIn(device_names()),
                         [](const auto& i) { return i.param; });

struct Kind {
  Code code;
  bool zeros;
  DType scale_type;
  Activations activations = Activations::as_is;
  bool minimums = false;
};
constexpr std::array kKinds = {Kind{Code::u4, false, DType::bf16},
                               Kind{Code::u4, true, DType::f16},
                               Kind{Code::i8, false, DType::f16},
                               Kind{Code::i8, true, DType::f32},
                               Kind{Code::f8_e4m3, false, DType::f32},
                               Kind{Code::f8_e4m3, false, DType::bf16, Activations::f8_token},
                               Kind{Code::f4_e2m1, false, DType::f8_e8m0},
                               Kind{Code::i8, false, DType::f32, Activations::i8_token},
                               Kind{Code::i8, true, DType::f16, Activations::i8_tensor}};

// With minimums too.
std::vector<Kind> all_kinds() {
  std::vector<Kind> out(kKinds.begin(), kKinds.end());
  for (const auto code : {Code::u4, Code::i8}) {
    for (const bool zeros : {false, true}) {
      out.push_back({code, zeros, zeros ? DType::f16 : DType::f32, Activations::as_is, true});
    }
  }
  return out;
}

bool has_integer_activations(const Kind& kind) {
  return kind.activations == Activations::i8_token || kind.activations == Activations::i8_tensor;
}

// Stacked parts of one format.
struct Weight {
  Kind kind;
  std::vector<MemoryQuantSource> parts;
  std::vector<Matrix> biases;
  std::vector<const QuantSource*> sources;
  std::vector<HostMatrix> bias_hosts;
  std::int64_t n = 0, k = 0;

  Weight(Random& random, const Kind& of, std::vector<std::int64_t> rows, std::int64_t groups, std::int64_t group,
         bool with_bias, bool with_order)
      : kind(of), k(groups * group) {
    const QuantFormat format{kind.code, group, kind.zeros, kind.scale_type, kind.activations, kind.minimums};
    std::vector<std::int32_t> order(with_order ? static_cast<std::size_t>(k) : 0);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (const auto r : rows) {
      parts.push_back(MemoryQuantSource::random(random, r, k, format));
      parts.back().set_order(order);
      // The largest is used for all parts.
      if (kind.activations == Activations::i8_tensor) parts.back().input = parts.size() == 1 ? 0.02F : 0.015F;
      if (with_bias) biases.push_back(Matrix::random(random, DType::f32, r, 1));
      n += r;
    }
    for (const auto& part : parts) sources.push_back(&part);
    for (const auto& bias : biases) bias_hosts.push_back(bias.host());
    if (bias_hosts.size() > 1) bias_hosts[0] = {};
  }

  // One row, and the allowed error of a device that rounds sums to float.
  void product(const DeviceTraits& device, const Matrix& in, std::int64_t row, std::vector<double>& value,
               std::vector<double>& bound) const {
    value.clear(), bound.clear();
    std::vector<float> x_of_row;
    for (std::int64_t c = 0; c < k; ++c) x_of_row.push_back(in.at(row, c));
    float input_scale = 0;
    for (const auto& part : parts) input_scale = std::max(input_scale, part.input);
    const auto activations = quantised_activations(x_of_row, parts[0].format().activations, input_scale);
    std::vector<double> columns = activations;
    const auto& order = parts[0].order();
    for (std::size_t c = 0; c < order.size(); ++c) columns[c] = activations[static_cast<std::size_t>(order[c])];
    const bool is_fixed = device.fixed_point_rows && in.dtype == DType::bf16 && !has_integer_activations(kind) &&
                          kind.code != Code::f8_e4m3 && parts[0].format().group >= 16;
    const auto exact = columns;  // of these, minimums multiply the sums
    if (is_fixed) columns = fixed_point(columns, parts[0].format().group);
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const auto& part = parts[p];
      const auto& format = part.format();
      for (std::int64_t r = 0; r < part.rows(); ++r) {
        const bool biased = !biases.empty() && bias_hosts[p].data != nullptr;
        double sum = biased ? biases[p].at(r, 0) : 0, magnitude = std::abs(sum);
        for (std::int64_t c = 0; c < k; ++c) {
          const auto g = static_cast<std::size_t>(r * part.groups() + c / format.group);
          const double middle = format.code == Code::u4 ? 8 : 0;
          const double zero = format.zeros ? part.zeros[g] : middle;
          const double number = number_of(format.code, part.codes[static_cast<std::size_t>(r * k + c)]);
          const double x = columns[static_cast<std::size_t>(c)] * double{part.scales[g]};
          sum += x * (number - zero);
          magnitude += std::abs(x) * (std::abs(number - middle) + std::abs(zero - middle));
          if (!format.minimums) continue;
          const double added = exact[static_cast<std::size_t>(c)] * part.minimums[g];
          sum += added;
          magnitude += std::abs(added);
        }
        value.push_back(sum);
        // Every addition is rounded once, and so are the operations on a group's sum: the errors are those of partial
        // sums.
        const auto roundings = static_cast<double>(k + 4 * part.groups());
        bound.push_back(1e-30 + magnitude * 0x1p-24 * (2 + 4 * std::sqrt(roundings)));
      }
    }
  }
};

Matrix run(Ops& ops, const Linear& linear, const DeviceMatrix& in, int begin, int end) {
  const DeviceMatrix out(ops, DType::f32, end - begin, linear.out_features(), 3);
  ops.linear(out.tensor(), in.slice(begin, end), linear);
  return out.host();
}

// Groups of 32, 64 and 128, the whole row, and lengths that are not multiples of vectors or tiles.
TEST_P(QuantLinearTest, equals_a_product_in_double_and_a_row_alone_equals_the_row_among_others) {
  Random random(1);
  const auto ops = make_ops(GetParam(), 2), alone = make_ops(GetParam(), 1);
  struct Shape {
    std::vector<std::int64_t> rows;
    std::int64_t groups, group;
  };
  const std::vector<Shape> shapes = {{{5, 70}, 3, 128}, {{130}, 5, 32},  {{64}, 3, 64}, {{33, 1, 40}, 1, 300},
                                     {{20}, 5, 36},     {{129}, 1, 704}, {{7}, 2, 256}, {{9}, 6, 8}};
  int trial = 0;
  for (const auto& kind : all_kinds()) {
    for (const auto type : kWeightTypes) {
      // Every shape with every kind of the CPU's two kernels; f16 uses the same kernel as f32.
      for (const auto& shape : shapes) {
        ++trial;
        if (type == DType::f16 && trial % 3 != 0) continue;
        const Weight w(random, kind, shape.rows, shape.groups, shape.group, trial % 2 == 0, trial % 4 == 1);
        const auto linear = ops->make_quantised_linear(w.sources, w.bias_hosts, type);
        const auto other = alone->make_quantised_linear(w.sources, w.bias_hosts, type);
        ASSERT_EQ(linear->out_features(), w.n);
        ASSERT_EQ(linear->in_features(), w.k);
        constexpr int kRows = 100;
        const auto rows = Matrix::random(random, ops->precision(type).activation, kRows, w.k, 1, trial % 5);
        const DeviceMatrix in(*ops, rows), in_alone(*alone, rows);
        const auto all = run(*ops, *linear, in, 0, kRows);
        const auto where = cat(to_string(w.parts[0].format()), ", ", to_string(type), ", ", w.n, " by ", w.k);
        std::vector<double> value, bound;
        for (const int r : {0, 51, kRows - 1}) {
          w.product(traits(GetParam()), rows, r, value, bound);
          for (std::size_t j = 0; j < value.size(); ++j) {
            ASSERT_NEAR(all.at(r, static_cast<std::int64_t>(j)), value[j], bound[j])
                << "row " << r << ", feature " << j << ", " << where;
          }
        }
        if (!traits(GetParam()).bitwise) continue;
        for (const int count : {1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 48, 49}) {
          const int first = uniform(random, 0, kRows - count);
          const auto some = count % 2 == 0 ? run(*ops, *linear, in, first, first + count)
                                           : run(*alone, *other, in_alone, first, first + count);
          for (int r = 0; r < count; ++r) ASSERT_TRUE(some.same_bits(r, all, first + r)) << count << " rows, " << where;
        }
      }
    }
  }
}

TEST_P(QuantLinearTest, a_row_alone_equals_the_row_among_more_than_are_multiplied_at_a_time) {
  if (!traits(GetParam()).bitwise) GTEST_SKIP() << "the device does not promise it";
  Random random(2);
  const auto ops = make_ops(GetParam(), 2);
  const Weight w(random, kKinds[1], {90}, 4, 64, true, true);
  const auto linear = ops->make_quantised_linear(w.sources, w.bias_hosts, DType::bf16);
  constexpr int kRows = 700;
  const DeviceMatrix in(*ops, Matrix::random(random, ops->precision(DType::bf16).activation, kRows, w.k));
  const auto all = run(*ops, *linear, in, 0, kRows);
  for (int r = 0; r < kRows; r += 23) ASSERT_TRUE(run(*ops, *linear, in, r, r + 1).same_bits(0, all, r)) << r;
}

// Tiles read beyond the end of a group that is not a multiple of their size; after the last group follows the next row.
TEST_P(QuantLinearTest, a_row_of_nan_does_not_affect_others) {
  Random random(6);
  const auto ops = make_ops(GetParam(), 1);
  for (const std::int64_t group : {48, 44, 32}) {
    const Weight w(random, kKinds[0], {70}, 2, group, false, false);
    const auto linear = ops->make_quantised_linear(w.sources, {}, DType::bf16);
    auto rows = Matrix::random(random, ops->precision(DType::bf16).activation, 3, w.k);
    const auto alone = run(*ops, *linear, DeviceMatrix(*ops, rows), 0, 1);
    for (std::int64_t c = 0; c < w.k; ++c) rows.set(1, c, NAN);
    const auto out = run(*ops, *linear, DeviceMatrix(*ops, rows), 0, 3);
    EXPECT_TRUE(out.same_bits(0, alone, 0)) << group;
    for (std::int64_t j = 0; j < w.n; ++j) {
      ASSERT_TRUE(std::isnan(out.at(1, j)) && std::isfinite(out.at(0, j)) && std::isfinite(out.at(2, j))) << group;
    }
  }
}

TEST_P(QuantLinearTest, memory_is_at_most_5_percent_above_the_file_s) {
  Random random(3);
  const auto ops = make_ops(GetParam(), 1);
  for (const auto& kind : kKinds) {
    for (const std::int64_t group : {32, 128, 512}) {
      // With integer activations a group also has a correction; its files have whole rows.
      if (has_integer_activations(kind) && group != 512) continue;
      const Weight w(random, kind, {64}, 512 / group, group, false, false);
      const auto linear = ops->make_quantised_linear(w.sources, {}, DType::bf16);
      const auto groups = static_cast<double>(w.n * w.k / group);
      const double codes = static_cast<double>(w.n * w.k) * bits_of(kind.code) / 8;
      const double zeros = kind.zeros ? groups * bits_of(kind.code) / 8 : 0;
      const double file = codes + groups * static_cast<double>(size_of(kind.scale_type)) + zeros;
      // The CUDA device stores exponents as bf16.
      const bool wider = kind.scale_type == DType::f8_e8m0 && GetParam().starts_with("cuda");
      EXPECT_LE(static_cast<double>(linear->bytes()), (wider ? 1.06 : 1.05) * file) << to_string(w.parts[0].format());
    }
  }
}

// Every code at every position of a word, with every zero of 4 bits and some of 8.
TEST_P(QuantLinearTest, every_code_has_the_correct_number) {
  const auto ops = make_ops(GetParam(), 1);
  for (const auto& kind : kKinds) {
    if (has_integer_activations(kind)) continue;  // cpu_integers_test.cpp
    const std::int64_t codes = std::int64_t{1} << bits_of(kind.code), k = 32;
    std::vector<int> zeros = {0};
    if (kind.zeros && kind.code == Code::i8) zeros = {-128, -127, -1, 0, 1, 127};
    if (kind.zeros && kind.code == Code::u4) {
      zeros.resize(17);
      std::iota(zeros.begin(), zeros.end(), 0);
    }
    const auto rows = codes * std::ssize(zeros);
    MemoryQuantSource source(rows, k, {kind.code, k, kind.zeros, kind.scale_type, kind.activations});
    std::fill(source.scales.begin(), source.scales.end(), 1.0F);
    for (std::int64_t r = 0; r < rows; ++r) {
      const auto code = static_cast<std::uint8_t>(r % codes);
      std::fill_n(source.codes.begin() + r * k, k, std::isnan(number_of(kind.code, code)) ? std::uint8_t{0} : code);
      if (kind.zeros) {
        source.zeros[static_cast<std::size_t>(r)] =
            static_cast<std::int8_t>(zeros[static_cast<std::size_t>(r / codes)]);
      }
    }
    const QuantSource* const sources[] = {&source};
    for (const auto type : kWeightTypes) {
      const auto linear = ops->make_quantised_linear(sources, {}, type);
      // Sets one input feature after another to one, to test each position of a word.
      Matrix in(ops->precision(type).activation, k, k);
      for (std::int64_t i = 0; i < k; ++i) in.set(i, i, 1);
      const auto out = run(*ops, *linear, DeviceMatrix(*ops, in), 0, static_cast<int>(k));
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t i = 0; i < k; ++i) {
          ASSERT_EQ(out.at(i, r), source.at(r, i))
              << to_string(kind.code) << " " << r % codes << ", zero " << r / codes << ", column " << i;
        }
      }
    }
  }
}

TEST_P(QuantLinearTest, mismatched_shapes_are_rejected) {
  Random random(4);
  const auto ops = make_ops(GetParam(), 1);
  const QuantFormat format{.code = Code::u4, .group = 32};
  auto other_format = format;
  other_format.group = 64;
  const auto a = MemoryQuantSource::random(random, 4, 64, format), b = MemoryQuantSource::random(random, 4, 96, format);
  const auto c = MemoryQuantSource::random(random, 4, 64, other_format);
  auto d = MemoryQuantSource::random(random, 4, 64, format);
  std::vector<std::int32_t> order(64);
  std::iota(order.rbegin(), order.rend(), 0);
  d.set_order(order);
  const auto make = [&](std::vector<const QuantSource*> parts) { ops->make_quantised_linear(parts, {}, DType::f32); };
  EXPECT_NO_THROW(make({&a, &a}));
  for (const QuantSource* other : std::vector<const QuantSource*>{&b, &c, &d}) EXPECT_THROW(make({&a, other}), Error);
  EXPECT_THROW(make({}), Error);
  const auto bias = Matrix::random(random, DType::f32, 5, 1);
  const QuantSource* const parts[] = {&a};
  const HostMatrix biases[] = {bias.host()};
  EXPECT_THROW(ops->make_quantised_linear(parts, biases, DType::f32), Error);
  order[3] = 64;
  d.set_order(order);
  EXPECT_THROW(make({&d}), Error);
  for (const std::int64_t group : {5, 30}) {
    const MemoryQuantSource odd(4, 75, {.code = Code::u4, .group = group});
    expect_error(ErrorCode::unsupported, {"test.weight"}, [&] { make({&odd}); });
  }
}

// A layer of experts with top 1 has the bits of the dense GEMMs and the activation of the expert, for rows together and
// alone.
TEST_P(QuantLinearTest, experts_equal_their_gemms) {
  if (!traits(GetParam()).bitwise) GTEST_SKIP() << "the device does not promise it";
  Random random(6);
  const auto ops = make_ops(GetParam(), 2), one = make_ops(GetParam(), 1);
  constexpr std::int64_t kHidden = 96, kInter = 64;
  constexpr int kRows = 20, kCount = 3;
  for (const auto& kind : all_kinds()) {
    for (const auto type : {DType::bf16, DType::f32}) {
      const bool integers = has_integer_activations(kind);  // of whole rows
      const bool biased = kind.zeros || kind.code == Code::f4_e2m1;
      const Activation activation = biased ? Activation(Activation::clamped_swiglu, 2, 1.7F) : Activation::silu;
      std::vector<Weight> weights;
      std::vector<QuantExpertSource> sources;
      weights.reserve(2 * kCount);
      for (int e = 0; e < kCount; ++e) {
        // Expert 1: gate and up have one order, down has another.
        weights.emplace_back(random, kind, std::vector{kInter, kInter}, integers ? 1 : 3, integers ? kHidden : 32,
                             biased, e == 1);
        weights.emplace_back(random, kind, std::vector{kHidden}, 2, kInter / 2, biased, e == 1);
        const auto& gate_up = weights[weights.size() - 2];
        const auto& down = weights.back();
        sources.push_back({gate_up.sources[0], gate_up.sources[1], down.sources[0]});
        if (biased) sources.back().bias = {gate_up.bias_hosts[0], gate_up.bias_hosts[1], down.bias_hosts[0]};
      }
      const auto experts = ops->make_quantised_experts(sources, type),
                 experts_one = one->make_quantised_experts(sources, type);
      ASSERT_EQ(experts->hidden(), kHidden);
      ASSERT_EQ(experts->inter(), kInter);
      const auto data = ops->precision(type).activation;
      const auto in = Matrix::random(random, data, kRows, kHidden);
      Matrix router(DType::f32, kRows, kCount);
      for (int r = 0; r < kRows; ++r) router.set(r, r % kCount, 9);
      const auto compute = [&](Ops& on, const Experts& layer, int begin, int end) {
        const auto scratch = on.allocate(on.experts_scratch_bytes({kCount, 1, kHidden, kInter, type}, end - begin));
        const DeviceMatrix rows(on, in), logits(on, router), out(on, DType::f32, end - begin, kHidden);
        on.experts(out.tensor(), rows.slice(begin, end), logits.slice(begin, end), layer,
                   {.top_k = 1, .renormalize = true}, activation, scratch->data());
        return out.host();
      };
      const auto out = compute(*ops, *experts, 0, kRows);
      const DeviceMatrix rows(*ops, in), both(*ops, DType::f32, kRows, 2 * kInter),
          gated(*ops, data, kRows, kInter), expected(*ops, DType::f32, kRows, kHidden);
      for (int e = 0; e < kCount; ++e) {
        const auto dense = [&](int i) {
          const auto& weight = weights[static_cast<std::size_t>(2 * e + i)];
          return ops->make_quantised_linear(weight.sources, weight.bias_hosts, type);
        };
        ops->linear(both.tensor(), rows.tensor(), *dense(0));
        ops->gated_activation(gated.tensor(), both.tensor(), activation);
        ops->linear(expected.tensor(), gated.tensor(), *dense(1));
        const auto want = expected.host();
        for (int r = e; r < kRows; r += kCount) {
          ASSERT_TRUE(out.same_bits(r, want, r)) << "row " << r << ", " << to_string(weights[0].parts[0].format());
          ASSERT_TRUE(compute(*one, *experts_one, r, r + 1).same_bits(0, out, r)) << "row " << r << " alone";
        }
      }
    }
  }
}

TEST_P(QuantLinearTest, integer_activations_reject_unsupported_formats_and_keep_nan) {
  Random random(7);
  const auto ops = make_ops(GetParam(), 1);
  const auto refused = [&](const QuantFormat& format, std::int64_t cols, float input) {
    MemoryQuantSource source(4, cols, format);
    source.input = input;
    const QuantSource* const parts[] = {&source};
    try {
      ops->make_quantised_linear(parts, {}, DType::f32);
    } catch (const Error& error) {
      return std::string(error.what()).find("test.weight") != std::string::npos;
    }
    return false;
  };
  const QuantFormat token{.code = Code::i8, .group = 64, .activations = Activations::i8_token};
  EXPECT_FALSE(refused(token, 64, 0));
  auto format = token;
  format.activations = Activations::i8_tensor;
  for (const float input : {0.0F, -1.0F, INFINITY, NAN}) EXPECT_TRUE(refused(format, 64, input)) << input;
  format = token;
  format.code = Code::f8_e4m3;
  EXPECT_TRUE(refused(format, 64, 0));

  const Weight w(random, kKinds[7], {70}, 1, 64, true, false);
  const auto linear = ops->make_quantised_linear(w.sources, w.bias_hosts, DType::f32);
  for (const float broken : {NAN, INFINITY, -INFINITY}) {
    auto in = Matrix::random(random, ops->precision(DType::f32).activation, 9, 64);
    in.set(4, 11, broken);
    const auto out = run(*ops, *linear, DeviceMatrix(*ops, in), 0, 9);
    for (int r = 0; r < 9; ++r) {
      for (int j = 0; j < 70; ++j) ASSERT_EQ(std::isnan(out.at(r, j)), r == 4) << broken;
    }
  }
}

}  // namespace
}  // namespace charonia::ops
