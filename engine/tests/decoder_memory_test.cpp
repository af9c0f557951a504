// A decoder's memory needs equal its actual memory.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/text.h"
#include "charonia/engine.h"
#include "errors.h"
#include "forwarding_ops.h"
#include "model/decoder.h"
#include "ops/cpu/make_cpu_ops.h"
#include "runtime/executor.h"
#include "runtime/memory_plan.h"
#include "runtime/settings.h"
#include "test_folder.h"
#include "tiny_workspace.h"

namespace charonia {
namespace {

using testing::TinyModel;
using testing::write_tiny_workspace;

// Counts the allocations for vectors, tables and activations.
class CountingOps : public testing::ForwardingOps {
 public:
  using ForwardingOps::ForwardingOps;
  std::unique_ptr<ops::Buffer> allocate(std::size_t bytes) override {
    allocated += bytes;
    return ForwardingOps::allocate(bytes);
  }
  std::unique_ptr<ops::Linear> make_linear(std::span<const ops::HostMatrix> parts,
                                           std::span<const ops::HostMatrix> bias, DType weight) override {
    for (const auto& one : bias) biases += static_cast<std::size_t>(one.rows * one.cols) * sizeof(float);
    return ForwardingOps::make_linear(parts, bias, weight);
  }
  std::unique_ptr<ops::Experts> make_experts(std::span<const ops::ExpertSource> experts, DType weight) override {
    for (const auto& [gate, up, down, bias] : experts) {
      biases += static_cast<std::size_t>(bias.gate.rows + bias.up.rows + bias.down.rows) * sizeof(float);
    }
    return ForwardingOps::make_experts(experts, weight);
  }
  std::size_t allocated = 0, biases = 0;
};

class DecoderMemory : public ::testing::Test {
 protected:
  void SetUp() override { dir_ = testing::test_folder(); }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  // Sizes that are whole panels of the CPU's layout, so that nothing is padded.
  static TinyModel even() {
    TinyModel model;
    model.hidden = 64, model.inter = 128, model.heads = 4, model.kv_heads = 2, model.head_dim = 32;
    model.vocab = 192, model.expert_inter = 64;
    return model;
  }

  // share: allowed relative difference. activations: of quantised weights, as in the manifest.
  void expect_exact(const TinyModel& model, const Settings& overrides = {}, double share = 0,
                    const std::string& activations = {}) {
    std::filesystem::remove_all(dir_);
    write_tiny_workspace(dir_, model);
    if (!activations.empty()) {
      auto changed = nlohmann::json::parse(std::ifstream(dir_ / "manifest.json"));
      for (auto& tensor : changed["tensors"]) {
        if (tensor.contains("quantization")) tensor["quantization"]["activations"] = activations;
      }
      std::ofstream(dir_ / "manifest.json") << changed.dump();
    }
    auto settings = runtime::read_settings(dir_, overrides);
    runtime::resolve_step_sizes(settings.config, {"cpu"});
    const auto limits = runtime::step_limits(settings.config, settings.model);
    CountingOps ops(ops::make_cpu_ops(1));
    const model::WeightFiles files(dir_, 1);
    const auto& manifest = files.manifest();
    const auto needs = runtime::rank_memory("cpu", model::rules_of(ops), settings.model, manifest,
                                            model::Shard(settings.model, manifest, 0), limits, settings.config);
    const model::Decoder decoder(settings.model, files, ops, limits);
    const auto needed = static_cast<double>(needs.weights);
    EXPECT_NEAR(needed,
                static_cast<double>(decoder.weight_bytes()) +
                    static_cast<double>(ops.allocated + ops.biases - needs.activations),
                share * needed)
        << model.more;
    for (const auto kind : kCacheKinds) EXPECT_EQ(needs.kv_block[kind], decoder.kv_layout().block_bytes(kind));
  }

  std::filesystem::path dir_;
};

TEST_F(DecoderMemory, PlanEqualsUseForEveryKindOfDecoder) {
  const auto expect = [&](auto change, const char* more = "", double share = 0) {
    auto model = even();
    change(model);
    model.more = more;
    expect_exact(model, {}, share);
  };
  expect([](auto&) {});
  expect([](auto& m) { m.biases = m.tied = true; });
  expect([](auto& m) { m.biases = m.tied = m.qk_norm = m.post_norms = true, m.windows = {8}, m.rotations = {"local"}; },
         "rope_local_theta = 100\nlogn_length = 32\n");
  expect([](auto& m) { m.qk_norm = m.qk_norm_rows = m.post_norms = true, m.pre_norms = false; },
         "q_scale_beta = 0.1\nq_scale_length = 16\n");
  expect([](auto& m) { m.parallel_block = true; }, "layer_norm = 1\n");
  expect([](auto& m) { m.experts = 64, m.biases = true; });
  expect([](auto& m) { m.experts = 64, m.biases = true, m.layer_experts = "md"; });
  // The router has one row more than whole panels.
  expect([](auto& m) { m.experts = 64, m.layer_experts = "md", m.shared_inter = 192, m.shared_gate = true; }, "", 0.01);
  expect([](auto& m) { m.experts = 64, m.layer_experts = "md", m.router_bias = true, m.shared_inter = 64; },
         "data_type = bf16\nrouter_fp32 = 1\n");
  expect([](auto& m) { m.experts = 64, m.biases = m.router_bias = m.expert_biases = m.sinks = true; },
         "router_logit_bias = 1\nactivation = clamped_swiglu\n");
  expect(
      [](auto& m) {
        m.qk_norm = m.post_norms = m.layer_scalars = true, m.per_layer = 64, m.kv_sources = {0, 1}, m.inters = {0, 128};
      },
      "v_norm = 1\n");
  expect([](auto& m) {
    m.qk_norm = m.post_norms = m.expert_norms = m.expert_scales = true, m.experts = 64, m.shared_inter = 192;
  });
  for (const auto* type : {"", "data_type = bf16\n"}) {
    expect([](auto& m) { m.mixers = {"short_conv", "attention"}, m.biases = true; }, type);
    expect(
        [](auto& m) {
          m.mixers = {"delta_net", "attention"}, m.attention_gate = m.biases = true;
          m.k_heads = m.k_dim = 8, m.v_heads = 32;
        },
        type);
  }
  expect([](auto& m) { m.rotations = {"none"}; }, "alibi = 1\nrotary_embedding = 0\n");
  expect([](auto&) {}, "rope_scaling_type = qwen\nrope_original_max_position_embeddings = 50\n");
  expect_exact(even(), {{"quant_policy", "8"}});
  expect_exact(even(), {{"quant_policy", "4"}});
  expect_exact(even(), {{"quant_policy", "16"}});
  for (const auto* kind : {"layer", "head"}) {
    auto model = even();
    model.kv_scales = kind, model.more = cat("# ", kind, "\n");
    model.windows = {0, 8};
    for (const auto* policy : {"0", "8", "16"}) expect_exact(model, {{"quant_policy", policy}});
  }
  expect_exact(even(), {{"rope_scaling_factor", "1"}, {"session_len", "512"}, {"use_logn_attn", "1"}});
}

TEST_F(DecoderMemory, AGpuReadsTheTableOfPerLayerEmbeddingsFromHostMemory) {
  auto model = even();
  model.post_norms = true, model.per_layer = 64;
  write_tiny_workspace(dir_, model);
  auto settings = runtime::read_settings(dir_, {});
  runtime::resolve_step_sizes(settings.config, {"cpu"});
  const model::Manifest manifest(dir_, 1);
  const model::Shard shard(settings.model, manifest, 0);
  const auto needs = [&](const char* device) {
    return runtime::rank_memory(device, runtime::rules_of(device), settings.model, manifest, shard,
                                runtime::step_limits(settings.config, settings.model), settings.config);
  };
  const auto cpu = needs("cpu"), cuda = needs("cuda");
  EXPECT_EQ(cpu.host, 0U);
  EXPECT_EQ(cuda.host, static_cast<std::size_t>(model.vocab * model.layers * model.per_layer) * sizeof(float));
  EXPECT_EQ(cuda.weights + cuda.host, cpu.weights);
  EXPECT_NO_THROW(runtime::check_host_memory(cuda, 2, 2 * cuda.host));
  expect_error({"per-layer embeddings", "2 ranks"}, [&] { runtime::check_host_memory(cuda, 2, 2 * cuda.host - 1); });
}

TEST_F(DecoderMemory, AGpuHoldsSomeQuantisedWeightsLikeWeightsThatAreNotQuantised) {
  auto model = even();
  model.tied = true, model.experts = 4, model.layer_experts = "md";
  model.more = "data_type = bf16\n";
  write_tiny_workspace(dir_, model);
  auto settings = runtime::read_settings(dir_, {});
  runtime::resolve_step_sizes(settings.config, {"cpu"});
  const auto weights = [&](const char* device) {  // of rank 0
    const model::Manifest manifest(dir_, model.ranks);
    return runtime::rank_memory(device, runtime::rules_of(device), settings.model, manifest,
                                model::Shard(settings.model, manifest, 0),
                                runtime::step_limits(settings.config, settings.model), settings.config)
        .weights;
  };
  const auto warning = [&](const char* device) {
    return runtime::dequantised_warning(device, settings.model, model::Manifest(dir_, 1));
  };
  auto whole = nlohmann::json::parse(std::ifstream(dir_ / "manifest.json"));
  const auto dense = weights("cuda");
  // minimum: part of the names of the tensors with minimums.
  const auto quantise = [&](std::string_view minimum) {
    auto changed = whole;
    for (auto& [name, tensor] : changed["tensors"].items()) {
      if (tensor["shape"].size() < 2) continue;
      tensor["dtype"] = "U4";
      tensor["quantization"] = {
          {"layout", "gguf"}, {"group_size", 32}, {"minimums", name.find(minimum) != std::string::npos}};
      tensor.erase("parts");
    }
    std::ofstream(dir_ / "manifest.json") << changed.dump();
  };
  quantise(".");  // all
  EXPECT_EQ(weights("cuda"), dense);
  EXPECT_LT(weights("cpu"), dense);
  EXPECT_NE(warning("cuda").find("in bf16: "), std::string::npos);
  EXPECT_TRUE(warning("cuda").ends_with(". A file with all weights in Q4_0 or Q8_0 stays quantised"));
  EXPECT_EQ(warning("cpu"), "");
  quantise("none");
  const auto least = weights("cuda");
  EXPECT_LT(least, dense);
  EXPECT_EQ(warning("cuda"), "");
  quantise(".experts.1.w2.");
  const auto elements = static_cast<std::size_t>(3 * model.experts * model.expert_inter * model.hidden);
  EXPECT_EQ(weights("cuda"), least + elements * 2 - elements / 2 - elements / 32 * sizeof(float)) << "all experts";
  model.ranks = 2;
  write_tiny_workspace(dir_, model);
  whole = nlohmann::json::parse(std::ifstream(dir_ / "manifest.json"));
  quantise("none");
  const auto of_rank = weights("cuda");
  quantise(".experts.1.w2.1.");
  EXPECT_EQ(weights("cuda"), of_rank) << "another rank's experts";
  quantise(".experts.1.w2.0.");
  EXPECT_GT(weights("cuda"), of_rank);
  model = even();
  model.quantised = {"rows", "I8", 16};
  write_tiny_workspace(dir_, model);
  EXPECT_TRUE(warning("cuda").ends_with(" on a CPU")) << "not GGUF";
}

TEST_F(DecoderMemory, GraphsOfStepsWithProposalsCountOnlyIfThereAreGraphs) {
  auto model = even();
  model.layers = 64;  // with fewer, preparing weights takes more memory than steps
  write_tiny_workspace(dir_, model);
  auto settings = runtime::read_settings(dir_, {{"device", "cuda"}, {"speculative_method", "ngram"}});
  runtime::resolve_step_sizes(settings.config, {"cuda"});
  const model::Manifest manifest(dir_, 1);
  const model::Shard shard(settings.model, manifest, 0);
  const auto limits = runtime::step_limits(settings.config, settings.model);
  ASSERT_GT(limits.max_logits_rows, limits.max_sequences);
  const auto steps = [&](bool graphs) {
    settings.config.cuda_graphs = graphs;
    const auto rules = runtime::rules_of("cuda");
    return runtime::rank_memory("cuda", rules, settings.model, manifest, shard, limits, settings.config).steps;
  };
  EXPECT_GT(steps(true), steps(false));
}

// The device has its own layout of quantised weights.
TEST_F(DecoderMemory, QuantisedWeightsTakeAboutThePlannedMemory) {
  auto model = even();
  for (const testing::TinyQuant& how : std::vector<testing::TinyQuant>{{"awq", "U4", 32, true},
                                                                       {"packed-rows", "U4", 64},
                                                                       {"rows", "I8", 0},
                                                                       {"rows", "F8_E4M3", 64},
                                                                       {"mxfp4", "F4_E2M1", 32}}) {
    model.quantised = how;
    model.more = cat("# ", how.layout, "\n");
    expect_exact(model, {}, 0.05);
  }
  model.more = "normalize_output = 1\n";  // a dense output layer
  expect_exact(model, {}, 0.05);
  // Groups that are multiplied as integers need more memory.
  for (const testing::TinyQuant& how :
       std::vector<testing::TinyQuant>{{"rows", "I8", 16}, {"packed-rows", "I8", 16, true}}) {
    model.quantised = how;
    model.more = cat("# ", how.layout, " int8-token\n");
    expect_exact(model, {}, 0.05, "int8-token");
  }
}

TEST_F(DecoderMemory, ATableThatIsAlsoTheOutputLayerIsStoredOnce) {
  auto model = even();
  const auto bytes = [&](int ranks) {
    model.ranks = ranks;
    std::filesystem::remove_all(dir_);
    write_tiny_workspace(dir_, model);
    const auto planned = plan_memory(dir_, {{"device", "cpu"}}).weight_bytes;
    return std::pair{Engine(dir_).info().weight_bytes, planned};
  };
  const auto apart = bytes(1), apart_by_two = bytes(2);
  model.tied = true;
  const std::int64_t table = std::int64_t{model.vocab} * model.hidden * 4;
  const auto shared = bytes(1);
  EXPECT_EQ(shared.first, apart.first - table);
  EXPECT_EQ(shared.second, apart.second - table);
  EXPECT_EQ(bytes(2), apart_by_two);  // each rank has the whole table, and its rows of the output layer
}

TEST_F(DecoderMemory, AStepReadsTheExpertsOfOneToken) {
  auto model = even();
  model.experts = 64, model.experts_per_token = 4;
  write_tiny_workspace(dir_, model);
  const Engine engine(dir_);
  const std::int64_t expert = 3 * 64 * 64 * 4, all = model.layers * model.experts * expert;
  const std::int64_t embedding = std::int64_t{model.vocab} * model.hidden * 4;
  const auto not_read = embedding + all - model.layers * model.experts_per_token * expert;
  EXPECT_EQ(engine.info().weight_bytes - engine.info().weight_bytes_per_step, not_read);
  // And all of the shared expert.
  const auto before = engine.info().weight_bytes;
  model.shared_inter = 128;
  write_tiny_workspace(dir_, model);
  const Engine shared(dir_);
  EXPECT_EQ(shared.info().weight_bytes - before, model.layers * 2 * expert);
  EXPECT_EQ(shared.info().weight_bytes - shared.info().weight_bytes_per_step, not_read);
}

TEST_F(DecoderMemory, APlanForAnotherMachineUsesItsMemory) {
  write_tiny_workspace(dir_, even());
  const auto plan = plan_memory(dir_, {{"device", "cuda"}, {"cache_max_entry_count", "0.5"}}, std::int64_t{1} << 30);
  EXPECT_EQ(plan.num_blocks, 64 * 256 / 4);  // not more than all sequences can fill
  EXPECT_TRUE(plan.warnings.empty());
  const auto small = plan_memory(dir_, {{"device", "cuda"}}, 1 << 20);
  EXPECT_EQ(small.num_blocks, 0);
  ASSERT_EQ(small.warnings.size(), 1U);
  EXPECT_NE(small.warnings[0].find("the model does not fit"), std::string::npos) << small.warnings[0];
}

TEST_F(DecoderMemory, TheCacheOrItsFirstChunkHasMemoryAtStart) {
  write_tiny_workspace(dir_, even());
  const auto chunk = [&](const char* size) {
    auto settings =
        runtime::read_settings(dir_, {{"device", "cpu"}, {"cache_max_entry_count", "50"}, {"cache_chunk_size", size}});
    runtime::Executor executor(dir_, settings.model, settings.config);
    EXPECT_EQ(executor.num_blocks(), (PerKind<int>{50, 0}));
    executor.commit_blocks(CacheKind::full, 50);
    return executor.chunk_blocks().full;
  };
  EXPECT_EQ(chunk("-1"), 50);
  EXPECT_EQ(chunk("0"), 8);
  EXPECT_EQ(chunk("20"), 20);
}

}  // namespace
}  // namespace charonia
