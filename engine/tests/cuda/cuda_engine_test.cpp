// The engine on the CUDA device, compared with the engine on the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <random>

#include "charonia/engine.h"
#include "engine_fixture.h"
#include "engine_support.h"
#include "errors.h"
#include "model_variants.h"
#include "ops/cuda/device/runtime.h"
#include "ops/cuda/make_cuda_ops.h"
#if defined(CHARONIA_CUDA_ON_HOST)
#include "emulator/emulated_device.h"
#endif
#include "test_folder.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::Completion;
using testing::completions;
using testing::error_of;
using testing::MaskOf;
using testing::request;
using testing::TinyModel;

class CudaEngineTest : public ::testing::Test {
 protected:
  void SetUp() override { dir_ = testing::test_folder(); }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  // Writes a model with weights in the given type, and returns its folder.
  std::filesystem::path write(TinyModel model = {}, const std::string& weight_type = "fp32") const {
    const auto folder = dir_ / (weight_type + "_" + std::to_string(model.ranks));
    model.weight_type = weight_type;
    testing::write_tiny_workspace(folder, model);
    return folder;
  }

  testing::AllProposals all_proposals_;
  std::filesystem::path dir_;
};

Settings with(Settings settings, const std::string& key, const std::string& value) {
  settings[key] = value;
  return settings;
}

const Settings kCpu = {{"device", "cpu"}, {"threads", "1"}};
const Settings kCuda = {{"device", "cuda"}, {"max_batch_size", "8"}};
const Settings kReproducible = with(kCuda, "reproducible", "True");

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

std::vector<std::vector<float>> pooled(const std::filesystem::path& folder, const Settings& settings,
                                       const std::string& task) {
  Engine engine(folder, settings);
  std::vector<std::vector<float>> out;
  for (int round = 0; round < 2; ++round) {  // the second round has hits of the prefix cache
    for (const int length : {1, 3, 17, 40}) {
      Request one;
      one.input_ids = prompt(length, 0);
      one.pooling = task;
      out.push_back(Collector(engine, one).last().pooled);
    }
  }
  return out;
}

// Sizes that are not multiples of the kernels' tiles: one layer without experts and two with experts.
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

// Tensor cores compute heads of 32 in 16 bits. The layers have different windows.
TinyModel tiled() {
  TinyModel model;
  model.head_dim = 32, model.layers = 3;
  model.windows = {8, 0};
  model.more = "attention_soft_cap = 20\n";
  return model;
}

TEST_F(CudaEngineTest, EmbeddingsAndScoresAreNearTheCpus) {
  for (const auto* const type : {"fp32", "bf16"}) {
    for (const int labels : {0, 1, 2}) {
      TinyModel model;
      model.labels = labels;
      const std::string task = labels > 0 ? "score" : "embed";
      model.more = "model_task = " + task + "\nscore_labels = " + std::to_string(labels) + "\n";
      const auto folder = write(model, type);
      const auto expected = pooled(folder, kCpu, task), found = pooled(folder, kCuda, task);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        ASSERT_EQ(found[i].size(), labels > 0 ? 1U : 32U);
        for (std::size_t n = 0; n < found[i].size(); ++n) {
          EXPECT_NEAR(found[i][n], expected[i][n], type == std::string("fp32") ? 1e-4 : 0.05);
        }
      }
    }
  }
}

TEST_F(CudaEngineTest, tokens_of_all_variants_equal_the_cpu) {
  TinyModel biased, tied, wide;
  biased.biases = true;
  tied.tied = true;
  tied.vocab = 53;
  wide.heads = 4, wide.kv_heads = 1, wide.head_dim = 6, wide.inter = 76, wide.layers = 3;
  auto models = testing::model_variants();
  models.insert(models.end(), {TinyModel{}, biased, tied, wide, mixture(), scored_mixture(), tiled()});
  for (const auto& model : models) {
    SCOPED_TRACE(model.more);
    const auto folder = write(model);
    const auto all = greedy_requests(16);
    const auto expected = completions(folder, kCpu, all);
    for (const auto* graphs : {"True", "False"}) {
      EXPECT_EQ(completions(folder, with(kCuda, "cuda_graphs", graphs), all), expected);
    }
  }
}

// With 20 blocks for the windows of five sequences. Captured steps read the tables of each step.
TEST_F(CudaEngineTest, windows_that_free_their_blocks_change_no_token) {
  const auto folder = write(tiled());
  const auto all = greedy_requests(40);
  const auto expected = completions(folder, kCpu, all);
  auto settings = kCuda;
  settings.insert({{"cache_block_seq_len", "8"},
                   {"cache_max_entry_count", "80"},
                   {"cache_user_tokens", "80"},
                   {"token_budget", "24"}});
  for (const auto* graphs : {"True", "False"}) {
    Engine engine(folder, with(settings, "cuda_graphs", graphs));
    EXPECT_EQ(engine.info().num_window_blocks, 20);
    EXPECT_EQ(completions(engine, all), expected);
  }
}

// Also masks, log probabilities of prompts, and several sequences of one prompt, which copy its last block.
TEST_F(CudaEngineTest, every_kind_of_sampling_equals_the_cpu) {
  auto all = sampled_requests(12, 12);
  all[5].sampling.n = 3;
  const auto masked = masked_requests(12);
  all.insert(all.end(), masked.begin(), masked.end());
  for (const auto& model : {TinyModel{}, mixture()}) {
    const auto folder = write(model);
    const auto expected = completions(folder, kCpu, all);
    for (const auto* graphs : {"True", "False"}) {
      const auto got = completions(folder, with(with(kCuda, "cuda_graphs", graphs), "token_budget", "24"), all);
      SCOPED_TRACE(graphs);
      testing::expect_near(got, expected);
      for (std::size_t i = 0; i < all.size(); ++i) {
        EXPECT_EQ(got[i].prompt_logprobs.empty(), i < 12 || i % 2 == 1 || all[i].input_ids.size() == 1);
      }
    }
  }
}

// The sampler counts again after several tokens were accepted together, and steps with several tokens of a sequence are
// not replayed.
TEST_F(CudaEngineTest, jump_forward_tokens_equal_tokens_sampled_one_by_one) {
  std::vector<Request> together, one_by_one;
  for (auto& one : sampled_requests(9, 30)) {
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

// In 16 bits the device may choose another token if two have nearly equal probabilities. For common tokens, the
// probabilities are close. An integer of a quantised cache that is a tie on one device may be the next integer on the
// other. So the devices may differ by as much as without quantisation, plus the effect of quantisation on either
// device.
TEST_F(CudaEngineTest, probabilities_in_16_bits_or_with_a_quantised_cache_are_close_to_the_cpu) {
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
  for (const auto& [type, bound] : {std::pair("fp32", 1e-4F), std::pair("fp16", 0.02F), std::pair("bf16", 0.15F)}) {
    const auto folder = write(model, type);
    const auto exact = first_logprobs(folder, kCpu, "0");
    const float of_devices = max_difference(first_logprobs(folder, kCuda, "0"), exact);
    EXPECT_LT(of_devices, bound) << type;
    float of_int8 = 0;
    for (const auto* policy : {"8", "4", "16"}) {
      SCOPED_TRACE(std::string(type) + ", quant_policy " + policy);
      const auto expected = first_logprobs(folder, kCpu, policy);
      const float of_quantisation = max_difference(expected, exact);
      EXPECT_GT(of_quantisation, of_int8) << "fewer bits, and FP8, give a larger difference";
      if (of_int8 == 0) of_int8 = of_quantisation;
      EXPECT_LE(max_difference(first_logprobs(folder, kCuda, policy), expected), of_devices + 2 * of_quantisation);
    }
  }
}

TEST_F(CudaEngineTest, nothing_is_allocated_in_a_step) {
  Engine engine(write(mixture()), kCuda);
  const auto before = cuda::allocations();
  completions(engine, masked_requests(12));
  EXPECT_EQ(cuda::allocations(), before);
}

// Its proposals are accepted.
Request one_token_repeated() {
  auto one = request({5, 5, 5}, 20);
  one.sampling.logit_bias = {{5, 100.0F}};
  return one;
}

TEST_F(CudaEngineTest, nothing_is_allocated_in_a_step_with_proposals) {
  TinyModel recurrent;
  recurrent.mixers = {"delta_net", "attention"};
  for (const auto& model : {TinyModel{}, recurrent}) {
    Engine engine(write(model), with(kCuda, "speculative_method", "ngram"));
    auto all = greedy_requests(40);  // they soon repeat
    const auto masked = masked_requests(12);
    all.insert(all.end(), masked.begin(), masked.end());
    all.insert(all.begin(), one_token_repeated());
    const auto before = cuda::allocations();
    completions(engine, all);
    EXPECT_EQ(cuda::allocations(), before);
    EXPECT_GT(engine.stats().accepted_tokens, 0);
  }
}

TEST_F(CudaEngineTest, recurrent_layers_give_equal_tokens_with_and_without_proposals_and_captured_steps) {
  for (const auto* const mixer : {"short_conv", "delta_net"}) {
    TinyModel model;
    model.mixers = {mixer, "attention"};
    const auto folder = write(model, "bf16");
    auto all = greedy_requests(24);
    all.insert(all.begin(), one_token_repeated());
    const auto expected = completions(folder, kReproducible, all);
    for (const auto* const graphs : {"True", "False"}) {
      SCOPED_TRACE(std::string(mixer) + ", graphs " + graphs);
      Engine engine(folder, with(with(kReproducible, "speculative_method", "ngram"), "cuda_graphs", graphs));
      EXPECT_EQ(completions(engine, all), expected);
      EXPECT_GT(engine.stats().accepted_tokens, 0);
    }
  }
}

TEST_F(CudaEngineTest, captured_and_issued_decodes_give_equal_tokens) {
  for (const auto& model : {TinyModel{}, tiled()}) {
    const auto folder = write(model, "bf16");
    for (const auto* policy : {"0", "4", "16"}) {
      SCOPED_TRACE(model.more + ", quant_policy " + policy);
      const auto settings = with(kReproducible, "quant_policy", policy);
      for (const auto& all : {sampled_requests(6, 12), masked_requests(8)}) {
        EXPECT_EQ(completions(folder, settings, all), completions(folder, with(settings, "cuda_graphs", "False"), all));
      }
    }
  }
}

// The guarantee of the reproducible mode, bitwise: also compares log probabilities.
class CudaReproducibleTest : public CudaEngineTest, public ::testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Type, CudaReproducibleTest, ::testing::Values("fp32", "bf16", "fp16"),
                         [](const auto& i) { return i.param; });

// With any other rows in the batch: alone, in batches that are padded to a captured step, and prefilled in chunks of
// other sizes.
TEST_P(CudaReproducibleTest, completions_depend_only_on_the_request) {
  auto sampled = sampled_requests(8, 10), masked = masked_requests(10);
  for (auto* const requests : {&sampled, &masked}) {
    for (auto& one : *requests) one.sampling.logprobs = 2;
  }
  struct Case {
    TinyModel model;
    const char* quant_policy;
    const std::vector<Request>& all;
  };
  const Case cases[] = {{{}, "0", sampled},
                        {tiled(), "8", sampled},
                        {tiled(), "4", sampled},
                        {tiled(), "16", sampled},
                        {mixture(), "0", sampled},
                        {scored_mixture(), "0", masked}};
  for (const auto& [model, policy, all] : cases) {
    SCOPED_TRACE(model.more + ", quant_policy " + policy);
    const auto folder = write(model, GetParam());
    const auto settings = with(kReproducible, "quant_policy", policy);
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
      EXPECT_TRUE(&all == &masked || engine.stats().num_preemptions > 0);
    }
  }
}

TEST_F(CudaEngineTest, two_ranks_give_the_tokens_of_one) {
  TinyModel experts, norms;
  experts.biases = true;
  experts.experts = 5;
  experts.layer_experts = "dm";
  // The norms of q and k are over the heads of both ranks.
  norms.qk_norm = norms.qk_norm_rows = norms.post_norms = true;
  norms.pre_norms = false;
  const auto all = masked_requests(10);
  for (const auto& one : {experts, norms}) {
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

// One block at a time: a block of this model is smaller than the unit of memory, so most of them cost nothing.
TEST_F(CudaEngineTest, a_cache_whose_memory_grows_gives_equal_tokens) {
  const auto folder = write();
  const auto all = greedy_requests(24);
  const auto sized = with(kCuda, "cache_max_entry_count", "200");
  EXPECT_EQ(completions(folder, with(sized, "cache_chunk_size", "1"), all), completions(folder, sized, all));
}

#if defined(CHARONIA_CUDA_ON_HOST)
// Only an emulated device can be made to fail and to work again.
TEST_F(CudaEngineTest, kv_that_a_new_engine_loads_from_files_gives_equal_tokens) {
  for (const auto* const kinds : {"full", "window", "state"}) {
    TinyModel model;
    model.ranks = 2;
    if (kinds == std::string("window")) model.windows = {8, 0};
    if (kinds == std::string("state")) model.mixers = {"delta_net", "attention"};
    const auto folder = write(model, "bf16");
    for (const auto* const bits : {"0", "8", "16"}) {
      SCOPED_TRACE(std::string(kinds) + " " + bits);
      auto settings = with(with(kReproducible, "cache_block_seq_len", "4"), "device_ids", "0,0");
      settings.insert({{"quant_policy", bits}, {"kv_offload_path", (dir_ / (kinds + std::string(bits))).string()}});
      std::vector<Result> results;
      for (int round = 0; round < 2; ++round) {
        Engine engine(folder, settings);
        Collector out(engine, request(prompt(41, 0), 8));
        results.push_back(out.last());
        results.back().token_ids = out.tokens();
      }
      EXPECT_EQ(results[1].token_ids, results[0].token_ids);
      EXPECT_EQ(results[0].num_cached_tokens, 0);
      EXPECT_EQ(results[1].num_cached_tokens, 40);
    }
  }
}

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
