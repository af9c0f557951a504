// The kernels on single rows, compared with references in double: any width, all types, and strides that do not allow
// wide accesses.
#include "ops/cuda/kernels/rows.h"

#include <gtest/gtest.h>

#include <string>

#include "charonia/error.h"
#include "device_arrays.h"
#include "errors.h"

namespace charonia::cuda {
namespace {

using ops::Matrix;
using ops::Random;
using ops::uniform;

constexpr auto kTypes = ops::kWeightTypes;

DType any_type(Random& random) { return kTypes[static_cast<std::size_t>(uniform(random, 0, 2))]; }

// Widths near multiples of vectors, warps and blocks; `wide` widths are multiples of 8, with gaps that keep rows
// aligned.
int any_width(Random& random, int most, bool wide) {
  const int n = uniform(random, 1, most);
  return wide ? (n + 7) / 8 * 8 : n;
}
int any_gap(Random& random, bool wide) { return wide ? 8 * uniform(random, 0, 2) : uniform(random, 0, 5); }

TEST(CudaRowsTest, embed_reads_rows_by_id_or_by_sampled_token) {
  in_both_orders([] {
    Random random(1);
    Stream stream;
    for (const auto from : kTypes) {
      for (const bool wide : {false, true}) {
        const int vocab = uniform(random, 2, 50), hidden = any_width(random, 2500, wide);
        const auto table = Matrix::random(random, from, vocab, hidden);
        const std::vector<std::int32_t> sampled = {uniform(random, 0, vocab - 1), -1, uniform(random, 0, vocab - 1)};
        const std::vector<std::int32_t> ids = {uniform(random, 0, vocab - 1), -3, vocab - 1, -2, -1};
        const std::vector<std::int32_t> expected = {ids[0], sampled[2], vocab - 1, 0, sampled[0]};
        Matrix out(DType::f32, static_cast<std::int64_t>(ids.size()), hidden, any_gap(random, wide));
        const MatrixOnDevice on_device(stream, out), device_table(stream, table);
        const DeviceArray device_ids(stream, ids), device_sampled(stream, sampled);
        const float scale = wide ? 1.0F : 5.656F;
        embed(stream, on_device.tensor(), device_table.tensor().data, from, device_ids.data(), device_sampled.data(),
              scale);
        out = on_device.host();
        for (std::size_t r = 0; r < ids.size(); ++r) {
          for (int c = 0; c < hidden; ++c) {
            ASSERT_EQ(out.at(static_cast<std::int64_t>(r), c), table.at(expected[r], c) * scale);
          }
        }
      }
    }
  });
}

struct NormCase {
  DType type;  // of delta and out
  int hidden;
  bool wide, with_delta, normed_delta = false;
  float scale = 1;  // of delta
  bool weighted = true, written = true, subtract_mean = false;
};

void check_norm(Random& random, const NormCase& c) {
  const int rows = uniform(random, 1, 4);
  const float eps = 1e-5F;
  const auto before = Matrix::random(random, DType::f32, rows, c.hidden, 3, any_gap(random, c.wide));
  const auto delta = Matrix::random(random, c.type, rows, c.hidden, 1, any_gap(random, c.wide));
  const auto weight = Matrix::random(random, DType::f32, 1, c.hidden),
             delta_weight = Matrix::random(random, DType::f32, 1, c.hidden);
  Stream stream;
  const MatrixOnDevice residual(stream, before), added(stream, delta), weights(stream, weight),
      delta_weights(stream, delta_weight), out(stream, Matrix(c.type, rows, c.hidden, any_gap(random, c.wide)));
  const auto norm = [&](std::int64_t first, std::int64_t n, const MatrixOnDevice& to, const MatrixOnDevice& in) {
    auto delta_rows = added.tensor();
    delta_rows.data = static_cast<std::byte*>(delta_rows.data) +
                      static_cast<std::size_t>(first * delta_rows.stride) * size_of(delta_rows.dtype);
    delta_rows.rows = n;
    auto written = to.tensor();
    if (!c.written) written.data = nullptr;
    rms_norm(stream, written, in.tensor(), c.with_delta ? delta_rows : Tensor{},
             {.weight = c.weighted ? static_cast<const float*>(weights.tensor().data) : nullptr,
              .eps = eps,
              .delta_weight = c.normed_delta ? static_cast<const float*>(delta_weights.tensor().data) : nullptr,
              .delta_scale = c.scale,
              .subtract_mean = c.subtract_mean});
  };
  norm(0, rows, out, residual);
  const auto after = residual.host(), result = out.host();
  for (int r = 0; r < rows; ++r) {
    double squares = 0, delta_squares = 0;
    for (int i = 0; i < c.hidden; ++i) {
      delta_squares += static_cast<double>(delta.at(r, i)) * static_cast<double>(delta.at(r, i));
    }
    const double delta_factor = 1 / std::sqrt(delta_squares / c.hidden + static_cast<double>(eps));
    for (int i = 0; i < c.hidden; ++i) {
      if (c.normed_delta) {
        const double norm = static_cast<double>(c.scale) * static_cast<double>(delta.at(r, i)) * delta_factor *
                            static_cast<double>(delta_weight.at(0, i));
        const double sum = static_cast<double>(before.at(r, i)) + norm;
        ASSERT_NEAR(after.at(r, i), sum, std::abs(sum) * ops::rounding(DType::f32) + std::abs(norm) * 1e-5 + 0x1p-24);
      } else {
        const float sum = std::fma(delta.at(r, i), c.scale, before.at(r, i));
        ASSERT_EQ(after.at(r, i), c.with_delta ? sum : before.at(r, i));
      }
    }
    double mean = 0;
    for (int i = 0; c.subtract_mean && i < c.hidden; ++i) mean += static_cast<double>(after.at(r, i)) / c.hidden;
    for (int i = 0; i < c.hidden; ++i) squares += std::pow(static_cast<double>(after.at(r, i)) - mean, 2);
    const double factor = 1 / std::sqrt(squares / c.hidden + static_cast<double>(eps));
    for (int i = 0; i < c.hidden; ++i) {
      const double x = after.at(r, i), w = weight.at(0, i);
      const double expected = !c.written ? 0 : c.weighted ? (x - mean) * factor * w : x;
      // The third term: fp16 has steps of 2^-24 near zero. The last term: the rounding of the mean.
      ASSERT_NEAR(result.at(r, i), expected,
                  std::abs(expected) * (1e-5 + ops::rounding(c.type)) + (c.type == DType::f16 ? 0x1p-24 : 1e-30) +
                      (c.subtract_mean ? 1e-5 * std::abs(w) : 0));
    }
  }
  // The same row alone, with strides that allow and do not allow wide accesses: the same bits.
  for (const int gap : {0, 3}) {
    Matrix one(DType::f32, 1, c.hidden, gap);
    for (int i = 0; i < c.hidden; ++i) one.set(0, i, before.at(rows - 1, i));
    const MatrixOnDevice alone(stream, one), alone_out(stream, Matrix(c.type, 1, c.hidden, gap));
    norm(rows - 1, 1, alone_out, alone);
    ASSERT_TRUE(alone_out.host().same_bits(0, result, rows - 1));
    ASSERT_TRUE(alone.host().same_bits(0, after, rows - 1));
  }
}

TEST(CudaRowsTest, rms_norm_adds_the_delta_and_normalises_for_all_types_and_rows) {
  in_both_orders([] {
    Random random(2);
    for (int trial = 0; trial < 24; ++trial) {
      const bool wide = uniform(random, 0, 1) == 1;
      check_norm(random, {kTypes[static_cast<std::size_t>(trial % 3)], any_width(random, 700, wide), wide,
                          uniform(random, 0, 3) != 0});
    }
  });
}

TEST(CudaRowsTest, rms_norm_supports_any_width) {
  in_both_orders([] {
    Random random(3);
    for (const int hidden : {1, 7, 8, 255, 256, 257, 4096, 8191, 8192, 8193, 14336, 16384, 16385, 20000}) {
      check_norm(random, {any_type(random), hidden, hidden % 8 == 0, true});
    }
  });
}

TEST(CudaRowsTest, rms_norm_scales_the_delta_and_has_variants_of_the_norm) {
  in_both_orders([] {
    Random random(10);
    for (int trial = 0; trial < 36; ++trial) {
      const bool wide = uniform(random, 0, 1) == 1;
      const int hidden = trial % 6 == 5 ? std::array{8192, 8193, 16384, 16385, 20000, 20001}[std::size_t(trial / 6)]
                                        : any_width(random, 700, wide);
      check_norm(random, {.type = kTypes[static_cast<std::size_t>(trial % 3)],
                          .hidden = hidden,
                          .wide = wide && hidden % 8 == 0,
                          .with_delta = true,
                          .normed_delta = trial % 4 == 3,
                          .scale = trial % 2 == 0 ? 0.22F : 1.0F,
                          .weighted = uniform(random, 0, 2) != 0,
                          .written = uniform(random, 0, 3) != 0,
                          .subtract_mean = false});
      check_norm(random, {.type = kTypes[static_cast<std::size_t>(trial % 3)],
                          .hidden = hidden,
                          .wide = wide && hidden % 8 == 0,
                          .with_delta = trial % 3 != 0,
                          .subtract_mean = true});
    }
  });
}

TEST(CudaRowsTest, qk_squares_are_of_q_and_k_only) {
  in_both_orders([] {
    Random random(11);
    Stream stream;
    for (int trial = 0; trial < 24; ++trial) {
      const bool wide = trial % 2 == 0;
      const int rows = uniform(random, 1, 4), q = any_width(random, trial % 5 == 0 ? 20000 : 600, wide),
                k = any_width(random, 300, wide);
      const auto qkv = Matrix::random(random, any_type(random), rows, q + 2 * k, 1, any_gap(random, wide));
      const MatrixOnDevice there(stream, qkv), sums(stream, Matrix(DType::f32, rows, 2)),
          alone(stream, Matrix(DType::f32, 1, 2));
      qk_squares(stream, static_cast<float*>(sums.tensor().data), there.tensor(), q, k);
      const auto found = sums.host();
      for (int r = 0; r < rows; ++r) {
        double of_q = 0, of_k = 0;
        for (int i = 0; i < q + k; ++i) (i < q ? of_q : of_k) += std::pow(static_cast<double>(qkv.at(r, i)), 2);
        ASSERT_NEAR(found.at(r, 0), of_q, 1e-5 * of_q);
        ASSERT_NEAR(found.at(r, 1), of_k, 1e-5 * of_k);
      }
      auto last = there.tensor();
      last.data =
          static_cast<std::byte*>(last.data) + static_cast<std::size_t>((rows - 1) * last.stride) * size_of(last.dtype);
      last.rows = 1;
      qk_squares(stream, static_cast<float*>(alone.tensor().data), last, q, k);
      ASSERT_TRUE(alone.host().same_bits(0, found, rows - 1));
    }
  });
}

TEST(CudaRowsTest, rms_norm_normalises_a_delta_with_a_weight_first) {
  in_both_orders([] {
    Random random(7);
    for (int trial = 0; trial < 18; ++trial) {
      const bool wide = uniform(random, 0, 1) == 1;
      check_norm(random, {kTypes[static_cast<std::size_t>(trial % 3)], any_width(random, 700, wide), wide, true, true});
    }
    for (const int hidden : {1, 8, 257, 3584, 8192, 8193, 16384, 16392, 20001}) {
      check_norm(random, {any_type(random), hidden, hidden % 8 == 0, true, true});
    }
  });
}

// Only the combinations of types in a model's steps are compiled. Others are rejected, and nothing is written.
TEST(CudaRowsTest, unsupported_combinations_of_types_are_rejected) {
  Stream stream;
  const auto refused = [](auto call, const std::string& part) {
    expect_error(ErrorCode::internal, {part}, [&] { call(); });
  };
  const MatrixOnDevice floats(stream, Matrix(DType::f32, 2, 16)), halves(stream, Matrix(DType::f16, 2, 16)),
      brains(stream, Matrix(DType::bf16, 2, 16)), wide(stream, Matrix(DType::bf16, 2, 32));
  const DeviceArray<std::int32_t> ids(stream, {0, 0});
  const auto* const weight = static_cast<const float*>(floats.tensor().data);
  refused([&] { embed(stream, brains.tensor(), halves.tensor().data, DType::f16, ids.data(), ids.data()); },
          "embed: out is bf16 and must be fp32");
  refused([&] { rms_norm(stream, brains.tensor(), brains.tensor(), Tensor{}, {.weight = weight}); },
          "rms_norm: residual is bf16 and must be fp32");
  refused([&] { rms_norm(stream, brains.tensor(), floats.tensor(), halves.tensor(), {.weight = weight}); },
          "rms_norm: delta is fp16 and must be bf16");
  refused([&] { gated_activation(stream, halves.tensor(), wide.tensor(), ops::Activation::silu); },
          "gated_activation: out is fp16 and must be bf16");
}

TEST(CudaRowsTest, logits_of_any_size_are_scaled_and_capped) {
  in_both_orders([] {
    Random random(8);
    Stream stream;
    for (int trial = 0; trial < 12; ++trial) {
      const bool wide = trial % 2 == 0;
      const int rows = uniform(random, 1, 4), cols = any_width(random, 3000, wide);
      const float cap = std::array{30.0F, 0.7F, 0.0F}[static_cast<std::size_t>(trial % 3)];
      const float scale = trial % 4 < 2 ? 1.0F : 0.0625F;
      auto in = Matrix::random(random, DType::f32, rows, cols, trial % 4 == 0 ? 500.0F : 3.0F, any_gap(random, wide));
      in.set(0, 0, 0);
      const MatrixOnDevice logits(stream, in);
      scale_logits(stream, logits.tensor(), scale, cap);
      const auto out = logits.host();
      for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < cols; ++c) {
          const double x = static_cast<double>(scale) * static_cast<double>(in.at(r, c)), most = cap;
          const double expected = cap > 0 ? most * std::tanh(x / most) : x;
          ASSERT_NEAR(out.at(r, c), expected, std::abs(expected) * 1e-6) << in.at(r, c);
        }
      }
    }
  });
}

TEST(CudaRowsTest, a_block_is_copied_in_all_layers_and_nothing_else_changes) {
  in_both_orders([] {
    Random random(9);
    Stream stream;
    for (const auto type : kTypes) {
      for (const int dim : {2, 16}) {
        constexpr int kLayers = 3, kBlocks = 5, kKvHeads = 2, kBlockLen = 3;
        const int block_rows = 2 * kKvHeads * kBlockLen;
        auto expected = Matrix::random(random, type, std::int64_t{kLayers} * kBlocks * block_rows, dim);
        const MatrixOnDevice cache(stream, expected);
        const CacheLayer first{cache.tensor().data, type, kKvHeads, dim, kBlockLen};
        for (const auto& [from, to] : {std::pair(0, 4), std::pair(4, 2), std::pair(3, 0)}) {
          copy_block(stream, first, kLayers, static_cast<std::size_t>(kBlocks * first.block_size()) * size_of(type),
                     from, to);
          for (int layer = 0; layer < kLayers; ++layer) {
            for (int r = 0; r < block_rows; ++r) {
              for (int d = 0; d < dim; ++d) {
                expected.set((layer * kBlocks + to) * block_rows + r, d,
                             expected.at((layer * kBlocks + from) * block_rows + r, d));
              }
            }
          }
        }
        const auto after = cache.host();
        for (std::int64_t r = 0; r < after.rows; ++r) ASSERT_TRUE(after.same_bits(r, expected, r)) << r;
      }
    }
  });
}

TEST(CudaRowsTest, gated_activation_is_correct_far_from_zero) {
  in_both_orders([] {
    Random random(4);
    Stream stream;
    for (int trial = 0; trial < 48; ++trial) {
      const bool wide = trial % 2 == 0, silu = trial < 24;
      const int rows = uniform(random, 1, 5), inter = any_width(random, trial % 6 == 0 ? 3000 : 300, wide);
      const auto type = kTypes[static_cast<std::size_t>(trial % 3)];
      const auto in =
          Matrix::random(random, type, rows, 2 * inter, trial % 5 == 0 ? 60.0F : 2.0F, any_gap(random, wide));
      const MatrixOnDevice gate_up(stream, in), out(stream, Matrix(type, rows, inter, any_gap(random, wide)));
      gated_activation(stream, out.tensor(), gate_up.tensor(),
                       silu ? ops::Activation::silu : ops::Activation::gelu_tanh);
      const auto result = out.host();
      for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < inter; ++c) {
          const double gate = in.at(r, c), up = in.at(r, inter + c);
          constexpr double kRootOf2OverPi = 0.7978845608028654;
          const double tanh = std::tanh(kRootOf2OverPi * (gate + 0.044715 * gate * gate * gate));
          const double expected = (silu ? gate / (1 + std::exp(-gate)) : gate / 2 * (1 + tanh)) * up;
          // 1 + tanh in double has no correct digits where gelu is nearly 0.
          ASSERT_NEAR(result.at(r, c), expected,
                      std::abs(expected) * (2e-5 + ops::rounding(type)) + (type == DType::f16 ? 0x1p-24 : 1e-30) +
                          (silu ? 0 : 1e-15 * std::abs(gate * up)))
              << gate;
        }
      }
    }
  });
}

TEST(CudaRowsTest, gather_copies_the_given_rows) {
  in_both_orders([] {
    Random random(5);
    Stream stream;
    for (const auto type : kTypes) {
      for (const bool wide : {false, true}) {
        const int cols = any_width(random, 3000, wide);
        const auto in = Matrix::random(random, type, 20, cols, 1, any_gap(random, wide));
        const std::vector<std::int32_t> rows = {19, 0, 7, 7};
        const MatrixOnDevice from(stream, in), to(stream, Matrix(type, 4, cols, any_gap(random, wide)));
        const DeviceArray device_rows(stream, rows);
        gather_rows(stream, to.tensor(), from.tensor(), device_rows.data());
        const auto out = to.host();
        for (int i = 0; i < 4; ++i) ASSERT_TRUE(out.same_bits(i, in, rows[static_cast<std::size_t>(i)]));
      }
    }
  });
}

TEST(CudaRowsTest, all_gather_orders_shards_by_rank) {
  in_both_orders([] {
    Random random(6);
    Stream stream;
    for (const bool wide : {false, true}) {
      for (const int ranks : {1, 2, 4}) {
        const int rows = uniform(random, 1, 9), cols = any_width(random, 700, wide);
        const auto shards = Matrix::random(random, DType::f32, ranks * rows, cols);
        const MatrixOnDevice from(stream, shards),
            to(stream, Matrix(DType::f32, rows, ranks * cols, any_gap(random, wide)));
        side_by_side(stream, to.tensor(), from.tensor().data, ranks);
        const auto out = to.host();
        for (int r = 0; r < rows; ++r) {
          for (int c = 0; c < ranks * cols; ++c) ASSERT_EQ(out.at(r, c), shards.at(c / cols * rows + r, c % cols));
        }
      }
    }
  });
}

}  // namespace
}  // namespace charonia::cuda
