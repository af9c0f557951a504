// The options that the Triton backend reads from config.pbtxt, such as the device. Tests of real servers cover the
// others.
#include "model_options.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/text.h"
#include "charonia/error.h"
#include "errors.h"

namespace charonia::triton {
namespace {

ModelOptions read(const std::string& group, const std::string& parameters = "") {
  return read_model_options(cat(R"({"model_transaction_policy": {"decoupled": true}, "instance_group": [)", group,
                                R"(], "parameters": {)", parameters, "}}"));
}

std::string parameter(const std::string& key, const std::string& value) {
  return cat("\"", key, R"(": {"string_value": ")", value, "\"}");
}

std::string device_of(const ModelOptions& options) {
  const auto found = options.settings.find("device");
  return found == options.settings.end() ? "" : found->second;
}

TEST(ModelOptions, TheKindOfTheInstanceGroupIsTheDevice) {
  EXPECT_EQ(device_of(read(R"({"count": 1, "kind": "KIND_MODEL"})")), "");
  EXPECT_EQ(device_of(read("")), "");
  EXPECT_EQ(device_of(read(R"({"count": 1, "kind": "KIND_CPU", "gpus": []})")), "cpu");
  const auto gpu = read(R"({"count": 1, "kind": "KIND_GPU", "gpus": [3]})");
  EXPECT_EQ(device_of(gpu), "cuda");
  EXPECT_EQ(gpu.gpus, std::vector<int>{3});
}

TEST(ModelOptions, AParameterDeviceStandsWithKindModelAndBesideItsOwnKind) {
  EXPECT_EQ(device_of(read(R"({"kind": "KIND_MODEL"})", parameter("device", "cuda"))), "cuda");
  EXPECT_EQ(device_of(read(R"({"kind": "KIND_CPU"})", parameter("device", "cpu"))), "cpu");
  EXPECT_EQ(device_of(read(R"({"kind": "KIND_GPU", "gpus": [0]})", parameter("device", "auto"))), "cuda");
}

void expect_refused(const std::string& group, const std::string& parameters, const std::string& named) {
  expect_error(ErrorCode::invalid_argument, {named, "KIND_MODEL"}, [&] { read(group, parameters); });
}

TEST(ModelOptions, AnotherDeviceInTheSameFileIsRefusedWithTheRemedy) {
  expect_refused(R"({"kind": "KIND_CPU"})", parameter("device", "cuda"), "KIND_CPU and the parameter device is cuda");
  expect_refused(R"({"kind": "KIND_GPU", "gpus": [0]})", parameter("device", "cpu"), "the parameter device is cpu");
  expect_refused(R"({"kind": "KIND_GPU", "gpus": [0]})", parameter("device_ids", "1"), "device_ids (1)");
}

TEST(ModelOptions, MoreThanOneInstanceIsRefusedAndSeveralGpusAreNot) {
  expect_refused(R"({"count": 2, "kind": "KIND_CPU"})", "", "2 instances");
  expect_refused(R"({"count": 1, "kind": "KIND_GPU", "gpus": [0]}, {"count": 1, "kind": "KIND_GPU", "gpus": [1]})", "",
                 "2 instances");
  EXPECT_EQ(read(R"({"count": 1, "kind": "KIND_GPU", "gpus": [0, 1]})").gpus, (std::vector<int>{0, 1}));
}

TEST(ModelOptions, EveryRankGetsOneOfTheGpusInTheirOrder) {
  EXPECT_EQ(device_ids_of({0, 1, 2, 3}, 1), "0");
  EXPECT_EQ(device_ids_of({2, 0, 1}, 2), "2,0");
  EXPECT_EQ(device_ids_of({5}, 2), "5");  // too few: the engine says so
}

}  // namespace
}  // namespace charonia::triton
