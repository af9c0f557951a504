#include "runtime/step_sizes.h"

#include <gtest/gtest.h>

#include <string>

#include "charonia/error.h"
#include "runtime/cache_size.h"
#include "runtime/executor.h"

namespace charonia::runtime {
namespace {

constexpr std::size_t kGiB = std::size_t{1} << 30;

EngineConfig sizes(const StepDevice& device, int token_budget = 0, int max_batch_size = 0) {
  EngineConfig out;
  out.token_budget = token_budget;
  out.max_batch_size = max_batch_size;
  resolve_step_sizes(out, device);
  return out;
}

void expect_sizes(const StepDevice& device, int token_budget, int max_batch_size) {
  const auto got = sizes(device);
  EXPECT_EQ(got.token_budget, token_budget) << device.sms << ", " << device.free_bytes / kGiB << " GiB";
  EXPECT_EQ(got.max_batch_size, max_batch_size) << device.sms << ", " << device.free_bytes / kGiB << " GiB";
}

TEST(StepSizes, TheCpusSizesDoNotDependOnMemory) {
  expect_sizes({"cpu", 0, kGiB}, 512, 64);
  expect_sizes({"cpu", 0, 2000 * kGiB}, 512, 64);
}

TEST(StepSizes, AGpuHasThemByItsSmsAndFreeMemory) {
  expect_sizes({"cuda", 132, 139 * kGiB}, 2048, 256);  // H200
  expect_sizes({"cuda", 108, 79 * kGiB}, 1536, 192);   // A100
  expect_sizes({"cuda", 58, 22 * kGiB}, 768, 64);      // L4
  expect_sizes({"cuda", 132, 40 * kGiB}, 2048, 128);   // an H100 that is shared
  expect_sizes({"cuda", 132, 10 * kGiB}, 1280, 64);
}

TEST(StepSizes, NoGpuHasLessThanTheCpuOrMoreThanABound) {
  expect_sizes({"cuda", 6, 2 * kGiB}, 512, 64);
  expect_sizes({"cuda", 132, 0}, 512, 64);
  expect_sizes({"cuda", 5000, 4000 * kGiB}, 8192, 512);
}

TEST(StepSizes, SizesThatTheUserSetStay) {
  const StepDevice h200{"cuda", 132, 139 * kGiB};
  EXPECT_EQ(sizes(h200, 7).token_budget, 7);
  EXPECT_EQ(sizes(h200, 7).max_batch_size, 256);
  EXPECT_EQ(sizes(h200, 0, 3).max_batch_size, 3);
  EXPECT_EQ(sizes(h200, 0, 3).token_budget, 2048);
}

TEST(StepSizes, NothingComputesWithSizesThatAreNotResolved) {
  const auto refused = [](const auto& use, const EngineConfig& config, const std::string& name) {
    try {
      use(config);
      ADD_FAILURE() << name << " = 0 was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::internal);
      EXPECT_NE(std::string(error.what()).find(name + " = 0 was not resolved"), std::string::npos) << error.what();
    }
  };
  EngineConfig no_budget, no_batch;
  no_budget.max_batch_size = no_batch.token_budget = 1;
  no_budget.session_len = no_batch.session_len = 10;
  for (const auto& [config, name] : {std::pair{no_budget, "token_budget"}, std::pair{no_batch, "max_batch_size"}}) {
    refused([](const EngineConfig& c) { step_limits(c); }, config, name);
    refused([](const EngineConfig& c) { blocks_that_fit(c, {1000, 100'000, 1}); }, config, name);
    refused([](const EngineConfig& c) { check_model_fits(c, {"cpu", 1, 1, 1, 100}); }, config, name);
  }
}

}  // namespace
}  // namespace charonia::runtime
