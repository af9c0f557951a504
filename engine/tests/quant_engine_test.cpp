// The engine with quantised weights: every layout gives the same model as its dense values.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "dequantising_ops.h"
#include "engine_fixture.h"

namespace charonia {
namespace {

using nlohmann::json;
using testing::Collector;
using testing::request;
using testing::TinyModel;
using testing::TinyQuant;
using testing::write_tiny_workspace;

class QuantEngine : public testing::EngineFixtureBase {
 protected:
  static TinyModel tiny(const TinyQuant& how) {
    TinyModel out;
    out.hidden = 64, out.inter = 128, out.head_dim = 16, out.expert_inter = 64;  // whole groups for two ranks
    out.quantised = how;
    return out;
  }
  static void dequantise() {
    runtime::wrap_devices_for_tests(
        [](std::unique_ptr<ops::Ops> ops) { return std::make_unique<testing::DequantisingOps>(std::move(ops)); });
  }
  struct Answer {
    std::vector<TokenId> tokens;
    std::vector<float> logprobs;
  };
  Answer answer(const TinyModel& model) const {
    write_tiny_workspace(weights(), model);
    return answer();
  }
  Answer answer() const {
    const auto loaded = engine();
    auto one = request({5, 6, 7, 8}, 12);
    one.sampling.logprobs = 0;
    Collector out(*loaded, one);
    return {out.tokens(), out.logprobs()};
  }
  // With a device that stores the dense values: the same bits.
  void expect_same(TinyModel model) const {
    const auto& how = *model.quantised;
    const auto quantised = answer(model);
    model.quantised->as_floats = true;
    const auto dense = answer(model);
    EXPECT_EQ(quantised.tokens.size(), 12U);
    EXPECT_EQ(quantised.tokens, dense.tokens) << how.layout << " " << how.dtype;
    EXPECT_EQ(quantised.logprobs, dense.logprobs) << how.layout << " " << how.dtype;
  }
  // Changes manifest.json.
  void patch(const std::function<void(json& tensors)>& change) const {
    auto manifest = json::parse(std::ifstream(weights() / "manifest.json"));
    change(manifest["tensors"]);
    std::ofstream(weights() / "manifest.json") << manifest.dump();
  }
  void expect_rejected(ErrorCode code, std::initializer_list<std::string_view> parts) const {
    expect_error(code, parts, [this] { engine(); });
  }
};

const std::vector<TinyQuant> kQuants = {
    {"rows", "I8", 0},       {"rows", "F8_E4M3", 16},  {"packed-rows", "U4", 32, true}, {"packed-rows", "I8", 16},
    {"awq", "U4", 16, true}, {"gptq", "U4", 32, true}, {"gptq", "I8", 16, true},        {"mxfp4", "F4_E2M1", 32}};

TEST_F(QuantEngine, EveryLayoutEqualsTheModelOfItsValues) {
  dequantise();
  for (const auto& how : kQuants) {
    auto some = tiny(how);  // both ranks have parts of all divided tensors, and of experts
    some.ranks = 2;
    some.experts = 4;
    some.layer_experts = "md";
    expect_same(some);
  }
}

// With the CPU's kernels, whose sums have another order: 128 products per row, some layers, and logits of a few tens.
TEST_F(QuantEngine, TheCpuEqualsTheModelOfItsValues) {
  constexpr float kTolerance = 1e-3F;
  const auto expect_near = [&](TinyModel model) {
    SCOPED_TRACE(model.quantised->layout + " " + model.quantised->dtype);
    const auto quantised = answer(model);
    model.quantised->as_floats = true;
    const auto dense = answer(model);
    EXPECT_EQ(quantised.tokens, dense.tokens);
    ASSERT_EQ(quantised.logprobs.size(), dense.logprobs.size());
    for (std::size_t i = 0; i < dense.logprobs.size(); ++i) {
      EXPECT_NEAR(quantised.logprobs[i], dense.logprobs[i], kTolerance);
    }
  };
  auto quants = kQuants;
  quants.push_back({"gptq", "U4", 16, true, true});
  quants.push_back({"rows", "F8_E4M3", 48});  // of 64 and 128 columns
  for (const auto& how : quants) {
    auto some = tiny(how);
    some.biases = true;
    expect_near(some);
  }
  for (const auto& how : kQuants) {
    auto some = tiny(how);
    some.ranks = 2, some.experts = 4, some.layer_experts = "md";
    expect_near(some);
  }
}

// In bf16 the device may use other kernels than in fp32. Alone on one thread, and in a batch on two threads with
// chunked prompts: the same bits.
TEST_F(QuantEngine, InBf16AnAnswerDependsOnlyOnItsRequest) {
  for (TinyQuant how : {TinyQuant{"packed-rows", "U4", 32, true},
                        {"rows", "I8", 0},
                        {"mxfp4", "F4_E2M1", 32},
                        {"rows", "F8_E4M3", 16}}) {
    SCOPED_TRACE(how.layout + " " + how.dtype);
    how.data_type = "bf16";
    auto some = tiny(how);
    some.experts = 4;
    some.layer_experts = "md";
    write_tiny_workspace(weights(), some);
    patch([&](json& tensors) {
      for (auto& tensor : tensors) {
        if (how.dtype == "I8" && tensor.contains("quantization")) tensor["quantization"]["activations"] = "int8-token";
      }
    });
    const auto single = engine({{"threads", "1"}});
    const auto many = engine({{"threads", "2"}, {"token_budget", "16"}});
    std::vector<Collector> out(7);
    std::vector<Request> requests;
    for (int i = 0; i < std::ssize(out); ++i) {
      requests.push_back(request({}, 10 + i));
      for (int k = 0; k < 3 + 5 * i; ++k) requests.back().input_ids.push_back((7 * k + 3 * i + 1) % 40);
      requests.back().sampling.logprobs = 0;
      many->submit(requests.back(), out[static_cast<std::size_t>(i)].callback());
    }
    for (std::size_t i = 0; i < out.size(); ++i) {
      Collector alone(*single, requests[i]);
      EXPECT_EQ(out[i].tokens(), alone.tokens());
      EXPECT_EQ(out[i].logprobs(), alone.logprobs());
      EXPECT_EQ(alone.tokens().size(), 10 + i);
    }
  }
}

TEST_F(QuantEngine, AQuantisedOutputLayerHasRowsOfLength1) {
  for (const auto& how : kQuants) {
    auto some = tiny(how);
    const auto plain = answer(some);
    some.more = "normalize_output = 1\n";
    some.ranks = 2;
    dequantise();
    expect_same(some);
    EXPECT_NE(answer(some).logprobs, plain.logprobs);
  }
}

TEST_F(QuantEngine, ScatteredGroupsOfColumnsGiveTheSameModelOnOneRank) {
  dequantise();
  auto shuffled = tiny({"gptq", "U4", 16, true, true});
  expect_same(shuffled);
  shuffled.experts = 4;
  expect_same(shuffled);
  shuffled.ranks = 2;
  write_tiny_workspace(weights(), shuffled);
  expect_rejected(ErrorCode::unsupported, {"layers.0.attention.wo.0.weight", "tensor_para_size = 1"});
}

TEST_F(QuantEngine, InconsistentWeightsAreRejectedByName) {
  dequantise();
  const std::string gate = "layers.1.feed_forward.w1.0.weight", up = "layers.1.feed_forward.w3.0.weight";
  const auto expect = [&](const TinyModel& model, ErrorCode code, std::initializer_list<std::string_view> what,
                          const std::function<void(json & tensors)>& change) {
    write_tiny_workspace(weights(), model);
    patch(change);
    expect_rejected(code, what);
  };
  auto four = tiny({"packed-rows", "U4", 32});
  four.vocab = four.inter;
  expect(four, ErrorCode::unsupported, {gate, up, "tensor " + up + " is quantised", "computed together"},
         [&](json& tensors) { tensors[gate] = tensors["tok_embeddings.weight"]; });
  auto both = tiny({"rows", "I8", 0});
  expect(both, ErrorCode::unsupported, {gate, up, "int8, groups of 64", "must have the same format"},
         [&](json& tensors) { tensors[up]["quantization"]["activations"] = "int8-token"; });
  both.experts = 4;
  const std::string expert = "layers.0.feed_forward.experts.2.w3.0.weight";
  expect(both, ErrorCode::unsupported, {"layers.0.experts.gate_up", "of a layer's experts must have the same format"},
         [&](json& tensors) { tensors[expert]["quantization"]["activations"] = "int8-token"; });
  auto many = both;
  many.experts = 64;
  const std::string router = "layers.0.feed_forward.gate.weight";
  expect(many, ErrorCode::unsupported, {"tensor " + router + " is quantised (int8)", "does not quantise it"},
         [&](json& tensors) { tensors[router] = tensors[expert]; });
  expect(both, ErrorCode::invalid_argument, {"tensor " + expert, "of shape [512, 1], expected [512, 4]"},
         [&](json& tensors) { tensors[expert]["quantization"]["group_size"] = 16; });
  expect(both, ErrorCode::invalid_argument, {"tensor " + expert, "has shape [64, 64], but its 1 parts have 32 rows"},
         [&](json& tensors) { tensors[expert]["parts"][0]["row_step"] = 2; });
  for (const auto& wrong : std::vector<json>{0, -1, 1.5, "2"}) {
    expect(both, ErrorCode::invalid_argument, {"tensor " + expert, "row_step = " + wrong.dump() + ", expected"},
           [&](json& tensors) { tensors[expert]["parts"][0]["row_step"] = wrong; });
  }
}

TEST_F(QuantEngine, TheTypeOfActivationsMustBeGiven) {
  dequantise();
  write_tiny_workspace(weights(), tiny({"awq", "U4", 16, true}));
  std::string config{std::istreambuf_iterator<char>(std::ifstream(weights() / "config.ini").rdbuf()), {}};
  const std::string line = "data_type = fp32\n";
  config.erase(config.find(line), line.size());
  std::ofstream(weights() / "config.ini") << config;
  expect_rejected(ErrorCode::unsupported, {"weight_type = int4 needs data_type = bf16, fp16 or fp32"});
}

TEST_F(QuantEngine, ScalesMayBeInAFileOfTheirOwn) {
  const auto expected = answer(tiny({"rows", "I8", 0}));
  std::filesystem::copy_file(weights() / "rank-0.safetensors", weights() / "scales.safetensors");
  auto manifest = json::parse(std::ifstream(weights() / "manifest.json"));
  manifest["files"]["scales.safetensors"] = manifest["files"]["rank-0.safetensors"];
  for (auto& tensor : manifest["tensors"]) {
    for (auto& part : tensor["parts"]) {
      if (part.contains("scales")) part["scales"]["file"] = "scales.safetensors";
    }
  }
  std::ofstream(weights() / "manifest.json") << manifest.dump();
  EXPECT_EQ(answer().logprobs, expected.logprobs);
}

TEST_F(QuantEngine, ABrokenScaleIsRejectedByName) {
  auto broken = tiny({"rows", "F8_E4M3", 16});
  broken.change = [](const std::string& name, float value) {
    return name == "layers.1.feed_forward.w2.0.weight" ? value * std::numeric_limits<float>::infinity() : value;
  };
  write_tiny_workspace(weights(), broken);
  expect_rejected(ErrorCode::invalid_argument, {"layers.1.feed_forward.w2.0.weight", "are not finite"});
}

}  // namespace
}  // namespace charonia
