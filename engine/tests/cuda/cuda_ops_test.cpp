// Steps of a whole decoder on the CUDA device: captured and issued steps, steps in flight, memory, and rejected
// arguments. ops_*_test.cpp, which all devices share, test the results of each operation.
#include "ops/cuda/cuda_ops.h"

#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <numeric>
#include <set>

#include "charonia/config.h"
#include "charonia/error.h"
#include "errors.h"
#include "forwarding_ops.h"
#include "model/decoder.h"
#include "ops/cpu/make_cpu_ops.h"
#include "ops/cuda/make_cuda_ops.h"
#include "ops_support.h"
#include "test_folder.h"
#include "tiny_workspace.h"

namespace charonia::cuda {
namespace {

using ops::Sampled;
using ops::SampleRow;
using ops::StepInput;

constexpr int kBlockLen = 4, kBlocks = 80, kVocab = 40;
constexpr ops::StepLimits kLimits{.max_rows = 40, .max_sequences = 20, .max_positions = 64, .block_len = kBlockLen};

// Prepares for exactly the number of sequences of a test, so that its decodes fill a bucket and need no padding.
class Exact : public testing::ForwardingOps {
 public:
  Exact(std::unique_ptr<ops::Ops> to, int sequences) : ForwardingOps(std::move(to)), sequences_(sequences) {}
  void prepare(const ops::StepLimits& limits, const Issue& issue) override {
    auto exact = limits;
    exact.max_sequences = sequences_;
    ForwardingOps::prepare(exact, issue);
  }

 private:
  int sequences_;
};

// A decoder with random weights, and its sequences.
class Model {
 public:
  Model(const std::filesystem::path& folder, std::unique_ptr<ops::Ops> ops, const std::string& weight_type = "fp32")
      : ops_(std::move(ops)) {
    EngineConfig engine;
    ModelConfig config;
    auto settings = read_config_ini(folder / "config.ini");
    for (auto& [key, value] : settings) {
      if (key == "weight_type") value = weight_type;
    }
    apply_settings(settings, engine, &config);
    const model::WeightFiles files(folder, 1);
    decoder_ = std::make_unique<model::Decoder>(config, files, *ops_, kLimits);
    cache_ = ops_->make_kv_cache(decoder_->kv_layout(kBlockLen), kBlocks);
    decoder_->prepare(*cache_);
  }

  // The next rows of a sequence: tokens, or { -1 - i } for the sample of row i of the previous step.
  struct Chunk {
    int sequence = 0;
    std::vector<std::int32_t> tokens;
    SampleRow sample;
    bool sampled = true;
  };

  void launch(std::vector<Chunk> chunks) {
    std::vector<std::int32_t> ids, starts{0}, positions, tables, logits_rows;
    std::vector<SampleRow> sample;
    const auto stride = static_cast<std::size_t>(kLimits.max_positions / kBlockLen);
    for (auto& chunk : chunks) {
      auto& length = lengths_[static_cast<std::size_t>(chunk.sequence)];
      for (const auto id : chunk.tokens) {
        ids.push_back(id);
        positions.push_back(length++);
      }
      starts.push_back(static_cast<std::int32_t>(ids.size()));
      auto& blocks = blocks_[static_cast<std::size_t>(chunk.sequence)];
      while (static_cast<int>(blocks.size()) * kBlockLen < length) blocks.push_back(next_block_++);
      tables.insert(tables.end(), blocks.begin(), blocks.end());
      tables.resize((starts.size() - 1) * stride, -1);  // invalid block
      if (!chunk.sampled) continue;
      logits_rows.push_back(static_cast<std::int32_t>(ids.size()) - 1);
      chunk.sample.sequence = static_cast<std::uint64_t>(chunk.sequence) + 1;
      chunk.sample.position = length;
      sample.push_back(chunk.sample);
    }
    decoder_->launch({ids, {starts, positions, tables, static_cast<std::int64_t>(stride)}, logits_rows, sample});
  }
  std::vector<Sampled> collect() { return ops_->collect(); }
  std::vector<Sampled> step(std::vector<Chunk> chunks) {
    launch(std::move(chunks));
    return collect();
  }

  ops::Ops& ops() { return *ops_; }
  std::int64_t replayed() const { return dynamic_cast<const CudaOps&>(*ops_).replayed_steps(); }

 private:
  std::unique_ptr<ops::Ops> ops_;
  std::unique_ptr<model::Decoder> decoder_;
  std::unique_ptr<ops::KvCache> cache_;
  std::vector<int> lengths_ = std::vector<int>(kLimits.max_sequences);
  std::vector<std::vector<std::int32_t>> blocks_{static_cast<std::size_t>(kLimits.max_sequences)};
  int next_block_ = 0;
};

using Chunk = Model::Chunk;

SampleRow greedy() {
  SampleRow row;
  row.temperature = 0;
  return row;
}

// The prompt of sequence s in a test, and its sampling.
std::vector<std::int32_t> prompt_of(int s) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(1 + s * 5 % 9));
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] = static_cast<std::int32_t>(i * i + 3 * static_cast<std::size_t>(s)) % kVocab;
  return out;
}
SampleRow sampling_of(int s) {
  SampleRow row;
  row.temperature = s % 3 == 0 ? 0.0F : 0.8F;
  row.top_k = s % 4 == 1 ? 7 : 0;
  row.top_p = s % 4 == 2 ? 0.9F : 1.0F;
  row.seed = static_cast<std::uint64_t>(s) * 77;
  return row;
}

class CudaOpsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::test_folder();
    mixture_ = folder_ / "mixture";
    testing::write_tiny_workspace(folder_);
    testing::TinyModel mixture;
    mixture.experts = 6, mixture.layer_experts = "md";
    testing::write_tiny_workspace(mixture_, mixture);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  Model make(const ops::CudaOptions& options = {}, const std::string& weight_type = "fp32") {
    return Model(folder_, ops::make_cuda_ops(options), weight_type);
  }

  std::filesystem::path folder_, mixture_;  // mixture_: a model with experts
};

// The tokens of `count` sequences, which are prefilled in one or more steps and then decoded together.
std::vector<std::vector<std::int32_t>> run(Model& model, int count, int decodes) {
  std::vector<std::vector<std::int32_t>> out(static_cast<std::size_t>(count));
  const auto keep = [&](const std::vector<Sampled>& sampled, int first) {
    for (std::size_t i = 0; i < sampled.size(); ++i) {
      EXPECT_EQ(sampled[i].error, "");
      out[static_cast<std::size_t>(first) + i].push_back(sampled[i].token);
    }
  };
  for (int s = 0; s < count; s += 4) {
    std::vector<Chunk> chunks;
    for (int i = s; i < std::min(count, s + 4); ++i) chunks.push_back({i, prompt_of(i), sampling_of(i)});
    keep(model.step(chunks), s);
  }
  for (int step = 0; step < decodes; ++step) {
    std::vector<Chunk> chunks;
    for (int s = 0; s < count; ++s) chunks.push_back({s, {out[static_cast<std::size_t>(s)].back()}, sampling_of(s)});
    keep(model.step(chunks), 0);
  }
  return out;
}

TEST_F(CudaOpsTest, a_replayed_step_equals_an_issued_step) {
  for (const bool reproducible : {false, true}) {
    for (const auto* type : {"fp32", "bf16"}) {
      auto replaying = make({.reproducible = reproducible}, type);
      auto issuing = make({.reproducible = reproducible, .graphs = false}, type);
      constexpr int kDecodes = 6;
      EXPECT_EQ(run(replaying, 11, kDecodes), run(issuing, 11, kDecodes)) << type << ", reproducible " << reproducible;
      EXPECT_EQ(replaying.replayed(), kDecodes);
      EXPECT_EQ(issuing.replayed(), 0);
    }
  }
}

TEST_F(CudaOpsTest, padding_changes_no_bit_of_a_reproducible_step) {
  for (const auto* type : {"fp32", "fp16"}) {
    for (const auto& folder : {folder_, mixture_}) {
      Model padded(folder, ops::make_cuda_ops({.reproducible = true}), type);
      auto issuing = ops::make_cuda_ops({.reproducible = true, .graphs = false});
      Model exact(folder, std::make_unique<Exact>(std::move(issuing), 5), type);
      EXPECT_EQ(run(padded, 5, 5), run(exact, 5, 5)) << type;
      EXPECT_EQ(padded.replayed(), 5);
    }
  }
}

TEST_F(CudaOpsTest, tokens_in_fp32_equal_the_cpu) {
  for (const auto& folder : {folder_, mixture_}) {
    Model cuda(folder, ops::make_cuda_ops({})), cpu(folder, ops::make_cpu_ops(1));
    EXPECT_EQ(run(cuda, 9, 8), run(cpu, 9, 8));
  }
}

TEST_F(CudaOpsTest, steps_in_flight_take_tokens_that_the_host_has_not_seen) {
  auto waiting = make(), flying = make();
  const auto expected = run(waiting, 3, 8);
  std::vector<std::vector<std::int32_t>> got(3);
  const auto keep = [&](const std::vector<Sampled>& sampled) {
    ASSERT_EQ(sampled.size(), 3U);
    for (std::size_t i = 0; i < 3; ++i) got[i].push_back(sampled[i].token);
  };
  flying.launch(
      {{0, prompt_of(0), sampling_of(0)}, {1, prompt_of(1), sampling_of(1)}, {2, prompt_of(2), sampling_of(2)}});
  for (int step = 0; step < 8; ++step) {
    flying.launch({{0, {-1}, sampling_of(0)}, {1, {-2}, sampling_of(1)}, {2, {-3}, sampling_of(2)}});
    keep(flying.collect());
  }
  keep(flying.collect());
  EXPECT_EQ(got, expected);
  EXPECT_EQ(flying.replayed(), 8);
}

TEST_F(CudaOpsTest, a_history_of_penalties_counts_the_tokens_in_flight) {
  auto waiting = make(), flying = make();
  Model cpu(folder_, ops::make_cpu_ops(1));
  const auto prompt = prompt_of(3);
  auto penal = greedy();
  penal.presence_penalty = 3;
  penal.repetition_penalty = 1.5F;
  penal.prompt = prompt;
  const auto stepwise = [&](Model& model) {
    std::vector<std::int32_t> tokens;
    auto row = penal;
    tokens.push_back(model.step({{0, prompt, row}})[0].token);
    for (int i = 0; i < 8; ++i) {
      row.output = tokens;
      tokens.push_back(model.step({{0, {tokens.back()}, row}})[0].token);
    }
    return tokens;
  };
  const auto expected = stepwise(cpu);
  EXPECT_EQ(stepwise(waiting), expected);
  EXPECT_EQ(waiting.replayed(), 8) << "rows with penalties are sampled after the replay";

  std::vector<std::int32_t> tokens;
  flying.launch({{0, prompt, penal}});
  for (int i = 0; i < 8; ++i) {
    auto row = penal;
    row.output = tokens;
    row.pending = 0;
    flying.launch({{0, {-1}, row}});
    tokens.push_back(flying.collect()[0].token);
  }
  tokens.push_back(flying.collect()[0].token);
  EXPECT_EQ(tokens, expected);
}

TEST_F(CudaOpsTest, log_probabilities_equal_the_cpu) {
  auto cuda = make();
  Model cpu(folder_, ops::make_cpu_ops(1));
  auto row = greedy();
  row.logprobs = 5;
  std::int32_t token = 3;
  for (int i = 0; i < 5; ++i) {
    const auto a = cuda.step({{0, {token}, row}, {1, {token}, greedy()}});
    const auto b = cpu.step({{0, {token}, row}, {1, {token}, greedy()}});
    ASSERT_EQ(a.size(), 2U);
    EXPECT_EQ(a[0].token, b[0].token);
    EXPECT_NEAR(a[0].logprob, b[0].logprob, 1e-4);
    ASSERT_EQ(a[0].top.size(), 5U);
    for (std::size_t t = 0; t < 5; ++t) {
      EXPECT_EQ(a[0].top[t].first, b[0].top[t].first);
      EXPECT_NEAR(a[0].top[t].second, b[0].top[t].second, 1e-4);
    }
    EXPECT_TRUE(a[1].top.empty());
    token = a[0].token;
  }
}

TEST_F(CudaOpsTest, nothing_is_allocated_in_a_step) {
  auto model = make();
  const auto before = allocations();
  std::vector<std::int32_t> all(static_cast<std::size_t>(kLimits.max_rows));
  std::iota(all.begin(), all.end(), 0);
  model.step({{0, all, greedy()}});  // the token budget
  auto penal = greedy();
  penal.presence_penalty = 1;
  penal.prompt = all;
  penal.output = all;
  const std::vector<std::int32_t> banned = {1, 2, 3};
  penal.banned = banned;
  std::vector<Chunk> widest;
  for (int s = 0; s < kLimits.max_sequences; ++s) widest.push_back({s, {s, s}, penal});
  model.step(widest);
  for (auto& chunk : widest) chunk.tokens = {7};
  model.step(widest);
  for (auto& chunk : widest) chunk.sample = greedy();
  model.step(widest);
  model.launch(widest);
  model.launch(widest);
  model.collect();
  model.collect();
  EXPECT_EQ(allocations(), before);
  EXPECT_EQ(model.replayed(), 4);
}

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

TEST_F(CudaOpsTest, a_mask_is_requested_after_the_replay_of_the_forward_pass) {
  auto model = make();
  Model cpu(folder_, ops::make_cpu_ops(1));
  for (auto* one : {&model, &cpu}) one->step({{0, prompt_of(1), greedy()}, {1, prompt_of(2), greedy()}});
  const auto before = allocations();
  for (int i = 0; i < 4; ++i) {
    // The mask forbids the most likely token.
    auto free = greedy();
    auto masked = greedy();
    masked.logprobs = i % 2 == 0 ? 2 : -1;
    const std::vector<std::int32_t> banned = {i};
    if (i == 3) free.banned = banned;
    const NotedMask mask(model, 7 + i);
    masked.mask = &mask;
    const auto got = model.step({{0, {7}, masked}, {1, {i}, free}});
    EXPECT_EQ(mask.replayed_then, i + 1) << "the forward pass was issued before the mask was ready";
    const auto expected = cpu.step({{0, {7}, masked}, {1, {i}, free}});
    ASSERT_EQ(got.size(), 2U);
    for (std::size_t r = 0; r < 2; ++r) {
      EXPECT_EQ(got[r].token, expected[r].token);
      EXPECT_NEAR(got[r].logprob, expected[r].logprob, 1e-4);
      ASSERT_EQ(got[r].top.size(), expected[r].top.size());
      for (std::size_t t = 0; t < got[r].top.size(); ++t) EXPECT_EQ(got[r].top[t].first, expected[r].top[t].first);
    }
  }
  EXPECT_EQ(model.replayed(), 4);
  EXPECT_EQ(allocations(), before);
}

// A step in flight next to a step with penalties and targets: the next step finds the samples of each.
TEST_F(CudaOpsTest, a_replay_that_is_sampled_later_gives_its_tokens_to_the_next_step) {
  auto model = make();
  Model issuing(folder_, ops::make_cuda_ops({.graphs = false}));
  const auto stepwise = [](Model& one) {
    std::vector<std::int32_t> out;
    const auto keep = [&] {
      for (const auto& sampled : one.collect()) {
        EXPECT_EQ(sampled.error, "");
        out.push_back(sampled.token);
      }
    };
    one.launch({{0, prompt_of(4), greedy()}, {1, prompt_of(5), greedy()}});
    for (int i = 0; i < 6; ++i) {
      auto first = sampling_of(i), second = greedy();
      const std::vector<std::int32_t> banned = {3 * i, 3 * i + 1};
      if (i % 2 == 0) first.banned = banned;
      if (i % 3 == 0) second.target = 30 + i, second.logprobs = 0;
      one.launch({{0, {-1}, first}, {1, {-2}, second}});
      keep();
    }
    keep();
    return out;
  };
  EXPECT_EQ(stepwise(model), stepwise(issuing));
  EXPECT_EQ(model.replayed(), 6);
}

TEST_F(CudaOpsTest, calls_in_the_wrong_order_are_rejected) {
  auto model = make();
  EXPECT_THROW(model.collect(), Error) << "run_step() was not called";
  EXPECT_TRUE(model.step({{0, {1, 2, 3}, {}, false}}).empty());
  model.launch({{0, {4}, greedy()}});
  model.launch({{0, {-1}, greedy()}});
  EXPECT_THROW(model.launch({{1, {5}, greedy()}}), Error) << "too many steps are in flight";
  EXPECT_EQ(model.collect().size(), 1U);
  EXPECT_EQ(model.collect().size(), 1U);
  EXPECT_THROW(model.collect(), Error);
}

TEST_F(CudaOpsTest, invalid_steps_are_rejected_and_the_next_step_works) {
  auto model = make(), other = make();
  const auto expected = other.step({{0, {5, 6}, greedy()}});
  auto& ops = model.ops();
  const std::vector<std::int32_t> starts = {0, 1}, zero = {0}, far = {kLimits.max_positions}, block = {kBlocks},
                                  unknown = {kVocab}, unsampled = {-1}, none;
  const std::vector<SampleRow> row = {greedy()};
  EXPECT_THROW(ops.begin_step({unknown, {starts, zero, zero, 1}, zero, row}), Error);
  EXPECT_THROW(ops.begin_step({unsampled, {starts, zero, zero, 1}, zero, row}), Error);
  EXPECT_THROW(ops.begin_step({zero, {starts, far, zero, 1}, zero, row}), Error);
  EXPECT_THROW(ops.begin_step({zero, {starts, zero, block, 1}, zero, row}), Error);
  EXPECT_THROW(ops.begin_step({zero, {starts, zero, none, 1}, zero, row}), Error);
  EXPECT_THROW(ops.run_step([](const ops::StepShape&) {}), Error);
  const auto got = model.step({{0, {5, 6}, greedy()}});
  EXPECT_EQ(got[0].token, expected[0].token);
}

TEST_F(CudaOpsTest, a_failed_step_does_not_affect_other_steps) {
  auto model = make(), other = make();
  const auto first = other.step({{0, prompt_of(2), greedy()}});
  const auto second = other.step({{0, {first[0].token}, greedy()}});
  model.launch({{0, prompt_of(2), greedy()}});
  auto& ops = model.ops();
  const std::vector<std::int32_t> ids = {1, 2};
  ops.begin_step({ids, {}, {}, {}});
  EXPECT_THROW(ops.run_step([](const ops::StepShape&) { throw Error(ErrorCode::internal, "a test"); }), Error);
  EXPECT_EQ(model.collect()[0].token, first[0].token);
  EXPECT_EQ(model.step({{0, {first[0].token}, greedy()}})[0].token, second[0].token);
}

TEST_F(CudaOpsTest, log_probabilities_of_16_bit_weights_are_close_to_fp32) {
  for (const auto* type : {"bf16", "fp16"}) {
    auto rounded = make({}, type);
    const double roundings = std::string(type) == "bf16" ? 0x1p-8 : 0x1p-11;
    auto row = greedy();
    row.logprobs = 0;
    for (int s = 0; s < 4; ++s) {
      auto exact = make();
      const auto a = exact.step({{s, prompt_of(s), row}}), b = rounded.step({{s, prompt_of(s), row}});
      if (a[0].token == b[0].token) {
        EXPECT_NEAR(a[0].logprob, b[0].logprob, 60 * roundings) << type;
      }
    }
  }
}

// Two layers with different windows and all optional features, directly on the operations.
class TwoLayers {
 public:
  static constexpr int kHeads = 4, kKvHeads = 2, kDim = 32, kHidden = 24, kTurns = 200;
  static constexpr DType kType = DType::bf16;

  explicit TwoLayers(std::unique_ptr<ops::Ops> ops, int quant_bits = 0) : ops_(std::move(ops)) {
    ops::Random random(7);
    constexpr int kQkv = (kHeads + 2 * kKvHeads) * kDim;
    table_ = ops_->make_embedding(matrix(random, kVocab, kHidden).host(), kType);
    for (int layer = 0; layer < 2; ++layer) {
      qkv_weight_.push_back(linear(random, kQkv, kHidden));
      out_weight_.push_back(linear(random, kHidden, kHeads * kDim));
    }
    logits_weight_ = linear(random, kVocab, kHidden);
    norm_ = floats(random, 1, kHidden);
    head_norm_ = floats(random, 1, kDim);
    q_scale_ = floats(random, 1, kLimits.max_positions);
    turns_ = floats(random, kTurns, kDim / 2);
    slopes_ = floats(random, 1, kHeads);
    const int rows = kLimits.max_rows;
    residual_ = std::make_unique<ops::DeviceMatrix>(*ops_, DType::f32, rows, kHidden);
    normed_ = std::make_unique<ops::DeviceMatrix>(*ops_, kType, rows, kHidden);
    delta_ = std::make_unique<ops::DeviceMatrix>(*ops_, kType, rows, kHidden);
    qkv_ = std::make_unique<ops::DeviceMatrix>(*ops_, kType, rows, kQkv);
    attended_ = std::make_unique<ops::DeviceMatrix>(*ops_, kType, rows, kHeads * kDim);
    last_ = std::make_unique<ops::DeviceMatrix>(*ops_, kType, kLimits.max_sequences, kHidden);
    logits_ = std::make_unique<ops::DeviceMatrix>(*ops_, DType::f32, kLimits.max_sequences, kVocab);
    cache_ = ops_->make_kv_cache({2, kKvHeads, kDim, kBlockLen, kType, quant_bits}, kBlocks);
    ops_->prepare(kLimits, [this](const ops::StepShape& shape) { issue(shape); });
  }

  // A step of consecutive rows of each sequence; the last row is sampled.
  struct Rows {
    std::vector<std::int32_t> tokens;
    int first_position = 0;
    std::vector<std::int32_t> blocks;
  };
  std::vector<Sampled> step(const std::vector<Rows>& sequences, bool own_turns = false, int logprobs = -1,
                            const std::vector<std::pair<std::int32_t, std::int32_t>>& copies = {}) {
    std::vector<std::int32_t> ids, starts{0}, positions, turns, tables, logits_rows;
    std::vector<SampleRow> sample(sequences.size(), greedy());
    constexpr std::size_t kStride = 16;
    for (const auto& rows : sequences) {
      for (const auto& id : rows.tokens) {
        positions.push_back(rows.first_position + static_cast<int>(&id - rows.tokens.data()));
        if (own_turns) turns.push_back(100 + positions.back());
        ids.push_back(id);
      }
      starts.push_back(static_cast<std::int32_t>(ids.size()));
      logits_rows.push_back(starts.back() - 1);
      tables.insert(tables.end(), rows.blocks.begin(), rows.blocks.end());
      tables.resize((starts.size() - 1) * kStride, -1);
    }
    for (auto& row : sample) row.logprobs = logprobs;
    ops_->begin_step({ids, {starts, positions, tables, kStride, turns}, logits_rows, sample});
    ops_->copy_blocks(*cache_, copies);
    ops_->run_step([this](const ops::StepShape& shape) { issue(shape); });
    return ops_->collect();
  }
  std::int64_t replayed() { return dynamic_cast<CudaOps&>(*ops_).replayed_steps(); }
  ops::Ops& ops() { return *ops_; }
  ops::KvCache& cache() { return *cache_; }

 private:
  static ops::Matrix matrix(ops::Random& random, int rows, int cols) {
    return ops::Matrix::random(random, kType, rows, cols, 0.4F);
  }
  std::unique_ptr<ops::Linear> linear(ops::Random& random, int rows, int cols) {
    const auto weight = matrix(random, rows, cols);
    const std::array parts = {weight.host()};
    return ops_->make_linear(parts, {}, kType);
  }
  std::unique_ptr<ops::DeviceMatrix> floats(ops::Random& random, int rows, int cols) {
    return std::make_unique<ops::DeviceMatrix>(*ops_, ops::Matrix::random(random, DType::f32, rows, cols));
  }

  void issue(const ops::StepShape& shape) {
    const auto rows = [&](const std::unique_ptr<ops::DeviceMatrix>& of) { return of->slice(0, shape.rows); };
    const auto last = [&](const std::unique_ptr<ops::DeviceMatrix>& of) { return of->slice(0, shape.logits_rows); };
    constexpr float kEps = 1e-5F;
    ops_->embed(rows(residual_), *table_, 1.5F);
    for (int layer = 0; layer < 2; ++layer) {
      const auto at = static_cast<std::size_t>(layer);
      ops_->rms_norm(rows(normed_), rows(residual_), layer == 0 ? ops::Tensor{} : rows(delta_),
                     {.weight = norm_->floats(), .eps = kEps, .delta_weight = layer == 0 ? nullptr : norm_->floats()});
      ops_->linear(rows(qkv_), rows(normed_), *qkv_weight_[at]);
      ops_->rotary_store(rows(qkv_),
                         {.cos_sin = turns_->floats(),
                          .rotary_dim = kDim / 2,
                          .q_norm = head_norm_->floats(),
                          .k_norm = head_norm_->floats(),
                          .norm_eps = kEps,
                          .q_scale = q_scale_->floats()},
                         *cache_, layer, kHeads);
      ops::AttentionParams how{.scale = 0.2F};
      if (layer == 0) {
        how.window = 6;
        how.alibi = slopes_->floats();
      } else {
        how.soft_cap = 1.5F;
      }
      ops_->attention(rows(attended_), rows(qkv_), *cache_, layer, kHeads, how);
      ops_->linear(rows(delta_), rows(attended_), *out_weight_[at]);
    }
    ops_->rms_norm(rows(normed_), rows(residual_), rows(delta_),
                   {.weight = norm_->floats(), .eps = kEps, .delta_weight = norm_->floats()});
    ops_->gather_rows(last(last_), rows(normed_));
    ops_->linear(last(logits_), last(last_), *logits_weight_);
    ops_->scale_logits(last(logits_), 1, 2);
    ops_->sample(last(logits_));
  }

  std::unique_ptr<ops::Ops> ops_;
  std::unique_ptr<ops::Embedding> table_;
  std::vector<std::unique_ptr<ops::Linear>> qkv_weight_, out_weight_;
  std::unique_ptr<ops::Linear> logits_weight_;
  std::unique_ptr<ops::DeviceMatrix> norm_, head_norm_, q_scale_, turns_, slopes_;
  std::unique_ptr<ops::DeviceMatrix> residual_, normed_, delta_, qkv_, attended_, last_, logits_;
  std::unique_ptr<ops::KvCache> cache_;
};

// Two sequences whose decodes go beyond the window and across blocks; from the 10th step on with their own rotary rows.
std::vector<std::int32_t> decode_two(TwoLayers& model) {
  const std::vector<std::int32_t> first = {3, 1, 7, 5, 9, 2, 2}, second = {8, 6};
  const std::vector<std::int32_t> blocks[2] = {{0, 1, 2, 3, 4, 5, 6, 7}, {20, 31, 22, 33, 24, 35, 26, 37}};
  std::vector<std::int32_t> tokens;
  auto sampled = model.step({{first, 0, blocks[0]}, {second, 0, blocks[1]}});
  for (int i = 0; i < 20; ++i) {
    for (const auto& one : sampled) {
      EXPECT_EQ(one.error, "");
      tokens.push_back(one.token);
    }
    const auto n = tokens.size();
    sampled = model.step({{{tokens[n - 2]}, 7 + i, blocks[0]}, {{tokens[n - 1]}, 2 + i, blocks[1]}}, i >= 10);
  }
  return tokens;
}

class CudaLayersTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(QuantPolicy, CudaLayersTest, ::testing::Values(0, 8, 4));

TEST_P(CudaLayersTest, layers_with_different_windows_can_be_replayed) {
  TwoLayers replaying(ops::make_cuda_ops({.reproducible = true}), GetParam());
  TwoLayers issuing(ops::make_cuda_ops({.reproducible = true, .graphs = false}), GetParam());
  const auto tokens = decode_two(replaying);
  EXPECT_EQ(replaying.replayed(), 20);
  EXPECT_EQ(decode_two(issuing), tokens);
  EXPECT_EQ(issuing.replayed(), 0);
  EXPECT_GT(std::set<std::int32_t>(tokens.begin(), tokens.end()).size(), 4U)
      << "the tokens must differ for the test to be useful";
}

TEST_P(CudaLayersTest, a_copied_block_belongs_to_the_other_sequence) {
  TwoLayers model(ops::make_cuda_ops({.reproducible = true}), GetParam());
  const std::vector<std::int32_t> prompt = {3, 1, 7, 5, 9, 2};
  const auto first = model.step({{prompt, 0, {0, 1}}})[0].token;
  // Block 1 through block 9: pairs are copied in order. The two sequences of one prompt then continue in separate
  // blocks.
  const auto both = model.step({{{first}, 6, {0, 1}}, {{first}, 6, {0, 5}}}, false, 0, {{1, 9}, {9, 5}, {0, 0}});
  EXPECT_EQ(both[0].token, both[1].token);
  EXPECT_EQ(both[0].logprob, both[1].logprob);
  const auto apart = model.step({{{11}, 7, {0, 1}}, {{12}, 7, {0, 5}}}, false, 0);
  const auto again = model.step({{{11}, 7, {0, 5}}}, false, 0);
  EXPECT_EQ(apart[0].token, again[0].token);
  EXPECT_EQ(apart[0].logprob, again[0].logprob);
  const std::vector<std::int32_t> ids = {1}, starts = {0, 1}, zero = {0};
  model.ops().begin_step({ids, {starts, zero, zero, 1}, {}, {}});
  const std::vector<std::pair<std::int32_t, std::int32_t>> beyond = {{0, kBlocks}}, below = {{-1, 0}};
  EXPECT_THROW(model.ops().copy_blocks(model.cache(), beyond), Error);
  EXPECT_THROW(model.ops().copy_blocks(model.cache(), below), Error);
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

}  // namespace
}  // namespace charonia::cuda
