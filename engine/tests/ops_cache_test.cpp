// Copies of KV blocks and their memory, tested through attention: a sequence that reads the copy gets the same results
// as with the original.
#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "ops_support.h"

namespace charonia::ops {
namespace {

// Parameters: a device, and the bits of a quantised cache.
class CacheTest : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  std::unique_ptr<Ops> make(int threads) const { return make_ops(std::get<0>(GetParam()), threads); }
  int bits() const { return std::get<1>(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Device, CacheTest,
                         testing::Combine(testing::ValuesIn(device_names()), testing::Values(0, 8, 4, kKvFp8)),
                         [](const auto& i) {
                           const int bits = std::get<1>(i.param);
                           return std::get<0>(i.param) + (bits == 0        ? ""
                                                        : bits == kKvFp8 ? "_fp8"
                                                                         : "_int" + std::to_string(bits));
                         });

using Copies = std::vector<BlockCopy>;

// A small cache. Each block has one sequence and is read by a query of ones, whose output is a fingerprint of a layer's
// block. With integers, the size of a block is not a multiple of 16 bytes.
struct Blocks {
  static constexpr int kHeads = 4, kKvHeads = 1, kDim = 16, kLen = 5, kLayers = 3, kCount = 7;
  static constexpr std::int64_t kColumns = (kHeads + 2 * kKvHeads) * kDim;

  Blocks(Ops& device, DType type, int quant_bits, int committed = kCount)
      : ops(device),
        precision(device.precision(type)),
        cache(device.make_kv_cache(kv_layout(kLayers, kKvHeads, kDim, kLen, precision.kv, quant_bits), {kCount},
                                   {{committed}})) {}

  // Runs rows 0 .. kLen - 1 of a sequence in `block`; returns attention's output for them, layer by layer.
  std::vector<Matrix> step(int block, const Matrix& qkv, int first, const Copies& copies) {
    std::vector<std::int32_t> positions, starts = {0, static_cast<std::int32_t>(qkv.rows)}, table = {block};
    for (int p = first; p < first + qkv.rows; ++p) positions.push_back(p);
    const std::vector<std::int32_t> ids(positions.size(), 0);
    const Matrix angles = identity();
    const DeviceMatrix turns(ops, angles);
    std::vector<std::unique_ptr<DeviceMatrix>> rows, out;
    for (int layer = 0; layer < kLayers; ++layer) {
      Matrix scaled(qkv.dtype, qkv.rows, qkv.cols);
      for (std::int64_t r = 0; r < qkv.rows; ++r) {
        for (std::int64_t c = 0; c < qkv.cols; ++c) scaled.set(r, c, qkv.at(r, c) * static_cast<float>(layer + 1));
      }
      rows.push_back(std::make_unique<DeviceMatrix>(ops, scaled));
      out.push_back(std::make_unique<DeviceMatrix>(ops, precision.activation, qkv.rows, kHeads * kDim));
    }
    const auto issue = [&](const StepShape&) {
      for (int layer = 0; layer < kLayers; ++layer) {
        const auto i = static_cast<std::size_t>(layer);
        ops.rotary_store(rows[i]->tensor(), {.cos_sin = turns.floats(), .rotary_dim = kDim}, *cache, layer, kHeads);
        ops.attention(out[i]->tensor(), rows[i]->tensor(), *cache, layer, kHeads, {.scale = 0.25F});
      }
    };
    const StepInput input{.ids = ids, .attention = {starts, positions, {table}, 1}, .logits_rows = {}, .sample = {}};
    ops.prepare(limits_of(input), issue);
    ops.begin_step(input);
    if (!copies.empty()) ops.copy_blocks(*cache, copies);
    ops.run_step(issue);
    ops.collect();
    std::vector<Matrix> result;
    for (const auto& matrix : out) result.push_back(matrix->host());
    return result;
  }

  // A rotation that changes nothing: cosines 1, sines 0.
  static Matrix identity() {
    Matrix m(DType::f32, kLen, kDim);
    for (int p = 0; p < kLen; ++p) {
      for (int d = 0; d < kDim / 2; ++d) m.set(p, d, 1);
    }
    return m;
  }

  Ops& ops;
  Precision precision;
  std::unique_ptr<KvCache> cache;
};

bool same(const std::vector<Matrix>& a, const std::vector<Matrix>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!a[i].same_bits(0, b[i], 0)) return false;
  }
  return true;
}

TEST_P(CacheTest, copied_blocks_are_read_in_all_layers_and_in_the_order_of_the_pairs) {
  Random random(30);
  for (const auto type : kWeightTypes) {
    const auto ops = make(2);
    Blocks blocks(*ops, type, bits());
    const auto probe = Matrix::random(random, blocks.precision.gemm_out, 1, Blocks::kColumns);
    // Two sequences that fill all but one position of a block, and what the last position then attends to.
    const auto a = Matrix::random(random, blocks.precision.gemm_out, Blocks::kLen - 1, Blocks::kColumns);
    const auto b = Matrix::random(random, blocks.precision.gemm_out, Blocks::kLen - 1, Blocks::kColumns);
    blocks.step(3, a, 0, {});
    blocks.step(5, b, 0, {});
    const auto of_a = blocks.step(3, probe, Blocks::kLen - 1, {}), of_b = blocks.step(5, probe, Blocks::kLen - 1, {});
    ASSERT_FALSE(same(of_a, of_b));

    // In order: 6 gets a through 0; 0 gets b last.
    const Copies chain = {{3, 0}, {0, 6}, {5, 0}, {2, 2}};
    EXPECT_TRUE(same(blocks.step(6, probe, Blocks::kLen - 1, chain), of_a));
    EXPECT_TRUE(same(blocks.step(0, probe, Blocks::kLen - 1, {}), of_b));
    EXPECT_TRUE(same(blocks.step(3, probe, Blocks::kLen - 1, {}), of_a)) << "the source block must not change";
    EXPECT_TRUE(same(blocks.step(5, probe, Blocks::kLen - 1, {}), of_b)) << "the source block must not change";

    // A copy is independent: writing to it does not change the original.
    blocks.step(6, b, 0, {});
    EXPECT_TRUE(same(blocks.step(6, probe, Blocks::kLen - 1, {}), of_b));
    EXPECT_TRUE(same(blocks.step(3, probe, Blocks::kLen - 1, {}), of_a));
  }
}

// Attention of each layer of a step over one sequence. `tables`: for each kind.
std::vector<Matrix> attend(Ops& ops, KvCache& cache, const std::vector<Matrix>& qkv, int heads, int dim, DType out_type,
                           const PerKind<std::vector<std::int32_t>>& tables) {
  const auto rows = qkv.front().rows;
  std::vector<std::int32_t> positions(static_cast<std::size_t>(rows)), starts = {0, static_cast<std::int32_t>(rows)};
  std::iota(positions.begin(), positions.end(), 0);
  const std::vector<std::int32_t> ids(positions.size(), 0);
  std::vector<std::unique_ptr<DeviceMatrix>> in, out;
  for (const auto& one : qkv) {
    in.push_back(std::make_unique<DeviceMatrix>(ops, one));
    out.push_back(std::make_unique<DeviceMatrix>(ops, out_type, rows, heads * dim));
  }
  const auto issue = [&] {
    for (std::size_t i = 0; i < qkv.size(); ++i) {
      ops.rotary_store(in[i]->tensor(), {}, cache, static_cast<int>(i), heads);
      ops.attention(out[i]->tensor(), in[i]->tensor(), cache, static_cast<int>(i), heads, {.scale = 0.25F});
    }
  };
  run_step(ops,
           {.ids = ids,
            .attention = {starts, positions, {tables.full, tables.window}, std::ssize(tables.full)},
            .logits_rows = {},
            .sample = {}},
           issue);
  std::vector<Matrix> result;
  for (const auto& matrix : out) result.push_back(matrix->host());
  return result;
}

TEST_P(CacheTest, layers_differ_in_kind_and_heads_and_share_storage) {
  constexpr int kHeads = 4, kDim = 16, kLen = 5, kRows = 9;
  Random random(34);
  for (const auto type : kWeightTypes) {
    const auto ops = make(2);
    const auto precision = ops->precision(type);
    KvLayout layout{.layers = {{.kv_heads = 2, .k_dim = kDim, .v_dim = kDim},
                               {.kind = CacheKind::window, .kv_heads = 1, .k_dim = kDim, .v_dim = kDim},
                               {.kv_heads = 4, .k_dim = kDim, .v_dim = kDim},
                               {.kv_heads = 2, .k_dim = kDim, .v_dim = kDim, .storage = 0}},
                    .block_len = kLen,
                    .dtype = precision.kv,
                    .quant_bits = bits()};
    std::vector<Matrix> qkv;
    for (const auto& layer : layout.layers) {
      const int kv_heads = layer.storage < 0 ? layer.kv_heads : 0;
      qkv.push_back(Matrix::random(random, precision.gemm_out, kRows, (kHeads + 2 * kv_heads) * kDim));
    }
    const auto cache = ops->make_kv_cache(layout, {3, 7});
    EXPECT_EQ(cache->num_blocks(), (PerKind<int>{3, 7}));
    const auto out = attend(*ops, *cache, qkv, kHeads, kDim, precision.activation, {{2, 0}, {6, 1}});

    for (std::size_t i = 0; i < layout.layers.size(); ++i) {
      const auto storage = layout.storage_of(i);
      auto alone = layout;
      alone.layers = {layout.layers[storage]};
      alone.layers.front().kind = CacheKind::full;
      Matrix all = qkv[storage];  // the layer's own q, with the k and v that it reads
      for (std::int64_t row = 0; row < kRows; ++row) {
        for (int c = 0; c < kHeads * kDim; ++c) all.set(row, c, qkv[i].at(row, c));
      }
      const auto own = ops->make_kv_cache(alone, {2});
      const auto expected = attend(*ops, *own, {all}, kHeads, kDim, precision.activation, {{1, 0}, {}});
      for (std::int64_t row = 0; row < kRows; ++row) {
        EXPECT_TRUE(out[i].same_bits(row, expected[0], row)) << "layer " << i << ", row " << row;
      }
    }

    layout.layers[3].kv_heads = 1;
    EXPECT_THROW(ops->make_kv_cache(layout, {3, 7}), Error);
  }
}

TEST_P(CacheTest, a_missing_block_is_not_copied) {
  const auto ops = make(1);
  Blocks blocks(*ops, DType::f32, bits());
  const std::vector<std::int32_t> ids = {0};
  ops->prepare({.max_rows = 1, .max_sequences = 1, .max_positions = 1}, [](const StepShape&) {});
  for (const auto& pair : Copies{{-1, 0}, {0, -1}, {Blocks::kCount, 0}, {0, Blocks::kCount}}) {
    ops->begin_step({.ids = ids, .attention = {}, .logits_rows = {}, .sample = {}});
    try {
      ops->copy_blocks(*blocks.cache, Copies{pair});
      FAIL() << pair.from << " to " << pair.to;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::unsupported) throw;
      EXPECT_EQ(error.code(), ErrorCode::internal);
    }
    ops->run_step([](const StepShape&) {});
    ops->collect();
  }
}

TEST_P(CacheTest, committed_blocks_keep_their_contents) {
  Random random(33);
  const auto ops = make(1);
  Blocks blocks(*ops, DType::bf16, bits(), 1), whole(*ops, DType::bf16, bits());
  const auto a = Matrix::random(random, blocks.precision.gemm_out, Blocks::kLen - 1, Blocks::kColumns);
  const auto probe = Matrix::random(random, blocks.precision.gemm_out, 1, Blocks::kColumns);
  ops->commit_blocks(*blocks.cache, {2});
  blocks.step(1, a, 0, {});
  whole.step(1, a, 0, {});
  const auto before = blocks.step(1, probe, Blocks::kLen - 1, {});
  EXPECT_TRUE(same(whole.step(1, probe, Blocks::kLen - 1, {}), before));
  for (const int n : {3, Blocks::kCount, 1, 0}) {
    ops->commit_blocks(*blocks.cache, {n});
    EXPECT_TRUE(same(blocks.step(1, probe, Blocks::kLen - 1, {}), before)) << n << " blocks";
  }
  blocks.step(Blocks::kCount - 1, a, 0, {});
  EXPECT_TRUE(same(blocks.step(Blocks::kCount - 1, probe, Blocks::kLen - 1, {}), before));
  for (const int n : {-1, Blocks::kCount + 1}) EXPECT_THROW(ops->commit_blocks(*blocks.cache, {n}), Error) << n;
}

}  // namespace
}  // namespace charonia::ops
