// The layouts of quantised weights in files, packed here code by code as each publisher describes them.
#include "model/quant_layouts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "charonia/error.h"
#include "errors.h"
#include "quant_files.h"

namespace charonia::model {
namespace {

using ops::Activations;
using ops::Code;
using testing::file_tensor;
using testing::FileQuant;
using testing::FileTensor;
using testing::pack;
using testing::pack_awq;
using testing::pack_gptq;
using testing::pack_packed_rows;
using Weight = testing::PlainQuant;

// Tensors of a file, at fixed addresses in memory.
class Files {
 public:
  QuantTensor add(const std::string& name, const FileTensor& tensor) {
    // Data in files is not aligned.
    const auto& bytes = bytes_.emplace_back(std::make_unique<std::string>(" " + tensor.bytes));
    return {name,
            {*SafetensorsFile::type_named(tensor.dtype), tensor.shape, std::as_bytes(std::span(*bytes)).subspan(1)}};
  }
  QuantTensors add(const FileQuant& all) {
    auto out = add("l.qweight", all.codes, "l.scales", all.scales);
    out.path = "model.safetensors";
    if (all.zeros) out.zeros = add("l.qzeros", *all.zeros);
    if (all.order) out.order = add("l.g_idx", *all.order);
    return out;
  }
  QuantTensors add(const std::string& name, const FileTensor& codes, const std::string& scales_name,
                   const FileTensor& scales) {
    return {.path = "f",
            .codes = add(name, codes),
            .scales = add(scales_name, scales),
            .zeros = {},
            .order = {},
            .input_scale = {}};
  }

 private:
  std::vector<std::unique_ptr<std::string>> bytes_;
};

// Groups of 32 with zeros.
Quantization layout_of(QuantLayout layout, int bits, int zero_offset = 1) {
  return {.layout = layout,
          .code = bits == 4 ? Code::u4 : Code::i8,
          .group_size = 32,
          .zeros = true,
          .zero_offset = zero_offset};
}

Weight random_weight(std::int64_t rows, std::int64_t cols, int bits, std::int64_t group, bool zeros,
                     bool shuffled = false) {
  std::mt19937 random(5);
  return testing::random_quant(random, bits == 4 ? "U4" : "I8", rows, cols, group, zeros, 1, shuffled);
}

// All values of a part, in the order of the weight's columns; reads at_once rows at a time.
std::vector<double> values_of(const ops::QuantSource& part, std::int64_t at_once) {
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  std::vector<double> out(size(part.rows() * part.cols()), std::numeric_limits<double>::quiet_NaN());
  for (std::int64_t first = 0; first < part.rows(); first += at_once) {
    const auto n = std::min(at_once, part.rows() - first);
    std::vector<std::uint8_t> codes(size(n * part.cols()));
    std::vector<float> scales(size(n * part.groups()));
    std::vector<std::int8_t> zeros(scales.size(), part.format().code == Code::u4 ? 8 : 0);
    part.read(first, n, codes.data(), scales.data(), part.format().zeros ? zeros.data() : nullptr);
    for (std::int64_t r = 0; r < n; ++r) {
      for (std::int64_t c = 0; c < part.cols(); ++c) {
        const auto group = size(r * part.groups() + c / part.format().group);
        const auto code = codes[size(r * part.cols() + c)];
        EXPECT_LT(code, 1 << ops::bits_of(part.format().code));
        const auto feature = part.order().empty() ? c : part.order()[size(c)];
        out[size((first + r) * part.cols() + feature)] =
            double{scales[group]} * (ops::number_of(part.format().code, code) - zeros[group]);
      }
    }
  }
  return out;
}

using Range = QuantPart::Range;
using Element = std::function<double(std::int64_t row, std::int64_t col)>;

QuantPart opened(const Quantization& how, const QuantTensors& tensors, const Range& rows = {}, const Range& cols = {},
                 std::int64_t row_step = 1) {
  QuantPart part(how, tensors, rows, cols, row_step);
  part.open();
  return part;
}

void expect_values(const QuantPart& part, const Element& element, std::int64_t first_row = 0,
                   std::int64_t first_col = 0, std::int64_t row_step = 1) {
  for (const std::int64_t at_once : {std::int64_t{1}, std::int64_t{13}, part.rows()}) {
    const auto values = values_of(part, at_once);
    for (std::int64_t r = 0; r < part.rows(); ++r) {
      for (std::int64_t c = 0; c < part.cols(); ++c) {
        ASSERT_EQ(values[static_cast<std::size_t>(r * part.cols() + c)],
                  element(first_row + r * row_step, first_col + c))
            << "row " << r << ", column " << c << ", " << at_once << " rows at once";
      }
    }
  }
}

// Reads all of it, and ranges of rows and columns [begin, end) that the groups allow.
void expect_all_ranges(const Quantization& how, const QuantTensors& tensors, const Element& element,
                       const std::vector<std::pair<std::int64_t, std::int64_t>>& columns) {
  expect_values(opened(how, tensors), element);
  const std::vector<Range> rows = {{{0, 8}}, {{8, 20}}, {{3, 14}}, {}};
  for (const auto& some_rows : rows) {
    const auto first = some_rows ? some_rows->first : 0;
    expect_values(opened(how, tensors, some_rows), element, first);
    for (const auto& some : columns) {
      expect_values(opened(how, tensors, some_rows, some), element, first, some.first);
    }
  }
  for (const std::int64_t step : {2, 5}) {  // rows 3, 5, ... 13; 3, 8, 13
    const auto part = opened(how, tensors, {{3, 14}}, {}, step);
    EXPECT_EQ(part.rows(), 10 / step + 1);
    expect_values(part, element, 3, 0, step);
    for (const auto& some : columns) {
      expect_values(opened(how, tensors, {{3, 14}}, some, step), element, 3, some.first, step);
    }
  }
}

// The error must contain `what`.
void expect_refused(const std::function<void()>& act, const std::string& what,
                    ErrorCode code = ErrorCode::invalid_argument) {
  expect_error(code, {what}, [&] { act(); });
}

const std::vector<std::pair<std::int64_t, std::int64_t>> kGroups32 = {{0, 32}, {32, 128}, {64, 96}};

// packed_rows: 20 rows are not a multiple of the rows per word of zeros. A scale of a whole row allows ranges of any
// columns.
TEST(QuantLayouts, WordsOfIntegersAreReadInEveryLayout) {
  struct Case {
    QuantLayout layout;
    int bits;
    std::int64_t rows;
    bool zeros = true, whole_rows = false;
    int zero_offset = 1;
  };
  const auto rows = QuantLayout::packed_rows, awq = QuantLayout::awq, gptq = QuantLayout::gptq;
  for (const auto& [layout, bits, num_rows, zeros, whole_rows, offset] :
       std::vector<Case>{{rows, 4, 20},
                         {rows, 4, 20, false},
                         {rows, 8, 20},
                         {rows, 8, 20, false},
                         {rows, 4, 24, true, true},
                         {rows, 8, 24, true, true},
                         {awq, 4, 24},
                         {gptq, 4, 24},
                         {gptq, 8, 24},
                         {gptq, 4, 24, true, false, 0},
                         {gptq, 8, 24, true, false, 0}}) {
    SCOPED_TRACE(cat(to_string(layout), ", ", bits, " bits"));
    Files files;
    auto w = random_weight(num_rows, 160, bits, whole_rows ? 160 : 32, zeros);
    // Like AutoGPTQ's kernels, which add 1 after they mask four bits: a stored zero of 15 means 16.
    if (layout == gptq && bits == 4 && offset == 1) w.zeros[2] = 16;
    auto how = layout_of(layout, bits, offset);
    how.zeros = zeros;
    if (whole_rows) how.group_size = 0;
    const auto tensors = files.add(layout == gptq ? pack_gptq(w, offset) : pack(std::string(to_string(layout)), w));
    expect_all_ranges(
        how, tensors, [&](auto r, auto c) { return w.value(r, c); },
        whole_rows ? decltype(kGroups32){{0, 16}, {3, 21}, {8, 63}} : kGroups32);
    const auto part = opened(how, tensors, {}, whole_rows ? Range{{3, 21}} : Range{});
    EXPECT_EQ(part.format(), (ops::QuantFormat{how.code, whole_rows ? 18 : 32, zeros,
                                               layout == rows ? DType::bf16 : DType::f16, Activations::as_is}));
    EXPECT_EQ(part.name(), "l.qweight");
  }
}

TEST(QuantLayouts, GptqColumnsAreSortedByGroupWithTheirOrder) {
  for (const int bits : {4, 8}) {
    Files files;
    const auto w = random_weight(24, 128, bits, 32, true, true);
    const auto how = layout_of(QuantLayout::gptq, bits);
    const auto tensors = files.add(pack_gptq(w));
    expect_all_ranges(how, tensors, [&](auto r, auto c) { return w.value(r, c); }, {});
    auto by_row = files.add(pack_packed_rows(w));  // like compressed-tensors with actorder = group
    by_row.order = tensors.order;
    expect_all_ranges(layout_of(QuantLayout::packed_rows, bits), by_row, [&](auto r, auto c) { return w.value(r, c); },
                      {});
    const auto part = opened(how, tensors);
    ASSERT_EQ(part.order().size(), 128U);
    for (std::size_t c = 1; c < 128; ++c) {
      const auto before = part.order()[c - 1], feature = part.order()[c];
      EXPECT_EQ(w.column_group[static_cast<std::size_t>(feature)], static_cast<int>(c / 32));
      EXPECT_TRUE(c % 32 == 0 || before < feature) << c;
    }
    expect_refused([&] { opened(how, tensors, {}, {{0, 64}}); }, "desc_act", ErrorCode::unsupported);
    opened(how, tensors, {}, {{0, 128}});
  }
  Files files;  // an identity order is ignored
  const auto w = random_weight(8, 128, 4, 32, true);
  EXPECT_TRUE(opened(layout_of(QuantLayout::gptq, 4), files.add(pack_gptq(w))).order().empty());
}

TEST(QuantLayouts, SymmetricCodesHaveNoZeros) {
  for (const int bits : {4, 8}) {
    Files files;
    auto w = random_weight(24, 64, bits, 32, true);
    std::ranges::fill(w.zeros, bits == 4 ? 8 : 128);
    const auto how = layout_of(QuantLayout::gptq, bits);
    auto symmetric = opened(how, files.add(pack_gptq(w)));
    EXPECT_FALSE(symmetric.format().zeros);
    expect_values(symmetric, [&](auto r, auto c) { return w.value(r, c); });
    // The weight is stacked with a part that has zeros, so it gets zeros too, with the same values.
    const auto mixed = random_weight(24, 64, bits, 32, true);
    auto other = opened(how, files.add(pack_gptq(mixed)));
    std::vector<QuantPart*> parts = {&symmetric, &other};
    QuantPart::unify(parts);
    EXPECT_EQ(symmetric.format(), other.format());
    EXPECT_TRUE(symmetric.format().zeros);
    expect_values(symmetric, [&](auto r, auto c) { return w.value(r, c); });
    // The same for a weight without a tensor of zeros, whose scales have another type.
    w.zeros.clear();
    auto without = layout_of(QuantLayout::packed_rows, bits);
    without.zeros = false;
    auto third = opened(without, files.add(pack_packed_rows(w)));
    parts.push_back(&third);
    QuantPart::unify(parts);
    EXPECT_EQ(third.format(), other.format());
    EXPECT_EQ(third.format().scale_type, DType::f32);
    expect_values(third, [&](auto r, auto c) { return w.value(r, c); });
  }
}

TEST(QuantLayouts, PartsWithOneInputUseItsLargestScale) {
  Files files;
  const Quantization how{.layout = QuantLayout::rows, .code = Code::i8, .activations = ops::Activations::i8_tensor};
  const auto part = [&](float input_scale) {
    auto tensors = files.add("l.weight", file_tensor("I8", {2, 16}, std::vector<std::uint8_t>(32, 1)), "l.scale",
                             file_tensor("F32", {2, 1}, std::vector<float>(2, 1)));
    tensors.input_scale = files.add("l.input_scale", file_tensor("F32", {1}, std::vector<float>{input_scale}));
    return opened(how, tensors);
  };
  auto a = part(0.25F), b = part(0.5F), c = part(0.125F);
  std::vector<QuantPart*> parts = {&a, &b, &c};
  QuantPart::unify(parts);
  for (const auto* one : parts) EXPECT_EQ(one->input_scale(), 0.5F);
}

// Bytes of random codes; for FP8 without NaN.
std::vector<std::uint8_t> random_bytes(std::int64_t n, bool f8) {
  std::mt19937 random(3);
  std::vector<std::uint8_t> out;
  while (static_cast<std::int64_t>(out.size()) < n) {
    const auto byte = static_cast<std::uint8_t>(std::uniform_int_distribution<int>(0, 255)(random));
    if (!f8 || (byte & 0x7fU) != 0x7fU) out.push_back(byte);
  }
  return out;
}

TEST(QuantLayouts, LayoutRowsSupportsScalesOfManyShapes) {
  constexpr std::int64_t kRows = 20, kCols = 64;
  struct Case {
    std::vector<std::int64_t> shape;
    std::int64_t group = 0, group_rows = 1;
  };
  const std::vector<Case> cases = {{{}},          {{1}},           {{1, 1}},         {{20}},          {{20, 1}},
                                   {{20, 4}, 16}, {{3, 4}, 16, 8}, {{2, 1}, 64, 16}, {{3, 2}, 48, 8}, {{20, 2}, 48}};
  for (const auto& some : cases) {
    for (const auto code : {Code::i8, Code::f8_e4m3}) {
      for (const std::string type : {"F32", "F16", "BF16"}) {
        Files files;
        const auto bytes = random_bytes(kRows * kCols, code == Code::f8_e4m3);
        std::int64_t count = 1;
        for (const auto size : some.shape) count *= size;
        std::vector<float> scales;
        for (std::int64_t i = 0; i < count; ++i) scales.push_back(static_cast<float>(i + 1) / 64.0F);
        const auto tensors =
            files.add("l.weight", file_tensor(code == Code::i8 ? "I8" : "F8_E4M3", {kRows, kCols}, bytes), "l.scale",
                      testing::file_floats(type, some.shape, scales));
        const Quantization how{
            .layout = QuantLayout::rows, .code = code, .group_size = some.group, .group_rows = some.group_rows};
        const bool is_short = some.group == 48;  // the last group
        const auto groups = some.group == 0 ? 1 : (kCols + some.group - 1) / some.group;
        const auto element = [&](std::int64_t r, std::int64_t c) {
          const auto index = count == 1 ? 0 : r / some.group_rows * groups + (groups == 1 ? 0 : c / some.group);
          const auto byte = bytes[static_cast<std::size_t>(r * kCols + c)];
          return double{scales[static_cast<std::size_t>(index)]} *
                 (code == Code::i8 ? static_cast<std::int8_t>(byte) : testing::f8_e4m3_value(byte));
        };
        expect_all_ranges(how, tensors, element,
                          groups == 1 ? std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 32}, {5, 64}}
                          : is_short  ? std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 48}, {48, 64}}
                                      : std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 16}, {16, 64}});
        if (is_short) {
          EXPECT_EQ(opened(how, tensors).format().group, 16);
          EXPECT_EQ(opened(how, tensors, {}, {{0, 48}}).format().group, 48);
          expect_refused([&] { opened(how, tensors, {}, {{16, 64}}); }, "begins and ends at groups of 48 columns");
        }
        EXPECT_EQ(opened(how, tensors).format().scale_type, SafetensorsFile::type_named(type));
      }
    }
  }
}

TEST(QuantLayouts, StackedMatricesHaveTheirOwnScalesAndBlocks) {
  Files files;
  const auto bytes = random_bytes(std::int64_t{3} * 16 * 32, true);
  std::vector<float> scales;
  for (int i = 0; i < 3 * 2 * 2; ++i) scales.push_back(static_cast<float>(i + 1));
  auto tensors = files.add("l.weight", file_tensor("F8_E4M3", {3, 16, 32}, bytes), "l.scale",
                           file_tensor("F32", {3, 2, 2}, scales));
  const Quantization how{.layout = QuantLayout::rows, .code = Code::f8_e4m3, .group_size = 16, .group_rows = 8};
  expect_values(
      opened(how, tensors, {{16, 32}}),
      [&](std::int64_t r, std::int64_t c) {
        return double{scales[static_cast<std::size_t>(r / 8 * 2 + c / 16)]} *
               testing::f8_e4m3_value(bytes[static_cast<std::size_t>(r * 32 + c)]);
      },
      16);
  // The same number of values in another order.
  for (const auto& shape : {std::vector<std::int64_t>{2, 3, 2}, {2, 2, 3}, {6, 1, 2}}) {
    tensors.scales = files.add("l.scale", file_tensor("F32", shape, scales));
    expect_refused([&] { opened(how, tensors); }, "expected [6, 2] or [3, 2, 2]: blocks of 8");
  }
  tensors.scales = files.add("l.scale", file_tensor("F32", {6, 2}, scales));
  EXPECT_EQ(opened(how, tensors).rows(), 48);
  // Matrices of 15 rows: the second one's blocks would begin in the middle of a block.
  tensors.codes =
      files.add("l.weight", file_tensor("F8_E4M3", {2, 15, 32}, random_bytes(std::int64_t{2} * 15 * 32, true)));
  tensors.scales = files.add("l.scale", file_tensor("F32", {4, 2}, std::vector<float>(8, 1)));
  expect_refused([&] { opened(how, tensors); },
                 "has scales l.scale of shape [4, 2], expected [4, 2] or [2, 2, 2]: blocks of 8");
}

TEST(QuantLayouts, Mxfp4HasPowersOfTwo) {
  const auto bytes = random_bytes(std::int64_t{24} * 64, false);
  std::vector<std::uint8_t> exponents;
  for (int i = 0; i < 24 * 4; ++i) exponents.push_back(static_cast<std::uint8_t>(100 + i % 50));
  exponents[0] = 0, exponents[1] = 254, exponents[2] = 1;
  const auto element = [&](std::int64_t r, std::int64_t c) {
    const auto byte = bytes[static_cast<std::size_t>(r * 64 + c / 2)];
    const int four = c % 2 == 0 ? byte & 15 : byte >> 4U;
    return testing::f4_e2m1_value(four) * std::pow(2.0, exponents[static_cast<std::size_t>(r * 4 + c / 32)] - 127);
  };
  const Quantization how{.layout = QuantLayout::mxfp4, .code = Code::f4_e2m1, .group_size = 32};
  Files files;
  for (const std::string type : {"U8", "F8_E8M0"}) {
    const auto plain =
        files.add("l.blocks", file_tensor("U8", {24, 64}, bytes), "l.scales", file_tensor(type, {24, 4}, exponents));
    const auto two_experts = files.add("l.blocks", file_tensor("U8", {2, 12, 4, 16}, bytes), "l.scales",
                                       file_tensor(type, {2, 12, 4}, exponents));  // of GPT-OSS
    for (const auto& tensors : {plain, two_experts}) {
      expect_all_ranges(how, tensors, element, kGroups32);
      EXPECT_EQ(opened(how, tensors).format(),
                (ops::QuantFormat{Code::f4_e2m1, 32, false, DType::f8_e8m0, Activations::as_is}));
    }
  }
  exponents[77] = 255;
  const auto broken =
      files.add("l.blocks", file_tensor("U8", {24, 64}, bytes), "l.scales", file_tensor("U8", {24, 4}, exponents));
  const auto part = opened(how, broken);
  expect_refused([&] { values_of(part, 24); }, "tensor l.blocks of f has scales, l.scales, that are not finite");
  expect_values(opened(how, broken, {{0, 19}}), element);
  expect_values(opened(how, broken, {{0, 24}}, {}, 2), element, 0, 0, 2);  // 77 belongs to row 19
  const auto others = opened(how, broken, {{1, 24}}, {}, 2);
  expect_refused([&] { values_of(others, 12); }, "that are not finite (NaN or infinity) in row 19");
  // Reading ahead ends with the last row: of 24 rows, rows 3, 5, ... 9.
  const auto bytes_ahead = opened(how, broken, {{3, 10}}, {}, 2).codes_bytes();
  EXPECT_EQ(bytes_ahead.data() - broken.codes.view.data.data(), 3 * 64);
  EXPECT_EQ(bytes_ahead.size(), 7U * 64);
}

TEST(QuantLayouts, ShapesThatDoNotFitAreRejected) {
  Files files;
  const auto w = random_weight(24, 128, 4, 32, true);
  const auto refused = [&](QuantLayout layout, const std::function<void(QuantTensors&, Quantization&)>& change,
                           const std::string& what, const Range& rows = {}, const Range& cols = {}) {
    auto tensors = files.add(pack(std::string(to_string(layout)), w));
    auto how = layout_of(layout, 4);
    change(tensors, how);
    expect_refused([&] { const QuantPart part(how, tensors, rows, cols); }, what);
  };
  const auto group_of = [](std::int64_t size) { return [size](auto&, Quantization& how) { how.group_size = size; }; };
  const auto none = [](auto&, auto&) {};
  for (const auto layout : {QuantLayout::packed_rows, QuantLayout::awq, QuantLayout::gptq}) {
    const bool by_row = layout == QuantLayout::packed_rows;
    refused(layout, group_of(64), by_row ? "of shape [24, 4], expected [24, 2]" : "of shape [4, 24], expected [2, 24]");
    refused(layout, group_of(0), by_row ? "of shape [24, 4], expected [24, 1]" : "of shape [4, 24], expected [1, 24]");
    refused(layout, group_of(48), "has 128 columns in l.");
    refused(layout, none, "rows [0, 25) and columns [0, 128) of l.", {{0, 25}});
    refused(layout, none, "rows [0, 24) and columns [96, 160)", {}, {{96, 160}});
    refused(layout, none, "rows [5, 5)", {{5, 5}});
    refused(layout, none, "columns [16, 48) of l.", {}, {{16, 48}});
    refused(layout, none, "expected a range that begins and ends at groups of 32 columns", {}, {{32, 100}});
    refused(layout, [](auto& tensors, auto&) { tensors.zeros->view.shape[0] -= 1; }, "has zeros l.");
    refused(
        layout, [](auto& tensors, auto&) { tensors.codes.view.shape.insert(tensors.codes.view.shape.begin(), 2, 1); },
        cat("has shape [1, 1, ", by_row                       ? 24
                                 : layout == QuantLayout::awq ? 128
                                                              : 16));
  }
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max() / 2;
  refused(
      QuantLayout::packed_rows, [](auto& tensors, auto&) { tensors.codes.view.shape = {0, kHuge}; },
      "sizes must be at least 1");
  refused(
      QuantLayout::packed_rows, [](auto& tensors, auto&) { tensors.codes.view.shape = {kHuge, kHuge, 0}; },
      "sizes must be at least 1");
  refused(
      QuantLayout::gptq, [](auto& tensors, auto&) { tensors.order->view.shape = {127}; },
      "l.g_idx of shape [127], expected [128]");
}

TEST(QuantLayouts, ValuesThatDoNotFitAreRejectedByName) {
  Files files;
  auto w = random_weight(24, 128, 8, 32, true);
  const auto how = layout_of(QuantLayout::gptq, 8);
  const auto with_order = [&](int column, int group) {
    auto changed = w;
    changed.column_group[static_cast<std::size_t>(column)] = group;
    return files.add(pack_gptq(changed));
  };
  const std::string tensor = "tensor l.qweight of model.safetensors has ";
  expect_refused([&] { opened(how, with_order(7, 4)); }, tensor + "column 7 in group 4 by l.g_idx, expected 0 to 3");
  expect_refused([&] { opened(how, with_order(7, -1)); }, tensor + "column 7 in group -1 by l.g_idx, expected 0 to 3");
  expect_refused([&] { opened(how, with_order(7, 1)); },
                 tensor + "more columns in group 1 by l.g_idx than its group_size = 32");

  w.zeros[13] = 256;  // row 3, group 1
  expect_refused([&] { opened(how, files.add(pack_gptq(w))); },
                 tensor + "zeros, l.qzeros: the zero of row 3 and group 1 is 256, expected 0 to 255");
  w.zeros[13] = 7;
  for (const float broken : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    auto changed = w;
    changed.scales[23 * 4 + 3] = broken;
    const auto part = opened(how, files.add(pack_gptq(changed)));
    expect_refused([&] { values_of(part, 24); },
                   tensor + "scales, l.scales, that are not finite (NaN or infinity) in row 23");
    expect_values(opened(how, files.add(pack_gptq(changed)), {}, {{0, 96}}),
                  [&](auto r, auto c) { return w.value(r, c); });
  }

  for (const std::uint8_t broken : {0x7f, 0xff}) {
    auto bytes = random_bytes(20 * 64, true);
    bytes[7 * 64 + 63] = broken;
    const auto f8 = files.add("l.weight", file_tensor("F8_E4M3", {20, 64}, bytes), "l.scale",
                              file_tensor("F32", {}, std::vector<float>{1}));
    const auto part = opened({.layout = QuantLayout::rows, .code = Code::f8_e4m3}, f8);
    expect_refused([&] { values_of(part, 20); }, "tensor l.weight of f has values that are not finite (NaN) in row 7");
  }
}

TEST(QuantLayouts, TheInputsScaleIsReadAndChecked) {
  Files files;
  auto tensors = files.add("l.weight", file_tensor("I8", {2, 4}, std::vector<std::int8_t>{1, 2, 3, 4, -1, -2, -3, -4}),
                           "l.scale", file_tensor("F32", {2, 1}, std::vector<float>{1, 2}));
  const Quantization how{.layout = QuantLayout::rows, .code = Code::i8, .activations = Activations::i8_tensor};
  const auto with = [&](std::vector<std::int64_t> shape, std::vector<float> values) {
    tensors.input_scale = files.add("l.input_scale", file_tensor("F32", std::move(shape), values));
    return opened(how, tensors);
  };
  EXPECT_EQ(with({}, {0.25F}).input_scale(), 0.25F);
  EXPECT_EQ(with({1}, {0.5F}).format().activations, Activations::i8_tensor);
  for (const float wrong :
       {0.0F, -1.0F, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    expect_refused([&] { with({1}, {wrong}); }, "tensor l.weight of f has the input's scale l.input_scale = ");
  }
  expect_refused([&] { with({2}, {1, 1}); }, "has the input's scale in l.input_scale of shape [2], expected one value");
}

}  // namespace
}  // namespace charonia::model
