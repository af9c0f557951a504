// Attention over a quantised cache on the device, compared with double precision and with the same values in 16 bits;
// and its bitwise independence of the batch.
#include "attention_kernel_world.h"

namespace charonia::cuda {
namespace {

TEST(CudaAttentionQuantTest, a_quantised_cache_equals_its_values_rounded_once) {
  Random random(15);
  for (int trial = 0; trial < 20; ++trial) {
    const auto type = trial % 2 == 0 ? DType::bf16 : DType::f16;
    const int dim = kTiledDims[static_cast<std::size_t>(trial % 5)];
    World world(random, shape_of(dim < 128 ? 2 : 1, one_of(random, kGroups), dim, one_of(random, kBlockLens)), type,
                {uniform(random, 1, 40), uniform(random, 1, 150), uniform(random, 60, 200)});
    if (trial % 3 == 2) world.weigh(random, 1 + trial % 7, 70);
    world.quantise(trial / 5 % 2 == 0 ? 8 : 4);
    const auto chunks = random_chunks(random, world.lengths);
    auto options = world.options();
    options.padding = trial % 3;
    options.plan_of_all = trial % 2 == 0;
    in_both_orders([&] {
      const auto out = world.run(chunks, options);
      world.check(random, chunks, out, ops::rounding(type), ops::rounding(type));
    });
  }
}

// Makes the smallest element of k and of v tiny compared with the others: a zero that cannot be folded
// (attention_quant.h).
void make_least_tiny(World& world, int sequence, int position) {
  auto& rows = world.qkv[static_cast<std::size_t>(sequence)];
  const auto& shape = world.shape;
  for (int c = shape.heads * shape.head_dim; c < rows.cols; ++c) {
    rows.set(position, c, c % shape.head_dim == 5 ? 1.13e-5F : 0.01F + std::abs(rows.at(position, c)));
  }
}

// Compared with the same kernels over the same values in 16 bits: their tiles are equal bit by bit.
TEST(CudaAttentionQuantTest, with_a_quantised_cache_rows_have_the_bits_of_its_values_in_16_bits) {
  Random random(16);
  for (const int bits : {8, 4}) {
    for (const int dim : kTiledDims) {
      World quantised(random, shape_of(1, 3, dim, 32), dim == 64 ? DType::f16 : DType::bf16, {700, 90});
      for (int i = 0; i < 90; ++i) make_least_tiny(quantised, 1, i);
      for (int i = 0; i < 700; ++i) {
        if (i % 96 >= 40 && i % 96 < 60) make_least_tiny(quantised, 0, i);
      }
      quantised.quantise(bits);
      auto plain = quantised;
      plain.quant_bits = 0;
      plain.window = 1 << 20;  // selects the kernel version that a quantised cache uses
      const std::vector<Chunk> chunks = {{0, 690, 700}, {1, 89, 90}, {0, 650, 651}};
      for (const int sms : {1, 132}) {
        auto options = quantised.options();
        options.sms = sms;
        options.reproducible = dim != 96;
        const auto expected = plain.run(chunks, options), got = quantised.run(chunks, options);
        for (int row = 0; row < 12; ++row) {
          ASSERT_TRUE(expected.same_bits(row, got, row)) << bits << " bits, head size " << dim << ", row " << row;
        }
      }
    }
  }
}

// As without quantisation: prompt chunks, decodes, other sequences in the batch, with and without splits.
TEST(CudaAttentionQuantTest, with_a_quantised_cache_bits_do_not_depend_on_chunks_batch_or_splits) {
  Random random(17);
  for (const int bits : {8, 4}) {
    for (const int dim : {64, 128}) {
      const int n = dim == 64 ? 1150 : 560;
      World world(random, shape_of(1, 2, dim, 24), DType::bf16, {n, 90, 30});
      if (bits == 4) world.weigh(random, 7, 700);
      world.quantise(bits);
      auto options = world.options();
      options.reproducible = true;
      options.sms = 1;
      const int begin = n - 50;
      const auto whole = world.run({{0, begin, n}}, options);
      for (int at = begin; at < n;) {
        const int end = std::min(n, at + (at == begin ? 1 : uniform(random, 1, 40)));
        options.sms = at % 2 == 0 ? 132 : 1;
        const auto out = world.run({{1, 20, 40}, {0, at, end}, {2, 29, 30}}, options);
        for (int i = at; i < end; ++i) {
          ASSERT_TRUE(whole.same_bits(i - begin, out, 20 + i - at)) << bits << " bits, position " << i;
        }
        at = end;
      }
      for (const int position : {begin, n - 1}) {
        for (const int sms : {1, 132}) {
          options.sms = sms;
          ASSERT_TRUE(whole.same_bits(position - begin, world.run({{0, position, position + 1}}, options), 0))
              << bits << " bits, decode at " << position;
        }
      }
    }
  }
}

// Head sizes and types without tiles, and blocks that are not all aligned to 16 bytes.
TEST(CudaAttentionQuantTest, any_head_size_of_a_quantised_cache_is_correct_in_float) {
  Random random(18);
  constexpr std::array kDims = {2, 6, 16, 80, 32};
  constexpr std::array kTypes = {DType::f32, DType::bf16, DType::f16};
  for (int trial = 0; trial < 15; ++trial) {
    const int dim = kDims[static_cast<std::size_t>(trial % 5)];
    World world(random,
                shape_of(dim == 32 ? 1 : 2, one_of(random, kGroups), dim, dim == 32 ? 3 : one_of(random, kBlockLens)),
                kTypes[static_cast<std::size_t>(trial % 3)], {uniform(random, 1, 70), uniform(random, 30, 150)});
    if (trial % 4 == 3) world.weigh(random, 1 + trial % 7, 80);
    world.quantise(trial % 2 == 0 ? 4 : 8);
    auto options = world.options();
    options.out_type = DType::f32;
    const auto chunks = random_chunks(random, world.lengths);
    in_both_orders([&] { world.check(random, chunks, world.run(chunks, options), 0, 0); });
  }
}

}  // namespace
}  // namespace charonia::cuda
