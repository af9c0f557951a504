// The engine on the CUDA device, compared with the engine on the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <stdexcept>

#include "charonia/engine.h"
#include "engine_support.h"
#include "errors.h"
#include "ops/cuda/device/runtime.h"
#include "ops/cuda/make_cuda_ops.h"
#if defined(CHARONIA_CUDA_ON_HOST)
#include "emulator/emulated_device.h"
#endif
#include "test_folder.h"
#include "tiny_workspace.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::error_of;
using testing::MaskOf;
using testing::request;
using testing::TinyModel;
using testing::write_tiny_workspace;

class CudaEngineTest : public ::testing::Test {
 protected:
  void SetUp() override { dir_ = testing::test_folder(); }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  // Writes a model with weights in the given type, and returns its folder.
  std::filesystem::path write(TinyModel model = {}, const std::string& weight_type = "fp32") const {
    const auto folder = dir_ / (weight_type + "_" + std::to_string(model.ranks));
    write_tiny_workspace(folder, model);
    std::stringstream config;
    config << std::ifstream(folder / "config.ini").rdbuf();
    auto text = config.str();
    const std::string before = "weight_type = fp32";
    text.replace(text.find(before), before.size(), "weight_type = " + weight_type);
    std::ofstream(folder / "config.ini") << text;
    return folder;
  }

  std::filesystem::path dir_;
};

Settings with(Settings settings, const std::string& key, const std::string& value) {
  settings[key] = value;
  return settings;
}

const Settings kCpu = {{"device", "cpu"}, {"threads", "1"}};
const Settings kCuda = {{"device", "cuda"}, {"max_batch_size", "8"}};
const Settings kReproducible = with(kCuda, "reproducible", "True");

struct Completion {
  std::vector<TokenId> tokens;
  std::vector<float> logprobs, prompt_logprobs;
  bool operator==(const Completion&) const = default;
};

std::vector<Completion> completions(Engine& engine, const std::vector<Request>& all) {
  std::vector<Collector> collectors(all.size());
  for (std::size_t i = 0; i < all.size(); ++i) engine.submit(all[i], collectors[i].callback());
  std::vector<Completion> out;
  for (auto& collector : collectors) {
    out.push_back({collector.tokens(), collector.logprobs(), collector.prompt_logprobs()});
  }
  engine.check_integrity();
  return out;
}

std::vector<Completion> completions(const std::filesystem::path& folder, const Settings& settings,
                                    const std::vector<Request>& all) {
  Engine engine(folder, settings);
  return completions(engine, all);
}

// Prompts of several lengths, so that steps mix chunks and decodes.
std::vector<TokenId> prompt(int length, int salt) {
  std::vector<TokenId> ids;
  for (int i = 0; i < length; ++i) ids.push_back((i * i + 7 * length + salt) % 40);
  return ids;
}

std::vector<Request> greedy_requests(int max_tokens) {
  std::vector<Request> out;
  for (const int length : {1, 3, 17, 40, 9}) out.push_back(request(prompt(length, 0), max_tokens));
  return out;
}

// Requests of every kind of sampling.
std::vector<Request> sampled_requests(int count, int max_tokens) {
  std::mt19937 random(5);
  const auto below = [&](int n) { return std::uniform_int_distribution<int>(0, n - 1)(random); };
  std::vector<Request> out;
  for (int i = 0; i < count; ++i) {
    auto one = request(prompt(1 + below(30), i), max_tokens);
    auto& sampling = one.sampling;
    sampling.seed = static_cast<std::uint64_t>(i);
    sampling.temperature = i % 4 == 0 ? 0.0F : 0.9F;
    if (i % 3 == 0) sampling.top_k = 1 + below(10);
    if (i % 3 == 1) sampling.top_p = 0.8F;
    if (i % 5 == 0) sampling.min_p = 0.05F;
    if (i % 2 == 0) sampling.repetition_penalty = 1.2F;
    if (i % 4 == 1) sampling.presence_penalty = 0.6F;
    if (i % 4 == 2) sampling.frequency_penalty = 0.4F;
    if (i % 5 == 1) sampling.logit_bias = {{below(40), 3.0F}, {below(40), -4.0F}};
    if (i % 5 == 2) sampling.bad_words = {{below(40)}};
    if (i % 3 == 0) sampling.logprobs = below(4);
    out.push_back(std::move(one));
  }
  return out;
}

// One layer without experts and two with experts, with sizes that are not multiples of the kernels' tiles.
TinyModel mixture() {
  TinyModel model;
  model.layers = 3, model.experts = 7, model.experts_per_token = 3, model.expert_inter = 20;
  model.layer_experts = "dmm";
  return model;
}

// The same with another router and a shared expert.
TinyModel scored_mixture() {
  auto model = mixture();
  model.experts = 8, model.router_bias = true, model.shared_inter = 12;
  model.more =
      "router_score = sigmoid\nrouter_groups = 4\nrouter_top_groups = 2\nrouter_scale = 1.5\nrouter_fp32 = 1\n";
  return model;
}

// Requests whose tokens must alternate between classes, some with bans and penalties, and some with log probabilities
// of their prompts.
std::vector<Request> masked_requests(int max_tokens) {
  auto out = sampled_requests(9, max_tokens);
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (i % 3 != 2) {
      const auto classes = static_cast<TokenId>(2 + i);
      out[i].mask = std::make_shared<MaskOf>(40, [classes](TokenId token, std::span<const TokenId> output) {
        return token % classes == static_cast<TokenId>(output.size()) % classes;
      });
    }
    if (i % 2 == 0) out[i].sampling.prompt_logprobs = static_cast<int>(i);
  }
  return out;
}

void expect_near(const std::vector<float>& got, const std::vector<float>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-4) << i;
}

// Models with the attributes for other norms, rotations, residual streams, logits, routers and shared experts.
std::vector<TinyModel> variants() {
  TinyModel olmo, granite, hunyuan, cohere, qwen = mixture();
  olmo.qk_norm = olmo.qk_norm_rows = olmo.post_norms = true;
  olmo.pre_norms = false;
  olmo.more = "layer_rotary = rn\n";
  granite.more = "residual_multiplier = 0.22\nlogits_scale = 0.125\nlogit_soft_cap = 9\nrotary_interleaved = 1\n";
  hunyuan.qk_norm = true;
  hunyuan.more = "qk_norm_after_rotary = 1\nq_scale_beta = 0.1\nq_scale_length = 4\n";
  cohere.parallel_block = true;
  cohere.more = "layer_norm = 1\nrotary_interleaved = 1\nlogits_scale = 0.25\n";
  qwen.shared_inter = 52, qwen.shared_gate = true;
  return {olmo, granite, hunyuan, cohere, qwen, scored_mixture()};
}

TEST_F(CudaEngineTest, tokens_of_all_variants_equal_the_cpu) {
  for (const auto& model : variants()) {
    SCOPED_TRACE(model.more);
    const auto folder = write(model);
    const auto all = greedy_requests(16);
    const auto expected = completions(folder, kCpu, all);
    for (const auto* graphs : {"True", "False"}) {
      EXPECT_EQ(completions(folder, with(kCuda, "cuda_graphs", graphs), all), expected);
    }
  }
}

TEST_F(CudaEngineTest, tokens_in_fp32_equal_the_cpu) {
  TinyModel biased, tied, wide;
  biased.biases = true;
  tied.tied = true;
  tied.vocab = 53;
  wide.heads = 4, wide.kv_heads = 1, wide.head_dim = 6, wide.inter = 76, wide.layers = 3;
  for (const auto& model : {TinyModel{}, biased, tied, wide, mixture()}) {
    const auto folder = write(model);
    const auto all = greedy_requests(16);
    EXPECT_EQ(completions(folder, kCuda, all), completions(folder, kCpu, all));
  }
}

TEST_F(CudaEngineTest, every_kind_of_sampling_equals_the_cpu) {
  const auto folder = write();
  const auto all = sampled_requests(12, 12);
  const auto got = completions(folder, kCuda, all), expected = completions(folder, kCpu, all);
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(got[i].tokens, expected[i].tokens) << "request " << i;
    ASSERT_EQ(got[i].logprobs.size(), expected[i].logprobs.size());
    for (std::size_t t = 0; t < got[i].logprobs.size(); ++t) {
      EXPECT_NEAR(got[i].logprobs[t], expected[i].logprobs[t], 1e-4);
    }
  }
}

TEST_F(CudaEngineTest, masks_and_prompt_log_probabilities_equal_the_cpu) {
  const auto all = masked_requests(12);
  for (const auto& model : {TinyModel{}, mixture()}) {
    const auto folder = write(model);
    const auto expected = completions(folder, kCpu, all);
    for (const auto* graphs : {"True", "False"}) {
      const auto got = completions(folder, with(with(kCuda, "cuda_graphs", graphs), "token_budget", "24"), all);
      for (std::size_t i = 0; i < all.size(); ++i) {
        SCOPED_TRACE("request " + std::to_string(i) + ", graphs " + graphs);
        EXPECT_EQ(got[i].tokens, expected[i].tokens);
        expect_near(got[i].logprobs, expected[i].logprobs);
        expect_near(got[i].prompt_logprobs, expected[i].prompt_logprobs);
        EXPECT_EQ(got[i].prompt_logprobs.empty(), i % 2 == 1 || all[i].input_ids.size() == 1);
      }
    }
  }
}

// The sampler counts again after several tokens were accepted together, and steps with several tokens of a sequence are
// not replayed.
TEST_F(CudaEngineTest, jump_forward_tokens_equal_tokens_sampled_one_by_one) {
  auto all = sampled_requests(9, 30);
  std::vector<Request> together, one_by_one;
  for (auto& one : all) {
    one.sampling.logprobs = -1;
    one.sampling.logit_bias.clear();
    one.sampling.bad_words.clear();
    together.push_back(testing::with_runs(one, 40, false));
    one_by_one.push_back(testing::with_runs(one, 40, true));
  }
  const auto folder = write();
  const auto expected = completions(folder, kCpu, one_by_one);
  for (const auto* graphs : {"True", "False"}) {
    Engine engine(folder, with(with(kCuda, "cuda_graphs", graphs), "token_budget", "24"));
    for (auto* const requests : {&together, &one_by_one}) {
      const auto before = engine.stats().num_steps;
      // A provider belongs to one request.
      auto fresh = *requests;
      for (auto& one : fresh) one.mask = std::make_shared<testing::RunsOf>(40);
      const auto got = completions(engine, fresh);
      for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i].tokens, expected[i].tokens) << "request " << i;
      const auto steps = engine.stats().num_steps - before;
      EXPECT_EQ(steps < 45, requests == &together) << steps;
    }
  }
}

TEST_F(CudaEngineTest, a_mask_that_fails_or_allows_nothing_ends_only_its_request) {
  const auto folder = write();
  Engine engine(folder, kCuda);
  auto failing = request(prompt(5, 1), 30), empty = request(prompt(6, 2), 30);
  failing.mask = std::make_shared<MaskOf>(40, [](TokenId, std::span<const TokenId> output) -> bool {
    if (output.size() == 3) throw std::runtime_error("no rule follows");
    return true;
  });
  empty.mask = std::make_shared<MaskOf>(40, [](TokenId, std::span<const TokenId> output) { return output.size() < 2; });
  Collector failed, emptied, free;
  engine.submit(request(prompt(9, 3), 20), free.callback());
  engine.submit(failing, failed.callback());
  engine.submit(empty, emptied.callback());
  EXPECT_NE(failed.last().error.find("no rule follows"), std::string::npos) << failed.last().error;
  EXPECT_NE(emptied.last().error.find("allows no token"), std::string::npos) << emptied.last().error;
  EXPECT_EQ(free.tokens(), completions(folder, kCpu, {request(prompt(9, 3), 20)})[0].tokens);
  engine.check_integrity();
}

// In 16 bits the device may choose another token if two have nearly equal probabilities. For common tokens, the
// probabilities are close.
TEST_F(CudaEngineTest, probabilities_in_16_bits_are_close_to_the_cpu) {
  for (const auto* type : {"bf16", "fp16"}) {
    const auto folder = write({}, type);
    auto all = greedy_requests(1);
    for (auto& one : all) one.sampling.logprobs = 0;
    const auto got = completions(folder, kCuda, all), expected = completions(folder, kCpu, all);
    for (std::size_t i = 0; i < all.size(); ++i) {
      EXPECT_NEAR(got[i].logprobs[0], expected[i].logprobs[0], std::string(type) == "bf16" ? 0.15 : 0.02) << type;
    }
  }
}

// An integer that is a tie on one device may be the next integer on the other. So the devices may differ by as much as
// without quantisation, plus the effect of quantisation on either device.
TEST_F(CudaEngineTest, probabilities_with_a_quantised_cache_are_close_to_the_cpu) {
  TinyModel model;
  model.head_dim = 32;
  auto all = greedy_requests(1);
  for (auto& one : all) one.sampling.logprobs = 0;
  const auto first_logprobs = [&](const std::filesystem::path& folder, const Settings& device, const char* policy) {
    std::vector<float> found;
    for (const auto& completion : completions(folder, with(device, "quant_policy", policy), all)) {
      found.push_back(completion.logprobs[0]);
    }
    return found;
  };
  const auto max_difference = [](const std::vector<float>& a, const std::vector<float>& b) {
    float maximum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) maximum = std::max(maximum, std::abs(a[i] - b[i]));
    return maximum;
  };
  for (const auto* type : {"fp32", "bf16"}) {
    const auto folder = write(model, type);
    const auto exact = first_logprobs(folder, kCpu, "0");
    const float of_devices = max_difference(first_logprobs(folder, kCuda, "0"), exact);
    EXPECT_LT(of_devices, std::string(type) == "fp32" ? 1e-4F : 0.15F);
    float coarser = 0;
    for (const auto* policy : {"8", "4"}) {
      SCOPED_TRACE(std::string(type) + ", quant_policy " + policy);
      const auto expected = first_logprobs(folder, kCpu, policy);
      const float of_quantisation = max_difference(expected, exact);
      EXPECT_GT(of_quantisation, coarser) << "fewer bits give a larger difference";
      coarser = of_quantisation;
      EXPECT_LE(max_difference(first_logprobs(folder, kCuda, policy), expected), of_devices + 2 * of_quantisation);
    }
  }
}

TEST_F(CudaEngineTest, captured_and_issued_decodes_give_equal_tokens) {
  const auto expect_same = [&](const std::filesystem::path& folder, const Settings& settings, const auto& all) {
    EXPECT_EQ(completions(folder, settings, all), completions(folder, with(settings, "cuda_graphs", "False"), all));
  };
  const auto folder = write({}, "bf16");
  for (const auto& all : {sampled_requests(6, 12), masked_requests(8)}) expect_same(folder, kReproducible, all);
  TinyModel tiled;
  tiled.head_dim = 32;
  const auto other = write(tiled, "bf16");
  for (const auto* policy : {"8", "4"}) {
    SCOPED_TRACE(std::string("quant_policy ") + policy);
    expect_same(other, with(kReproducible, "quant_policy", policy), sampled_requests(6, 12));
  }
}

// The guarantee of the reproducible mode, bitwise: also compares log probabilities.
class CudaReproducibleTest : public CudaEngineTest, public ::testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Type, CudaReproducibleTest, ::testing::Values("fp32", "bf16", "fp16"),
                         [](const auto& i) { return i.param; });

void expect_completions_of_the_request_alone(const std::filesystem::path& folder, const Settings& settings) {
  auto all = sampled_requests(8, 10);
  for (auto& one : all) one.sampling.logprobs = 2;
  std::vector<Completion> alone;
  {
    Engine engine(folder, settings);
    for (const auto& one : all) alone.push_back(completions(engine, {one})[0]);
  }
  {
    Engine engine(folder, settings);
    EXPECT_EQ(completions(engine, all), alone) << "all requests together";
    EXPECT_EQ(completions(engine, all), alone) << "with cached prompt blocks";
    Collector again(engine, all[1]);
    EXPECT_GT(again.wait().back().num_cached_tokens, 0);
  }
  {
    Engine engine(folder, with(with(settings, "cache_max_entry_count", "14"), "token_budget", "24"));
    EXPECT_EQ(completions(engine, all), alone) << "in small chunks, with preemptions";
    EXPECT_GT(engine.stats().num_preemptions, 0);
  }
}

TEST_P(CudaReproducibleTest, completions_depend_only_on_the_request) {
  expect_completions_of_the_request_alone(write({}, GetParam()), kReproducible);
}

// Heads of 32 use tensor cores in 16 bits, heads of 8 do not.
TEST_P(CudaReproducibleTest, completions_with_a_quantised_cache_depend_only_on_the_request) {
  TinyModel tiled;
  tiled.head_dim = 32;
  const auto folder = write(tiled, GetParam());
  for (const auto* policy : {"8", "4"}) {
    expect_completions_of_the_request_alone(folder, with(kReproducible, "quant_policy", policy));
  }
}

// With any other rows in the batch: alone, in batches that are padded to a captured step, and prefilled in chunks of
// other sizes.
TEST_P(CudaReproducibleTest, completions_of_experts_depend_only_on_the_request) {
  for (const auto& model : {mixture(), scored_mixture()}) {
    SCOPED_TRACE(model.more);
    const auto folder = write(model, GetParam());
    auto all = masked_requests(8);
    for (auto& one : all) one.sampling.logprobs = 2;
    std::vector<Completion> alone;
    {
      Engine engine(folder, kReproducible);
      for (const auto& one : all) alone.push_back(completions(engine, {one})[0]);
    }
    EXPECT_EQ(completions(folder, kReproducible, all), alone) << "all requests together";
    EXPECT_EQ(completions(folder, with(kReproducible, "token_budget", "16"), all), alone) << "in small chunks";
  }
}

TEST_F(CudaEngineTest, two_ranks_give_the_tokens_of_one) {
  TinyModel model;
  model.biases = true;
  model.experts = 5;
  model.layer_experts = "dm";
  const auto all = masked_requests(10);
  // Also a model whose norms of q and k are over the heads of both ranks.
  for (auto one : {model, variants().front()}) {
    auto split = one;
    split.ranks = 2;
    const auto expected = completions(write(one), kCuda, all);
    const auto two = write(split);
    for (const auto* reproducible : {"False", "True"}) {
      auto settings = with(with(kCuda, "device_ids", "0,0"), "reproducible", reproducible);
      const auto got = completions(two, settings, all);
      for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(got[i].tokens, expected[i].tokens) << "request " << i;
    }
  }
}

TEST_F(CudaEngineTest, ranks_on_one_gpu_share_its_memory) {
  const auto alone = ops::make_cuda_ops({});
  const auto first_of_two = ops::make_cuda_ops({}, ops::make_nccl_group({0, 0}), 0);
  const auto free = static_cast<double>(alone->free_memory());
  EXPECT_NEAR(static_cast<double>(first_of_two->free_memory()), free / 2, 0.05 * free);
}

TEST_F(CudaEngineTest, a_cancelled_request_does_not_change_the_others) {
  const auto folder = write();
  const auto expected = completions(folder, kCpu, {request(prompt(9, 1), 30)})[0];
  Engine engine(folder, kCuda);
  Collector kept, cancelled;
  const auto handle = engine.submit(request(prompt(12, 2), 200), cancelled.callback());
  engine.submit(request(prompt(9, 1), 30), kept.callback());
  cancelled.wait_for(3);
  engine.cancel(handle);
  EXPECT_EQ(cancelled.wait().back().finish_reason, FinishReason::cancelled);
  EXPECT_EQ(kept.tokens(), expected.tokens);
  engine.check_integrity();
}

// One block at a time: a block of this model is smaller than the unit of memory, so most of them cost nothing.
TEST_F(CudaEngineTest, a_cache_whose_memory_grows_gives_equal_tokens) {
  const auto folder = write();
  const auto all = greedy_requests(24);
  const auto sized = with(kCuda, "cache_max_entry_count", "200");
  EXPECT_EQ(completions(folder, with(sized, "cache_chunk_size", "1"), all), completions(folder, sized, all));
}

#if defined(CHARONIA_CUDA_ON_HOST)
// Only an emulated device can be made to fail and to work again.
TEST_F(CudaEngineTest, a_device_that_fails_ends_all_requests_and_the_engine) {
  for (const int ranks : {1, 2}) {
    for (const auto* graphs : {"True", "False"}) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks, graphs " + graphs);
      TinyModel model;
      model.ranks = ranks;
      const auto folder = write(model);
      const auto settings = with(with(kCuda, "device_ids", ranks == 2 ? "0,0" : "0"), "cuda_graphs", graphs);
      std::vector<Collector> collectors(12);
      {
        Engine engine(folder, settings);
        cuda::fail_in_step(5);
        for (auto& one : collectors) engine.submit(request(prompt(9, 1), 40), one.callback());
        for (auto& one : collectors) {
          EXPECT_EQ(one.last().error_code, ErrorCode::unavailable);
          EXPECT_NE(one.last().error.find("in step 5 ("), std::string::npos) << one.last().error;
        }
        error_of([&] { engine.submit(request({1}, 2), {}); }, ErrorCode::unavailable);
        engine.check_integrity();
      }
      // Not even another engine can use it.
      error_of([&] { Engine engine(folder, settings); }, ErrorCode::internal);
      cuda::fail_in_step(0);
      EXPECT_EQ(completions(folder, settings, {request(prompt(9, 1), 8)})[0].tokens.size(), 8U);
    }
  }
}
#endif

TEST_F(CudaEngineTest, too_little_memory_is_rejected_before_serving) {
  const auto folder = write();
  expect_error(ErrorCode::resource_exhausted, {"cache_max_entry_count"},
               [&] { Engine engine(folder, with(kCuda, "cache_max_entry_count", "1000000000")); });
}

}  // namespace
}  // namespace charonia
