// Whole quantised models on the CUDA device, compared with the same engine on the CPU: every layout and code, and W8A8.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <sstream>
#include <vector>

#include "base/json.h"
#include "charonia/engine.h"
#include "engine_support.h"
#include "test_folder.h"
#include "tiny_workspace.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::request;
using testing::TinyModel;
using testing::TinyQuant;

struct Case {
  TinyQuant how;
  std::string activations;  // of all quantised weights; empty: 16 bits, or fp32
  int experts = 0;
  const char* quant_policy = "0";
};

class CudaQuantEngineTest : public ::testing::Test {
 protected:
  void SetUp() override { dir_ = testing::test_folder(); }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  void write(const Case& c, const std::string& data_type) const {
    TinyModel model;
    model.hidden = 64, model.inter = 128, model.head_dim = 16, model.expert_inter = 64;
    model.quantised = c.how;
    model.experts = c.experts;
    testing::write_tiny_workspace(dir_, model);
    if (!c.activations.empty()) {
      auto manifest = nlohmann::json::parse(std::ifstream(dir_ / "manifest.json"));
      for (auto& tensor : manifest["tensors"]) {
        if (tensor.contains("quantization")) tensor["quantization"]["activations"] = c.activations;
      }
      std::ofstream(dir_ / "manifest.json") << manifest.dump();
    }
    std::stringstream config;
    config << std::ifstream(dir_ / "config.ini").rdbuf();
    auto text = config.str();
    const std::string before = "data_type = fp32";
    text.replace(text.find(before), before.size(), "data_type = " + data_type);
    std::ofstream(dir_ / "config.ini") << text;
  }

  struct Answer {
    std::vector<TokenId> tokens;
    std::vector<float> logprobs;
  };
  static TokenId prompt_token(std::size_t place, std::size_t prompt) {
    return static_cast<TokenId>((7 * place + 3 * prompt) % 40);
  }
  // Responses to prompts of several lengths, together and token by token; then to the next turn of a session, and to a
  // prompt with a common prefix.
  std::vector<Answer> answers(const Settings& settings, int max_tokens) const {
    Engine engine(dir_, settings);
    std::vector<Collector> out(4);
    for (std::size_t i = 0; i < out.size(); ++i) {
      std::vector<TokenId> ids;
      for (std::size_t t = 0; t < 1 + 11 * i; ++t) ids.push_back(prompt_token(t, i));
      auto one = request(ids, max_tokens);
      if (i == 2) one.session_id = "s";
      one.sampling.logprobs = 0;
      engine.submit(one, out[i].callback());
    }
    std::vector<Answer> all;
    for (auto& collector : out) all.push_back({collector.tokens(), collector.logprobs()});
    for (const bool turn : {true, false}) {
      std::vector<TokenId> ids;
      for (std::size_t t = 0; t < 33 && !turn; ++t) ids.push_back(prompt_token(t, 3));
      ids.insert(ids.end(), {3, 1, 4, 1, 5});
      auto one = request(turn ? std::vector<TokenId>{} : ids, max_tokens);
      if (turn) one.session_id = "s", one.continuation_ids = ids;
      one.sampling.logprobs = 0;
      Collector more(engine, one);
      EXPECT_GT(more.last().num_cached_tokens, 0);
      all.push_back({more.tokens(), more.logprobs()});
    }
    engine.check_integrity();
    return all;
  }

  std::filesystem::path dir_;
};

const Settings kCpu = {{"device", "cpu"}, {"threads", "1"}};
Settings cuda(bool reproducible) {
  return {{"device", "cuda"}, {"max_batch_size", "8"}, {"reproducible", reproducible ? "True" : "False"}};
}

// In fp32 arithmetic: integers are the same on both devices.
TEST_F(CudaQuantEngineTest, tokens_in_fp32_equal_the_cpu) {
  const std::vector<Case> cases = {
      {{"rows", "I8", 0}, "", 0},
      {{"packed-rows", "U4", 32, true}, "", 0, "8"},
      {{"gptq", "U4", 16, true, true}, "", 4},
      {{"mxfp4", "F4_E2M1", 32}, "", 0, "8"},
      {{"mxfp4", "F4_E2M1", 32}, "", 4, "8"},
      {{"rows", "F8_E4M3", 16}, "", 4, "8"},
      {{"rows", "F8_E4M3", 48}, "", 4},  // of 64 and 128 columns
      {{"rows", "I8", 0}, "int8-token", 0},
      {{"rows", "I8", 0}, "int8-token", 4, "8"},
  };
  for (const auto& c : cases) {
    write(c, "fp32");
    const auto with_cache = [&](Settings settings) {
      settings["quant_policy"] = c.quant_policy;
      return settings;
    };
    const auto expected = answers(with_cache(kCpu), 10);
    for (const bool reproducible : {false, true}) {
      if (reproducible && c.activations.empty()) continue;  // only 8-bit GEMMs have another weight layout
      const auto found = answers(with_cache(cuda(reproducible)), 10);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        SCOPED_TRACE(c.how.layout + " " + c.how.dtype + " " + c.activations + ", request " + std::to_string(i));
        ASSERT_EQ(found[i].tokens, expected[i].tokens);
        // A code of an activation, key or value that is a tie on one device may be the next code on the other.
        const float bound = c.activations.empty() && *c.quant_policy == '0' ? 1e-3F : 2e-2F;
        for (std::size_t t = 0; t < expected[i].logprobs.size(); ++t) {
          ASSERT_NEAR(found[i].logprobs[t], expected[i].logprobs[t], bound);
        }
      }
    }
  }
}

// In 16 bits, where norms and gates write codes: the first token's probability is close, and in reproducible mode a
// request has the same bits alone and in a batch.
TEST_F(CudaQuantEngineTest, probabilities_in_16_bits_are_close_to_the_cpu) {
  const std::vector<Case> cases = {{{"rows", "I8", 0}, "int8-token", 0},
                                   {{"rows", "I8", 0}, "int8-token", 4},
                                   {{"rows", "F8_E4M3", 0}, "fp8-token", 0}};
  int turn = 0;
  for (const auto& c : cases) {
    const std::string type = turn++ % 2 == 0 ? "bf16" : "fp16";
    write(c, type);
    const auto expected = answers(kCpu, 1);
    for (const bool reproducible : {false, true}) {
      const auto found = answers(cuda(reproducible), 6);
      // FP8 activations have 4 bits here, and 16 on the CPU.
      const float bound = c.how.dtype == "I8" ? 0.2F : 0.5F;
      for (std::size_t i = 0; i < 4; ++i) {  // later ones follow different earlier responses
        ASSERT_NEAR(found[i].logprobs[0], expected[i].logprobs[0], bound) << c.how.dtype << " " << type;
      }
      if (!reproducible) continue;
      Engine engine(dir_, cuda(true));
      Collector alone;
      std::vector<TokenId> ids;
      for (int t = 0; t < 34; ++t) ids.push_back((7 * t + 9) % 40);
      auto one = request(ids, 6);
      one.sampling.logprobs = 0;
      engine.submit(one, alone.callback());
      EXPECT_EQ(alone.tokens(), found[3].tokens) << c.how.dtype << " " << type;
      EXPECT_EQ(alone.logprobs(), found[3].logprobs) << c.how.dtype << " " << type;
    }
  }
}

}  // namespace
}  // namespace charonia
