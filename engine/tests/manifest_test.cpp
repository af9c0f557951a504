// Manifests that do not match the files or the model: each is rejected with the name of the tensor.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <tuple>
#include <vector>

#include "base/json.h"
#include "charonia/engine.h"
#include "charonia/error.h"
#include "errors.h"
#include "model/weights.h"
#include "test_folder.h"
#include "tiny_workspace.h"

namespace charonia {
namespace {

using nlohmann::json;

const std::string kOut = "layers.0.attention.wo.1.weight", kQkv = "layers.0.attention.w_qkv.0.weight",
                  kDown = "layers.1.feed_forward.w2.1.weight", kOutput = "output.1.weight";

class ManifestTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = testing::test_folder();
    testing::TinyModel model;
    model.ranks = 2;
    model.biases = true;
    testing::write_tiny_workspace(dir_, model);
    manifest_ = json::parse(std::ifstream(dir_ / "manifest.json"));
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  void write(const json& manifest) const { std::ofstream(dir_ / "manifest.json") << manifest.dump(); }
  // The error if the engine loads the folder.
  std::string error() const {
    auto text = charonia::error_of([this] { const Engine engine(dir_); }, ErrorCode::invalid_argument);
    EXPECT_NE(text.find("charonia convert"), std::string::npos) << text;
    return text;
  }
  // Changes the entry of a tensor, and expects an error with its name and `what`.
  void expect_refused(const std::string& tensor, const json& patch, const std::string& what) const {
    auto manifest = manifest_;
    auto& entry = manifest["tensors"].at(tensor);
    entry = entry.patch(patch);
    expect_refused(manifest, {"tensor " + tensor, what});
  }
  void expect_refused(const std::string& tensor, const std::string& path, const json& value,
                      const std::string& what) const {
    expect_refused(tensor, json::array({set(path, value)}), what);
  }
  void expect_refused(const json& manifest, const std::vector<std::string>& parts) const {
    write(manifest);
    const auto message = error();
    for (const auto& part : parts) EXPECT_NE(message.find(part), std::string::npos) << part << ": " << message;
  }
  static json set(const std::string& path, const json& value) {
    return {{"op", "add"}, {"path", path}, {"value", value}};
  }

  std::filesystem::path dir_;
  json manifest_;
};

TEST_F(ManifestTest, ARangeOutsideItsTensorIsRejected) {
  const json largest = json::parse("[0, 9223372036854775807]");
  for (const auto& range : std::vector<json>{{16, 48}, {-8, 8}, {16, 16}, {32, 16}, {32, 48}, largest}) {
    expect_refused(kOut, "/parts/0/cols", range, "which has shape [32, 32]");
    expect_refused(kOut, "/parts/0/rows", range, "which has shape [32, 32]");
  }
  for (const auto* range : {"[0, 18446744073709551615]", "[0, 1e300]", "[0.5, 16]", "[0, \"16\"]", "[true, 16]"}) {
    expect_refused(kOut, "/parts/0/cols", json::parse(range), "expected a whole number");
  }
  for (const auto* range : {"[0]", "[0, 8, 16]", "16", "null"}) {
    expect_refused(kOut, "/parts/0/cols", json::parse(range), "expected [begin, end]");
  }
}

TEST_F(ManifestTest, ARowStepThatDoesNotFitTheShapeIsRejected) {
  expect_refused(kOut, "/parts/0/row_step", 2, "has shape [32, 16], but its 1 parts have 16 rows");
  expect_refused(kOut, "/parts/0/row_step", std::int64_t{1} << 48, "its 1 parts have 1 rows");
  expect_refused(kOut, "/parts/0/row_step", 0, "row_step = 0, expected 1 to");
}

TEST_F(ManifestTest, PartsThatDoNotFitTheShapeAreRejected) {
  expect_refused(kOut, "/shape", {32, 24}, "has shape [32, 24], but its part layers.0.attention.wo.0.weight has 16");
  expect_refused(kOut, "/shape", {16, 16}, "has shape [16, 16], but its 1 parts have 32 rows");
  expect_refused(kOut, "/parts", json::array(), "its 0 parts have 0 rows");
  expect_refused(kQkv, "/parts/1/rows", {8, 16}, "has elements of layers.0.attention.w_qkv.0.weight in two parts");
  for (const auto* shape :
       {"[0, 16]", "[32, -16]", "[4611686018427387904, 4]", "[3037000500, 3037000500]", "[]", "[32, 4, 4]", "32"}) {
    expect_refused(kOut, "/shape", json::parse(shape), "expected [rows, columns] or [size]");
  }
  expect_refused(kOut, "/shape", {32.5, 16}, "expected a whole number");
}

TEST_F(ManifestTest, ATypeOrPlaceUnlikeTheFilesIsRejected) {
  expect_refused(kOut, "/dtype", "BF16", "has type fp32 in");
  expect_refused(kOut, "/parts/0/dtype", "F16", "expected fp16");
  for (const json& type : {json("I32"), json("fp32"), json(4), json()}) {
    expect_refused(kOut, "/dtype", type, "expected F32, F16 or BF16");
  }
  expect_refused(kOut, "/parts/0/file", "rank-1.safetensors", "`files` does not list");
  expect_refused(kOut, "/parts/0/name", "layers.0.attention.wo", "which has no such tensor");
  expect_refused(kOut, "/parts/0/name", 3, "is not valid");
  expect_refused(kOut, "/rank", 2, "rank = 2, expected 0 to 1");
  expect_refused(kOut, "/rank", -1, "rank = -1, expected 0 to 1");
}

TEST_F(ManifestTest, TheErrorNamesAMissingTensor) {
  for (const auto& tensor : {kOut, kQkv, kDown, kOutput, std::string("norm.weight")}) {
    auto manifest = manifest_;
    manifest["tensors"].erase(tensor);
    expect_refused(manifest, {"tensor " + tensor + " is missing"});
  }
}

TEST_F(ManifestTest, UnexpectedShapesAreRejectedWithBothShapes) {
  const auto cut = [](const char* dimension, int begin, int end, const std::vector<int>& shape) {
    return json::array({set(std::string("/parts/0/") + dimension, {begin, end}), set("/shape", shape)});
  };
  expect_refused(kOut, cut("cols", 0, 8, {32, 8}), "has shape [32, 8], expected a share of head_num = 4 heads");
  expect_refused(kQkv, cut("rows", 0, 8, {24, 32}), "expected rows of 2 q heads and of 1 k and v heads each");
  expect_refused(kDown, cut("cols", 24, 32, {32, 8}), "has shape [32, 8], expected [32, 24]");
  // Either rank may be the first that finds the wrong sum, and names its own tensor.
  auto wrong_sum = manifest_;
  auto& first = wrong_sum["tensors"].at("layers.0.feed_forward.w1.0.weight");
  first = first.patch(cut("rows", 0, 8, {8, 32}));
  expect_refused(wrong_sum, {"tensor layers.0.feed_forward.w1.", "inter_size = 48 rows"});
  expect_refused(kOutput, cut("rows", 20, 36, {16, 32}), "expected 20 rows, its share of vocab_size = 40");
  expect_refused("output.0.weight", cut("rows", 0, 18, {18, 32}), "expected a multiple of 4 rows");
  expect_refused("layers.1.ffn_norm.weight", cut("rows", 0, 31, {31}), "has shape [31], expected [32]");
  expect_refused("layers.1.attention.w_qkv.1.bias", cut("rows", 16, 31, {31}), "has shape [31], expected [32]");
}

TEST_F(ManifestTest, APlanNeedsNoFiles) {
  const auto planned = plan_memory(dir_);
  auto manifest = manifest_;
  manifest["files"] = json::object();
  for (auto& tensor : manifest["tensors"]) tensor.erase("parts");
  write(manifest);
  const auto without = plan_memory(dir_);
  EXPECT_EQ(without.weight_bytes, planned.weight_bytes);
  EXPECT_EQ(without.activation_bytes, planned.activation_bytes);
  EXPECT_NE(error().find("its 0 parts have 0 rows"), std::string::npos) << error();
  auto& huge = manifest["tensors"]["norm.weight"]["shape"];
  huge = {std::int64_t{1} << 48};
  write(manifest);
  EXPECT_THROW(plan_memory(dir_), Error);
}

TEST_F(ManifestTest, RankReadsItsOwnTensorsAndTheSharedOnes) {
  const model::Manifest manifest(dir_, 2);
  // hidden 32, 4 heads and 2 KV heads of 8, inter 48, vocabulary 40, 2 layers.
  const std::int64_t layer = 32 * 32 + 32 * 16 + 3 * 32 * 24;
  const std::int64_t biases = 32 + 2 * 24, norms = 2 * 32;
  for (const int rank : {0, 1}) {
    const auto elements = manifest.elements(rank);
    EXPECT_EQ(elements.matrices, 2 * layer + 40 * 32 + 20 * 32);
    EXPECT_EQ(elements.vectors, 2 * (biases + norms + (rank == 0 ? 2 * 32 : 0)) + 32);
  }
}

TEST_F(ManifestTest, AnotherVersionOrNumberOfRanksIsRejected) {
  const std::vector<std::pair<json, std::string>> wrong = {
      {{{"format_version", 2}}, "its format_version is 2, but this engine reads 3"},
      {{{"ranks", 4}}, "it was converted for tensor_para_size = 4, but the setting is now 2"},
      {{{"ranks", "2"}}, "manifest.json has ranks = \"2\""},
      {{{"tensors", nullptr}}, "is missing"},
      {{{"layers", json::array()}}, "manifest.json has 0 layers for num_layer = 2"},
      {{{"layers", {7}}}, "layer 0 has the value 7, expected an object"},
      {{{"layers", {json::object(), {{"window", -1}}}}}, "layer 1 has window = -1, expected 0 to"},
      {{{"layers", {{{"rotation", "left"}}}}}, "layer 0 has rotation = \"left\", expected one of global, local, none"},
      {{{"layers", {{{"windows", 8}}}}}, "layer 0 has windows = 8, which is not an attribute of a layer"},
      {{{"layers", {json::object(), {{"ffn", "experts"}}}}}, "layer 1 has ffn = experts, and num_experts is 0"},
      {{{"layers", {json::object(), {{"rotation", "local"}}}}}, "layer 1 has rotation = local, and rope_local_theta"},
      {{{"files", {{"rank-0.safetensors", {{"bytes", -1}}}}}}, "file rank-0.safetensors has bytes = -1"}};
  for (const auto& [change, what] : wrong) {
    auto manifest = manifest_;
    manifest.update(change);
    expect_refused(manifest, {what});
  }
  for (const auto* text : {"", "[]", "{", "{\"format_version\": 3}"}) {
    std::ofstream(dir_ / "manifest.json") << text;
    EXPECT_NE(error().find("manifest.json is not valid"), std::string::npos) << error();
  }
}

TEST_F(ManifestTest, AConfigOfAnotherVersionIsRejected) {
  std::ofstream(dir_ / "config.ini", std::ios::app) << "layer_windows = sf\n";
  EXPECT_NE(error().find("unknown setting 'layer_windows'"), std::string::npos) << error();
}

// Manifests with a quantised tensor, with any files: an invalid quantisation is rejected before the files are checked.
class QuantisedManifestTest : public ManifestTest {
 protected:
  void SetUp() override {
    ManifestTest::SetUp();
    auto& entry = manifest_["tensors"].at(kOut);
    entry["dtype"] = "U4";
    entry["quantization"] = {{"layout", "gptq"}, {"group_size", 16}, {"zeros", true}, {"activations", "int8-tensor"}};
    auto& part = entry["parts"][0];
    const auto beside = [&](const char* name, const char* dtype) {
      return json{{"file", part["file"]}, {"name", name}, {"dtype", dtype}};
    };
    part["scales"] = beside("wo.scales", "F16");
    part["zeros"] = beside("wo.qzeros", "I32");
    part["input_scale"] = beside("wo.input_scale", "BF16");
  }
  static json remove(const std::string& path) { return json::array({{{"op", "remove"}, {"path", path}}}); }
};

TEST_F(QuantisedManifestTest, IsRead) {
  manifest_["tensors"].at(kOut)["quantization"]["zero_offset"] = 0;
  write(manifest_);
  const model::Manifest manifest(dir_, 2);
  const auto& tensor = manifest.tensor(kOut);
  ASSERT_TRUE(tensor.quantization.has_value());
  EXPECT_EQ(tensor.quantization->layout, model::QuantLayout::gptq);
  EXPECT_EQ(tensor.quantization->code, ops::Code::u4);
  EXPECT_EQ(tensor.quantization->group_size, 16);
  EXPECT_EQ(tensor.quantization->zero_offset, 0);
  EXPECT_EQ(tensor.quantization->activations, ops::Activations::i8_tensor);
  EXPECT_TRUE(tensor.quantization->zeros);
  const auto& part = tensor.parts.at(0);
  EXPECT_EQ(part.dtype, DType::i32);
  EXPECT_EQ(part.scales->name, "wo.scales");
  EXPECT_EQ(part.scales->dtype, DType::f16);
  EXPECT_EQ(part.zeros->name, "wo.qzeros");
  EXPECT_EQ(part.input_scale->dtype, DType::bf16);
  EXPECT_FALSE(part.order.has_value());
  EXPECT_FALSE(manifest.tensor(kQkv).quantization.has_value());
  for (const auto* layout : {"gptq", "packed-rows"}) {
    auto ordered = manifest_;
    auto& entry = ordered["tensors"].at(kOut);
    entry["quantization"] = {{"layout", layout}, {"group_size", 16}, {"zeros", true}, {"activations", "int8-tensor"}};
    entry["parts"][0]["order"] = entry["parts"][0]["zeros"];
    write(ordered);
    EXPECT_EQ(model::Manifest(dir_, 2).tensor(kOut).parts.at(0).order->name, "wo.qzeros");
  }
  const auto bytes_of = [&](const char* dtype, int cols, const json& how) {
    write({{"format_version", 3},
           {"ranks", 2},
           {"files", json::object()},
           {"layers", json::array()},
           {"tensors", {{"a", {{"dtype", dtype}, {"shape", {32, cols}}, {"quantization", how}}}}}});
    const auto elements = model::Manifest(dir_, 2).elements(0);
    EXPECT_EQ(elements.matrices, 0);
    return elements.quantised_bytes;
  };
  // Half a byte for each code, two bytes for a group's scale and one for its zero.
  EXPECT_EQ(bytes_of("U4", 64, {{"layout", "awq"}, {"group_size", 32}, {"zeros", true}}), 32 * 32 + 32 * 2 * 3);
  // With integer activations: a scale and a correction of four bytes each.
  EXPECT_EQ(bytes_of("I8", 64, {{"layout", "rows"}, {"group_size", 32}, {"activations", "int8-token"}}),
            32 * 64 + 32 * 2 * 8);
  // The last group of 64 is short, so devices have groups of 32.
  EXPECT_EQ(bytes_of("F8_E4M3", 96, {{"layout", "rows"}, {"group_size", 64}, {"group_rows", 64}}),
            32 * 96 + 32 * 3 * 4);
}

TEST_F(QuantisedManifestTest, AnInvalidQuantisationIsRejected) {
  const std::vector<std::tuple<std::string, json, std::string>> wrong = {
      {"/dtype", "BF16", "dtype = \"BF16\", expected U4, I8, F8_E4M3 or F4_E2M1"},
      {"/dtype", "F8_E4M3", "dtype = \"F8_E4M3\" in layout gptq, expected U4 or I8"},
      {"/quantization", "gptq", "quantization = \"gptq\", expected an object"},
      {"/quantization/layout", "marlin", "layout = \"marlin\", expected rows, packed-rows, awq, gptq, mxfp4 or gguf"},
      {"/quantization/layout", "awq", "order, expected only with layout gptq"},
      {"/quantization/layout", "mxfp4", "dtype = \"U4\" in layout mxfp4, expected F4_E2M1"},
      {"/quantization/group_size", 0, "group_size = 0, expected 1 to"},
      {"/quantization/group_size", "128", "group_size = \"128\", expected a whole number"},
      {"/quantization/group_rows", 128, "group_rows = 128, expected 1 to 1"},
      {"/quantization/zero_offset", 2, "zero_offset = 2, expected 0 to 1"},
      {"/quantization/zeros", 1, "zeros = 1, expected true or false"},
      {"/quantization/zeros", false, "with zeros, expected only with zeros = true"},
      {"/quantization/activations", "int4", "activations = \"int4\", expected int8-token, int8-tensor, fp8-token or"},
      {"/quantization/activations", "int8-token", "with input_scale, expected only with activations = int8-tensor or"},
      {"/shape", {32}, "shape = [32] and is quantised, expected [rows, columns]"},
      {"/parts/0/dtype", "I8", "dtype = \"I8\" in a part, expected \"U4\""},
      {"/parts/0/scales/dtype", "I32", "scales with dtype = \"I32\", expected F32, F16 or BF16"},
      {"/parts/0/scales/file", "other", "scales with file = other, which `files` does not list"},
      {"/parts/0/zeros/dtype", "I8", "zeros with dtype = \"I8\", expected I32"},
      {"/parts/0/order/dtype", "I64", "order with dtype = \"I64\", expected I32"}};
  auto& part = manifest_["tensors"].at(kOut)["parts"][0];
  part["order"] = part["zeros"];
  for (const auto& [path, value, what] : wrong) expect_refused(kOut, path, value, what);
  for (const auto* path : {"scales", "zeros", "input_scale"}) {
    expect_refused(kOut, remove(std::string("/parts/0/") + path), std::string(" without ") + path + ", expected with ");
  }
  expect_refused(kOut, remove("/quantization"), "dtype = \"U4\", expected F32, F16 or BF16");
  expect_refused(kOut, remove("/quantization/layout"), "is not valid");
  expect_refused(kOut, remove("/parts/0/scales/name"), "is not valid");
  expect_refused(kOut, json::array({set("/dtype", "F4_E2M1"), set("/quantization", {{"layout", "mxfp4"}})}),
                 "no group_size, expected 32 in layout mxfp4");
  expect_refused(kOut, json::array({set("/dtype", "I8"), set("/quantization", {{"layout", "rows"}, {"zeros", true}})}),
                 "zeros = true in layout rows, expected none");
}

TEST_F(QuantisedManifestTest, ATensorMissingInTheFilesIsRejectedWithItsCanonicalName) {
  expect_refused(kOut, json::array(), "has type fp32 in");
  const std::string codes = "layers.0.attention.wo.0.weight";
  auto& part = manifest_["tensors"].at(kOut)["parts"][0];
  manifest_["tensors"].at(kOut)["dtype"] = "I8";
  part.erase("input_scale");
  part.erase("zeros");
  manifest_["tensors"].at(kOut)["quantization"] = {{"layout", "rows"}};
  expect_refused(kOut, json::array(), "(" + codes + ") has type fp32 in");
  expect_refused(kOut, "/parts/0/name", "wo", "should be wo of");
}

}  // namespace
}  // namespace charonia
