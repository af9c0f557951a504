// Steps on the CUDA device: captured and issued steps, memory, and rejected arguments. ops_*_test.cpp, which all
// devices share, test the results of each operation, and cuda_engine_test.cpp those of whole models.
#include "ops/cuda/cuda_ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "base/text.h"
#include "charonia/error.h"
#include "device_arrays.h"
#include "errors.h"
#include "low_rank_change.h"
#include "ops/cuda/make_cuda_ops.h"
#include "sample_reference.h"
#if defined(CHARONIA_CUDA_ON_HOST)
#include "emulator/host_grid.h"
#endif

namespace charonia::cuda {
namespace {

using ops::Ids;
using ops::Matrix;
using ops::Random;
using ops::Sampled;
using ops::SampleRow;
using ops::uniform;
using Rows = std::vector<SampleRow>;

constexpr int kVocab = 40, kHidden = 24, kBlocks = 8;

SampleRow greedy() {
  SampleRow row;
  row.temperature = 0;
  return row;
}

// A model of an embedding, an attention whose result is not used, and a matrix. Its steps have one row for each
// sequence, which is a decode. adapters: changes of the matrix; each is in its own slot.
class Model {
 public:
  // logits_rows: StepLimits::max_logits_rows.
  explicit Model(const ops::CudaOptions& options = {}, std::span<const ops::HostAdapter> adapters = {},
                 int logits_rows = 0)
      : ops_(ops::make_cuda_ops(options)) {
    Random random(1);
    table_ = ops_->make_embedding(Matrix::random(random, DType::f32, kVocab, kHidden).host(), DType::f32);
    const auto weight = Matrix::random(random, DType::f32, kVocab, kHidden);
    const auto host = weight.host();
    linear_ = ops_->make_linear({&host, 1}, {}, DType::f32);
    cache_ = ops_->make_kv_cache(ops::kv_layout(1, 1, 8, 4, DType::f32), {kBlocks});
    hidden_ = std::make_unique<ops::DeviceMatrix>(*ops_, DType::f32, 8, kHidden);
    qkv_ = std::make_unique<ops::DeviceMatrix>(*ops_, DType::f32, 8, 3 * 8);
    attended_ = std::make_unique<ops::DeviceMatrix>(*ops_, DType::f32, 8, 8);
    logits_ = std::make_unique<ops::DeviceMatrix>(*ops_, DType::f32, 8, kVocab);
    make_slots(adapters);
    ops_->prepare({.max_rows = 8, .max_sequences = 5, .max_positions = 16, .block_len = 4, .max_logits_rows = logits_rows},
                  [this](const ops::StepShape& shape) { issue(shape); });
  }

  // ids: tokens, or -1 - i for the sample of row i of the previous step. slots: of the adapters of rows.
  // lengths: rows of the sequences; empty: one each.
  void launch(const Ids& ids, Rows rows, const Ids& slots = {}, Ids lengths = {}) {
    if (lengths.empty()) lengths.assign(ids.size(), 1);
    Ids starts = {0}, positions, tables(lengths.size()), logits_rows;
    for (const auto length : lengths) {
      starts.push_back(starts.back() + length);
      for (std::int32_t i = 0; i < length; ++i) {
        rows[logits_rows.size()].sequence = starts.size();
        logits_rows.push_back(static_cast<std::int32_t>(logits_rows.size()));
        positions.push_back(i);
      }
    }
    ops_->begin_step({.ids = ids,
                      .attention = {starts, positions, {tables}, 1},
                      .logits_rows = logits_rows,
                      .sample = rows,
                      .adapters = slots});
    ops_->run_step([this](const ops::StepShape& shape) { issue(shape); });
  }
  std::vector<Sampled> collect() { return ops_->collect(); }
  std::vector<Sampled> step(const Ids& ids, const Rows& rows) {
    launch(ids, rows);
    return collect();
  }

  ops::Ops& ops() { return *ops_; }
  std::int64_t replayed() const { return dynamic_cast<const CudaOps&>(*ops_).replayed_steps(); }

 private:
  void make_slots(std::span<const ops::HostAdapter> adapters) {
    if (adapters.empty()) return;
    ops::AdapterSlots slots{.count = static_cast<int>(adapters.size()), .bytes = 0, .weights = {{kHidden, 0}}};
    for (const auto& adapter : adapters) {
      slots.weights[0].ranks = std::max(slots.weights[0].ranks, adapter[0]->shape.ranks);
      images_.push_back(image_of(*ops_, adapter));
      slots.bytes = std::max(slots.bytes, images_.back()->bytes());
    }
    ops_->make_adapter_slots(slots);
    for (int slot = 0; slot < slots.count; ++slot) {
      ops_->fill_adapter_slot(slot, *images_[static_cast<std::size_t>(slot)]);
    }
  }

  void issue(const ops::StepShape& shape) {
    ops_->embed(hidden_->slice(0, shape.rows), *table_, 1);
    ops_->rotary_store(qkv_->slice(0, shape.rows), {}, *cache_, 0, 1);
    ops_->attention(attended_->slice(0, shape.rows), qkv_->slice(0, shape.rows), *cache_, 0, 1, {.scale = 1});
    ops_->linear(logits_->slice(0, shape.rows), hidden_->slice(0, shape.rows), *linear_);
    if (shape.adapters) ops_->add_adapters(logits_->slice(0, shape.rows), hidden_->slice(0, shape.rows), 0);
    ops_->sample(logits_->slice(0, shape.logits_rows));
  }

  std::unique_ptr<ops::Ops> ops_;
  std::unique_ptr<ops::Embedding> table_;
  std::unique_ptr<ops::Linear> linear_;
  std::unique_ptr<ops::KvCache> cache_;
  std::unique_ptr<ops::DeviceMatrix> hidden_, qkv_, attended_, logits_;
  std::vector<std::unique_ptr<ops::Buffer>> images_;
};

// Steps in flight, with penalties, lists, log probabilities and targets, which are sampled after the replay.
TEST(CudaOpsTest, every_decode_is_replayed_and_equals_an_issued_step) {
  constexpr int kSteps = 12;
  const auto run = [](Model& model) {
    Random random(2);
    std::vector<Sampled> all;
    const auto keep = [&] {
      for (auto& sampled : model.collect()) all.push_back(sampled);
    };
    const auto before = allocations();
    for (int step = 0; step < kSteps; ++step) {
      std::vector<ops::OwnedRow> owned;
      Rows rows;
      for (int r = 0; r < 3; ++r) owned.push_back(ops::random_row(random, kVocab, (step + r) % 3 == 0));
      for (auto& row : owned) rows.push_back(row.view());
      for (int r = 0; step > 0 && r < 3; ++r) rows[static_cast<std::size_t>(r)].pending = r;
      rows[0].logprobs = step % 4 == 0 ? 3 : -1;
      if (step % 5 == 2) rows[1].target = step;
      model.launch(step == 0 ? Ids{1, 2, 3} : Ids{-3, -1, -2}, rows);
      if (step > 0) keep();
    }
    keep();
    EXPECT_EQ(allocations(), before);
    return all;
  };
  Model replaying, issuing({.graphs = false});
  const auto got = run(replaying), expected = run(issuing);
  EXPECT_EQ(replaying.replayed(), kSteps);
  EXPECT_EQ(issuing.replayed(), 0);
  ASSERT_EQ(got.size(), 3U * kSteps);
  std::set<std::int32_t> tokens;
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].error, "");
    EXPECT_EQ(got[i].token, expected[i].token) << i;
    EXPECT_EQ(got[i].top, expected[i].top) << i;
    tokens.insert(got[i].token);
  }
  EXPECT_GT(tokens.size(), 8U) << "the tokens must differ for the test to be useful";
}

TEST(CudaOpsTest, a_decode_with_adapters_is_replayed_and_equals_an_issued_step) {
  Random random(3);
  std::vector<ops::HostAdapter> adapters(2);
  for (auto& adapter : adapters) adapter.emplace_back(std::in_place, random, DType::f32, kHidden, kVocab, true, 0, 1, 1);
  Model replaying({}, adapters), issuing({.graphs = false}, adapters);
  const auto lines = replaying.ops().report();
  EXPECT_TRUE(std::ranges::count(lines, "decode steps are captured for 1, 2, 4, 5 rows") == 1 &&
              std::ranges::count(lines, "decode steps with adapters are captured for 1, 2, 4, 5 rows") == 1)
      << lines.at(1) << "\n" << lines.at(2);
  std::set<std::vector<std::int32_t>> all;
  const Ids steps[] = {{}, {0, -1, 1}, {1, 1, 1}, {-1, -1, -1}, {-1, 0, 1}};
  for (const auto& slots : steps) {
    std::vector<std::int32_t> tokens;
    for (auto* const model : {&replaying, &issuing}) {
      model->launch({1, 2, 3}, Rows(3, greedy()), slots);
      for (const auto& sampled : model->collect()) tokens.push_back(sampled.token);
    }
    EXPECT_TRUE(std::equal(tokens.begin(), tokens.begin() + 3, tokens.begin() + 3, tokens.end()));
    all.insert(std::move(tokens));
  }
  EXPECT_EQ(all.size(), 4U) << "adapters must change tokens for the test to be useful";
  EXPECT_EQ(replaying.replayed(), std::ssize(steps));
}

TEST(CudaOpsTest, a_decode_with_proposals_is_replayed_and_equals_an_issued_step) {
  Random random(4);
  std::vector<ops::HostAdapter> adapters(2);
  for (auto& adapter : adapters) adapter.emplace_back(std::in_place, random, DType::f32, kHidden, kVocab, true, 0, 1, 1);
  constexpr int kLogitsRows = 8;
  Model replaying({}, adapters, kLogitsRows), issuing({.graphs = false}, adapters, kLogitsRows);
  for (const auto* const kind : {"", " with adapters", " with proposals", " with adapters and proposals"}) {
    const bool proposals = std::string_view(kind).ends_with("proposals");
    const auto line = cat("decode steps", kind, " are captured for ", proposals ? "" : "1, ", "2, 4, 8 rows");
    EXPECT_EQ(std::ranges::count(replaying.ops().report(), line), 1) << line;
  }
  struct Case {
    Ids lengths, slots;
  };
  const Case cases[] = {{{4}, {}}, {{1, 1, 3}, {}}, {{2, 1, 2}, {0, -1, 1}}, {{4, 4}, {1, 1}}, {{1, 1}, {}}, {{1}, {0}}};
  std::set<std::int32_t> all;
  for (const auto& [lengths, slots] : cases) {
    const auto rows = static_cast<std::size_t>(std::accumulate(lengths.begin(), lengths.end(), 0));
    std::vector<ops::OwnedRow> owned;
    Rows sampled_rows;
    for (std::size_t row = 0; row < rows; ++row) owned.push_back(ops::random_row(random, kVocab, false));
    for (auto& row : owned) sampled_rows.push_back(row.view());
    Ids ids(rows);
    std::ranges::generate(ids, [&] { return uniform(random, 0, kVocab - 1); });
    std::vector<std::int32_t> tokens;
    for (auto* const model : {&replaying, &issuing}) {
      model->launch(ids, sampled_rows, slots, lengths);
      for (const auto& sampled : model->collect()) tokens.push_back(sampled.token);
    }
    const auto half = tokens.begin() + static_cast<std::ptrdiff_t>(rows);
    EXPECT_TRUE(std::equal(tokens.begin(), half, half, tokens.end()));
    all.insert(tokens.begin(), tokens.end());
  }
  EXPECT_GT(all.size(), 8U) << "the tokens must differ for the test to be useful";
  EXPECT_EQ(replaying.replayed(), std::ssize(cases));
  EXPECT_EQ(issuing.replayed(), 0);
}
#if defined(CHARONIA_CUDA_ON_HOST)
// CHARONIA_CUDA_PREFETCH: in each replay, the weight after the attention, and nothing in an issued step.
TEST(CudaOpsTest, captured_steps_prefetch_the_weights_after_attention_only_if_set) {
  constexpr std::uint64_t kWeightBytes = kVocab * kHidden * sizeof(float), kLines = (kWeightBytes + 127) / 128;
  Model replaying, issuing({.graphs = false});
  for (auto* const model : {&replaying, &issuing}) {
    host_grid::calls() = {};
    constexpr int kSteps = 3;
    for (int step = 0; step < kSteps; ++step) model->step({7, 1}, {greedy(), greedy()});
    const auto steps = static_cast<std::uint64_t>(model->replayed());
    EXPECT_EQ(steps, model == &replaying ? kSteps : 0);
    EXPECT_EQ(host_grid::calls().prefetches, prefetch_setting() > 0 ? steps * kLines : 0);
  }
}
#endif

// Allows every token except `never`, and records the number of replayed steps at its call.
class NotedMask : public ops::TokenMask {
 public:
  NotedMask(const Model& model, std::int32_t never) : model_(model), words_((kVocab + 31) / 32, ~std::uint32_t{0}) {
    words_[static_cast<std::size_t>(never) / 32] &= ~(std::uint32_t{1} << (never % 32));
  }
  std::span<const std::uint32_t> wait() const override {
    replayed_then = model_.replayed();
    return words_;
  }
  mutable std::int64_t replayed_then = -1;

 private:
  const Model& model_;
  std::vector<std::uint32_t> words_;
};

TEST(CudaOpsTest, a_mask_is_requested_after_the_replay_of_the_forward_pass) {
  Model model;
  const auto most_likely = model.step({7, 1}, {greedy(), greedy()});
  const auto before = allocations();
  const NotedMask mask(model, most_likely[0].token);
  const Ids banned = {most_likely[0].token};
  auto by_mask = greedy(), by_ban = greedy();
  by_mask.mask = &mask;
  by_mask.logprobs = 2;
  by_ban.banned = banned;
  const auto got = model.step({7, 1}, {by_mask, greedy()});
  EXPECT_EQ(mask.replayed_then, 2) << "the forward pass was issued before the mask was ready";
  EXPECT_EQ(got[0].token, model.step({7, 1}, {by_ban, greedy()})[0].token);
  EXPECT_EQ(got[0].top[0].first, most_likely[0].token);
  EXPECT_EQ(got[1].token, most_likely[1].token);
  EXPECT_EQ(model.replayed(), 3);
  EXPECT_EQ(allocations(), before);
}

TEST(CudaOpsTest, calls_in_the_wrong_order_are_rejected) {
  Model model;
  EXPECT_THROW(model.collect(), Error) << "run_step() was not called";
  model.launch({4}, {greedy()});
  model.launch({-1}, {greedy()});
  EXPECT_THROW(model.launch({5}, {greedy()}), Error) << "too many steps are in flight";
  EXPECT_EQ(model.collect().size(), 1U);
  EXPECT_EQ(model.collect().size(), 1U);
  EXPECT_THROW(model.collect(), Error);
}

TEST(CudaOpsTest, an_invalid_or_failed_step_does_not_affect_other_steps) {
  Model model, other;
  const auto first = other.step({5}, {greedy()}), second = other.step({first[0].token}, {greedy()});
  model.launch({5}, {greedy()});
  auto& ops = model.ops();
  const Ids starts = {0, 1}, zero = {0}, block = {kBlocks}, none;
  const Rows row = {greedy()};
  EXPECT_THROW(ops.begin_step({zero, {starts, zero, {block}, 1}, zero, row}), Error);
  EXPECT_THROW(ops.begin_step({zero, {starts, zero, {none}, 1}, zero, row}), Error);
  EXPECT_THROW(ops.run_step([](const ops::StepShape&) {}), Error);
  const Ids ids = {1, 2};
  ops.begin_step({ids, {}, {}, {}});
  EXPECT_THROW(ops.run_step([](const ops::StepShape&) { throw Error(ErrorCode::internal, "a test"); }), Error);
  EXPECT_EQ(model.collect()[0].token, first[0].token);
  EXPECT_EQ(model.step({first[0].token}, {greedy()})[0].token, second[0].token);
}

// A block that is no multiple of 16 bytes is copied 2 bytes at a time. A grid's second dimension has at most 65535
// thread blocks, which copy less than this block.
TEST(CudaKvCacheTest, a_block_with_more_units_than_a_grid_is_copied) {
  Stream stream;
  constexpr int kLen = 2049;
  std::vector<std::uint16_t> both(std::size_t{4} * kLen * kLen);
  const auto half = both.begin() + std::ssize(both) / 2;
  std::iota(both.begin(), half, std::uint16_t{1});
  const DeviceArray<std::uint16_t> blocks(stream, both);
  copy_block(stream, {.data = blocks.data(), .kv_heads = 1, .head_dim = kLen, .block_len = kLen}, 1, 0, 0, 1);
  std::copy(both.begin(), half, half);
  EXPECT_TRUE(blocks.host() == both);
}

TEST(CudaDeviceTest, devices_are_listed_and_unknown_ones_rejected_by_number) {
  std::string why;
  const auto devices = ops::cuda_devices(why);
  ASSERT_FALSE(devices.empty()) << why;
  EXPECT_EQ(why, "");
  EXPECT_GE(devices[0].major, 8);
  EXPECT_GT(devices[0].free_bytes, 0U);
  expect_error(ErrorCode::unsupported, {"99"}, [&] { (void)ops::make_cuda_ops({.device = 99}); });
  const auto ops = ops::make_cuda_ops({});
  EXPECT_EQ(ops->device(), "cuda");
  EXPECT_TRUE(ops->asynchronous());
  EXPECT_EQ(ops->precision(DType::bf16).residual, DType::f32);
  EXPECT_EQ(ops->precision(DType::bf16).kv, DType::bf16);
}

TEST(CudaDeviceTest, an_fp8_cache_is_rejected_on_a_device_without_fp8) {
  const auto layout = ops::kv_layout(1, 1, 32, 16, DType::bf16, ops::kKvFp8);
  expect_error(ErrorCode::unsupported, {"quant_policy = 16", "8.9"}, [&] { CudaKvCache(layout, {2}, {2}, false); });
}

}  // namespace
}  // namespace charonia::cuda
