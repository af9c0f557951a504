// LoRA adapters in the slots of a CUDA device: more adapters than slots, loading and unloading while requests run,
// memory.
#include <gtest/gtest.h>

#include <fstream>

#include "adapter_fixture.h"
#include "errors.h"
#include "ops/cuda/device/runtime.h"
#include "runtime/adapter.h"

namespace charonia {
namespace {

using testing::adapter_requests;
using testing::Collector;
using testing::completions;
using testing::request;
using testing::TinyModel;

class CudaAdapterTest : public testing::AdapterFixture {
 protected:
  Settings write(int adapters, const TinyModel& model = {}) const {
    auto out = AdapterFixture::write(model, adapters);
    out.insert({{"device", "cuda"}, {"max_batch_size", "8"}, {"reproducible", "True"}});
    return out;
  }
};

std::vector<std::string> first_names(int count) {
  std::vector<std::string> out;
  for (int i = 0; i < count; ++i) out.emplace_back(1, static_cast<char>('a' + i));
  return out;
}

TEST_F(CudaAdapterTest, AdaptersTakeTurnsInFewerSlots) {
  auto settings = write(5);
  const auto all = adapter_requests(first_names(5), 6);
  const auto expected = completions(weights(), settings, all);  // a slot for each
  auto cpu = settings;
  cpu["device"] = "cpu";
  testing::expect_near(expected, completions(weights(), cpu, all), 1e-3F);
  for (const auto* const slots : {"1", "2"}) {
    settings["lora_device_adapters"] = slots;
    const auto engine = this->engine(settings);
    completions(*engine, {all.front()});
    const auto before = cuda::allocations();
    for (int round = 0; round < 2; ++round) EXPECT_EQ(completions(*engine, all), expected) << slots;
    EXPECT_EQ(cuda::allocations(), before) << "a step allocates nothing";
  }
}

TEST_F(CudaAdapterTest, ARequestKeepsItsAdapterAfterItIsUnloadedAndReplaced) {
  auto settings = write(3);
  settings["lora_device_adapters"] = "1";
  settings["max_batch_size"] = "2";
  auto long_one = request({1, 2, 3}, 40), other = request({4, 5}, 10);
  long_one.lora_name = "a";
  other.lora_name = "b";
  const auto expected = completions(weights(), settings, {long_one, other});
  other.lora_name = "c";
  const auto of_c = completions(weights(), settings, {other});
  const auto engine = this->engine(settings);
  for (int round = 0; round < 2; ++round) {
    Collector first(*engine, long_one);
    first.wait_for(1);
    other.lora_name = "b";
    Collector second(*engine, other);  // waits for the slot
    EXPECT_TRUE(engine->unload_adapter("a"));
    EXPECT_TRUE(engine->unload_adapter("b"));
    engine->load_adapter("b", dir_ / "c");
    Collector third(*engine, other);  // another adapter with the name
    EXPECT_EQ(first.tokens(), expected[0].tokens);
    EXPECT_EQ(second.tokens(), expected[1].tokens);
    EXPECT_EQ(third.tokens(), of_c[0].tokens);
    EXPECT_TRUE(engine->unload_adapter("b"));
    engine->load_adapter("a", dir_ / "a");
    engine->load_adapter("b", dir_ / "b");
  }
}

TEST_F(CudaAdapterTest, CancelledRequestsFreeTheirSlots) {
  auto settings = write(3);
  settings["lora_device_adapters"] = "1";
  const auto engine = this->engine(settings);
  for (int round = 0; round < 2; ++round) {
    std::vector<std::unique_ptr<Collector>> all;
    std::vector<Engine::Handle> handles;
    for (const auto& name : first_names(3)) {
      auto one = request({1, 2, 3}, 20);
      one.lora_name = name;
      all.push_back(std::make_unique<Collector>());
      handles.push_back(engine->submit(one, all.back()->callback()));
    }
    all[0]->wait_for(1);
    engine->cancel(handles[0]);
    engine->cancel(handles[1]);
    EXPECT_EQ(all[2]->tokens().size(), 20U);
    for (const auto& one : all) one->wait();
    engine->check_integrity();
  }
}

TEST_F(CudaAdapterTest, AnEngineWithoutSlotsOrForSmallerRanksRejectsAnAdapter) {
  auto settings = write(2);  // ranks 3 and 7
  settings.erase("lora_adapters");
  expect_error(ErrorCode::unsupported, {"adapter a", "lora_device_adapters"},
               [&] { this->engine(settings)->load_adapter("a", dir_ / "a"); });
  settings["lora_device_adapters"] = "2";
  settings["lora_max_rank"] = "4";
  const auto engine = this->engine(settings);
  engine->load_adapter("a", dir_ / "a");
  expect_error(ErrorCode::invalid_argument, {"adapter b", "rank 7", "lora_max_rank = 4"},
               [&] { engine->load_adapter("b", dir_ / "b"); });
  settings["lora_adapters"] = cat("b=", (dir_ / "b").string());
  expect_error(ErrorCode::invalid_argument, {"adapter b", "rank 7"},
               [&] { plan_memory(weights(), settings, 1 << 30); });
  expect_error(ErrorCode::invalid_argument, {"adapter b", "rank 7"}, [&] { this->engine(settings); });
}

TEST_F(CudaAdapterTest, AModelWithoutModulesHasNoSlots) {
  auto settings = write(1);
  auto manifest = nlohmann::json::parse(std::ifstream(weights() / "manifest.json"));
  manifest.erase("modules");
  std::ofstream(weights() / "manifest.json") << manifest;
  const auto list = std::exchange(settings["lora_adapters"], "");
  const auto all = adapter_requests({""}, 6);
  const auto expected = completions(weights(), settings, all);
  settings["lora_device_adapters"] = "4";
  const auto engine = this->engine(settings);
  EXPECT_EQ(completions(*engine, all), expected);
  const auto warns = [](const std::vector<std::string>& warnings) {
    return std::ranges::any_of(warnings, [](const auto& one) {
      return one.starts_with("lora_device_adapters = 4 has no effect") && one.find("GGUF") != std::string::npos;
    });
  };
  EXPECT_TRUE(warns(engine->info().warnings));
  expect_error(ErrorCode::unsupported, {"adapter a", "GGUF"}, [&] { engine->load_adapter("a", dir_ / "a"); });
  const auto plan = plan_memory(weights(), settings, 1 << 30);
  EXPECT_TRUE(warns(plan.warnings));
  EXPECT_EQ(plan.adapter_bytes, 0);
  settings["lora_adapters"] = list;
  expect_error(ErrorCode::unsupported, {"adapter a", "GGUF"}, [&] { plan_memory(weights(), settings, 1 << 30); });
  expect_error(ErrorCode::unsupported, {"adapter a", "GGUF"}, [&] { this->engine(settings); });
}

TEST_F(CudaAdapterTest, APlanCountsTheSlotsBesideTheCache) {
  TinyModel model;
  model.ranks = 2;
  auto settings = write(2, model);
  settings["device_ids"] = "0,0";
  constexpr std::int64_t kMemory = std::int64_t{1} << 30;
  const auto two = plan_memory(weights(), settings, kMemory);
  EXPECT_EQ(two.config.lora_device_adapters, 2);
  EXPECT_EQ(two.config.lora_max_rank, 7);
  std::int64_t largest = 0, all = 0;
  for (const auto& one : this->engine(settings)->adapters()) {
    largest = std::max(largest, one.bytes);
    all += one.bytes;
  }
  EXPECT_GE(two.adapter_bytes, 2 * largest);
  EXPECT_LT(two.adapter_bytes, 3 * largest);
  EXPECT_GE(two.host_bytes, all);
  settings["lora_device_adapters"] = "4";
  const auto four = plan_memory(weights(), settings, kMemory);
  EXPECT_EQ(four.adapter_bytes, 2 * two.adapter_bytes);
  settings["lora_device_adapters"] = "4096";
  settings["lora_max_rank"] = "256";
  const auto too_many = plan_memory(weights(), settings, kMemory);
  EXPECT_EQ(too_many.num_blocks, 0);
  for (const auto* const part : {"4096 LoRA adapters of rank 256", "lower lora_device_adapters or lora_max_rank"}) {
    EXPECT_NE(too_many.warnings.back().find(part), std::string::npos) << too_many.warnings.back();
  }
  settings["lora_max_rank"] = "257";
  expect_error(ErrorCode::invalid_argument, {"lora_max_rank = 257", "256"},
               [&] { plan_memory(weights(), settings, kMemory); });
}

TEST(AdapterMemory, AdaptersOfAGpuMustFitIntoHostMemory) {
  EngineConfig config;
  EXPECT_NO_THROW(runtime::check_host_memory(config, 100, 100));
  expect_error(ErrorCode::resource_exhausted, {"LoRA adapters", "host memory", "Leave an adapter out, or"},
               [&] { runtime::check_host_memory(config, 101, 100); });
  config.kv_offload_memory = "1GiB";
  expect_error(ErrorCode::resource_exhausted, {"beside kv_offload_memory", "lower kv_offload_memory"},
               [&] { runtime::check_host_memory(config, 101, -5); });
}

}  // namespace
}  // namespace charonia
