// The changes of weights by LoRA adapters on a CUDA device, compared with products in double.
#include <gtest/gtest.h>

#include <memory>

#include "low_rank_change.h"
#include "ops_support.h"

namespace charonia::ops {
namespace {

struct Weight {
  std::int64_t in = 0, out = 0;
  bool f32_out = false;
  std::int64_t ranks = 0;           // of a part; 0: any few
  float x = 1, a = 0.3F, b = 0.3F;  // standard deviations of values
};
// More than a slice of columns; odd numbers; the largest rank; products with A beyond the range of fp16, and others so small
// that fp16 has few bits for them.
const std::vector<Weight> kWeights = {{2100, 200},
                                      {96, 300, true},
                                      {33, 75},
                                      {64, 64},
                                      {40, 70, false, LowRank::kMaxRanks},
                                      {96, 100, true, 0, 3000, 3, 0.03F},
                                      {64, 64, true, 0, 1e-5F, 0.3F, 6000}};
constexpr int kSlots = 2, kAdapters = 4, kMaxRows = 90;

// Sequences of a step, with their adapters; -1: none.
struct Sequences {
  std::vector<std::int32_t> lengths, adapters;
};

class CudaLowRankTest : public testing::TestWithParam<DType> {
 protected:
  CudaLowRankTest() {
    const auto type = GetParam();
    AdapterSlots slots{.count = kSlots, .bytes = 0, .weights = {}};
    for (const auto& weight : kWeights) {
      slots.weights.push_back({weight.in, 0});
      ins_.push_back(std::make_unique<DeviceMatrix>(*ops_, type, kMaxRows, weight.in, 1));
      outs_.push_back(std::make_unique<DeviceMatrix>(*ops_, out_type(weight), kMaxRows, weight.out, 3));
    }
    for (int i = 0; i < kAdapters; ++i) {
      auto& adapter = adapters_.emplace_back();
      for (std::size_t w = 0; w < kWeights.size(); ++w) {
        const auto& one = kWeights[w];
        auto& change = adapter.emplace_back();
        if (i == 1 && w == 3) continue;
        change.emplace(random_, type, one.in, one.out, i % 2 == 0, one.ranks, one.a, one.b);
        slots.weights[w].ranks = std::max(slots.weights[w].ranks, change->shape.ranks);
      }
      images_.push_back(image_of(*ops_, adapter));
      slots.bytes = std::max(slots.bytes, images_.back()->bytes());
    }
    ops_->make_adapter_slots(slots);
    ops_->prepare({.max_rows = kMaxRows, .max_sequences = 8, .max_positions = kMaxRows},
                  [this](const StepShape& shape) { issue(shape); });
  }

  static DType out_type(const Weight& weight) { return weight.f32_out ? DType::f32 : GetParam(); }
  // Null: the adapter does not change the weight.
  const HostChange* change_of(std::int32_t adapter, std::size_t weight) const {
    if (adapter < 0) return nullptr;
    const auto& change = adapters_[static_cast<std::size_t>(adapter)][weight];
    return change ? &*change : nullptr;
  }
  void issue(const StepShape& shape) {
    for (std::size_t w = 0; shape.adapters && w < kWeights.size(); ++w) {
      ops_->add_adapters(outs_[w]->slice(0, shape.rows), ins_[w]->slice(0, shape.rows), static_cast<int>(w));
    }
  }
  void upload(const DeviceMatrix& to, const Matrix& from) const {
    ops_->upload(to.tensor().data, from.bytes.data(), from.bytes.size());
  }

  // Adapters of different parity have different slots.
  void run(const Sequences& sequences) {
    std::vector<std::int32_t> starts{0}, positions, slots;
    for (const auto length : sequences.lengths) {
      starts.push_back(starts.back() + length);
      for (std::int32_t p = 0; p < length; ++p) positions.push_back(p);
    }
    for (const auto adapter : sequences.adapters) {
      slots.push_back(adapter < 0 ? -1 : adapter % kSlots);
      if (adapter < 0) continue;
      auto& there = in_slots_[static_cast<std::size_t>(slots.back())];
      if (there != adapter) ops_->fill_adapter_slot(slots.back(), *images_[static_cast<std::size_t>(adapter)]);
      there = adapter;
    }
    const std::vector<std::int32_t> ids(positions.size());
    ops_->begin_step({.ids = ids,
                      .attention = {.query_start = starts, .positions = positions, .block_tables = {}},
                      .logits_rows = {},
                      .sample = {},
                      .adapters = slots});
    ops_->run_step([this](const StepShape& shape) { issue(shape); });
    ops_->collect();
  }

  Sequences some_sequences(bool decodes) {
    Sequences out;
    const int adapters[] = {uniform(random_, 0, 1) * 2, 1 + uniform(random_, 0, 1) * 2};  // in different slots
    for (int s = uniform(random_, 1, 8); s > 0; --s) {
      out.lengths.push_back(decodes ? 1 : uniform(random_, 1, s == 1 ? 40 : 7));
      out.adapters.push_back(uniform(random_, 0, 4) == 0 ? -1 : adapters[uniform(random_, 0, 1)]);
    }
    return out;
  }

  // Compares a row of each weight's output.
  void expect_row(std::int64_t row, std::int32_t adapter) const {
    for (std::size_t w = 0; w < kWeights.size(); ++w) {
      const auto* const change = change_of(adapter, w);
      if (change == nullptr) {
        ASSERT_TRUE(got_[w].same_bits(row, before_[w], row)) << "a row without a change is different";
        continue;
      }
      const auto added = change->of(x_[w], row);
      // The sum of absolute products bounds the error of t, which keeps 16 bits.
      for (std::int64_t c = 0; c < kWeights[w].out; ++c) {
        const double expected = before_[w].at(row, c) + added[static_cast<std::size_t>(c)];
        const auto& [in, out, f32_out, ranks, x, a, b] = kWeights[w];
        const double error = 2e-2 * x * a * b + 1e-4 * std::abs(expected) +
                             rounding(got_[w].dtype) * std::abs(expected);
        ASSERT_NEAR(got_[w].at(row, c), expected, error) << "weight " << w << ", " << row << ", " << c;
      }
    }
  }

  // The sequence of these rows alone, its rows in other places: all of it, and its first row.
  void expect_same_alone(std::int64_t first, std::int64_t end, std::int32_t adapter) {
    for (const auto length : {static_cast<std::int32_t>(end - first), 1}) {
      for (std::size_t w = 0; w < kWeights.size(); ++w) {
        upload(*ins_[w], x_[w].slice(first, end, 1));
        upload(*outs_[w], before_[w].slice(first, end, 3));
      }
      run({{length}, {adapter}});
      for (std::size_t w = 0; w < kWeights.size(); ++w) {
        const auto alone = outs_[w]->host();
        for (std::int64_t r = 0; r < length; ++r) {
          ASSERT_TRUE(got_[w].same_bits(first + r, alone, r)) << "row " << r << " depends on the other rows";
        }
      }
    }
  }

  Random random_{7};
  std::unique_ptr<Ops> ops_ = make_ops("cuda_reproducible", 1);
  std::vector<HostAdapter> adapters_;
  std::vector<std::unique_ptr<Buffer>> images_;
  std::vector<std::unique_ptr<DeviceMatrix>> ins_, outs_;  // of each weight
  std::vector<int> in_slots_ = std::vector<int>(kSlots, -1);  // adapters
  std::vector<Matrix> x_, before_, got_;  // of each weight: the input, and the output before and after the step
};
INSTANTIATE_TEST_SUITE_P(Type, CudaLowRankTest, testing::Values(DType::f32, DType::bf16, DType::f16),
                         [](const auto& i) { return std::string(to_string(i.param)); });

// The operation in steps of sequences with any adapters, which take slots of other adapters.
TEST_P(CudaLowRankTest, equals_a_product_in_double_and_depends_only_on_the_row) {
  for (int trial = 0; trial < 8; ++trial) {
    const auto sequences = some_sequences(trial % 2 == 0);
    x_.clear(), before_.clear(), got_.clear();
    for (std::size_t w = 0; w < kWeights.size(); ++w) {
      x_.push_back(Matrix::random(random_, GetParam(), kMaxRows, kWeights[w].in, kWeights[w].x, 1));
      before_.push_back(Matrix::random(random_, out_type(kWeights[w]), kMaxRows, kWeights[w].out, 1, 3));
      upload(*ins_[w], x_[w]);
      upload(*outs_[w], before_[w]);
    }
    run(sequences);
    for (const auto& out : outs_) got_.push_back(out->host());
    std::int64_t row = 0;
    for (std::size_t s = 0; s < sequences.lengths.size(); ++s) {
      for (const auto end = row + sequences.lengths[s]; row < end; ++row) {
        ASSERT_NO_FATAL_FAILURE(expect_row(row, sequences.adapters[s]));
      }
    }
    for (auto rest = row; rest < kMaxRows; ++rest) {
      for (std::size_t w = 0; w < kWeights.size(); ++w) ASSERT_TRUE(got_[w].same_bits(rest, before_[w], rest));
    }
    if (sequences.adapters.back() < 0) continue;
    ASSERT_NO_FATAL_FAILURE(expect_same_alone(row - sequences.lengths.back(), row, sequences.adapters.back()));
  }
}

}  // namespace
}  // namespace charonia::ops
