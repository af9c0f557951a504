// The choice of the kernels for GEMMs of quantised experts at the start of an engine.
#include "ops/cuda/expert_kernels.h"

#include <gtest/gtest.h>

#include <deque>
#include <filesystem>
#include <set>

#include "base/text.h"
#include "charonia/error.h"
#include "cuda/device_arrays.h"
#include "cuda/quant_formats.h"
#if defined(CHARONIA_CUDA_ON_HOST)
#include "emulator/emulated_device.h"
#include "errors.h"
#endif
#include "ops/cuda/cuda_ops.h"
#include "test_folder.h"

namespace charonia::cuda {
namespace {

using ops::Activations;
using ops::Code;

constexpr int kExperts = 4, kTopK = 2;
constexpr std::int64_t kHidden = 128, kInter = 64;
constexpr ops::QuantFormat kInt4{Code::u4, 32, true, DType::f16};
// A row has two of four experts, so an average of 5 to 8 rows needs 10 to 17 rows, and 9 to 16 needs 18 to 33.
constexpr int kRows = 20;

class ExpertKernelsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!device_info(0).wgmma) GTEST_SKIP() << "wgmma needs compute capability 9.0 and kernels for 90a";
    broken_ = nullptr;
    launches_ = measured_ = 0;
    kinds_.clear();
    blocks_.clear();
  }
  ~ExpertKernelsTest() override { std::filesystem::remove_all(folder_); }

  // Options whose measurements say that wgmma takes this many times as long as the other kernel.
  ExpertKernels::Options options(double ratio = 0.5) {
    ExpertKernels::Options out;
    out.unproven = true;
    out.seconds = 3600;
    out.multiply = [](Stream& stream, const DeviceInfo& device, const ExpertGemm& gemm) {
      ++launches_;
      wgmma_ = gemm.wgmma;
      if (!wgmma_) note_tiles(stream, gemm);
      auto changed = gemm;
      if (wgmma_ && broken_ && !broken_(changed)) return;
      multiply_experts(stream, device, changed);
    };
    out.timer = [ratio](Stream& stream, double expected, const std::function<void(int)>& issue) {
      EXPECT_GT(expected, 0);
      for (const int i : {0, kMaxTimedGemms - 1}) issue(i);
      stream.wait("test");
      ++measured_;
      return wgmma_ ? 1000 * ratio : 1000;
    };
    return out;
  }

  // A layer with random weights.
  const CudaExperts& layer(const ops::QuantFormat& gate_up = kInt4, const ops::QuantFormat& down = kInt4,
                           DType type = DType::bf16, bool biases = false, bool ordered = false) {
    std::deque<ops::MemoryQuantSource> sources;
    std::deque<ops::Matrix> columns;
    std::vector<ops::QuantExpertSource> experts;
    const auto weight = [&](std::int64_t n, std::int64_t k, const ops::QuantFormat& format) {
      return &sources.emplace_back(random_source(random_, n, k, {format, ordered}));
    };
    const auto bias = [&](std::int64_t n) {
      return columns.emplace_back(ops::Matrix::random(random_, DType::f32, n, 1)).host();
    };
    for (int e = 0; e < experts_; ++e) {
      auto* const gate = weight(kInter, kHidden, gate_up);
      auto* const up = weight(kInter, kHidden, gate_up);
      if (ordered) up->set_order({gate->order().begin(), gate->order().end()});
      experts.push_back({gate, up, weight(kHidden, kInter, down)});
      if (biases) experts.back().bias = {bias(kInter), bias(kInter), bias(kHidden)};
    }
    MatrixUpload upload(stream_);
    return layers_.emplace_back(experts, type, upload);
  }

  ExpertKernels chosen(const CudaExperts& of, ExpertKernels::Options with, int max_rows = kRows, double seconds = 3600) {
    ExpertKernels kernels(device_info(0), std::move(with));
    std::vector<ExpertLayers> all;
    ExpertKernels::add(all, of, kTopK, {});
    kernels.prepare(stream_, all, max_rows, seconds);
    return kernels;
  }

  static void expect_use(const ExpertKernels& kernels, const CudaExperts& of, std::int64_t rows, bool gate_up, bool down) {
    const auto use = kernels.use(of, kTopK, rows);
    EXPECT_EQ(use.gate_up, gate_up) << rows;
    EXPECT_EQ(use.down, down) << rows;
  }

  static void note_tiles(Stream& stream, const ExpertGemm& gemm) {
    std::vector<ExpertTile> tiles(static_cast<std::size_t>(gemm.num_tiles));
    stream.download(tiles.data(), gemm.tiles, tiles.size() * sizeof(ExpertTile), "test");
    stream.wait("test");
    for (const auto& tile : tiles) kinds_.insert(tile.rows == gemm.tile_rows ? 2 : tile.rows > 0 ? 1 : 0);
    for (const auto& tile : tiles) {
      if (tile.rows > 0) counts_.insert(tile.rows);
    }
    const auto used = std::ranges::count_if(tiles, [](const auto& tile) { return tile.rows > 0; });
    blocks_.push_back(used * divide_up(gemm.n, 256));
  }

  Stream stream_;
  ops::Random random_{190};
  std::deque<CudaExperts> layers_;
  int experts_ = kExperts;  // of layer()
  const std::filesystem::path folder_ = charonia::testing::test_folder();
  // Changes what wgmma computes, or returns false: nothing is launched.
  static inline std::function<bool(ExpertGemm&)> broken_;
  static inline bool wgmma_ = false;               // of the last launch
  static inline int launches_ = 0, measured_ = 0;  // measured_: calls of the timer
  static inline std::vector<std::int64_t> blocks_;  // with rows, of wgmma's launches
  static inline std::set<int> kinds_, counts_;     // of tiles of the other kernel: 0 empty, 1 partly full, 2 full; rows
};

TEST_F(ExpertKernelsTest, a_faster_kernel_with_right_results_is_chosen) {
  const auto& of = layer();
  const auto faster = chosen(of, options());
  expect_use(faster, of, 9, false, false);  // four rows each: the kernel for few rows
  for (const int rows : {10, 17, 18, 20, 5000}) expect_use(faster, of, rows, rows < 34, rows < 34);
  EXPECT_EQ(faster.warning(), "");
  EXPECT_EQ(faster.report(),
            (std::vector<std::string>{
                "experts, 2 of 4, 5 to 8 rows each, gate and up n 128 k 128 bf16, int4, groups of 32, zeros: wgmma, measured "
                "with 17 rows: wgmma 500 us, tiles 1000 us",
                "experts, 2 of 4, 5 to 8 rows each, down n 128 k 64 bf16, int4, groups of 32, zeros: wgmma, measured with 17 "
                "rows: wgmma 500 us, tiles 1000 us",
                "experts, 2 of 4, 9 to 16 rows each, gate and up n 128 k 128 bf16, int4, groups of 32, zeros: wgmma, measured "
                "with 20 rows: wgmma 500 us, tiles 1000 us",
                "experts, 2 of 4, 9 to 16 rows each, down n 128 k 64 bf16, int4, groups of 32, zeros: wgmma, measured with 20 "
                "rows: wgmma 500 us, tiles 1000 us"}));
  const auto slower = chosen(of, options(1.5));
  for (const int rows : {10, 20}) expect_use(slower, of, rows, false, false);
  EXPECT_EQ(slower.warning(), "");
  EXPECT_EQ(slower.report().size(), 4U);
}

// With tiles of 32 and of 64 rows, which are full and not.
TEST_F(ExpertKernelsTest, right_results_agree_for_every_average) {
  counts_.clear();
  const auto& of = layer();
  const auto kernels = chosen(of, options(), 300);
  EXPECT_EQ(kernels.report().size(), 2 * ExpertKernels::kAverages.size());
  EXPECT_TRUE(kernels.report().back().starts_with("experts, 2 of 4, 65 rows or more each, down "));
  EXPECT_EQ(kernels.warning(), "");
  for (const int rows : {10, 33, 65, 129, 300, 5000}) expect_use(kernels, of, rows, true, true);
  EXPECT_EQ(kinds_, (std::set{0, 1, 2}));
  EXPECT_GT(counts_.size(), 10U) << "experts have different numbers of rows";
  EXPECT_EQ(*counts_.rbegin(), 64);
}

TEST_F(ExpertKernelsTest, right_results_agree_in_every_format) {
  using enum Activations;
  const struct {
    ops::QuantFormat gate_up, down;
    bool biases = false, ordered = false;
  } cases[] = {
      {{Code::u4, 128, false, DType::f16}, {Code::u4, 64, false, DType::f16}},
      {kInt4, kInt4, false, true},
      {{Code::f4_e2m1, 32, false, DType::f8_e8m0}, {Code::f4_e2m1, 32, false, DType::f8_e8m0}, true},
      {{Code::i8, 128, false, DType::f32, i8_token}, {Code::i8, 64, false, DType::f32, i8_token}},
      {{Code::f8_e4m3, 128, false, DType::f32}, {Code::f8_e4m3, 64, false, DType::f32, f8_token}},
  };
  for (const auto& c : cases) {
    for (const auto type : {DType::bf16, DType::f16}) {
      const auto& of = layer(c.gate_up, c.down, type, c.biases, c.ordered);
      const auto kernels = chosen(of, options(), 17);
      EXPECT_EQ(kernels.warning(), "") << ops::to_string(c.gate_up);
      expect_use(kernels, of, 17, true, true);
      ASSERT_EQ(kernels.report().size(), 2U);
      EXPECT_EQ(kernels.report()[0].find(", biases") != std::string::npos, c.biases);
      EXPECT_EQ(kernels.report()[0].find(", ordered columns") != std::string::npos, c.ordered);
    }
  }
}

TEST_F(ExpertKernelsTest, a_kernel_with_wrong_results_is_not_chosen_and_named) {
  const auto& of = layer(kInt4, kInt4, DType::bf16, true);
  const struct {
    const char* what;
    std::function<bool(ExpertGemm&)> change;
  } faults[] = {
      {"the scales of the next group",
       [](auto& gemm) {
         gemm.quant->scales = static_cast<const std::byte*>(gemm.quant->scales) + 32;
         return true;
       }},
      {"no biases",
       [](auto& gemm) {
         gemm.bias = nullptr;
         return true;
       }},
      {"nothing is written", [](auto&) { return false; }},
  };
  for (const auto& [what, change] : faults) {
    broken_ = change;
    const auto kernels = chosen(of, options());
    for (const int rows : {10, 20}) expect_use(kernels, of, rows, false, false);
    EXPECT_EQ(kernels.report().size(), 2U) << what << ": it is not compared again";
    EXPECT_EQ(kernels.warning(),
              "the kernel 'wgmma' for experts, 2 of 4, 5 to 8 rows each, gate and up n 128 k 128 bf16, int4, groups of 32, "
              "zeros, biases gave results that differ from the other kernel's, and is not used. Please report this; the "
              "kernel 'wgmma' for experts, 2 of 4, 5 to 8 rows each, down n 128 k 64 bf16, int4, groups of 32, zeros, biases "
              "gave results that differ from the other kernel's, and is not used. Please report this")
        << what;
    EXPECT_EQ(measured_, 0) << what;
  }
}

TEST_F(ExpertKernelsTest, input_scales_of_another_row_are_found) {
  using enum Activations;
  const auto& of = layer({Code::i8, 128, false, DType::f32, i8_token}, {Code::i8, 64, false, DType::f32, i8_token});
  broken_ = [](ExpertGemm& gemm) {
    ++gemm.quant->row_scales;
    return true;
  };
  const auto kernels = chosen(of, options());
  expect_use(kernels, of, 17, false, false);
  EXPECT_NE(kernels.warning().find("gave results that differ"), std::string::npos) << kernels.warning();
}

// A launch that leaves the outputs of the launch in front of it.
TEST_F(ExpertKernelsTest, outputs_of_the_launch_in_front_are_found) {
  int launches = 0;
  broken_ = [&](ExpertGemm&) { return ++launches % 2 == 1; };
  const auto& of = layer();
  expect_use(chosen(of, options()), of, 17, false, false);
  EXPECT_EQ(launches, 4);
}

TEST_F(ExpertKernelsTest, a_kernel_that_is_wrong_for_one_average_is_used_for_none) {
  broken_ = [](ExpertGemm& gemm) {
    if (gemm.tile_rows == 64 && !gemm.gated) gemm.bias = nullptr;
    return true;
  };
  const auto& of = layer(kInt4, kInt4, DType::bf16, true);
  const auto kernels = chosen(of, options(), 70);
  for (const int rows : {17, 33, 65, 70}) expect_use(kernels, of, rows, true, false);
  EXPECT_NE(kernels.warning().find("33 to 64 rows each, down"), std::string::npos) << kernels.warning();
  ASSERT_EQ(kernels.report().size(), 5U) << "four averages of gate and up, and one line of down";
  EXPECT_EQ(std::ranges::count_if(kernels.report(), [](const auto& line) { return line.find(" each, down ") != line.npos; }), 1);
}

TEST_F(ExpertKernelsTest, a_stored_kernel_that_is_wrong_for_another_average_is_not_used_without_a_measurement) {
  const auto& of = layer();
  const auto start = [&](bool measures) {
    auto with = options();
    with.memory = folder_ / "gemms.json";
    if (!measures) with.timer = nullptr;
    return chosen(of, std::move(with), measures ? 33 : 70);
  };
  expect_use(start(true), of, 33, true, true);
  expect_use(start(false), of, 33, true, true);
  broken_ = [](ExpertGemm& gemm) { return gemm.tile_rows == 32; };
  const auto wrong = start(false);
  for (const int rows : {33, 70}) expect_use(wrong, of, rows, false, false);
  EXPECT_NE(wrong.warning().find("33 to 64 rows each"), std::string::npos) << wrong.warning();
}

// Thread blocks begin while others have ended, as in a step of a model with many experts.
TEST_F(ExpertKernelsTest, an_sm_computes_more_than_two_tiles_of_a_check) {
  experts_ = 24;
  const auto& of = layer();
  auto device = device_info(0);
  device.sms = 6;
  ExpertKernels kernels(device, options());
  std::vector<ExpertLayers> all;
  ExpertKernels::add(all, of, kTopK, {});
  kernels.prepare(stream_, all, 100, 3600);
  EXPECT_EQ(kernels.warning(), "");
  ASSERT_GE(blocks_.size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) EXPECT_GT(blocks_[i], 12) << "checks of gate and up, and of down";
}

TEST_F(ExpertKernelsTest, a_device_without_wgmma_does_not_use_it) {
  const auto& of = layer();
  auto device = device_info(0);
  device.wgmma = false;
  for (const bool asked : {false, true}) {
    auto with = options();
    if (asked) with.asked = true;
    ExpertKernels kernels(device, std::move(with));
    std::vector<ExpertLayers> all;
    ExpertKernels::add(all, of, kTopK, {});
    kernels.prepare(stream_, all, kRows, 3600);
    expect_use(kernels, of, 17, false, false);
    ASSERT_EQ(kernels.report().size(), 2U);
    EXPECT_EQ(kernels.report()[1],
              "experts, 2 of 4, down n 128 k 64 bf16, int4, groups of 32, zeros: tiles, because of wgmma: it needs compute "
              "capability 9.0, and an engine that is compiled for 90a");
  }
  EXPECT_EQ(launches_, 0);
}

// The device's preparation finds the layers, and its report has their lines.
TEST_F(ExpertKernelsTest, the_device_reports_the_kernels_of_its_layers) {
  const auto ops = ops::make_cuda_ops({.wgmma_experts = true});
  const auto source = random_source(random_, 64, 64, {{Code::u4, 32}});
  const std::vector<ops::QuantExpertSource> sources(kExperts, {&source, &source, &source});
  const auto experts = ops->make_quantised_experts(sources, DType::bf16);
  const ops::DeviceMatrix rows(*ops, DType::bf16, kRows, 64), router(*ops, DType::f32, kRows, kExperts);
  const auto scratch = ops->allocate(ops->experts_scratch_bytes({kExperts, kTopK, 64, 64, DType::bf16}, kRows));
  ops->prepare({.max_rows = kRows, .max_sequences = 1, .max_positions = 1}, [&](const ops::StepShape& shape) {
    ops->experts(rows.slice(0, shape.rows), rows.slice(0, shape.rows), router.slice(0, shape.rows), *experts,
                 {.top_k = kTopK}, {}, scratch->data());
  });
  const auto lines = ops->report();
  ASSERT_GE(lines.size(), 2U);
  EXPECT_EQ(lines[lines.size() - 2], "experts, 2 of 4, gate and up n 128 k 64 bf16, int4, groups of 32: wgmma, as asked for");
  EXPECT_EQ(lines.back(), "experts, 2 of 4, down n 64 k 64 bf16, int4, groups of 32: wgmma, as asked for");
}

TEST_F(ExpertKernelsTest, an_unproven_kernel_is_not_considered_by_default) {
  auto with = options();
  with.unproven = false;
  const auto& of = layer();
  const auto kernels = chosen(of, std::move(with));
  expect_use(kernels, of, 17, false, false);
  EXPECT_TRUE(kernels.report().empty());
  EXPECT_EQ(launches_, 0);
}

TEST_F(ExpertKernelsTest, the_reproducible_mode_never_uses_the_kernel) {
  const auto& of = layer();
  for (const bool asked : {false, true}) {
    auto with = options();
    with.reproducible = true;
    if (asked) with.asked = true;
    expect_use(chosen(of, std::move(with)), of, 17, false, false);
  }
  EXPECT_EQ(launches_, 0);
}

TEST_F(ExpertKernelsTest, the_kernel_can_be_asked_for_without_a_measurement) {
  const auto& of = layer();
  for (const bool wgmma : {false, true}) {
    auto with = options();
    with.asked = wgmma;
    const auto kernels = chosen(of, std::move(with));
    expect_use(kernels, of, 17, wgmma, wgmma);
    ASSERT_EQ(kernels.report().size(), 2U);
    EXPECT_TRUE(kernels.report()[0].ends_with(wgmma ? ": wgmma, as asked for" : ": tiles, as asked for"));
  }
  EXPECT_EQ(launches_, 0);
}

TEST_F(ExpertKernelsTest, without_a_measurement_the_kernel_is_not_chosen) {
  const auto& of = layer();
  auto with = options();
  with.timer = nullptr;
  const auto without_timer = chosen(of, std::move(with)), without_time = chosen(of, options(), kRows, 0);
  for (const auto* kernels : {&without_timer, &without_time}) {
    expect_use(*kernels, of, 17, false, false);
    ASSERT_EQ(kernels->report().size(), 4U);
    EXPECT_EQ(kernels->warning(), "");
  }
  EXPECT_TRUE(without_timer.report()[0].ends_with(": tiles, because nothing was measured"));
  EXPECT_TRUE(without_time.report()[0].ends_with("CHARONIA_CUDA_MEASURE_S). The next start measures it"))
      << without_time.report()[0];
  EXPECT_EQ(launches_, 0);
}

TEST_F(ExpertKernelsTest, stored_choices_are_read_again_and_checked) {
  const auto& of = layer();
  const auto start = [&](double ratio, int max_rows = kRows) {
    auto with = options(ratio);
    with.memory = folder_ / "gemms.json";
    measured_ = launches_ = 0;
    return chosen(of, std::move(with), max_rows);
  };
  const auto first = start(0.5);
  EXPECT_EQ(measured_, 8) << "two kernels of two GEMMs, for two averages";
  const auto second = start(1.5);
  EXPECT_EQ(measured_, 0);
  EXPECT_GT(launches_, 0) << "results are compared at every start";
  EXPECT_EQ(second.report(), first.report());
  expect_use(second, of, 20, true, true);
  start(0.5, 17);
  EXPECT_EQ(measured_, 0) << "the first average has the same rows";
  broken_ = [](ExpertGemm&) { return false; };
  const auto wrong = start(0.5);
  expect_use(wrong, of, 20, false, false);
  EXPECT_NE(wrong.warning(), "");
}

TEST_F(ExpertKernelsTest, a_measurement_without_memory_is_a_warning) {
  broken_ = [](ExpertGemm&) -> bool { throw Error(ErrorCode::resource_exhausted, "no memory"); };
  const auto& of = layer();
  const auto kernels = chosen(of, options(), 17);
  expect_use(kernels, of, 17, false, false);
  EXPECT_EQ(kernels.report()[1],
            "experts, 2 of 4, 5 to 8 rows each, down n 128 k 64 bf16, int4, groups of 32, zeros: tiles, because there is no "
            "memory to measure with");
  EXPECT_EQ(kernels.warning(), cat(kernels.report()[0], "; ", kernels.report()[1]));
}

TEST_F(ExpertKernelsTest, a_kernel_that_cannot_be_launched_is_not_chosen) {
  broken_ = [](ExpertGemm&) -> bool { throw Error(ErrorCode::internal, "no room for the block"); };
  const auto& of = layer();
  const auto kernels = chosen(of, options(), 17);
  expect_use(kernels, of, 17, false, false);
  EXPECT_TRUE(kernels.report()[0].ends_with(": tiles, because wgmma failed: no room for the block")) << kernels.report()[0];
  EXPECT_EQ(kernels.warning(), cat(kernels.report()[0], ". Please report this; ", kernels.report()[1],
                                   ". Please report this"));
}

#if defined(CHARONIA_CUDA_ON_HOST)
TEST_F(ExpertKernelsTest, a_device_that_fails_in_the_kernel_ends_the_start_with_its_name) {
  broken_ = [this](ExpertGemm&) {
    set_step("step 1 of the test");
    fail_in_step(1);
    Event end;
    end.record(stream_);
    end.wait("a kernel");
    return true;
  };
  const auto& of = layer();
  expect_error({"the device fails since the kernel 'wgmma' ran for experts, 2 of 4, 5 to 8 rows each, gate and up n 128 ",
                "a kernel: the emulated device has failed", "Set CHARONIA_CUDA_UNPROVEN=0"},
               [&] { chosen(of, options()); });
  fail_in_step(0);
  set_step("");
}
#endif

TEST_F(ExpertKernelsTest, layers_of_one_shape_share_a_choice_and_are_measured_in_turn) {
  const auto &one = layer(), &two = layer(), &other = layer(kInt4, {Code::u4, 64, true, DType::f16});
  std::vector<ExpertLayers> all;
  for (const auto* of : {&one, &other, &two, &one}) ExpertKernels::add(all, *of, kTopK, {});
  ASSERT_EQ(all.size(), 2U);
  EXPECT_EQ(all[0].layers, (std::vector<const CudaExperts*>{&one, &two}));
  std::set<const void*> weights;
  broken_ = [&](ExpertGemm& gemm) {
    weights.insert(gemm.weight);
    return true;
  };
  ExpertKernels kernels(device_info(0), options());
  kernels.prepare(stream_, std::span(all).first(1), 17, 3600);
  EXPECT_TRUE(weights.contains(one.gate_up()) && weights.contains(two.gate_up()));
  expect_use(kernels, two, 17, true, true);
  expect_use(kernels, other, 17, false, false);
}

TEST_F(ExpertKernelsTest, formats_of_the_plain_kernel_have_no_candidates) {
  const auto& of = layer({Code::u4, 16, false, DType::f32});
  const auto kernels = chosen(of, options());
  EXPECT_TRUE(kernels.report().empty());
  expect_use(kernels, of, 17, false, false);
}

}  // namespace
}  // namespace charonia::cuda
