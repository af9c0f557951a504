// The choice of the kernel for attention of prompts at the start of an engine, and steps with the chosen kernel.
#include "ops/cuda/prompt_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "attention_kernel_world.h"
#include "attention_step.h"
#include "charonia/error.h"
#include "test_folder.h"

namespace charonia::cuda {
namespace {

class PromptKernelsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!device_info(0).wgmma) GTEST_SKIP() << "wgmma needs compute capability 9.0 and kernels for 90a";
    broken_ = nullptr;
    changed_ = nullptr;
    broken_rows_ = 0;
    least_units_ = 1e9;
    times_ = 0;
  }

  // Options whose measurements say that wgmma takes this many times as long as the other kernel.
  PromptKernels::Options options(double ratio = 0.5) {
    PromptKernels::Options out;
    out.unproven = true;
    out.seconds = 3600;
    out.attention = [](Stream& stream, const DeviceInfo& device, const Tensor& to, const Tensor& qkv,
                       const CacheLayer& cache, const AttentionShape& shape, const ops::AttentionParams& how,
                       const AttentionWork& work) {
      auto changed = how;
      wgmma_ = shape.wgmma;
      if (wgmma_ && broken_ != nullptr && (broken_rows_ == 0 || to.rows == broken_rows_)) broken_(changed);
      attention(stream, device, to, qkv, cache, shape, changed, work);
      if (!wgmma_ || to.rows == kMeasuredRows) return;
      const auto units = static_cast<double>(work.max_prefill * cache.kv_heads);
      least_units_ = std::min(least_units_, units / shape.prefill_blocks());
    };
    out.timer = [ratio](Stream& stream, double expected, const std::function<void(int)>& issue) {
      EXPECT_GT(expected, 0);
      ++times_;
      issue(0);
      stream.wait("test");
      return wgmma_ ? 1000 * ratio : 1000;
    };
    return out;
  }
  // Options whose kernels compute nothing, so their results are equal, unless changed_ changes wgmma's. wgmma takes these
  // times for the measured steps, in their order, tiles 1000 us.
  static PromptKernels::Options timed(std::vector<double> wgmma) {
    PromptKernels::Options out;
    out.unproven = true;
    out.seconds = 3600;
    out.attention = [](Stream& stream, const DeviceInfo&, const Tensor& to, const Tensor&, const CacheLayer&,
                       const AttentionShape& shape, const ops::AttentionParams&, const AttentionWork&) {
      if (shape.wgmma && changed_ != nullptr) changed_(stream, to);
    };
    out.timer = [wgmma](Stream&, double, const std::function<void(int)>& issue) {
      issue(0);
      const auto at = static_cast<std::size_t>(times_++);
      return at % 2 == 0 ? 1000 : wgmma.at(at / 2);
    };
    return out;
  }

  AttentionLayers layers(int bits = 0, int dim = 64) {
    auto shape = shape_of(1, 4, dim, 64);
    shape.sms = 6;
    return {shape, {nullptr, DType::bf16, 1, dim, 64, bits}, {{.scale = 0.125F}}};
  }

  // Prepares one plan.
  PromptKernels chosen(const AttentionLayers& of, PromptKernels::Options with, int max_rows = 64,
                       int max_positions = 256) {
    PromptKernels kernels(device_info(0), std::move(with));
    kernels.prepare(stream_, {&of, 1}, max_rows, max_positions);
    return kernels;
  }
  static constexpr const char* kName = "attention of prompts, 4 heads over 1 of 64, bf16, blocks of 64";

  Stream stream_;
  using Change = void(ops::AttentionParams&);
  static inline Change* broken_ = nullptr;  // changes what wgmma computes
  using Changed = void(Stream&, const Tensor&);
  template <int rows>
  static void make_wrong(Stream& stream, const Tensor& to) {
    static const std::uint16_t one = float_to_bf16(1);
    if (to.rows == rows) stream.upload(to.data, &one, sizeof one, "test");
  }
  static inline Changed* changed_ = nullptr;  // changes the results of wgmma (timed())
  static inline std::int64_t broken_rows_;  // only in steps with this number of rows; 0: in all steps
  static inline bool wgmma_ = false;        // of the last call
  static inline double least_units_;        // of a thread block of wgmma, in steps that are not measured
  static inline int times_;                  // calls of the timer
  static constexpr int kMeasuredRows = 256;  // four chunks of 64 rows
};

TEST_F(PromptKernelsTest, a_faster_kernel_with_right_results_is_chosen) {
  for (const int bits : {0, 8, 4, ops::kKvFp8}) {
    const auto faster = chosen(layers(bits), options());
    EXPECT_TRUE(faster.chosen(0));
    EXPECT_TRUE(faster.uses_wgmma(0, 64, 0));
    EXPECT_FALSE(faster.uses_wgmma(0, 63, 0));
    EXPECT_FALSE(faster.uses_wgmma(1, 64, 0)) << "a plan that does not exist";
    EXPECT_EQ(faster.warning(), "");
    EXPECT_GE(least_units_, 3) << "the check does not reach a thread block's second unit";
    ASSERT_EQ(faster.report().size(), 1U);
    EXPECT_EQ(faster.report()[0], std::string("attention of prompts, 4 heads over 1 of 64, bf16") +
                                      (bits == 0   ? ""
                                       : bits == 8 ? " in 8 bits"
                                       : bits == 4 ? " in 4 bits"
                                                   : " in FP8") +
                                      ", blocks of 64, plain, after 0 and 192 positions: wgmma, measured with 64 rows: "
                                      "wgmma 500 us, tiles 1000 us");
    const auto slower = chosen(layers(bits), options(1.5));
    EXPECT_FALSE(slower.chosen(0));
    EXPECT_EQ(slower.warning(), "");
  }
}

TEST_F(PromptKernelsTest, each_number_of_rows_has_its_own_choice) {
  const auto kernels = chosen(layers(), timed({1500, 500}), 300, 512);
  EXPECT_TRUE(kernels.chosen(0));
  for (const auto& [rows, wgmma] : {std::pair{64, false}, {255, false}, {256, true}, {1024, true}, {9000, true}}) {
    EXPECT_EQ(kernels.uses_wgmma(0, rows, 0), wgmma) << rows;
  }
  EXPECT_FALSE(kernels.uses_wgmma(0, 256, 2048)) << "not measured after many positions";
  ASSERT_EQ(kernels.report().size(), 2U);
  EXPECT_EQ(kernels.report()[1], std::string(kName) + ", plain, after 0 positions: wgmma, measured with 256 rows: wgmma "
                                                      "500 us, tiles 1000 us");
}

TEST_F(PromptKernelsTest, chunks_after_many_positions_have_their_own_choice) {
  const auto kernels = chosen(layers(), timed({500, 1500}), 64, 2048 + 64);
  EXPECT_TRUE(kernels.uses_wgmma(0, 64, 2047));
  EXPECT_FALSE(kernels.uses_wgmma(0, 64, 2048));
  ASSERT_EQ(kernels.report().size(), 2U);
  EXPECT_EQ(kernels.report()[1], std::string(kName) + ", plain, after 2048 positions: tiles, measured with 64 rows: "
                                                      "wgmma 1500 us, tiles 1000 us");
}

// A decode takes a row of the step's budget, so the longest chunk has fewer rows than the budget.
TEST_F(PromptKernelsTest, a_chunk_beside_a_decode_uses_the_choice_of_the_largest_size) {
  const auto kernels = chosen(layers(), timed({1500, 1500, 1500, 1500, 500, 600}), 2048, 32768);
  for (const int before : {0, 2048}) {
    for (const auto& [rows, wgmma] : {std::pair{1023, false}, {1024, true}, {2047, true}}) {
      EXPECT_EQ(kernels.uses_wgmma(0, rows, before), wgmma) << rows << " rows after " << before;
    }
  }
  ASSERT_EQ(kernels.report().size(), 6U);
  EXPECT_EQ(kernels.report()[5], std::string(kName) + ", plain, after 8192 positions: wgmma, measured with 1024 rows: "
                                                      "wgmma 600 us, tiles 1000 us");
}

TEST_F(PromptKernelsTest, without_memory_for_a_size_the_other_sizes_are_chosen) {
  changed_ = [](Stream&, const Tensor& to) {
    if (to.rows == 1024) throw Error(ErrorCode::resource_exhausted, "no memory");
  };
  const auto kernels = chosen(layers(), timed({500, 500, 500, 500}), 1024, 2400);
  for (const auto& [rows, before] : {std::pair{64, 0}, {64, 2048}, {1023, 0}, {1024, 2048}}) {
    EXPECT_TRUE(kernels.uses_wgmma(0, rows, before)) << rows << " rows after " << before;
  }
  EXPECT_FALSE(kernels.uses_wgmma(0, 1024, 0));
  ASSERT_EQ(kernels.report().size(), 5U);
  EXPECT_NE(kernels.report()[3].find(": wgmma, measured with 256 rows"), std::string::npos);
  EXPECT_EQ(kernels.report()[4],
            std::string(kName) + ", plain, after 0 positions: tiles, because there is no memory to measure with");
  EXPECT_EQ(kernels.warning(), kernels.report()[4]);
}

TEST_F(PromptKernelsTest, a_kernel_that_is_wrong_or_fails_in_a_later_size_is_chosen_for_none) {
  const struct {
    Changed* change;
    const char* why;
  } faults[] = {
      {make_wrong<1024>, "the results of wgmma were wrong"},
      {[](Stream&, const Tensor& to) {
         if (to.rows == 1024) throw Error(ErrorCode::internal, "no room");
       },
       "wgmma failed: no room"},
  };
  for (const auto& fault : faults) {
    changed_ = fault.change;
    times_ = 0;
    const auto kernels = chosen(layers(), timed({500, 500, 500, 500, 500}), 1024, 2400);
    EXPECT_FALSE(kernels.chosen(0));
    ASSERT_EQ(kernels.report().size(), 1U);
    EXPECT_EQ(kernels.report()[0], std::string(kName) + ", plain, after 0 positions: tiles, because " + fault.why);
    EXPECT_NE(kernels.warning(), "");
  }
}

TEST_F(PromptKernelsTest, a_stored_kernel_that_is_wrong_in_another_size_is_not_used_without_a_measurement) {
  const auto file = charonia::testing::test_folder();
  const auto start = [&](bool measures, int max_rows) {
    auto with = timed({500});
    with.memory = file;
    if (!measures) with.seconds = 0;
    return chosen(layers(), with, max_rows, 1024);
  };
  EXPECT_TRUE(start(true, 64).uses_wgmma(0, 64, 0));
  EXPECT_TRUE(start(false, 1024).uses_wgmma(0, 64, 0));
  changed_ = make_wrong<1024>;
  const auto kernels = start(false, 1024);
  EXPECT_FALSE(kernels.chosen(0));
  ASSERT_EQ(kernels.report().size(), 1U);
  EXPECT_EQ(kernels.report()[0],
            std::string(kName) + ", plain, after 0 positions: tiles, because the results of wgmma were wrong");
  EXPECT_EQ(kernels.warning(), std::string("the kernel 'wgmma' for ") + kName +
                                   ", plain, after 0 positions gave results that differ from the other kernel's, and is "
                                   "not used. Please report this");
  std::filesystem::remove(file);
}

TEST_F(PromptKernelsTest, no_size_is_measured_after_the_limit_of_time) {
  auto with = timed({});
  with.seconds = 0;
  const auto kernels = chosen(layers(), with, 256, 256);
  EXPECT_FALSE(kernels.chosen(0));
  EXPECT_EQ(kernels.warning(), "");
  ASSERT_EQ(kernels.report().size(), 2U);
  for (const auto& line : kernels.report()) {
    EXPECT_NE(line.find(": tiles, because the 0 s for measurements are over (CHARONIA_CUDA_MEASURE_S). The next start "
                        "measures it"),
              std::string::npos)
        << line;
  }
}

TEST_F(PromptKernelsTest, times_are_stored_and_results_are_compared_again) {
  const auto file = charonia::testing::test_folder();
  const auto stored = [&](double ratio) {
    auto out = options(ratio);
    out.memory = file;
    return out;
  };
  EXPECT_TRUE(chosen(layers(), stored(0.5)).chosen(0));
  EXPECT_EQ(times_, 2);
  EXPECT_TRUE(chosen(layers(), stored(1.5)).chosen(0));
  EXPECT_EQ(times_, 2) << "a stored time is measured again";
  auto other = layers();
  other.scores = {{.scale = 0.1F, .window = 90}};
  EXPECT_FALSE(chosen(other, stored(1.5)).chosen(0)) << "other layers have their own times";
  EXPECT_EQ(times_, 4);
  broken_ = [](ops::AttentionParams& how) { how.scale *= 1.25F; };
  const auto wrong = chosen(layers(), stored(0.5));
  EXPECT_FALSE(wrong.chosen(0));
  EXPECT_NE(wrong.warning(), "");
  EXPECT_EQ(times_, 4);
  std::filesystem::remove(file);
}

// Also with scores that have no exact probabilities.
TEST_F(PromptKernelsTest, right_results_agree_in_every_version_of_the_kernels) {
  const DeviceArray<float> slopes(stream_, {0.5F, 0.25F, 0.125F, 0.0625F}), sinks(stream_, {0.5F, -1, 3, 100});
  const struct {
    int dim;
    DType type;
  } cases[] = {{64, DType::bf16}, {64, DType::f16}, {128, DType::bf16}, {256, DType::bf16}};
  for (const auto& [dim, type] : cases) {
    auto of = layers(0, dim);
    of.cache.dtype = type;
    if (dim == 64) {
      add_scores(of, {.scale = 0.1F, .window = 4096});
      add_scores(of, {.scale = 0.1F, .soft_cap = 50});
      add_scores(of, {.scale = 0.1F, .alibi = slopes.data()});
      add_scores(of, {.scale = 0.1F, .window = 128, .sinks = sinks.data()});
      add_scores(of, {.scale = 0.2F, .window = 30, .sinks = sinks.data()});  // the same version
      EXPECT_EQ(of.scores.size(), 5U);
    }
    const auto kernels = chosen(of, options(), 64, 64);
    EXPECT_TRUE(kernels.chosen(0)) << dim << ' ' << kernels.report()[0];
  }
}

// Scales of v have their own version of the kernels. The check uses scales of its own.
TEST_F(PromptKernelsTest, scales_of_values_belong_to_the_check) {
  const DeviceArray<float> scales(stream_, {3e4F, 1e-5F});
  auto of = layers(ops::kKvFp8);
  of.shape.heads = 8, of.shape.kv_heads = of.cache.kv_heads = 2;
  add_scores(of, {.scale = 0.1F, .v_scales = scales.data()});
  add_scores(of, {.scale = 0.2F, .v_scales = scales.data()});  // the same version
  EXPECT_EQ(of.scores.size(), 2U);
  EXPECT_TRUE(chosen(of, options()).chosen(0));
  broken_ = [](auto& how) { how.v_scales = nullptr; };
  EXPECT_FALSE(chosen(of, options()).chosen(0));
}

TEST_F(PromptKernelsTest, a_kernel_with_wrong_results_is_not_chosen_and_named) {
  const DeviceArray<float> slopes(stream_, {0.5F, 0.25F, 0.125F, 0.0625F}), sinks(stream_, {0.5F, -1, 3, 4});
  const struct {
    ops::AttentionParams how;
    Change* change;
  } faults[] = {
      {{.scale = 0.1F}, [](auto& how) { how.scale *= 1.25F; }},
      {{.scale = 0.1F, .window = 90}, [](auto& how) { how.window = 89; }},
      {{.scale = 0.1F, .window = 90}, [](auto& how) { how.window = 0; }},
      {{.scale = 0.1F, .window = 1100}, [](auto& how) { how.window = 1000; }},
      {{.scale = 0.1F, .soft_cap = 5}, [](auto& how) { how.soft_cap = 6; }},
      {{.scale = 0.1F, .alibi = slopes.data()}, [](auto& how) { how.alibi = nullptr; }},
      {{.scale = 0.1F, .sinks = sinks.data()}, [](auto& how) { how.sinks = nullptr; }},
  };
  for (const auto& [how, change] : faults) {
    for (const int bits : {0, 4}) {
      auto of = layers(bits);
      of.scores = {how};
      broken_ = change;
      const auto kernels = chosen(of, options());
      EXPECT_FALSE(kernels.chosen(0)) << &change - &faults[0].change;
      EXPECT_EQ(kernels.warning().find(std::string("the kernel 'wgmma' for attention of prompts, 4 heads over 1 of 64, ") +
                                       (bits == 4 ? "bf16 in 4 bits, " : "bf16, ")),
                0U);
      EXPECT_NE(kernels.warning().find(
                    " gave results that differ from the other kernel's, and is not used. Please report this"),
                std::string::npos);
    }
  }
}

TEST_F(PromptKernelsTest, a_kernel_with_wrong_results_in_the_measurement_only_is_not_chosen) {
  broken_ = [](ops::AttentionParams& how) { how.scale *= 1.25F; };
  broken_rows_ = kMeasuredRows;
  const auto kernels = chosen(layers(), options());
  EXPECT_FALSE(kernels.chosen(0));
  EXPECT_EQ(kernels.report()[0],
            std::string(kName) + ", plain, after 0 and 192 positions: tiles, because the results of wgmma were wrong");
  EXPECT_NE(kernels.warning(), "");
}

TEST_F(PromptKernelsTest, an_unproven_kernel_is_not_considered_by_default) {
  auto with = options();
  with.unproven = false;
  const auto kernels = chosen(layers(), std::move(with));
  EXPECT_FALSE(kernels.chosen(0));
  EXPECT_TRUE(kernels.report().empty());
  EXPECT_FALSE(kernels.chosen(7)) << "a plan that does not exist";
}

TEST_F(PromptKernelsTest, without_a_measurement_the_kernel_is_not_chosen) {
  auto with = options();
  with.timer = nullptr;
  for (const auto& kernels : {chosen(layers(), with), chosen(layers(), options(), 63)}) {
    EXPECT_FALSE(kernels.chosen(0));
    EXPECT_EQ(kernels.report()[0].find(std::string(kName) + ", plain"), 0U);
    EXPECT_NE(kernels.report()[0].find(": tiles, because nothing was measured"), std::string::npos);
  }
}

TEST_F(PromptKernelsTest, layers_that_the_kernel_cannot_compute_keep_the_other_one) {
  auto of = layers(0, 96);
  const auto kernels = chosen(of, options());
  EXPECT_FALSE(kernels.chosen(0));
  EXPECT_EQ(kernels.report()[0],
            "attention of prompts, 4 heads over 1 of 96, bf16, blocks of 64, plain: tiles, because of wgmma: it supports "
            "heads of 64, 128 and 256");
  of = layers();
  of.shape.reproducible = true;
  EXPECT_FALSE(chosen(of, options()).chosen(0));
  of = layers();
  of.scores.clear();
  EXPECT_TRUE(chosen(of, options()).report().empty()) << "layers of another kernel";
}

TEST_F(PromptKernelsTest, a_kernel_that_cannot_be_launched_is_not_chosen) {
  broken_ = [](ops::AttentionParams&) { throw Error(ErrorCode::internal, "no room for the block"); };
  const auto kernels = chosen(layers(), options());
  EXPECT_FALSE(kernels.chosen(0));
  EXPECT_EQ(kernels.report()[0],
            std::string(kName) +
                ", plain, after 0 and 192 positions: tiles, because wgmma failed: no room for the block");
  EXPECT_EQ(kernels.warning(), kernels.report()[0] + ". Please report this");
}

TEST_F(PromptKernelsTest, a_measurement_without_memory_is_a_warning) {
  broken_ = [](ops::AttentionParams&) { throw Error(ErrorCode::resource_exhausted, "no memory"); };
  const auto kernels = chosen(layers(), options());
  EXPECT_FALSE(kernels.chosen(0));
  EXPECT_EQ(kernels.warning(),
            std::string(kName) +
                ", plain, after 0 and 192 positions: tiles, because there is no memory to measure with");
}

TEST_F(PromptKernelsTest, the_kernel_can_be_asked_for) {
  for (const bool wgmma : {false, true}) {
    auto with = options();
    with.asked = wgmma;
    EXPECT_EQ(chosen(layers(), with).chosen(0), wgmma);
    with.unproven = false;
    const auto kernels = chosen(layers(), with);
    EXPECT_EQ(kernels.report().size(), 1U);
    for (const int before : {0, 10'000}) {
      EXPECT_EQ(kernels.uses_wgmma(0, 64, before), wgmma);
      EXPECT_FALSE(kernels.uses_wgmma(0, 63, before));
    }
  }
}

TEST_F(PromptKernelsTest, steps_with_the_kernel_equal_steps_without_it) {
  for (const int bits : {0, 8, 4, ops::kKvFp8}) {
    Attention with(bits, true), without(bits, false);
    EXPECT_TRUE(std::ranges::any_of(with.report(), [](const auto& line) {
      return line.starts_with("attention of prompts, 4 heads over 2 of 64");
    }));
    for (const auto& [begin, end] : {std::pair{0, 70}, {70, 71}, {71, 190}}) {
      const auto a = with.step({begin, end}), b = without.step({begin, end});
      expect_near(a, b, end - begin + 1);
      bool same = true;
      for (int row = 0; row < end - begin; ++row) same = same && a.same_bits(row, b, row);
      EXPECT_EQ(same, end - begin < 64) << "the kernel takes chunks of 64 rows or more, " << bits << " bits";
      if (HasFatalFailure()) return;
    }
  }
}

// With stored times that choose wgmma for chunks after many positions only. Ends the process.
[[noreturn]] void take_steps_with_two_choices(const PromptKernels::Options& stored) {
  constexpr int kPositions = PromptKernels::kManyPositions + PromptKernels::kMinRows;
  Stream stream;
  auto with = stored;
  with.memory = autotune_cache_path();
  const AttentionLayers layers{shape_of(2, 2, 64, 64), {nullptr, DType::bf16, 2, 64, 64, 0}, {{.scale = 0.125F}}};
  PromptKernels(device_info(0), with).prepare(stream, {&layers, 1}, 150, kPositions);
  Attention both(0, std::nullopt, false, 64, kPositions), wgmma(0, true, false, 64, kPositions);
  Attention tiles(0, false, false, 64, kPositions);
  const Attention::Range first{0, 64}, late{kPositions - 64, kPositions}, decode{kPositions - 1, kPositions};
  const struct {
    Attention::Range a, b;
    bool wgmma;
  } steps[] = {
      {late, {0, 1}, true},
      {decode, first, false},
      {first, late, false},  // the first one of two longest chunks
  };
  for (const auto& step : steps) {
    const auto by_both = both.step(step.a, step.b), by_wgmma = wgmma.step(step.a, step.b);
    const auto by_tiles = tiles.step(step.a, step.b);
    const auto same = [&](const Matrix& other) {
      bool all = true;
      for (int row = 0; row < 64; ++row) all = all && by_both.same_bits(row, other, row);
      return all;
    };
    EXPECT_EQ(same(by_wgmma), step.wgmma) << &step - steps;
    EXPECT_EQ(same(by_tiles), !step.wgmma) << &step - steps;
  }
  std::exit(::testing::Test::HasFailure() ? 1 : 0);
}

TEST_F(PromptKernelsTest, the_longest_chunk_of_a_step_and_the_positions_before_it_decide) {
  const auto folder = ::testing::TempDir() + "prompt_kernels_test";
  std::filesystem::remove_all(folder);
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process of its own, because the environment is read only once
  EXPECT_EXIT(
      {
        ::setenv("CHARONIA_CACHE_DIR", folder.c_str(), 1);
        ::setenv("CHARONIA_CUDA_UNPROVEN", "1", 1);
        ::setenv("CHARONIA_CUDA_MEASURE_S", "0", 1);  // stored times are used
        take_steps_with_two_choices(timed({1500, 500}));
      },
      ::testing::ExitedWithCode(0), "");
  std::filesystem::remove_all(folder);
}

TEST_F(PromptKernelsTest, steps_without_memory_for_16_bit_copies_use_the_other_kernel) {
  constexpr int kLen = (1 << 18) + 64;  // the copy of a block takes more than kWideCacheBytes
  Attention with(4, true, false, kLen), without(4, false, false, kLen);
  const auto a = with.step({0, 70}), b = without.step({0, 70});
  for (int row = 0; row < 71; ++row) ASSERT_TRUE(a.same_bits(row, b, row)) << row;
}

TEST_F(PromptKernelsTest, reproducible_mode_does_not_use_the_kernel) {
  Attention with(0, true, true), without(0, false, true);
  const auto a = with.step({0, 70}), b = without.step({0, 70});
  for (int row = 0; row < 71; ++row) ASSERT_TRUE(a.same_bits(row, b, row)) << row;
}

}  // namespace
}  // namespace charonia::cuda
