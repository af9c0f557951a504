// Checks of attention on a device: it equals the reference in double, and gives the same bits for any division of a
// sequence into steps.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "attention_world.h"

namespace charonia::ops {

// Whether the device rounds queries and weights to bf16 in this world.
inline bool in_bf16(const std::string& device, const World& world) {
  return traits(device).attention_in_bf16 && world.kv == DType::bf16 && world.shape.quant_bits == 0;
}
// The maximum difference of element d from the expected value that rounding the weights causes.
inline double rounded_weights(const std::string& device, const World& world, const World::Expected& expected, int d) {
  constexpr double e = 0x1p-8;  // one rounding to bf16
  return in_bf16(device, world) ? e / (1 - e) * expected.spread[static_cast<std::size_t>(d)] : 0;
}

// Attention of one step over two sequences, checked at random rows. plain: without variants, whose errors are larger.
inline void expect_reference(Random& random, const std::string& device, const World& world, bool plain = false) {
  const auto& shape = world.shape;
  const auto ops = make_ops(device, 2);
  const auto cache = ops->make_kv_cache(world.layout(), {world.blocks});
  const auto out_type = ops->precision(shape.weight).activation;
  const auto [out, rows] = world.step(*ops, *cache, {{1, 0, world.lengths[1]}, {0, 0, world.lengths[0]}}, out_type);
  for (int probe = 0; probe < 12; ++probe) {
    const int sequence = probe % 2, length = world.lengths[static_cast<std::size_t>(sequence)];
    const int position = probe < 2 ? length - 1 : uniform(random, 0, length - 1);
    const int head = uniform(random, 0, shape.heads - 1);
    const auto row = sequence == 1 ? position : world.lengths[1] + position;
    const auto expected = world.reference(sequence, position, head, rows, row, in_bf16(device, world));
    const auto rotated = world.rotated(sequence, position, head);
    for (int d = 0; d < shape.head_dim; ++d) {
      const double turned = rotated[static_cast<std::size_t>(d)];
      ASSERT_NEAR(rows.at(row, head * shape.head_dim + d), turned,
                  2e-6 * (1 + std::abs(turned)) +
                      (world.gemm_out == DType::f32 ? 0 : 1.01 * rounding(world.gemm_out) * std::abs(turned)))
          << "element " << d << " of head " << head << " at position " << position;
      // k may be rounded to the other side, and slopes cause large scores, so errors are larger than in plain
      // attention. Codes do not depend on the arithmetic, unless k was normalised first.
      const auto quant_bits = shape.quant_bits;
      const double roundings = std::max(quant_bits != 0 || plain ? 0.0 : 1.0, traits(device).attention_roundings);
      const double other_code = !world.variant.normed  ? 0
                                : quant_bits == 8      ? 2e-3
                                : quant_bits == kKvFp8 ? 1e-2
                                : quant_bits == 4      ? 3e-2
                                                       : 0;
      const double bound = (world.variant.alibi ? 1e-4
                            : plain             ? 1e-5
                                                : 2e-5) +
                           other_code + (world.kv == DType::f32 ? 0 : roundings * rounding(world.kv)) +
                           rounded_weights(device, world, expected, d) +
                           (out_type == DType::f32 ? 0 : 1.01 * rounding(out_type)) *
                               std::abs(expected.out[static_cast<std::size_t>(d)]);
      ASSERT_NEAR(out.at(row, head * shape.head_dim + d), expected.out[static_cast<std::size_t>(d)], bound)
          << "heads " << shape.heads << "/" << shape.kv_heads << " dim " << shape.head_dim << " block "
          << shape.block_len << " kv " << to_string(world.kv) << " bits " << quant_bits << " position " << position
          << " window " << world.variant.window << " cap " << world.variant.soft_cap;
    }
  }
}

inline Shape random_head(Random& random) {
  constexpr std::array kDims = {16, 32, 48, 64, 80, 96, 128, 256};
  constexpr std::array kBlocks = {3, 16, 20, 64, 128};
  const int kv_heads = uniform(random, 1, 3);
  return {uniform(random, 1, 8) * kv_heads, kv_heads, kDims[static_cast<std::size_t>(uniform(random, 0, 7))],
          kBlocks[static_cast<std::size_t>(uniform(random, 0, 4))],
          kWeightTypes[static_cast<std::size_t>(uniform(random, 0, 2))]};
}

inline int random_window(Random& random, const Shape& shape, int length) {
  const std::array windows = {1,
                              uniform(random, 1, shape.block_len),
                              shape.block_len,
                              shape.block_len + 1,
                              uniform(random, 1, length),
                              length,
                              length + 50};
  return windows[static_cast<std::size_t>(uniform(random, 0, 6))];
}

// Compares one prefill on `one` with chunks of any length and decodes among other sequences on `many`, bit by bit. The
// world has three sequences; the first is compared. longest: of a chunk.
inline void expect_chunks_change_nothing(Random& random, Ops& one, Ops& many, const World& world, int longest = 60) {
  const int n = world.lengths[0];
  const auto out_type = one.precision(world.shape.weight).activation;
  const auto whole_cache = one.make_kv_cache(world.layout(), {world.blocks});
  const auto [whole, whole_rows] = world.step(one, *whole_cache, {{0, 0, n}}, out_type);

  const auto cache = many.make_kv_cache(world.layout(), {world.blocks});
  int done_1 = 0, done_2 = 0;
  for (int begin = 0; begin < n;) {
    // Chunks of any length, and single rows towards the end.
    const int end = begin > 3 * n / 4 ? begin + 1 : std::min(n, begin + uniform(random, 1, longest));
    const int next_1 = std::min(world.lengths[1], done_1 + 1), next_2 = std::min(world.lengths[2], done_2 + 5);
    const auto [out, rows] =
        world.step(many, *cache, {{1, done_1, next_1}, {0, begin, end}, {2, done_2, next_2}}, out_type);
    for (int i = begin; i < end; ++i) {
      ASSERT_TRUE(whole.same_bits(i, out, next_1 - done_1 + i - begin)) << "position " << i << " of " << n;
      ASSERT_TRUE(whole_rows.same_bits(i, rows, next_1 - done_1 + i - begin));
    }
    begin = end, done_1 = next_1, done_2 = next_2;
  }
}

}  // namespace charonia::ops
