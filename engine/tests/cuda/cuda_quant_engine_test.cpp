// Whole quantised models on the CUDA device, compared with the same engine on the CPU: every layout and code, and W8A8.
#include <gtest/gtest.h>

#include <filesystem>
#include <vector>

#include "charonia/engine.h"
#include "engine_support.h"
#include "test_folder.h"
#include "tiny_workspace.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::Completion;
using testing::request;
using testing::TinyQuant;

struct Case {
  TinyQuant how;
  int experts = 0;
  const char* quant_policy = "0";
};

class CudaQuantEngineTest : public ::testing::Test {
 protected:
  void SetUp() override { dir_ = testing::test_folder(); }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  void write(const Case& c) const {
    testing::TinyModel model;
    model.hidden = 64, model.inter = 128, model.head_dim = 16, model.expert_inter = 64;
    model.quantised = c.how;
    model.experts = c.experts;
    testing::write_tiny_workspace(dir_, model);
  }

  static Request prompt(std::size_t index, std::size_t length, int max_tokens) {
    std::vector<TokenId> ids;
    for (std::size_t t = 0; t < length; ++t) ids.push_back(static_cast<TokenId>((7 * t + 3 * index) % 40));
    auto one = request(ids, max_tokens);
    one.sampling.logprobs = 0;
    return one;
  }
  static Completion answer(Collector& collector) { return {collector.tokens(), collector.logprobs(), {}}; }
  // Responses to prompts of several lengths, together and token by token; then to the next turn of a session, and to a
  // prompt with a common prefix.
  std::vector<Completion> answers(const Settings& settings, int max_tokens) const {
    Engine engine(dir_, settings);
    std::vector<Collector> out(4);
    for (std::size_t i = 0; i < out.size(); ++i) {
      auto one = prompt(i, 1 + 11 * i, max_tokens);
      if (i == 2) one.session_id = "s";
      engine.submit(one, out[i].callback());
    }
    std::vector<Completion> all;
    for (auto& collector : out) all.push_back(answer(collector));
    for (const bool turn : {true, false}) {
      auto one = prompt(3, turn ? 0 : 33, max_tokens);
      if (turn) one.session_id = "s";
      auto& ids = turn ? one.continuation_ids : one.input_ids;
      ids.insert(ids.end(), {3, 1, 4, 1, 5});
      Collector more(engine, one);
      EXPECT_GT(more.last().num_cached_tokens, 0);
      all.push_back(answer(more));
    }
    engine.check_integrity();
    return all;
  }

  std::filesystem::path dir_;
};

Settings cpu(const char* quant_policy = "0") {
  return {{"device", "cpu"}, {"threads", "1"}, {"quant_policy", quant_policy}};
}
Settings cuda(bool reproducible, const char* quant_policy = "0") {
  return {{"device", "cuda"},
          {"max_batch_size", "8"},
          {"reproducible", reproducible ? "True" : "False"},
          {"quant_policy", quant_policy}};
}

// In fp32 arithmetic: integers are the same on both devices.
TEST_F(CudaQuantEngineTest, tokens_in_fp32_equal_the_cpu) {
  const TinyQuant w8a8{.layout = "rows", .dtype = "I8", .group = 0, .activations = "int8-token"};
  const Case cases[] = {
      {{"rows", "I8", 0}},
      {{"packed-rows", "U4", 32, true}, 0, "8"},
      {{"gptq", "U4", 16, true, true}, 4},
      {{"mxfp4", "F4_E2M1", 32}, 0, "8"},
      {{"mxfp4", "F4_E2M1", 32}, 4, "8"},
      {{"rows", "F8_E4M3", 16}, 4, "8"},
      {{"rows", "F8_E4M3", 48}, 4},  // of 64 and 128 columns
      {w8a8},
      {w8a8, 4, "8"},
  };
  for (const auto& c : cases) {
    write(c);
    const auto expected = answers(cpu(c.quant_policy), 10);
    const bool integers = !c.how.activations.empty();
    for (const bool reproducible : {false, true}) {
      if (reproducible && !integers) continue;  // only 8-bit GEMMs have another weight layout
      const auto found = answers(cuda(reproducible, c.quant_policy), 10);
      SCOPED_TRACE(c.how.layout + " " + c.how.dtype + " " + c.how.activations);
      // A code of an activation, key or value that is a tie on one device may be the next code on the other.
      testing::expect_near(found, expected, !integers && *c.quant_policy == '0' ? 1e-3F : 2e-2F);
    }
  }
}

// In 16 bits, where norms and gates write codes: the first token's probability is close, and in reproducible mode a
// request has the same bits alone and in a batch.
TEST_F(CudaQuantEngineTest, probabilities_in_16_bits_are_close_to_the_cpu) {
  const Case cases[] = {
      {{.layout = "rows", .dtype = "I8", .group = 0, .data_type = "bf16", .activations = "int8-token"}},
      {{.layout = "rows", .dtype = "I8", .group = 0, .data_type = "fp16", .activations = "int8-token"}, 4},
      {{.layout = "rows", .dtype = "F8_E4M3", .group = 0, .data_type = "bf16", .activations = "fp8-token"}}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.how.dtype + " " + c.how.data_type);
    write(c);
    const auto expected = answers(cpu(), 1);
    for (const bool reproducible : {false, true}) {
      const auto found = answers(cuda(reproducible), 6);
      // FP8 activations have 4 bits here, and 16 on the CPU.
      const float bound = c.how.dtype == "I8" ? 0.2F : 0.5F;
      for (std::size_t i = 0; i < 4; ++i) {  // later ones follow different earlier responses
        ASSERT_NEAR(found[i].logprobs[0], expected[i].logprobs[0], bound);
      }
      if (!reproducible) continue;
      Engine engine(dir_, cuda(true));
      Collector alone(engine, prompt(3, 34, 6));
      EXPECT_EQ(answer(alone), found[3]);
    }
  }
}

}  // namespace
}  // namespace charonia
