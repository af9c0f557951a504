// LoRA adapters of an engine: their names, files, memory and prefixes.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "adapter_fixture.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::request;
using testing::TinyAdapter;
using testing::TinyModel;
using testing::write_tiny_workspace;

class EngineAdapterTest : public testing::AdapterFixture {};

TEST_F(EngineAdapterTest, BlocksOfAPromptAreFoundOnlyWithTheSameAdapter) {
  const auto settings = write({}, 2);
  const auto engine = this->engine(settings);
  const auto cached = [&](const std::string& name, const std::string& session = "") {
    auto one = request(std::vector<TokenId>(41, 3), 1);
    one.lora_name = name;
    one.session_id = session;
    Collector out(*engine, one);
    return out.last().num_cached_tokens;
  };
  for (const int expected : {0, 40}) {
    for (const auto* const name : {"", "a", "b"}) EXPECT_EQ(cached(name), expected) << name;
  }
  EXPECT_EQ(cached("a", "session"), 40);
  EXPECT_TRUE(engine->unload_adapter("a"));
  EXPECT_TRUE(engine->unload_adapter("b"));
  engine->load_adapter("a", dir_ / "b");
  EXPECT_EQ(cached("a"), 0) << "the adapter has the name of an earlier one";
  EXPECT_EQ(cached("a", "session"), 40);
}

TEST_F(EngineAdapterTest, ARequestEndsWithTheAdapterThatItBeganWith) {
  const auto settings = write({}, 2);
  auto one = request({1, 2, 3}, 200);
  one.sampling.logprobs = 0;
  one.lora_name = "a";
  const auto expected = testing::completions(weights(), settings, {one});
  faults_->hold = true;
  wrap_devices(false);
  const auto engine = this->engine(settings);
  Collector out(*engine, one);
  EXPECT_TRUE(engine->unload_adapter("a"));
  EXPECT_FALSE(engine->unload_adapter("a"));
  engine->load_adapter("a", dir_ / "b");
  faults_->hold = false;
  faults_->hold.notify_all();
  EXPECT_EQ(out.tokens(), expected.front().tokens);
  EXPECT_EQ(out.logprobs(), expected.front().logprobs);
  const auto loaded = engine->adapters();
  ASSERT_EQ(loaded.size(), 2U);
  EXPECT_EQ(loaded[0].name, "a");
  EXPECT_EQ(loaded[0].folder, (dir_ / "b").string());
  EXPECT_EQ(loaded[0].max_rank, 7);
}

TEST_F(EngineAdapterTest, NamesThatAreUnknownUsedOrNotValidAreRejected) {
  const auto engine = this->engine(write({}, 2));
  auto one = request({1}, 1);
  one.lora_name = "other";
  expect_error(ErrorCode::not_found, {"other", "a, b"}, [&] { engine->submit(one, {}); });
  for (const auto* const name : {"a", "tiny", "", "  ", " x", "x ", "x=y", "x,y", "x\ny", "\xff"}) {
    expect_error(ErrorCode::invalid_argument, {name == std::string("\xff") ? "lora_name" : name},
                 [&] { engine->load_adapter(name, dir_ / "b"); });
  }
  expect_error(ErrorCode::invalid_argument, {"UTF-8"}, [&] { engine->load_adapter("c", dir_ / "\xff"); });
  expect_error(ErrorCode::invalid_argument, {"lora_adapters", "NAME=FOLDER"},
               [&] { this->engine({{"lora_adapters", "a"}}); });
  wrap_devices(true);
  const auto asynchronous = this->engine();
  expect_error(ErrorCode::unsupported, {"device", "merge"}, [&] { asynchronous->load_adapter("c", dir_ / "a"); });
}

TEST_F(EngineAdapterTest, AFingerprintNamesTheFilesOfAnAdapter) {
  const auto engine = this->engine(write({}, 2));
  const auto before = engine->adapters();
  EXPECT_NE(before[0].fingerprint, before[1].fingerprint);
  EXPECT_EQ(before[0].fingerprint.size(), 16U);
  engine->load_adapter("a", dir_ / "a");  // it is loaded
  EXPECT_EQ(engine->adapters().size(), 2U);
  auto one = request({1, 2, 3}, 4);
  one.lora_name = "a";
  const auto expected = testing::completions(*engine, {one}).front().tokens;
  one.lora_name += "=" + before[0].fingerprint;
  EXPECT_EQ(testing::completions(*engine, {one}).front().tokens, expected);
  engine->unload_adapter("a");
  engine->load_adapter("a", dir_ / "b");
  expect_error(ErrorCode::not_found, {one.lora_name, before[1].fingerprint}, [&] { engine->submit(one, {}); });
}

TEST_F(EngineAdapterTest, AnAdapterTakesNoMemoryOfTheCache) {
  TinyModel model;
  model.ranks = 2;
  write(model, 1);
  wrap_devices(false);
  const auto no_limit = faults_->free_bytes.load();
  for (const std::int64_t offload : {0, 1 << 20}) {
    faults_->free_bytes = no_limit;
    const auto engine = this->engine({{"kv_offload_memory", offload > 0 ? cat(offload) : ""}});
    engine->load_adapter("a", dir_ / "a");
    const auto bytes = engine->adapters().front().bytes;
    EXPECT_TRUE(engine->unload_adapter("a"));
    faults_->free_bytes = (engine->info().kv_cache_bytes + offload + bytes) / 2 - 1;
    expect_error(ErrorCode::resource_exhausted, {cat(bytes), cat(bytes - 2), "cache_max_entry_count"},
                 [&] { engine->load_adapter("a", dir_ / "a"); });
    ++faults_->free_bytes;
    engine->load_adapter("a", dir_ / "a");
  }
}

TEST_F(EngineAdapterTest, APlanCountsTheAdaptersOfAllRanks) {
  TinyModel model;
  model.ranks = 2;
  auto settings = write(model, 2);
  settings.emplace("cache_max_entry_count", "4");
  const auto plan = plan_memory(weights(), settings);
  std::int64_t bytes = 0;
  for (const auto& one : this->engine(settings)->adapters()) bytes += one.bytes;
  EXPECT_GE(plan.adapter_bytes, bytes);
  EXPECT_LT(plan.adapter_bytes, bytes + bytes / 8) << "more than padding";
  EXPECT_EQ(plan.num_blocks, 4);
  const auto all = plan.weight_bytes + plan.activation_bytes + 4 * plan.kv_block_bytes + plan.adapter_bytes;
  EXPECT_EQ(plan_memory(weights(), settings, all + 1).num_blocks, 4);
  const auto small = plan_memory(weights(), settings, all - 2);
  EXPECT_EQ(small.num_blocks, 0);
  EXPECT_NE(small.warnings.back().find("LoRA adapters do not fit"), std::string::npos) << small.warnings.back();
}

TEST_F(EngineAdapterTest, APlanCountsADraftModelBesideTheAdapters) {
  auto settings = write({}, 1);
  settings.insert({{"speculative_method", "draft_model"},
                   {"speculative_model", weights().string()},
                   {"session_len", "64"},
                   {"max_batch_size", "1"},
                   {"cache_max_entry_count", "400"}});  // so that the draft model has its full cache
  const auto plan = plan_memory(weights(), settings, 1 << 30);
  EXPECT_GT(plan.speculative_bytes, 0);
  EXPECT_EQ(plan.num_blocks, 400);
  const auto all = plan.weight_bytes + plan.activation_bytes + plan.speculative_bytes + 400 * plan.kv_block_bytes +
                   plan.adapter_bytes;
  EXPECT_EQ(plan_memory(weights(), settings, all).num_blocks, 400);
  const auto small = plan_memory(weights(), settings, all - 1);
  EXPECT_EQ(small.speculative_bytes, plan.speculative_bytes);
  EXPECT_EQ(small.num_blocks, 0);
  EXPECT_NE(small.warnings.back().find("beside the model, its draft model, and"), std::string::npos)
      << small.warnings.back();
}

TEST_F(EngineAdapterTest, APlanRejectsTheAdaptersThatTheEngineRejects) {
  auto settings = write({}, 2);
  const auto a = (dir_ / "a").string(), b = (dir_ / "b").string();
  const std::pair<std::string, std::string_view> rejected[] = {
      {"a=/missing", "not a folder"}, {"a", "NAME=FOLDER"},
      {cat(" =", a), "is not a name"}, {cat("tiny=", a), "name of the model"},
      {cat("a=", a, ",a=", b), "other files"}, {cat("a=", a, "\xff"), "UTF-8"}};
  for (const auto& [list, text] : rejected) {
    settings["lora_adapters"] = list;
    expect_error(ErrorCode::invalid_argument, {text}, [&] { plan_memory(weights(), settings); });
    expect_error(ErrorCode::invalid_argument, {text}, [&] { this->engine(settings); });
  }
  settings["lora_adapters"] = cat("a=", a);
  const auto bytes = plan_memory(weights(), settings).adapter_bytes;
  settings["lora_adapters"] = cat("a=", a, ",a=", a);  // one adapter
  EXPECT_EQ(plan_memory(weights(), settings).adapter_bytes, bytes);
  EXPECT_EQ(this->engine(settings)->adapters().size(), 1U);
  settings["device"] = "cuda";
  EXPECT_EQ(plan_memory(weights(), settings, 1 << 30).config.lora_device_adapters, 1);
  settings["lora_max_rank"] = "1";
  expect_error(ErrorCode::invalid_argument, {"adapter a", "lora_max_rank"},
               [&] { plan_memory(weights(), settings, 1 << 30); });
}

TEST_F(EngineAdapterTest, SettingsOfSlotsHaveAWarningOnTheCpu) {
  auto settings = write({}, 2);
  std::string expected;
  for (const std::string key : {"lora_max_rank", "lora_device_adapters"}) {
    settings[key] = "4";
    expected = cat(key, " = 4", expected.empty() ? "" : " and ", expected);
    const auto whole = cat("no effect with device = cpu: ", expected, ". Only a GPU has slots for adapters");
    for (const auto& warnings : {plan_memory(weights(), settings).warnings, engine(settings)->info().warnings}) {
      EXPECT_NE(std::ranges::find(warnings, whole), warnings.end()) << whole;
    }
  }
}

TEST_F(EngineAdapterTest, AdaptersThatTheEngineCannotComputeAreRejectedByName) {
  TinyModel model;
  model.experts = 4;
  write_tiny_workspace(weights(), model);
  auto manifest = nlohmann::json::parse(std::ifstream(weights() / "manifest.json"));
  manifest["module_prefixes"] = nlohmann::json::array({nlohmann::json::array({"other.", ""})});
  std::ofstream(weights() / "manifest.json") << manifest;
  const auto engine = this->engine();
  const TinyAdapter good(weights(), 1);
  const auto rejects = [&](ErrorCode code, std::initializer_list<std::string_view> parts,
                           const std::function<void(TinyAdapter&)>& change) {
    auto bad = good;
    change(bad);
    bad.write(dir_ / "bad");
    expect_error(code, parts, [&] { engine->load_adapter("bad", dir_ / "bad"); });
  };
  const auto module = good.shapes.begin()->first;
  const std::pair<const char*, nlohmann::json> features[] = {
      {"use_dora", true},
      {"modules_to_save", {"lm_head"}},
      {"bias", "all"},
      {"lora_bias", true},
      {"peft_type", "IA3"},
      {"target_parameters", {"x"}},
      {"new_key", 3},
      {"init_lora_weights", "pissa"},
      {"layer_replication", {{0, 1}}},
      {"trainable_token_indices", {1}}};
  rejects(ErrorCode::unsupported, {"modules_to_save = [\"lm_head\"] is not supported"},
          [&](TinyAdapter& bad) { bad.config["modules_to_save"] = {"lm_head"}; });
  for (const auto& [key, value] : features) {
    rejects(ErrorCode::unsupported, {"adapter bad", key}, [&](TinyAdapter& bad) { bad.config[key] = value; });
  }
  for (const auto* const tensor : {"base_model.model.x.lora_magnitude_vector", "base_model.model.x.lora_embedding_A",
                                   "base_model.model.lm_head.weight"}) {
    rejects(ErrorCode::unsupported, {"adapter bad", tensor}, [&](TinyAdapter& bad) { bad.more[tensor] = "F32"; });
  }
  rejects(ErrorCode::unsupported, {"layers.0.experts.gate_up", "Adapters can change: "}, [&](TinyAdapter& bad) {
    const std::string experts = "layers.0.experts.gate_up";
    bad.shapes[experts] = {4, 4};
    bad.ranks[experts] = 1;
    bad.a[experts] = bad.b[experts] = {1, 2, 3, 4};
  });
  rejects(ErrorCode::unsupported, {module, "rank 257", "256"}, [&](TinyAdapter& bad) {
    bad.ranks[module] = 257;
    bad.a[module].resize(static_cast<std::size_t>(257 * bad.shapes[module][1]));
    bad.b[module].resize(static_cast<std::size_t>(257 * bad.shapes[module][0]));
  });
  rejects(ErrorCode::invalid_argument, {module, "the weight is"}, [&](TinyAdapter& bad) {
    bad.shapes[module][0] += 1;
    bad.b[module].resize(bad.b[module].size() + static_cast<std::size_t>(bad.ranks[module]));
  });
  rejects(ErrorCode::invalid_argument, {module, "not finite"},
          [&](TinyAdapter& bad) { bad.a[module][0] = std::numeric_limits<float>::quiet_NaN(); });
  rejects(ErrorCode::invalid_argument, {module, "adapter_config.json", "rank_pattern"},
          [&](TinyAdapter& bad) { bad.config["rank_pattern"] = {{"another", 1}}; });
  rejects(ErrorCode::invalid_argument, {"adapter_config.json", "lora_alpha"},
          [&](TinyAdapter& bad) { bad.config.erase("lora_alpha"); });
  for (const auto* const expression : {"(.*)*x", "w_qkv.[01]", "a|b"}) {
    rejects(ErrorCode::unsupported, {"alpha_pattern", expression},
            [&](TinyAdapter& bad) { bad.config["alpha_pattern"] = {{expression, 4}}; });
  }
  rejects(ErrorCode::invalid_argument, {"adapter_config.json", "larger"},
          [&](TinyAdapter& bad) { bad.config["revision"] = std::string(1 << 20, 'x'); });
  rejects(ErrorCode::invalid_argument, {module, "twice"},
          [&](TinyAdapter& bad) { bad.more[module + ".lora_A.weight"] = "F32"; });
  rejects(ErrorCode::invalid_argument, {module, "other." + module, "the same module"}, [&](TinyAdapter& bad) {
    for (auto* const one : {&bad.a, &bad.b}) (*one)["other." + module] = one->at(module);
    bad.shapes["other." + module] = bad.shapes[module];
    bad.ranks["other." + module] = bad.ranks[module];
  });
  EXPECT_TRUE(engine->adapters().empty());
}

TEST_F(EngineAdapterTest, AdapterFilesThatCannotBeReadAreRejectedByName) {
  TinyModel model;
  write_tiny_workspace(weights(), model);
  const auto engine = this->engine();
  const TinyAdapter good(weights(), 1);
  const auto module = good.shapes.begin()->first;
  expect_error(ErrorCode::invalid_argument, {"not a folder"}, [&] { engine->load_adapter("bad", dir_ / "none"); });
  for (const auto* const file : {"adapter_config.json", "adapter_model.safetensors"}) {  // reading a pipe would wait
    std::filesystem::remove_all(dir_ / "bad");
    good.write(dir_ / "bad");
    std::filesystem::remove(dir_ / "bad" / file);
    ASSERT_EQ(mkfifo((dir_ / "bad" / file).c_str(), 0600), 0);
    expect_error(ErrorCode::invalid_argument, {file}, [&] { engine->load_adapter("bad", dir_ / "bad"); });
  }
  EXPECT_TRUE(engine->adapters().empty());

  model.weight_type = "bf16";
  write_tiny_workspace(weights(), model);
  auto large = good;
  large.b.at(module)[0] = 3.4e38F;  // the next bf16 is infinity
  large.write(dir_ / "large");
  expect_error(ErrorCode::invalid_argument, {module, "not finite", "bf16"},
               [&] { this->engine()->load_adapter("bad", dir_ / "large"); });
}

TEST_F(EngineAdapterTest, TheFactorFollowsPatternsAndTheRoot) {
  const TinyModel model;
  write_tiny_workspace(weights(), model);
  const auto run = [&](const TinyAdapter& adapter) {
    adapter.write(dir_ / "x");
    return testing::completions(weights(), {{"lora_adapters", cat("x=", (dir_ / "x").string())}},
                                testing::adapter_requests({"x"}));
  };
  // Multiplies B by a factor, as a change of alpha does.
  const auto scaled = [&](const std::function<double(const std::string&, int)>& factor) {
    TinyAdapter out(weights(), 1);
    for (auto& [name, values] : out.b) {
      for (auto& value : values) value *= static_cast<float>(factor(name, out.ranks.at(name)));
    }
    return out;
  };
  TinyAdapter root(weights(), 1);
  root.config["use_rslora"] = true;
  testing::expect_near(run(root), run(scaled([](const auto&, int rank) { return std::sqrt(rank); })), 1e-3F);
  TinyAdapter pattern(weights(), 1);
  pattern.config["alpha_pattern"] = {{"layers.1.attention.w_qkv.0", 24}, {"w2\\.0", 4}};
  testing::expect_near(run(pattern), run(scaled([](const std::string& name, int) {
                         return name == "layers.1.attention.w_qkv.0" ? 3.0 : name.ends_with("w2.0") ? 0.5 : 1.0;
                       })),
                       1e-3F);
}

}  // namespace
}  // namespace charonia
