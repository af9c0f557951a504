// Steps of one layer of attention on a CUDA device.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/cuda/cuda_ops.h"
#include "ops_support.h"

namespace charonia::cuda {

using ops::Matrix;
using ops::Random;

class Attention {
 public:
  Attention(int bits, std::optional<bool> wgmma, bool reproducible = false, int block_len = 64, int positions = 200)
      : ops_(ops::make_cuda_ops({.reproducible = reproducible, .wgmma_prompts = wgmma})),
        stride_(static_cast<int>(divide_up(positions, block_len))) {
    Random random(1);
    cache_ = ops_->make_kv_cache({.layers = {{.kv_heads = kKvHeads, .k_dim = kDim, .v_dim = kDim}},
                                  .block_len = block_len,
                                  .dtype = DType::bf16,
                                  .quant_bits = bits},
                                 {2 * stride_});
    if (bits == ops::kKvFp8) {
      Matrix scales(DType::f32, 1, kKvHeads);
      for (int h = 0; h < kKvHeads; ++h) scales.set(0, h, 0.5F / static_cast<float>(h + 1));
      scales_ = std::make_unique<ops::DeviceMatrix>(*ops_, scales);
    }
    qkv_ = std::make_unique<ops::DeviceMatrix>(*ops_, DType::bf16, kRows, (kHeads + 2 * kKvHeads) * kDim);
    out_ = std::make_unique<ops::DeviceMatrix>(*ops_, DType::bf16, kRows, kHeads * kDim);
    ops_->prepare({.max_rows = kRows,
                   .max_sequences = 3,
                   .max_positions = positions,
                   .block_len = block_len,
                   .kv_quant_bits = bits},
                  [this](const ops::StepShape& shape) { issue(shape); });
  }

  using Range = std::pair<int, int>;  // positions [begin, end)
  // Rows of two sequences. q, k and v depend on the position.
  Matrix step(Range first, Range second = {0, 1}) {
    std::vector<std::int32_t> starts{0}, positions, seeds, tables;
    for (const auto& [begin, end] : {first, second}) {
      for (int i = begin; i < end; ++i) {
        positions.push_back(i);
        seeds.push_back(starts.size() == 1 ? i + 1 : -i);
      }
      starts.push_back(static_cast<std::int32_t>(positions.size()));
    }
    const std::vector<std::int32_t> ids(positions.size());
    for (int i = 1; i <= 2 * stride_; ++i) tables.push_back(5 * i % (2 * stride_));  // each block once
    Matrix in(DType::bf16, kRows, (kHeads + 2 * kKvHeads) * kDim);
    for (std::size_t i = 0; i < positions.size(); ++i) {
      Random random(static_cast<unsigned>(seeds[i]));
      const auto row = Matrix::random(random, DType::bf16, 1, in.cols);
      for (int c = 0; c < in.cols; ++c) in.set(static_cast<std::int64_t>(i), c, row.at(0, c));
    }
    ops_->upload(qkv_->tensor().data, in.bytes.data(), in.bytes.size());
    ops_->begin_step({.ids = ids, .attention = {starts, positions, {tables}, stride_}, .logits_rows = {}, .sample = {}});
    const auto before = allocations();
    ops_->run_step([this](const ops::StepShape& shape) { issue(shape); });
    ops_->collect();
    EXPECT_EQ(allocations(), before);
    return out_->host();
  }
  std::vector<std::string> report() const { return ops_->report(); }

 private:
  static constexpr int kRows = 150, kHeads = 4, kKvHeads = 2, kDim = 64;
  void issue(const ops::StepShape& shape) {
    const float* const scales = scales_ ? scales_->floats() : nullptr;
    ops_->rotary_store(qkv_->slice(0, shape.rows), {.k_scales = scales, .v_scales = scales}, *cache_, 0, kHeads);
    ops_->attention(out_->slice(0, shape.rows), qkv_->slice(0, shape.rows), *cache_, 0, kHeads,
                    {.scale = 0.125F, .v_scales = scales});
  }
  std::unique_ptr<ops::Ops> ops_;
  int stride_;  // of the block tables
  std::unique_ptr<ops::KvCache> cache_;
  std::unique_ptr<ops::DeviceMatrix> qkv_, out_;
  std::unique_ptr<ops::DeviceMatrix> scales_;  // of an FP8 cache
};

inline void expect_near(const Matrix& a, const Matrix& b, int rows) {
  for (int row = 0; row < rows; ++row) {
    for (int c = 0; c < a.cols; ++c) ASSERT_NEAR(a.at(row, c), b.at(row, c), 0.02) << row << ", " << c;
  }
}

}  // namespace charonia::cuda
