// Weights that no model can compute with: loading does not look at values, the first request says which tensor it is.
#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <limits>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>

#include "base/text.h"
#include "engine_fixture.h"
#include "model/weights.h"
#include "runtime/weight_check.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::EngineFixture;
using testing::request;
using testing::TinyModel;
using testing::write_tiny_workspace;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

class BrokenWeightsTest : public EngineFixture {
 protected:
  // The tiny model with one value of a tensor, its first, replaced.
  void replace(const std::string& tensor, float value, int ranks = 1) const {
    TinyModel model;
    model.ranks = ranks;
    bool done = false;
    model.change = [&](const std::string& name, float old) {
      return name != tensor || std::exchange(done, true) ? old : value;
    };
    write_tiny_workspace(weights(), model);
    ASSERT_TRUE(done);
  }
  // On a busy machine the first ones may not have the cause yet.
  static std::string error_of_request(Engine& engine) {
    std::string error;
    do {
      Collector out;
      engine.submit(request({5, 6, 7}, 4), out.callback());
      const auto result = out.last();
      EXPECT_EQ(result.finish_reason, FinishReason::error);
      error = result.error;
    } while (error.find("are being read") != std::string::npos);
    return error;
  }
  std::string find_broken(DType weight_type, int ranks = 1) const {
    return model::WeightFiles(weights(), ranks).find_broken(weight_type, {});
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, BrokenWeightsTest, testing::kDevices, testing::device_name);

TEST_P(BrokenWeightsTest, TheFirstRequestsErrorNamesTheTensor) {
  const std::string tensor = "layers.1.feed_forward.w2.0.weight";
  replace(tensor, kNaN);
  const auto broken = engine();
  for (int time = 0; time < 2; ++time) {
    const auto error = error_of_request(*broken);
    for (const auto* part : {"the logit of token", tensor.c_str(), "rank-0.safetensors", "not finite"}) {
      EXPECT_NE(error.find(part), std::string::npos) << error;
    }
  }
}

TEST_P(BrokenWeightsTest, WhereAllWeightsAreFiniteItSaysSo) {
  TinyModel model;
  model.change = [](const std::string& name, float value) {
    return name.ends_with("w1.0.weight") || name.ends_with("w3.0.weight") ? value * 1e30F : value;
  };
  write_tiny_workspace(weights(), model);
  const auto overflowing = engine();
  const auto error = error_of_request(*overflowing);
  EXPECT_NE(error.find("all weights are finite"), std::string::npos) << error;
}

TEST_P(BrokenWeightsTest, OnlyTheFilesOfTensorsHaveToBeThere) {
  replace("norm.weight", kNaN);
  for (const bool all : {false, true}) {
    const auto broken = engine();
    if (all) std::filesystem::remove(weights() / "rank-0.safetensors");
    std::filesystem::remove(weights() / "token_table.safetensors");
    std::filesystem::remove(weights() / "manifest.json");
    const auto error = error_of_request(*broken);
    const auto* const expected = all ? "the weights cannot be read again" : "tensor norm.weight of";
    EXPECT_NE(error.find(expected), std::string::npos) << error;
    replace("norm.weight", kNaN);
  }
}

TEST_P(BrokenWeightsTest, OtherErrorsAreAsTheyWere) {
  const auto sound = engine();
  auto nothing_left = request({5, 6, 7}, 4);
  nothing_left.mask = std::make_shared<testing::MaskOf>(40, [](TokenId token, auto) { return token == 5; });
  nothing_left.sampling.bad_words = {{5}};
  Collector out;
  sound->submit(nothing_left, out.callback());
  const auto error = out.last().error;
  EXPECT_NE(error.find("no token is left"), std::string::npos) << error;
  EXPECT_EQ(error.find("weights"), std::string::npos) << error;
}

TEST_P(BrokenWeightsTest, AnyTensorOfAnyRankIsFound) {
  for (const float value : {kNaN, -kNaN, kInfinity, -kInfinity}) {
    for (const auto* tensor : {"norm.weight", "tok_embeddings.weight", "layers.0.attention.w_qkv.0.weight"}) {
      for (const int ranks : {1, 2}) {
        replace(tensor, value, ranks);
        const auto found = find_broken(DType::bf16, ranks);
        EXPECT_NE(found.find(tensor), std::string::npos) << found;
      }
    }
  }
  write_tiny_workspace(weights());
  EXPECT_EQ(find_broken(DType::f16), "");
}

TEST_P(BrokenWeightsTest, AMatrixWhoseValuesTheWeightTypeCannotHoldIsFound) {
  const std::string tensor = "layers.0.feed_forward.w1.0.weight";
  replace(tensor, -65520);  // the least that is rounded to an infinity
  EXPECT_NE(find_broken(DType::f16).find(tensor + " of "), std::string::npos);
  EXPECT_NE(find_broken(DType::f16).find(" fp16 cannot hold"), std::string::npos);
  EXPECT_EQ(find_broken(DType::bf16), "");
  replace(tensor, 65519);
  EXPECT_EQ(find_broken(DType::f16), "");
  replace(tensor, std::numeric_limits<float>::max());
  EXPECT_NE(find_broken(DType::bf16).find(" bf16 cannot hold"), std::string::npos);
  EXPECT_EQ(find_broken(DType::f32), "");
  replace("norm.weight", 70'000);  // kept as float
  EXPECT_EQ(find_broken(DType::f16), "");
}

TEST_P(BrokenWeightsTest, ItEndsWhenItIsAskedTo) {
  replace("norm.weight", kNaN);
  std::stop_source stop;
  stop.request_stop();
  EXPECT_EQ(model::WeightFiles(weights(), 1).find_broken(DType::f32, stop.get_token()), "");
}

// One tensor of 4 GiB, a file that takes no room on the disk: to read it takes a second or more.
TEST(WeightCheckTest, ItEndsInTheMiddleOfATensor) {
  const auto dir = testing::test_folder();
  const std::int64_t rows = 1 << 20, cols = 1024;
  const auto header = cat(R"({"output.weight": {"dtype": "F32", "shape": [)", rows, ", ", cols,
                          R"(], "data_offsets": [0, )", rows * cols * 4, "]}}");
  std::filesystem::create_directories(dir);
  {
    std::ofstream file(dir / "big.safetensors", std::ios::binary);
    const auto length = static_cast<std::uint64_t>(header.size());
    file.write(reinterpret_cast<const char*>(&length), sizeof length);
    file << header;
  }
  const auto bytes = sizeof(std::uint64_t) + header.size() + static_cast<std::size_t>(rows * cols) * 4;
  std::filesystem::resize_file(dir / "big.safetensors", bytes);
  std::ofstream(dir / "manifest.json")
      << R"({"format_version": 2, "ranks": 1, "files": {"big.safetensors": {"bytes": )" << bytes
      << R"(}}, "tensors": {"output.weight": {"shape": [)" << rows << ", " << cols << R"(], "dtype": "F32",)"
      << R"("parts": [{"file": "big.safetensors", "name": "output.weight"}]}}})";
  runtime::WeightCheck check(dir, 1, DType::f32);
  std::string error;
  std::thread asks([&] { error = check.explain("broken"); });
  std::this_thread::sleep_for(std::chrono::milliseconds{100});  // it reads
  check.stop();
  asks.join();
  EXPECT_EQ(error, "broken (the engine was closed before all weights were read for the cause)");
  check.join();
  std::filesystem::remove_all(dir);
}

}  // namespace
}  // namespace charonia
