// Steps with LoRA adapters on each device: a request with an adapter gets the tokens of a model with merged weights,
// and the same bits in any batch.
#include <gtest/gtest.h>

#include "adapter_fixture.h"
#include "ops_support.h"

namespace charonia {
namespace {

using testing::adapter_requests;
using testing::completions;
using testing::TinyAdapter;
using testing::TinyModel;
using testing::write_tiny_workspace;

// The instruction sets of the CPU are one device here.
std::vector<std::string> devices() {
  auto names = ops::device_names();
  if (!names.front().starts_with("cuda")) names = {"cpu"};
  return names;
}

class AdapterStepsTest : public testing::AdapterFixture, public ::testing::WithParamInterface<std::string> {
 protected:
  bool on_cuda() const { return GetParam() != "cpu"; }
  // The settings of the device, and others.
  Settings with(Settings others, int ranks = 1) const {
    others.emplace("device", on_cuda() ? "cuda" : "cpu");
    if (on_cuda()) others.insert({{"max_batch_size", "8"}, {"device_ids", ranks == 1 ? "0" : "0,0"}});
    if (GetParam() == "cuda_reproducible") others.emplace("reproducible", "True");
    return others;
  }
  std::vector<testing::Completion> run(const std::string& folder, const Settings& settings,
                                       const std::vector<Request>& all, int ranks = 1) const {
    return completions(dir_ / folder, with(settings, ranks), all);
  }
};
INSTANTIATE_TEST_SUITE_P(Device, AdapterStepsTest, ::testing::ValuesIn(devices()),
                         [](const auto& i) { return i.param; });

TEST_P(AdapterStepsTest, TokensEqualThoseOfAModelWithMergedWeights) {
  TinyModel plain, recurrent, experts, per_layer;
  recurrent.mixers = {"delta_net", "attention", "short_conv"};
  recurrent.layers = 3;
  recurrent.attention_gate = true;
  experts.experts = 4, experts.shared_inter = 24;
  per_layer.per_layer = 8;
  per_layer.post_norms = true;
  for (const int ranks : {1, 2}) {
    for (auto model : {plain, recurrent, experts, per_layer}) {
      model.ranks = ranks;
      const auto settings = write(model, 1);
      const TinyAdapter adapter(weights(), 0, 1);
      write_tiny_workspace(dir_ / "merged", adapter.merged(model));
      const auto got = run("weights", settings, adapter_requests({"a"}), ranks);
      testing::expect_near(got, run("merged", {}, adapter_requests({""}), ranks), 1e-3F);
      EXPECT_NE(got.back().logprobs, run("weights", {}, adapter_requests({""}), ranks).back().logprobs);
    }
  }
}

TEST_P(AdapterStepsTest, AQuantisedModelHasTheChangesOfItsValues) {
  const testing::TinyQuant formats[] = {{.layout = "gptq", .dtype = "U4", .group = 16, .shuffled = true},
                                        {.layout = "rows", .dtype = "I8", .group = 0},
                                        {.layout = "mxfp4", .dtype = "F4_E2M1", .group = 32},
                                        {.layout = "rows", .dtype = "F8_E4M3", .group = 16}};
  for (const auto& format : formats) {
    SCOPED_TRACE(format.layout + " " + format.dtype);
    TinyModel model;
    model.hidden = 64, model.inter = 128, model.head_dim = 16;
    model.quantised = format;
    const auto settings = write(model, 1);
    const auto got = run("weights", settings, adapter_requests({"a"}));
    model.quantised->as_floats = true;
    write_tiny_workspace(weights(), model);
    testing::expect_near(got, run("weights", settings, adapter_requests({"a"})), 1e-3F);
  }
}

// Norms and gates of these models write codes for the next weight, but adapters need their outputs.
TEST_P(AdapterStepsTest, QuantisedActivationsAreCloseToThoseOfTheCpu) {
  const testing::TinyQuant formats[] = {
      {.layout = "rows", .dtype = "I8", .group = 0, .data_type = "bf16", .activations = "int8-token"},
      {.layout = "rows", .dtype = "I8", .group = 0, .data_type = "fp16", .activations = "int8-token"},
      {.layout = "rows", .dtype = "F8_E4M3", .group = 0, .data_type = "bf16", .activations = "fp8-token"}};
  for (const auto& format : formats) {
    SCOPED_TRACE(format.dtype + " " + format.data_type);
    TinyModel model;
    model.hidden = 64, model.inter = 128, model.head_dim = 16;
    model.quantised = format;
    auto settings = write(model, 2);
    TinyAdapter zero(weights(), 2);  // changes nothing
    for (auto& [name, values] : zero.b) std::ranges::fill(values, 0.0F);
    zero.write(dir_ / "zero");
    settings["lora_adapters"] += cat(",zero=", (dir_ / "zero").string());
    const std::vector<std::string> names = {"a", "", "b", "zero"};
    const auto all = adapter_requests(names);
    const auto got = run("weights", settings, all), none = run("weights", {}, adapter_requests({"", "", "", ""}));
    auto cpu = settings;
    cpu["device"] = "cpu";
    const auto expected = completions(weights(), cpu, all);
    for (std::size_t i = 0; i < got.size(); ++i) {
      const auto& name = names[i % names.size()];
      const bool changed = name == "a" || name == "b";
      if (changed) {
        EXPECT_NE(got[i].logprobs[0], none[i].logprobs[0]) << i;
      } else if (GetParam() != "cuda") {
        EXPECT_EQ(got[i], none[i]) << i;
      }
      if (format.dtype != "I8") continue;  // FP8 activations have 4 bits on a GPU, and 16 on a CPU
      EXPECT_NEAR(got[i].logprobs[0], expected[i].logprobs[0], 0.2F) << i;
    }
  }
}

// The steps mix adapters, prefill in chunks, decodes, prefix hits and preemption. A GPU has fewer slots than adapters.
TEST_P(AdapterStepsTest, ARequestGetsTheSameBitsAloneAndInAnyBatch) {
  if (GetParam() == "cuda") GTEST_SKIP() << "only with `reproducible`";
  for (const auto* const type : {"fp32", "bf16", "fp16"}) {
    if (!on_cuda() && type == std::string("fp16")) continue;
    SCOPED_TRACE(type);
    TinyModel model;
    model.weight_type = type;
    auto settings = write(model, 3);
    settings["lora_device_adapters"] = "2";
    const std::vector<std::string> names = {"", "a", "b", "c"};
    const auto all = adapter_requests(names);
    std::vector<testing::Completion> expected;
    {
      const auto engine = this->engine(with(settings));
      for (const auto& one : all) expected.push_back(completions(*engine, {one}).front());
    }
    EXPECT_NE(expected[0].logprobs, expected[1].logprobs);
    EXPECT_NE(expected[1].logprobs, expected[2].logprobs);
    settings["token_budget"] = "24";
    settings["cache_size"] = std::string(type) == "fp32" ? "49152" : "24576";  // less than all requests need
    for (const auto* const graphs : {"True", "False"}) {
      if (!on_cuda() && graphs == std::string("False")) continue;
      settings["cuda_graphs"] = graphs;
      const auto engine = this->engine(with(settings));
      for (int round = 0; round < 2; ++round) testing::expect_near(completions(*engine, all), expected, 0);
      EXPECT_GT(engine->stats().num_preemptions, 0);
    }
  }
}

}  // namespace
}  // namespace charonia
