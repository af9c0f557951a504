// The choice of the kernel for attention of decodes over integers at the start of an engine, and steps with it.
#include "ops/cuda/decode_kernels.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "attention_kernel_world.h"
#include "attention_step.h"
#include "base/text.h"
#include "charonia/error.h"
#include "test_folder.h"

namespace charonia::cuda {
namespace {

class DecodeKernelsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    broken_ = nullptr;
    launches_ = times_ = 0;
  }

  // Options whose measurements say that the kernel takes this many times as long as the other one.
  DecodeKernels::Options options(double ratio = 0.5) {
    DecodeKernels::Options out;
    out.unproven = true;
    out.attention = [](Stream& stream, const DeviceInfo& device, const Tensor& to, const Tensor& qkv,
                       const CacheLayer& cache, const AttentionShape& shape, const ops::AttentionParams& how,
                       const AttentionWork& work) {
      ++launches_;
      k_outside_ = shape.k_outside;
      if (!k_outside_ || broken_ == nullptr) return attention(stream, device, to, qkv, cache, shape, how, work);
      auto changed = how;
      auto of = cache;
      std::vector<std::byte> memory(static_cast<std::size_t>(work.num_blocks * cache.block_bytes()));
      stream.download(memory.data(), cache.data, memory.size(), "test");
      stream.wait("test");
      broken_(changed, cache, memory);
      const DeviceArray<std::byte> other(stream, memory);
      of.data = other.data();
      attention(stream, device, to, qkv, of, shape, changed, work);
      stream.wait("test");
    };
    out.timer = [ratio](Stream& stream, double expected, const std::function<void(int)>& issue) {
      EXPECT_GT(expected, 0);
      for (const int i : {0, kMaxTimedGemms - 1}) issue(i);
      stream.wait("test");
      ++times_;
      return k_outside_ ? 1000 * ratio : 1000;
    };
    return out;
  }
  // Options whose kernels compute nothing. The kernel takes these times for the measured steps, the other one 1000 us.
  static DecodeKernels::Options timed(std::vector<double> times) {
    DecodeKernels::Options out;
    out.unproven = true;
    out.attention = [](Stream&, const DeviceInfo&, const Tensor&, const Tensor&, const CacheLayer&,
                       const AttentionShape&, const ops::AttentionParams&, const AttentionWork&) {};
    out.timer = [times](Stream&, double, const std::function<void(int)>&) {
      const auto at = static_cast<std::size_t>(times_++);
      return at % 2 == 0 ? 1000 : times.at(at / 2);
    };
    return out;
  }

  AttentionLayers layers(int bits = 8, int dim = 64) {
    auto shape = shape_of(1, 4, dim, 64);
    shape.sms = 6;
    return {shape, {nullptr, DType::bf16, 1, dim, 64, bits}, {{.scale = 0.125F}}};
  }

  // Prepares one plan.
  DecodeKernels chosen(const AttentionLayers& of, DecodeKernels::Options with, int max_sequences = 1,
                       int max_positions = 150, double seconds = 3600) {
    DecodeKernels kernels(device_info(0), std::move(with));
    kernels.prepare(stream_, {&of, 1}, max_sequences, max_positions, seconds);
    return kernels;
  }
  static constexpr const char* kName =
      "attention of decodes, 4 heads over 1 of 64, bf16 in 8 bits, blocks of 64, plain";

  // Exchanges the scales of k of neighbouring slots if at is 0, or their zeros if it is 2.
  template <int at>
  static void exchange(ops::AttentionParams&, const CacheLayer& cache, std::vector<std::byte>& memory) {
    const auto blocks = std::ssize(memory) / cache.block_bytes();
    for (std::int64_t block = 0; block < blocks; ++block) {
      for (int row = 0; row + 1 < cache.half_rows(); row += 2) {
        auto* const one = memory.data() + cache.scale_at(block, row) + at;
        auto* const next = memory.data() + cache.scale_at(block, row + 1) + at;
        if (next[1] != std::byte{0xff}) std::swap_ranges(one, one + 2, next);  // otherwise the sequence has ended
      }
    }
  }

  Stream stream_;
  using Change = void(ops::AttentionParams&, const CacheLayer&, std::vector<std::byte>&);
  static inline Change* broken_ = nullptr;  // changes what the kernel computes
  static inline bool k_outside_ = false;    // of the last launch
  static inline int launches_ = 0, times_ = 0;  // times_: calls of the timer
};

TEST_F(DecodeKernelsTest, a_faster_kernel_with_right_results_is_chosen) {
  for (const int bits : {8, 4}) {
    const auto faster = chosen(layers(bits), options());
    EXPECT_TRUE(faster.k_outside(0, 1));
    EXPECT_TRUE(faster.k_outside(0, 500));
    EXPECT_FALSE(faster.k_outside(1, 1)) << "a plan that does not exist";
    EXPECT_EQ(faster.warning(), "");
    ASSERT_EQ(faster.report().size(), 1U);
    EXPECT_EQ(faster.report()[0], cat("attention of decodes, 4 heads over 1 of 64, bf16 in ", bits,
                                      " bits, blocks of 64, plain, over 150 positions: scaled scores, measured with 1 "
                                      "rows: scaled scores 500 us, scaled keys 1000 us"));
    const auto slower = chosen(layers(bits), options(1.5));
    EXPECT_FALSE(slower.k_outside(0, 1));
    EXPECT_EQ(slower.warning(), "");
  }
}

// Both numbers of positions must be faster.
TEST_F(DecodeKernelsTest, each_number_of_sequences_has_its_own_choice) {
  const auto kernels = chosen(layers(8, 32), timed({500, 600, 500, 1500, 500, 600}), 64, 1500);
  for (const auto& [rows, outside] :
       {std::pair{1, true}, {7, true}, {8, false}, {63, false}, {64, true}, {2000, true}}) {
    EXPECT_EQ(kernels.k_outside(0, rows), outside) << rows;
  }
  ASSERT_EQ(kernels.report().size(), 6U);
  EXPECT_TRUE(kernels.report()[2].ends_with(
      "over 1024 positions: scaled scores, measured with 8 rows: scaled scores 500 us, scaled keys 1000 us"));
  EXPECT_TRUE(kernels.report()[3].ends_with(
      "over 1500 positions: scaled keys, measured with 8 rows: scaled scores 1500 us, scaled keys 1000 us"));
  times_ = 0;
  const auto other = chosen(layers(8, 32), timed({1500, 500, 500, 500}), 8, 1500);
  EXPECT_FALSE(other.k_outside(0, 7));
  EXPECT_TRUE(other.k_outside(0, 8));
}

// 64 sequences of 8192 positions take 544 MiB.
TEST_F(DecodeKernelsTest, steps_that_memory_cannot_hold_are_not_measured) {
  auto of = layers(8, 256);
  of.shape.heads = 8;
  of.shape.kv_heads = of.cache.kv_heads = 2;
  const auto kernels = chosen(of, timed({1500, 1500, 1500, 1500, 500}), 64, 8192);
  ASSERT_EQ(kernels.report().size(), 5U);
  EXPECT_NE(kernels.report()[4].find("over 1024 positions: scaled scores, measured with 64 rows"), std::string::npos);
  EXPECT_TRUE(kernels.k_outside(0, 64));
}

// Also with scores that have no exact probabilities.
TEST_F(DecodeKernelsTest, right_results_agree_in_every_version_of_the_kernels) {
  const DeviceArray<float> slopes(stream_, {0.5F, 0.25F, 0.125F, 0.0625F}), sinks(stream_, {0.5F, -1, 3, 100});
  for (const int bits : {8, 4}) {
    for (const auto& [dim, type] : {std::pair{64, DType::bf16}, {64, DType::f16}, {32, DType::bf16}, {96, DType::bf16},
                                    {128, DType::bf16}, {256, DType::bf16}}) {
      if (dim == 96 && bits == 4) continue;
      auto of = layers(bits, dim);
      of.cache.dtype = type;
      if (dim == 64) {
        add_scores(of, {.scale = 0.1F, .window = 1100});
        add_scores(of, {.scale = 0.1F, .soft_cap = 50});
        add_scores(of, {.scale = 0.1F, .alibi = slopes.data()});
        add_scores(of, {.scale = 0.1F, .window = 1100, .sinks = sinks.data()});
        EXPECT_EQ(of.scores.size(), 5U);
      }
      const auto kernels = chosen(of, options());
      EXPECT_TRUE(kernels.k_outside(0, 1)) << dim << ' ' << kernels.report()[0];
    }
  }
}

TEST_F(DecodeKernelsTest, a_kernel_with_wrong_results_is_not_chosen_and_named) {
  const DeviceArray<float> slopes(stream_, {0.5F, 0.25F, 0.125F, 0.0625F}), sinks(stream_, {0.5F, -1, 3, 4});
  const struct {
    ops::AttentionParams how;
    Change* change;
  } faults[] = {
      {{.scale = 0.1F}, [](auto& how, const auto&, auto&) { how.scale *= 1.25F; }},
      {{.scale = 0.1F}, exchange<0>},
      {{.scale = 0.1F}, exchange<2>},
      {{.scale = 0.1F, .window = 90}, [](auto& how, const auto&, auto&) { how.window = 89; }},
      {{.scale = 0.1F, .window = 2000}, [](auto& how, const auto&, auto&) { how.window = 1000; }},
      {{.scale = 0.1F, .soft_cap = 5}, [](auto& how, const auto&, auto&) { how.soft_cap = 6; }},
      {{.scale = 0.1F, .alibi = slopes.data()}, [](auto& how, const auto&, auto&) { how.alibi = nullptr; }},
      {{.scale = 0.1F, .sinks = sinks.data()}, [](auto& how, const auto&, auto&) { how.sinks = nullptr; }},
  };
  for (const auto& fault : faults) {
    for (const int bits : {8, 4}) {
      auto of = layers(bits);
      of.scores = {fault.how};
      broken_ = fault.change;
      const auto kernels = chosen(of, options());
      EXPECT_FALSE(kernels.k_outside(0, 1)) << &fault - faults;
      ASSERT_EQ(kernels.report().size(), 1U);
      EXPECT_TRUE(kernels.report()[0].ends_with(": scaled keys, because the results of scaled scores were wrong"));
      EXPECT_TRUE(kernels.warning().starts_with(
          cat("the kernel 'scaled scores' for attention of decodes, 4 heads over 1 of 64, bf16 in ", bits, " bits, ")));
      EXPECT_TRUE(kernels.warning().ends_with(
          "gave results that differ from the other kernel's, and is not used. Please report this"));
    }
  }
  EXPECT_EQ(times_, 0);
}

TEST_F(DecodeKernelsTest, times_are_stored_and_results_are_compared_again) {
  const auto file = charonia::testing::test_folder();
  const auto start = [&](double ratio, int min_split = 256) {
    auto with = options(ratio);
    with.memory = file;
    launches_ = times_ = 0;
    auto of = layers();
    of.shape.min_decode_split = min_split;
    return chosen(of, with, 1, 150, ratio < 1 ? 3600 : 0);
  };
  EXPECT_TRUE(start(0.5).k_outside(0, 1));
  EXPECT_EQ(times_, 2);
  const auto second = start(1.5);
  EXPECT_TRUE(second.k_outside(0, 1));
  EXPECT_EQ(times_, 0);
  EXPECT_GT(launches_, 0);
  const auto other_splits = start(1.5, 64);
  EXPECT_FALSE(other_splits.k_outside(0, 1));
  EXPECT_EQ(launches_, 0) << "times of other splits are not used";
  EXPECT_NE(other_splits.report()[0].find("plain, splits of 64 or more, over 150"), std::string::npos);
  broken_ = exchange<0>;
  const auto wrong = start(1.5);
  EXPECT_FALSE(wrong.k_outside(0, 1));
  EXPECT_NE(wrong.warning(), "");
  std::filesystem::remove(file);
}

TEST_F(DecodeKernelsTest, without_seconds_or_a_timer_the_kernel_is_not_chosen) {
  auto with = options();
  with.timer = nullptr;
  const auto without_timer = chosen(layers(), with), without_time = chosen(layers(), options(), 1, 150, 0);
  EXPECT_FALSE(without_timer.k_outside(0, 1));
  EXPECT_FALSE(without_time.k_outside(0, 1));
  EXPECT_EQ(without_timer.report(),
            std::vector{cat(kName, ", over 150 positions: scaled keys, because nothing was measured")});
  EXPECT_TRUE(without_time.report()[0].ends_with("The next start measures it")) << without_time.report()[0];
  EXPECT_EQ(launches_, 0);
}

TEST_F(DecodeKernelsTest, an_unproven_kernel_is_not_considered_by_default) {
  auto with = options();
  with.unproven = false;
  const auto kernels = chosen(layers(), std::move(with));
  EXPECT_FALSE(kernels.k_outside(0, 1));
  EXPECT_TRUE(kernels.report().empty());
  EXPECT_EQ(launches_, 0);
}

TEST_F(DecodeKernelsTest, layers_without_the_kernel_have_no_candidates) {
  auto reproducible = layers(), of_others = layers(), in_float = layers();
  reproducible.shape.reproducible = true;
  of_others.scores.clear();
  in_float.cache.dtype = DType::f32;
  for (const auto& of : {layers(0), layers(ops::kKvFp8), layers(4, 96), reproducible, of_others, in_float}) {
    const auto kernels = chosen(of, options());
    EXPECT_FALSE(kernels.k_outside(0, 1));
    EXPECT_TRUE(kernels.report().empty());
  }
  EXPECT_EQ(launches_, 0);
}

// Decodes of a sequence of 71 positions. Reproducible mode scales keys, and one split has the same bits in both modes.
bool scales_scores(Attention& attention, int bits) {
  Attention keys(bits, std::nullopt, true);
  for (auto* const one : {&attention, &keys}) one->step({0, 70});
  const auto a = attention.step({70, 71}), b = keys.step({70, 71});
  expect_near(a, b, 2);
  return !a.same_bits(0, b, 0);
}

TEST_F(DecodeKernelsTest, steps_do_not_use_the_kernel_by_default) {
  for (const int bits : {8, 4}) {
    Attention by_default(bits, std::nullopt);
    EXPECT_FALSE(scales_scores(by_default, bits));
  }
}

// With times that a start stores, and a next start that measures nothing. Ends the process.
[[noreturn]] void take_steps(DecodeKernels::Options faster, DecodeKernels::Options slower) {
  Stream stream;
  const auto store = [&](DecodeKernels::Options& with, int bits) {
    with.memory = autotune_cache_path();
    const AttentionLayers layers{shape_of(2, 2, 64, 64), {nullptr, DType::bf16, 2, 64, 64, bits}, {{.scale = 0.125F}}};
    DecodeKernels(device_info(0), with).prepare(stream, {&layers, 1}, 3, 200, 3600);
  };
  store(faster, 8);
  store(slower, 4);
  Attention faster_steps(8, std::nullopt), slower_steps(4, std::nullopt);
  EXPECT_TRUE(scales_scores(faster_steps, 8)) << faster_steps.report().back();
  EXPECT_FALSE(scales_scores(slower_steps, 4)) << slower_steps.report().back();
  EXPECT_EQ(faster_steps.report().back(),
            "attention of decodes, 4 heads over 2 of 64, bf16 in 8 bits, blocks of 64, plain, over 200 positions: "
            "scaled scores, measured with 1 rows: scaled scores 500 us, scaled keys 1000 us");
  std::exit(::testing::Test::HasFailure() ? 1 : 0);
}

TEST_F(DecodeKernelsTest, steps_use_the_kernel_if_a_start_has_found_it_faster) {
  const auto folder = ::testing::TempDir() + "decode_kernels_test";
  std::filesystem::remove_all(folder);
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process of its own, because the environment is read only once
  EXPECT_EXIT(
      {
        ::setenv("CHARONIA_CACHE_DIR", folder.c_str(), 1);
        ::setenv("CHARONIA_CUDA_UNPROVEN", "1", 1);
        ::setenv("CHARONIA_CUDA_MEASURE_S", "0", 1);
        take_steps(timed({500}), timed({500, 1500}));
      },
      ::testing::ExitedWithCode(0), "");
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace charonia::cuda
