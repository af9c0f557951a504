// The changes of weights by LoRA adapters on a CUDA device, compared with products in double.
#include <gtest/gtest.h>

#include <memory>
#include <optional>

#include "low_rank_change.h"
#include "ops_support.h"

namespace charonia::ops {
namespace {

class CudaLowRankTest : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Type, CudaLowRankTest, testing::Values(DType::f32, DType::bf16, DType::f16),
                         [](const auto& i) { return std::string(to_string(i.param)); });

// An adapter without a change of some weights, and its image.
using Adapter = std::vector<std::optional<HostChange>>;

std::unique_ptr<Buffer> image_of(Ops& ops, const Adapter& adapter) {
  std::vector<std::byte> out;
  const auto put = [&](const void* data, std::size_t bytes) {
    out.resize((out.size() + 63) / 64 * 64);
    const auto at = out.size();
    out.resize(at + bytes);
    std::memcpy(out.data() + at, data, bytes);
    return static_cast<std::int64_t>(at);
  };
  std::vector<std::int64_t> table(adapter.size());
  put(table.data(), table.size() * sizeof table[0]);
  for (std::size_t w = 0; w < adapter.size(); ++w) {
    if (!adapter[w]) continue;
    const auto& change = *adapter[w];
    const auto a = put(change.stored_a.bytes.data(), change.stored_a.bytes.size());
    const auto b = put(change.stored_b.bytes.data(), change.stored_b.bytes.size());
    const SlotChange header{.a = a,
                            .ranks = static_cast<std::int32_t>(change.shape.ranks),
                            .parts = static_cast<std::int32_t>(change.bs.size())};
    table[w] = put(&header, sizeof header);
    for (const auto& part : change.shape.parts) {
      const SlotPart one{.b = b + part.b * static_cast<std::int64_t>(size_of(change.shape.type)),
                         .first_column = static_cast<std::int32_t>(part.first_column),
                         .columns = static_cast<std::int32_t>(part.columns),
                         .first_rank = static_cast<std::int32_t>(part.first_rank),
                         .ranks = static_cast<std::int32_t>(part.ranks),
                         .scale = change.scales[static_cast<std::size_t>(part.first_rank)]};
      const auto* const bytes = reinterpret_cast<const std::byte*>(&one);
      out.insert(out.end(), bytes, bytes + sizeof one);
    }
  }
  std::memcpy(out.data(), table.data(), table.size() * sizeof table[0]);
  auto buffer = ops.allocate_host(out.size());
  std::memcpy(buffer->data(), out.data(), out.size());
  return buffer;
}

struct Weight {
  std::int64_t in = 0, out = 0;
  bool f32_out = false;
};

// The operation in steps of sequences with any adapters, which take slots of other adapters.
TEST_P(CudaLowRankTest, equals_a_product_in_double_and_depends_only_on_the_row) {
  const auto type = GetParam();
  Random random(7);
  // More than a slice of columns; and odd numbers.
  const std::vector<Weight> weights = {{2100, 200}, {96, 300, true}, {33, 75}, {64, 64}};
  constexpr int kSlots = 2, kAdapters = 4, kMaxRows = 90;
  const auto ops = make_ops("cuda_reproducible", 1);
  std::vector<Adapter> adapters(kAdapters);
  std::vector<std::unique_ptr<Buffer>> images;
  AdapterSlots slots{.count = kSlots, .bytes = 0, .weights = {}};
  for (const auto& weight : weights) slots.weights.push_back({weight.in, 0});
  for (int i = 0; i < kAdapters; ++i) {
    auto& adapter = adapters[static_cast<std::size_t>(i)];
    for (std::size_t w = 0; w < weights.size(); ++w) {
      auto& change = adapter.emplace_back();
      if (i == 1 && w == 3) continue;
      change.emplace(random, type, weights[w].in, weights[w].out, i % 2 == 0);
      slots.weights[w].ranks = std::max(slots.weights[w].ranks, change->shape.ranks);
    }
    images.push_back(image_of(*ops, adapter));
    slots.bytes = std::max(slots.bytes, images.back()->bytes());
  }
  ops->make_adapter_slots(slots);
  std::vector<std::unique_ptr<DeviceMatrix>> ins, outs;
  for (const auto& weight : weights) {
    ins.push_back(std::make_unique<DeviceMatrix>(*ops, type, kMaxRows, weight.in, 1));
    outs.push_back(std::make_unique<DeviceMatrix>(*ops, weight.f32_out ? DType::f32 : type, kMaxRows, weight.out, 3));
  }
  const auto issue = [&](const StepShape& shape) {
    for (std::size_t w = 0; shape.adapters && w < weights.size(); ++w) {
      ops->add_adapters(outs[w]->slice(0, shape.rows), ins[w]->slice(0, shape.rows), static_cast<int>(w));
    }
  };
  ops->prepare({.max_rows = kMaxRows, .max_sequences = 8, .max_positions = kMaxRows}, issue);
  std::vector<int> in_slots(kSlots, -1);  // adapters
  const auto run = [&](std::span<const std::int32_t> lengths, std::span<const std::int32_t> of_sequences) {
    std::vector<std::int32_t> starts{0}, ids;
    for (const auto length : lengths) starts.push_back(starts.back() + length);
    ids.assign(static_cast<std::size_t>(starts.back()), 0);
    std::vector<std::int32_t> slot_of;
    for (const auto adapter : of_sequences) {
      slot_of.push_back(adapter < 0 ? -1 : adapter % kSlots);
      if (adapter < 0) continue;
      auto& there = in_slots[static_cast<std::size_t>(slot_of.back())];
      if (there != adapter) ops->fill_adapter_slot(slot_of.back(), *images[static_cast<std::size_t>(adapter)]);
      there = adapter;
    }
    std::vector<std::int32_t> positions;
    for (const auto length : lengths) {
      for (std::int32_t p = 0; p < length; ++p) positions.push_back(p);
    }
    ops->begin_step({.ids = ids,
                     .attention = {.query_start = starts, .positions = positions, .block_tables = {}},
                     .logits_rows = {},
                     .sample = {},
                     .adapters = slot_of});
    ops->run_step(issue);
    ops->collect();
  };
  for (int trial = 0; trial < 8; ++trial) {
    std::vector<std::int32_t> lengths, of_sequences;
    std::int64_t rows = 0;
    const int step_adapters[] = {uniform(random, 0, 1) * 2, 1 + uniform(random, 0, 1) * 2};  // in different slots
    for (int s = uniform(random, 1, 8); s > 0; --s) {
      lengths.push_back(trial % 2 == 0 ? 1 : uniform(random, 1, s == 1 ? 40 : 7));
      of_sequences.push_back(uniform(random, 0, 4) == 0 ? -1 : step_adapters[uniform(random, 0, 1)]);
      rows += lengths.back();
    }
    std::vector<Matrix> x, before;
    const auto upload = [&](const DeviceMatrix& to, const Matrix& from) {
      ops->upload(to.tensor().data, from.bytes.data(), from.bytes.size());
    };
    for (std::size_t w = 0; w < weights.size(); ++w) {
      x.push_back(Matrix::random(random, type, kMaxRows, weights[w].in, 1, 1));
      before.push_back(Matrix::random(random, weights[w].f32_out ? DType::f32 : type, kMaxRows, weights[w].out, 1, 3));
      upload(*ins[w], x[w]);
      upload(*outs[w], before[w]);
    }
    run(lengths, of_sequences);
    std::vector<Matrix> got;
    for (const auto& out : outs) got.push_back(out->host());
    std::int64_t row = 0;
    for (std::size_t s = 0; s < lengths.size(); ++s) {
      for (const auto end = row + lengths[s]; row < end; ++row) {
        for (std::size_t w = 0; w < weights.size(); ++w) {
          const auto adapter = of_sequences[s];
          const auto* const change = adapter < 0 || !adapters[static_cast<std::size_t>(adapter)][w]
                                         ? nullptr
                                         : &*adapters[static_cast<std::size_t>(adapter)][w];
          if (change == nullptr) {
            ASSERT_TRUE(got[w].same_bits(row, before[w], row)) << "a row without a change is different";
            continue;
          }
          const auto added = change->of(x[w], row);
          // The sum of absolute products bounds the error of t, which keeps 16 bits.
          for (std::int64_t c = 0; c < weights[w].out; ++c) {
            const double expected = before[w].at(row, c) + added[static_cast<std::size_t>(c)];
            const double error = 2e-3 + 1e-4 * std::abs(expected) + rounding(got[w].dtype) * std::abs(expected);
            ASSERT_NEAR(got[w].at(row, c), expected, error) << "weight " << w << ", " << row << ", " << c;
          }
        }
      }
    }
    for (std::int64_t rest = rows; rest < kMaxRows; ++rest) {
      for (std::size_t w = 0; w < weights.size(); ++w) ASSERT_TRUE(got[w].same_bits(rest, before[w], rest));
    }
    // The last sequence alone, its rows in other places.
    const auto first = rows - lengths.back();
    for (std::size_t w = 0; w < weights.size(); ++w) {
      upload(*ins[w], x[w].slice(first, rows, 1));
      upload(*outs[w], before[w].slice(first, rows, 3));
    }
    const auto last = std::span(of_sequences).last(1);
    if (last[0] < 0) continue;
    for (const auto length : {lengths.back(), 1}) {  // all of it, and its first row
      for (std::size_t w = 0; w < weights.size(); ++w) upload(*outs[w], before[w].slice(first, rows, 3));
      run({&length, 1}, last);
      for (std::size_t w = 0; w < weights.size(); ++w) {
        const auto alone = outs[w]->host();
        for (std::int64_t r = 0; r < length; ++r) {
          ASSERT_TRUE(got[w].same_bits(first + r, alone, r)) << "row " << r << " depends on the other rows";
        }
      }
    }
  }
}

}  // namespace
}  // namespace charonia::ops
