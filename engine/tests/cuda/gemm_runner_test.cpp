// The selection of GEMM kernels and the stored results. A fake library replaces cuBLASLt; its algorithms and the
// built-in kernels take the times that a test sets.
#include "ops/cuda/gemm/gemm_runner.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <thread>

#include "base/json.h"
#include "base/log.h"
#include "base/text.h"
#include "cuda/fake_blas.h"
#include "cuda/gemm_problem.h"
#include "errors.h"
#include "ops/cuda/gemm/autotune_cache.h"
#if defined(CHARONIA_CUDA_ON_HOST)
#include "emulator/emulated_device.h"
#include "emulator/host_grid.h"
#endif

namespace charonia::cuda {
namespace {

namespace fs = std::filesystem;

::testing::AssertionResult says(const std::string& text, std::string_view part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << '"' << part << "\" is not in: " << text;
}

class GemmRunnerTest : public RunnerTest {
 protected:
  GemmRunner::Options options(bool library = true, const std::string& version = "library 1") {
    auto options = runner_options(
        [this] { return log_.runs.empty() ? 10 : library_time_ * static_cast<double>(log_.runs.back().algorithm); },
        version);
    if (!library) options.blas = nullptr;
    return options;
  }

  static void prepare(GemmRunner& runner, GemmProblem& problem, int max_rows, std::int64_t rows = 0) {
    auto gemm = problem.gemm();
    if (rows > 0) gemm.rows = rows;
    runner.prepare(problem.stream, {&gemm, 1}, max_rows);
  }
  // Returns the number of GEMMs that the library received.
  std::size_t run(GemmRunner& runner, GemmProblem& problem, bool rounded_twice = false) {
    log_.runs.clear();
    problem.clear();
    runner.run(problem.stream, problem.gemm());
    problem.download();
    problem.check(rounded_twice);
    return log_.runs.size();
  }

  double library_time_ = 1;  // of algorithm 1; algorithm i takes i times as long. A built-in kernel takes 10
};

constexpr Case kCase{.rows = 3, .n = 24, .k = 72, .bias = true};

TEST_F(GemmRunnerTest, the_fastest_candidate_is_chosen) {
  for (const bool library : {true, false}) {
    library_time_ = library ? 1 : 100;
    fs::remove_all(folder_ / "cache");
    GemmRunner runner(device_info(0), options());
    GemmProblem problem(kCase);
    prepare(runner, problem, 8);
    ASSERT_EQ(runner.report().size(), 1U);
    const auto* const expected = library
                                     ? "rows 1..4 n 24 k 72 bf16 -> bf16: cuBLASLt, 1.0 us"
                                     : "rows 1..4 n 24 k 72 bf16 -> bf16: own stream 8 x 16, 4 stages, 10.0 us";
    EXPECT_TRUE(runner.report().front().starts_with(expected)) << runner.report().front();
    EXPECT_EQ(run(runner, problem, true), library ? 1U : 0U);
    if (library) {
      EXPECT_EQ(log_.runs[0].algorithm, 1U) << "the library's fastest algorithm";
    }
    EXPECT_EQ(runner.warning(), "");
  }
}

TEST_F(GemmRunnerTest, rows_between_buckets_use_the_tactic_of_the_next_bucket) {
  auto with = options();
  with.timer = [&, timer = with.timer](Stream& stream, double expected, const std::function<void(int)>& issue) {
    const double time = timer(stream, expected, issue);
    // Up to 8 rows the library is slow.
    return !log_.runs.empty() && log_.runs.back().rows <= 8 ? time + 1000 : time;
  };
  GemmRunner runner(device_info(0), std::move(with));
  GemmProblem problem({.rows = 1, .n = 16, .k = 64});
  prepare(runner, problem, 8192, 24);
  EXPECT_EQ(runner.report().size(), 3U) << "1..4, 5..8 and 9..24; the shape's rows count more than max_rows";
  for (const int rows : {1, 5, 8, 9, 13, 24}) {
    GemmProblem some({.rows = rows, .n = 16, .k = 64});
    EXPECT_EQ(run(runner, some), rows > 8 ? 1U : 0U) << rows;
  }
}

TEST_F(GemmRunnerTest, measurements_are_stored_for_the_same_versions) {
  GemmProblem problem(kCase);
  std::vector<std::string> report;
  {
    GemmRunner runner(device_info(0), options());
    prepare(runner, problem, 4);
    report = runner.report();
    EXPECT_GT(measured_, 0);
    measured_ = 0;
    prepare(runner, problem, 4);
    EXPECT_EQ(measured_, 0) << "the second prepare() measures nothing";
  }
  library_time_ = 1000;  // must have no effect any more
  for (const auto* version : {"library 1", "library 2", "other overlap", "only proven", "library 1"}) {
    measured_ = 0;
    const std::string_view is = version;
    auto with = options(true, is == "library 2" ? version : "library 1");
    if (is == "other overlap") with.overlap = with.overlap == Overlap::late ? Overlap::early : Overlap::late;
    if (is == "only proven") with.unproven = false;
    GemmRunner runner(device_info(0), std::move(with));
    prepare(runner, problem, 4);
    const bool same = is == "library 1";
    EXPECT_EQ(measured_ == 0, same) << version;
    EXPECT_EQ(runner.report() == report, same);
    run(runner, problem, true);
  }
  // With more rows, only the new buckets are measured.
  measured_ = 0;
  GemmRunner runner(device_info(0), options());
  prepare(runner, problem, 16, 16);
  EXPECT_GT(measured_, 0);
  EXPECT_EQ(runner.report().front(), report.front());
}

TEST_F(GemmRunnerTest, an_unknown_file_is_ignored) {
  GemmProblem problem(kCase);
  {
    GemmRunner runner(device_info(0), options());
    prepare(runner, problem, 4);
  }
  nlohmann::json good;
  std::ifstream(file()) >> good;
  ASSERT_EQ(good["measured"].size(), 1U);
  std::vector<std::string> texts{"", "{", "[1, 2]", "null", std::string(100, '\0')};
  for (const auto* const patch :
       {R"({"format": 99})", R"({"format": null})", R"({"measured": null})", R"({"measured": [3]})"}) {
    auto one = good;
    one.merge_patch(nlohmann::json::parse(patch));  // null removes the member
    texts.push_back(one.dump());
  }
  const std::function<void(nlohmann::json&)> changes[] = {
      [](auto& tactic) { tactic = 5; },
      [](auto& tactic) { tactic["own"]["kernel"] = 77; },
      [](auto& tactic) { tactic["own"]["tile_rows"] = "x"; },
      [](auto& tactic) { tactic["own"]["k_blocks"] = 1 << 20; },
      [](auto& tactic) { tactic["own"]["sums"] = 2; },  // a cluster of one block
      [](auto& tactic) { tactic["own"].erase("sums"); },
      [](auto& tactic) { tactic["blas"]["algorithm"] = {1, 2}; },
      [](auto& tactic) { tactic["blas"]["algorithm"][0] = 4; },  // an unknown algorithm of the library
      [](auto& tactic) { tactic["padded_rows"] = 16; },          // more than the operands have
      [](auto& tactic) { tactic["apart"] = true; },              // it has no gate
      [](auto& tactic) { tactic.erase("microseconds"); }};
  for (const auto& change : changes) {
    auto one = good;
    for (auto& shapes : one["measured"]) {
      for (auto& rows : shapes) {
        for (auto& tactic : rows) change(tactic);
      }
    }
    texts.push_back(one.dump());
  }
  for (const auto& text : texts) {
    SCOPED_TRACE(text.substr(0, 300));
    std::ofstream(file()) << text;
    measured_ = 0;
    GemmRunner runner(device_info(0), options());
    prepare(runner, problem, 4);
    EXPECT_GT(measured_, 0);
    run(runner, problem, true);
    nlohmann::json now;
    std::ifstream(file()) >> now;
    EXPECT_EQ(now["measured"], good["measured"]);
  }
}

TEST_F(GemmRunnerTest, a_folder_that_cannot_be_written_is_a_warning) {
  fs::create_directories(folder_);
  std::ofstream(folder_ / "cache") << "in the way";
  GemmRunner runner(device_info(0), options());
  GemmProblem problem(kCase);
  prepare(runner, problem, 1);
  EXPECT_TRUE(says(runner.warning(), "CHARONIA_CACHE_DIR"));
  run(runner, problem, true);
}

TEST_F(GemmRunnerTest, concurrent_writers_leave_a_complete_file) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 30; ++i) {
        AutotuneCache memory(file(), cat("device ", t % 2));
        memory.keep({.n = t, .k = 64}, i + 1, {.own = {GemmTactic::Kernel::tile, 16, 64, 6, 1}, .microseconds = 3});
        EXPECT_EQ(memory.save(), "");
        nlohmann::json now;
        std::ifstream(file()) >> now;  // throws if the file is incomplete
        EXPECT_TRUE(now["measured"].is_object());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(std::distance(fs::directory_iterator(file().parent_path()), {}), 1) << "no temporary file is left";
  for (const auto* device : {"device 0", "device 1"}) {
    AutotuneCache one(file(), device);
    one.keep({.n = device[7], .k = 64}, 1, {.microseconds = 1});
    EXPECT_EQ(one.save(), "");
  }
  EXPECT_TRUE(AutotuneCache(file(), "device 0").find({.n = '0', .k = 64}, 1)) << "entries of other processes are kept";
  EXPECT_FALSE(AutotuneCache(file(), "device 1").find({.n = '0', .k = 64}, 1));
}

TEST_F(GemmRunnerTest, built_in_kernels_run_without_a_library_and_the_reason_is_named) {
  const auto runner = [&](bool library, bool reproducible, const std::string& reason) {
    auto with = options(library, "library 7");
    with.reproducible = reproducible;
    with.no_blas = reason;
    return std::make_unique<GemmRunner>(device_info(0), std::move(with));
  };
  const std::string reason = "cuBLASLt cannot be loaded (no such file)";
  EXPECT_EQ(runner(true, false, "")->library(), "library 7");
  EXPECT_EQ(runner(true, true, "")->library(), "own kernels only, for reproducible results");
  EXPECT_EQ(runner(false, false, "")->library(), "own kernels only");
  const auto without = runner(false, false, reason);
  EXPECT_EQ(without->library(), "own kernels only: " + reason);
  EXPECT_TRUE(without->warning().starts_with(reason + ". ")) << without->warning();
  for (const std::int64_t rows : {1, 40}) {
    GemmProblem problem({.rows = rows, .n = 24, .k = 72, .bias = true});
    run(*without, problem);
  }
}

TEST_F(GemmRunnerTest, gemms_that_the_library_rejects_run_on_built_in_kernels) {
  std::vector<std::pair<LogLevel, std::string>> logged;
  set_log_sink([&](LogLevel level, const std::string& line) { logged.emplace_back(level, line); });
  GemmRunner runner(device_info(0), options());
  GemmProblem problem(kCase);
  prepare(runner, problem, 8, 8);
  auto expected = runner.report();
  EXPECT_EQ(runner.rejected(), 0);
  log_.rejects = [](const Gemm&) { return true; };
  for (const std::int64_t rows : {3, 3, 2, 5}) {
    GemmProblem some({.rows = rows, .n = kCase.n, .k = kCase.k, .bias = true});
    EXPECT_EQ(run(runner, some), 1U) << "the library was not called";
  }
  log_.rejects = [](const Gemm&) { return false; };
  run(runner, problem, true);
  set_log_sink({});

  EXPECT_EQ(runner.rejected(), 4);
  expected.emplace_back(
      "n 24 k 72 bf16 -> bf16: own kernels computed 4 GEMMs of 2..5 rows although cuBLASLt was chosen");
  EXPECT_EQ(runner.report(), expected) << "the line must follow the tactics of its shape";
  ASSERT_EQ(logged.size(), 1U) << "only the first rejection is logged";
  EXPECT_EQ(logged[0].first, LogLevel::warning);
  EXPECT_TRUE(says(logged[0].second, "rejected a GEMM of 3 rows, n 24 k 72 bf16 -> bf16, with the algorithm that was "
                                     "chosen for up to 4 rows"));
}

TEST_F(GemmRunnerTest, a_tactic_that_is_rejected_when_measured_is_not_chosen) {
  GemmRunner runner(device_info(0), options());
  GemmProblem problem(kCase);
  log_.rejects = [](const Gemm& gemm) { return gemm.rows == 4; };
  prepare(runner, problem, 4, 4);
  for (const auto& line : runner.report()) {
    EXPECT_EQ(line.find("cuBLASLt") != std::string::npos, line.starts_with("rows 1..2 ")) << line;
  }
  EXPECT_EQ(runner.rejected(), 0) << "no chosen tactic was rejected";
}

TEST_F(GemmRunnerTest, few_rows_are_padded_if_that_is_faster_and_the_memory_allows_it) {
  for (const bool faster : {true, false}) {
    auto with = options();
    with.memory.clear();
    with.timer = [&, timer = with.timer](Stream& stream, double expected, const std::function<void(int)>& issue) {
      const double time = timer(stream, expected, issue);
      return log_.runs.empty() || (log_.runs.back().rows >= 16) == faster ? time : time + 100;
    };
    GemmRunner runner(device_info(0), std::move(with));
    GemmProblem all({.rows = 16, .n = 24, .k = 72, .bias = true});
    auto gemm = all.gemm();
    gemm.row_capacity = 16;
    runner.prepare(all.stream, {&gemm, 1}, 16);
    const auto report = runner.report();
    const auto padded = [](const std::string& line) { return line.find("padded to 16 rows") != std::string::npos; };
    EXPECT_EQ(std::ranges::count_if(report, padded), faster ? 1 : 0);
    EXPECT_EQ(padded(report.front()) && report.front().starts_with("rows 1..8 "), faster) << report.front();
    for (const std::int64_t rows : {1, 3, 8}) {
      const auto run_with = [&](std::int64_t capacity) {
        log_.runs.clear();
        all.clear();
        gemm.rows = rows;
        gemm.row_capacity = capacity;
        runner.run(all.stream, gemm);
        all.download();
        auto part = all.slice(0, rows);
        part.result = all.result.slice(0, rows);
        part.check(true);
        return log_.runs.empty() ? 0 : log_.runs.back().rows;
      };
      const auto before = runner.rejected();
      EXPECT_EQ(run_with(16), faster ? 16 : rows);
      EXPECT_EQ(runner.rejected(), before);
      EXPECT_EQ(run_with(0), faster ? 0 : rows) << "a built-in kernel computes GEMMs whose memory ends";
      EXPECT_EQ(runner.rejected(), before + (faster ? 1 : 0));
    }
  }
}

TEST_F(GemmRunnerTest, a_kernel_with_wrong_results_is_not_chosen_and_named) {
  GemmProblem problem(kCase);
  for (const bool stored : {false, true}) {
    log_.wrong = stored ? 2 : 1;
    GemmRunner runner(device_info(0), options());
    prepare(runner, problem, 4);
    EXPECT_TRUE(
        says(runner.warning(), "differ from the reference kernel's, and are not used: cuBLASLt for rows 1 n 24"))
        << "a stored choice is checked again";
    run(runner, problem, true);
    ASSERT_EQ(log_.runs.size(), 1U);
    EXPECT_NE(log_.runs[0].algorithm, log_.wrong);
  }
  log_.wrong = 0;
  GemmRunner runner(device_info(0), options());
  prepare(runner, problem, 4);
  EXPECT_EQ(runner.warning(), "");
}

TEST_F(GemmRunnerTest, choices_are_checked_behind_another_launch_and_with_one_row_less) {
  GemmProblem problem(kCase);
  {
    GemmRunner runner(device_info(0), options());
    prepare(runner, problem, 4);
  }
  bool front = false;
  const std::function<bool(const Gemm&)> faults[] = {
      [](const Gemm& gemm) { return gemm.rows == 3; },
      [&](const Gemm& gemm) { return (front = !front, !front) && gemm.rows == 4; },
  };
  for (const auto& fault : faults) {
    log_.runs.clear();
    log_.loses = fault;
    auto with = options();
    with.seconds = 0;
    GemmRunner runner(device_info(0), std::move(with));
    prepare(runner, problem, 4);
    EXPECT_TRUE(says(runner.warning(), "1 kernels gave results that differ"));
    EXPECT_TRUE(says(runner.warning(), "and are not used: cuBLASLt for rows 4 n 24"));
    std::vector<std::int64_t> rows;
    for (const auto& one : log_.runs) rows.push_back(one.rows);
    EXPECT_EQ(rows, (std::vector<std::int64_t>{1, 1, 2, 2, 4, 4, 3, 3}));
  }
}

TEST_F(GemmRunnerTest, a_wrong_stored_choice_is_replaced_also_without_time_to_measure) {
  GemmProblem problem(kCase);
  for (const double seconds : {1e-9, 0.0}) {  // over after the first measurement; none
    SCOPED_TRACE(seconds);
    log_.wrong = 0;
    {
      GemmRunner runner(device_info(0), options());
      prepare(runner, problem, 4);
    }
    log_.wrong = 1;
    measured_ = 0;
    auto with = options();
    with.seconds = seconds;
    GemmRunner runner(device_info(0), std::move(with));
    prepare(runner, problem, 4);
    EXPECT_EQ(measured_, seconds > 0 ? 1 : 0);
    EXPECT_TRUE(says(runner.warning(), "3 kernels gave results that differ")) << "for 1, 2 and 4 rows";
    EXPECT_EQ(run(runner, problem), 0U);
  }
}

TEST_F(GemmRunnerTest, the_log_says_for_how_many_gemms_the_time_was_too_short) {
  std::vector<std::string> logged;
  set_log_sink([&](LogLevel, const std::string& line) { logged.push_back(line); });
  auto with = options();
  with.seconds = 1e-9;  // over after the first measurement
  GemmRunner runner(device_info(0), std::move(with));
  GemmProblem problem(kCase);
  prepare(runner, problem, 4);
  set_log_sink({});
  ASSERT_EQ(logged.size(), 1U);
  EXPECT_TRUE(says(logged.front(), "the kernels of 2 of 3 GEMMs are chosen by rule"));
}

// Weights whose sums cancel, and columns of very different size, cause no false alarm: the check has its own weights.
TEST_F(GemmRunnerTest, weights_that_cancel_or_differ_in_size_cause_no_warning) {
  const Case c{.type = DType::f16, .out_type = DType::f16, .rows = 4, .n = 24, .k = 1032, .bias = true};
  GemmProblem random(c);
  auto operands = random.host;
  for (std::int64_t row = 0; row < c.n; ++row) {
    for (std::int64_t k = 0; k < c.k; ++k) {
      operands.weight.set(row, k, row == 5 ? 60000.0F : row % 2 == 0 ? (k % 2 == 0 ? 1.0F : -1.0F) : 1e-7F);
    }
  }
  GemmProblem problem(c, std::move(operands));
  GemmRunner runner(device_info(0), options());
  prepare(runner, problem, 64);
  EXPECT_EQ(runner.warning(), "");
}

// Two layers have GEMMs of one shape, and only one of them has memory for 16 rows.
TEST_F(GemmRunnerTest, no_candidate_uses_rows_that_the_operands_do_not_have) {
  std::int64_t most = 0;
  log_.rejects = [&](const Gemm& gemm) {
    if (gemm.row_capacity < 16) most = std::max(most, gemm.rows);
    return false;
  };
  for (const bool stored : {false, true}) {
    GemmRunner runner(device_info(0), options());
    GemmProblem problem({.rows = 8, .n = 24, .k = 72});
    auto gemm = problem.gemm(), gated = gemm;
    gemm.row_capacity = 16;
    gated.gate = Gate::silu;
    for (const auto& shapes : {std::array{gemm, gated}, {gated, gemm}}) runner.prepare(problem.stream, shapes, 8);
    EXPECT_LE(most, 8) << stored;
    EXPECT_EQ(runner.warning(), "");
  }
}

#if defined(CHARONIA_CUDA_ON_HOST)
// With or without stored choices.
TEST_F(GemmRunnerTest, without_memory_for_operands_tactics_are_chosen_by_rule) {
  GemmProblem problem({.rows = 3, .n = 512, .k = 1024});
  for (const bool stored : {false, true}) {
    {
      GemmRunner runner(device_info(0), options());
      const DeviceMemory rest(free_device_bytes() - (std::size_t{1} << 20));
      std::vector<std::string> logged;
      set_log_sink([&](LogLevel, const std::string& line) { logged.push_back(line); });
      measured_ = 0;
      prepare(runner, problem, 4);
      set_log_sink({});
      EXPECT_EQ(measured_, 0);
      for (const auto& line : runner.report()) EXPECT_TRUE(says(line, "by rule"));
      ASSERT_FALSE(logged.empty());
      EXPECT_TRUE(says(logged.front(), "chosen by rule instead of measured: operands to measure GEMMs with"));
    }
    GemmRunner runner(device_info(0), options());
    prepare(runner, problem, 4);
    EXPECT_EQ(measured_ == 0, stored);
  }
}
#endif

// One kernel for both takes 10, the library 1 to 3.
TEST_F(GemmRunnerTest, a_gate_is_computed_with_its_gemm_only_if_that_was_faster) {
  for (const double library : {1.0, 100.0}) {
    library_time_ = library;
    fs::remove_all(folder_ / "cache");
    for (const bool stored : {false, true}) {
      GemmRunner runner(device_info(0), options());
      GemmProblem problem({.rows = 4, .n = 24, .k = 72});
      auto gemm = problem.gemm();
      gemm.gate = Gate::silu;
      measured_ = 0;
      runner.prepare(problem.stream, {&gemm, 1}, 64);
      EXPECT_EQ(measured_ == 0, stored);
      for (const std::int64_t rows : {1, 4}) {
        gemm.rows = rows;
        EXPECT_EQ(runner.run_gated(problem.stream, gemm), library > 10);
      }
      EXPECT_EQ(runner.warning(), "");
      const auto report = runner.report();
      const auto apart = [](const std::string& line) {
        return line.find("silu gate: GEMM and gate apart") != std::string::npos;
      };
      EXPECT_EQ(std::ranges::any_of(report, apart), library < 10);
    }
  }
}

// Only if the chosen kernel supports gates.
TEST_F(GemmRunnerTest, gated_gemms_run_only_in_kernels_that_support_them) {
  const auto issued = [&](GemmRunner& runner, const Case& c) {
    GemmProblem problem(c);
    auto gemm = problem.gemm();
    gemm.gate = Gate::silu;
    log_.runs.clear();
    const bool taken = runner.run_gated(problem.stream, gemm);
    problem.download();
    EXPECT_NE(std::isnan(problem.result.at(0, 0)), taken);
    EXPECT_TRUE(log_.runs.empty());
    return taken;
  };
  constexpr auto f32 = DType::f32;
  GemmRunner own(device_info(0), options(false));
  EXPECT_TRUE(issued(own, {.rows = 1, .n = 24, .k = 72}));
  EXPECT_TRUE(issued(own, {.rows = 16, .n = 24, .k = 72}));
  EXPECT_FALSE(issued(own, {.rows = 17, .n = 24, .k = 72})) << "17 rows use a tile kernel";
  EXPECT_FALSE(issued(own, {.rows = 1, .n = 24, .k = 72, .in_offset = 1}));
  EXPECT_FALSE(issued(own, {.out_type = f32, .rows = 1, .n = 24, .k = 72}));
  EXPECT_FALSE(issued(own, {.type = f32, .out_type = f32, .rows = 1, .n = 24, .k = 72}));
  GemmRunner with(device_info(0), options());
  GemmProblem problem({.rows = 4, .n = 24, .k = 72});
  prepare(with, problem, 4);
  EXPECT_FALSE(issued(with, {.rows = 4, .n = 24, .k = 72})) << "the library was faster";
}

#if defined(CHARONIA_CUDA_ON_HOST)
// Kernels with bulk copies take 1, others 10.
double time_without_bulk_copies(Stream& stream, double, const std::function<void(int)>& issue) {
  host_grid::calls() = {};
  issue(0);
  stream.wait("test");
  return host_grid::calls().bulk_copies > 0 ? 1 : 10;
}

TEST_F(GemmRunnerTest, bulk_copies_are_used_only_if_measured_fastest_also_with_a_gate_and_stored) {
  auto device = device_info(0);
  GemmProblem problem({.rows = 4, .n = 24, .k = 1032});
  auto gated = problem.gemm();
  gated.gate = Gate::silu;
  const auto chooses_bulk = [&](bool timer, bool unproven = true) {
    auto with = options(false);
    with.unproven = unproven;
    with.timer = timer ? GemmTimer(time_without_bulk_copies) : GemmTimer();
    GemmRunner runner(device, std::move(with));
    runner.prepare(problem.stream, {&gated, 1}, 4);
    EXPECT_FALSE(says(runner.warning(), "differ")) << runner.warning();
    run(runner, problem);
    host_grid::calls() = {};
    EXPECT_TRUE(runner.run_gated(problem.stream, gated));
    problem.stream.wait("test");
    const auto report = runner.report();
    const bool all = std::ranges::all_of(report, [](const auto& line) {
      return line.find("own bulk 8 x 16, 3 stages, 6 blocks") != std::string::npos;
    });
    EXPECT_EQ(host_grid::calls().bulk_copies > 0, all);
    return all;
  };
  EXPECT_FALSE(chooses_bulk(false)) << "nothing was measured or stored";
  EXPECT_TRUE(chooses_bulk(true));
  EXPECT_TRUE(chooses_bulk(false)) << "the choice was stored";
  for (const bool timer : {false, true}) EXPECT_FALSE(chooses_bulk(timer, false)) << "off by default";
  device.clusters = false;
  fs::remove_all(folder_ / "cache");
  EXPECT_FALSE(chooses_bulk(true)) << "the device has no bulk copies";
}

TEST_F(GemmRunnerTest, a_gate_that_was_not_measured_runs_only_in_the_stream_kernel) {
  GemmProblem problem({.rows = 4, .n = 24, .k = 1032});
  for (const bool bulk : {true, false}) {
    auto with = options(false);
    with.memory.clear();
    with.unproven = bulk;
    with.timer = time_without_bulk_copies;
    GemmRunner runner(device_info(0), std::move(with));
    prepare(runner, problem, 4, 4);
    auto gated = problem.gemm();
    gated.gate = Gate::silu;
    EXPECT_EQ(runner.run_gated(problem.stream, gated), !bulk);
    problem.stream.wait("test");
  }
}

TEST_F(GemmRunnerTest, a_device_that_fails_in_a_candidate_ends_the_start_with_its_name) {
  for (const bool bulk : {true, false}) {
    auto with = options(false);
    with.timer = [bulk](Stream& stream, double, const std::function<void(int)>& issue) {
      host_grid::calls() = {};
      issue(0);
      stream.wait("test");
      if ((host_grid::calls().bulk_copies > 0) != bulk) return 1.0;
      set_step("step 1 of the test");
      fail_in_step(1);
      Event end;
      end.record(stream);
      end.wait("a kernel");
      return 1.0;
    };
    GemmRunner runner(device_info(0), std::move(with));
    GemmProblem problem(kCase);
    expect_error({"the device fails since the kernel 'own ", bulk ? "bulk 8 x 16" : "stream 8 x 16",
                  "ran for rows 1 n 24 k 72 bf16 -> bf16: a kernel: the emulated device has failed",
                  bulk ? "Set CHARONIA_CUDA_UNPROVEN=0" : "CHARONIA_CUDA_MEASURE_S=0 measures no kernels"},
                 [&] { prepare(runner, problem, 4); });
    fail_in_step(0);
    set_step("");
  }
}

// A stored fallback that the device rejects, of a library's choice.
TEST_F(GemmRunnerTest, a_stored_fallback_that_is_wrong_is_replaced) {
  auto device = device_info(0);
  device.shared_bytes = std::size_t{1} << 20;  // more than a block gets
  GemmProblem problem({.rows = 16, .n = 24, .k = 1032});
  {
    GemmRunner runner(device, options());
    prepare(runner, problem, 16, 16);
  }
  nlohmann::json stored;
  std::ifstream(file()) >> stored;
  for (auto& shapes : stored["measured"]) {
    for (auto& rows : shapes) {
      auto& own = rows["16"]["own"];
      own["kernel"] = static_cast<int>(GemmTactic::Kernel::bulk), own["sums"] = 0;
      own["tile_rows"] = own["tile_columns"] = 16, own["stages"] = 3, own["k_blocks"] = device.sms;
    }
  }
  std::ofstream(file()) << stored.dump();
  measured_ = 0;
  GemmRunner runner(device, options());
  prepare(runner, problem, 16, 16);
  EXPECT_EQ(measured_, 0);
  EXPECT_TRUE(says(runner.warning(), "own bulk 16 x 16, 3 stages"));
  log_.rejects = [](const Gemm&) { return true; };
  run(runner, problem);
  EXPECT_EQ(runner.rejected(), 1);
}

TEST_F(GemmRunnerTest, a_kernel_that_the_device_rejects_does_not_end_the_start) {
  auto device = device_info(0);
  device.shared_bytes = std::size_t{1} << 20;  // more than a block gets, so tactics are listed that cannot start
  auto with = options(false);
  with.timer = time_without_bulk_copies;
  GemmRunner runner(device, std::move(with));
  GemmProblem problem({.rows = 16, .n = 24, .k = 1032});
  prepare(runner, problem, 16, 16);
  run(runner, problem);
  for (const auto& line : runner.report()) {
    EXPECT_EQ(line.find("bulk 16 x 16, 3 stages"), std::string::npos) << line;
  }
}
#endif

TEST_F(GemmRunnerTest, unprepared_or_unaligned_gemms_are_computed_too) {
  GemmRunner runner(device_info(0), options());
  GemmProblem problem(kCase);
  library_time_ = 1000;
  prepare(runner, problem, 4);
  constexpr auto f16 = DType::f16, f32 = DType::f32;
  const Case cases[] = {{.rows = 3, .n = 24, .k = 72, .in_offset = 1},
                        {.rows = 2, .n = 24, .k = 72, .in_gap = 1},
                        {.rows = 2, .n = 11, .k = 7},
                        {.type = f16, .out_type = f32, .rows = 50, .n = 9, .k = 64},
                        {.type = f32, .out_type = f32, .rows = 2, .n = 9, .k = 65}};
  for (const auto& c : cases) {
    GemmProblem some(c);
    run(runner, some);
  }
  problem.clear();
  auto no_rows = problem.gemm();
  no_rows.rows = 0;
  runner.run(problem.stream, no_rows);
  problem.download();
  EXPECT_TRUE(std::isnan(problem.result.at(0, 0)));
}

TEST_F(GemmRunnerTest, without_time_or_timer_tactics_are_chosen_by_rule) {
  for (const bool timer : {false, true}) {
    auto with = options();
    with.seconds = 0;
    if (!timer) with.timer = nullptr;
    GemmRunner runner(device_info(0), std::move(with));
    GemmProblem problem(kCase);
    prepare(runner, problem, 64);
    EXPECT_EQ(measured_, 0);
    for (const auto& line : runner.report()) EXPECT_TRUE(says(line, "by rule"));
    EXPECT_FALSE(fs::exists(file())) << "tactics chosen by rule are not stored";
    run(runner, problem);
  }
}

// As on ranks, whose measurements differ.
TEST_F(GemmRunnerTest, ordered_gemms_have_the_same_bits_with_each_choice) {
  const Case of{.out_type = DType::f32, .rows = 17, .n = 16, .k = 1032};
  for (const bool ordered : {true, false}) {
    std::set<std::string> choices;
    std::set<std::vector<std::byte>> results;
    for (unsigned rank = 0; rank < 5; ++rank) {
      std::mt19937 random(rank);
      auto with = runner_options([&] { return 1 + static_cast<double>(random() % 1000); });
      with.memory.clear();
      GemmRunner runner(device_info(0), std::move(with));
      GemmProblem problem(of);
      auto gemm = problem.gemm();
      gemm.ordered = ordered;
      runner.prepare(problem.stream, {&gemm, 1}, static_cast<int>(of.rows));
      log_.runs.clear();
      problem.clear();
      runner.run(problem.stream, gemm);
      problem.download();
      problem.check();
      const auto chosen = runner.report().back();
      EXPECT_EQ(chosen.find(", one order: own ") != std::string::npos, ordered) << chosen;
      choices.insert(chosen.substr(0, chosen.rfind(" us")));
      results.insert(problem.result.bytes);
      if (ordered) {
        EXPECT_TRUE(log_.runs.empty()) << "the library has its own order";
      }
    }
    EXPECT_GT(choices.size(), 1U);
    EXPECT_EQ(results.size() == 1, ordered) << "if all tactics have one order, the test finds nothing";
  }
}

TEST_F(GemmRunnerTest, an_invalid_measuring_time_is_rejected) {
  for (const char* const said : {"soon", "-1"}) {
    setenv("CHARONIA_CUDA_MEASURE_S", said, 1);
    expect_error({cat("CHARONIA_CUDA_MEASURE_S = '", said, "'")}, [&] { GemmRunner(device_info(0), true); });
  }
  setenv("CHARONIA_CUDA_MEASURE_S", "0.5", 1);
  EXPECT_NO_THROW(GemmRunner(device_info(0), true));
  unsetenv("CHARONIA_CUDA_MEASURE_S");
}

TEST(AutotuneCacheTest, the_path_of_the_file_can_be_set) {
  const auto* const before = std::getenv("CHARONIA_CACHE_DIR");
  const std::string kept = before == nullptr ? "" : before;
  setenv("CHARONIA_CACHE_DIR", "/somewhere", 1);
  EXPECT_EQ(autotune_cache_path(), "/somewhere/gemms.json");
  unsetenv("CHARONIA_CACHE_DIR");
  if (const auto* const home = std::getenv("HOME")) {
    EXPECT_EQ(autotune_cache_path(), fs::path(home) / ".cache/charonia/gemms.json");
  }
  if (before != nullptr) setenv("CHARONIA_CACHE_DIR", kept.c_str(), 1);
}

}  // namespace
}  // namespace charonia::cuda
