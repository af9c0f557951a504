// The selection of GEMM kernels and the stored results. A fake library replaces cuBLASLt; its algorithms and the
// built-in kernels take the times that a test sets.
#include "ops/cuda/gemm/gemm_runner.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "base/json.h"
#include "base/log.h"
#include "base/text.h"
#include "charonia/error.h"
#include "cuda/gemm_problem.h"
#include "errors.h"
#include "ops/cuda/gemm/autotune_cache.h"

namespace charonia::cuda {
namespace {

namespace fs = std::filesystem;

// Each run records its time, and the timer returns the last recorded time.
struct Times {
  double library = 1;  // algorithm i takes i times as long
  double own = 10;
  double last = 0;
  int measured = 0;
};

class SlowLibrary final : public Blas {
 public:
  struct Log {
    std::vector<std::pair<std::int64_t, std::uint64_t>> runs;  // rows and algorithm
    std::int64_t refused_rows = -1;
  };

  SlowLibrary(Times& times, Log& log, std::string version) : times_(times), log_(log), version_(std::move(version)) {}

  std::string version() const override { return version_; }
  std::vector<BlasTactic> tactics(const Gemm&, std::size_t) override { return {tactic(3), tactic(1), tactic(2)}; }
  bool serves(const Gemm&, const BlasTactic& tactic, std::size_t) override { return tactic.algorithm[0] <= 3; }

  bool run(Stream& stream, const Gemm& gemm, const BlasTactic& tactic, void*, std::size_t) override {
    log_.runs.emplace_back(gemm.rows, tactic.algorithm[0]);
    times_.last = times_.library * static_cast<double>(tactic.algorithm[0]);
    if (gemm.rows == log_.refused_rows) return false;
    const auto in = fetch(stream, gemm.in, gemm.type, gemm.rows * gemm.in_stride - (gemm.in_stride - gemm.k));
    const auto weight = fetch(stream, gemm.weight, gemm.type, gemm.n * gemm.weight_stride);
    for (std::int64_t r = 0; r < gemm.rows; ++r) {
      for (std::int64_t c = 0; c < gemm.n; ++c) {
        double sum = 0;
        for (std::int64_t i = 0; i < gemm.k; ++i) {
          sum += static_cast<double>(in[static_cast<std::size_t>(r * gemm.in_stride + i)]) *
                 weight[static_cast<std::size_t>(c * gemm.weight_stride + i)];
        }
        const auto bits = encode(gemm.out_type, static_cast<float>(sum));
        const auto size = size_of(gemm.out_type);
        stream.upload(static_cast<std::byte*>(gemm.out) + static_cast<std::size_t>(r * gemm.out_stride + c) * size,
                      &bits, size, "test");
      }
    }
    return true;
  }

 private:
  static BlasTactic tactic(std::uint64_t algorithm) { return {{algorithm, 7}, 0}; }
  static std::vector<float> fetch(Stream& stream, const void* from, DType type, std::int64_t count) {
    const auto size = size_of(type);
    std::vector<std::byte> bytes(static_cast<std::size_t>(count) * size);
    stream.download(bytes.data(), from, bytes.size(), "test");
    stream.wait("test");
    std::vector<float> out;
    for (std::size_t i = 0; i < bytes.size(); i += size) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, bytes.data() + i, size);
      out.push_back(decode(type, bits));
    }
    return out;
  }

  Times& times_;
  Log& log_;
  std::string version_;
};

class GemmRunnerTest : public testing::Test {
 protected:
  GemmRunnerTest() {
    char name[] = "/tmp/charonia_gemms_XXXXXX";
    folder_ = mkdtemp(name);
  }
  ~GemmRunnerTest() override { fs::remove_all(folder_); }

  GemmRunner::Options options(bool library = true, const std::string& version = "library 1") {
    GemmRunner::Options options;
    if (library) options.blas = std::make_unique<SlowLibrary>(times_, log_, version);
    options.memory = file();
    options.seconds = 3600;  // enough for a slow machine or a sanitizer: the measured times do not depend on it
    options.timer = [this](Stream& stream, double expected, const std::function<void(int)>& issue) {
      EXPECT_GT(expected, 0);
      times_.last = times_.own;
      issue(0);
      issue(kMaxTimedGemms - 1);
      stream.wait("test");
      ++times_.measured;
      return times_.last;
    };
    return options;
  }
  fs::path file() const { return folder_ / "cache" / "gemms.json"; }

  static void run(GemmRunner& runner, GemmProblem& problem) {
    problem.clear_out();
    runner.run(problem.stream, problem.gemm());
    problem.out.download(problem.stream);
  }

  fs::path folder_;
  Times times_;
  SlowLibrary::Log log_;
};

constexpr Case kCase{.rows = 3, .n = 24, .k = 72, .bias = true};

TEST_F(GemmRunnerTest, the_fastest_candidate_is_chosen) {
  for (const double library : {1.0, 100.0}) {
    times_.library = library;
    fs::remove_all(folder_ / "cache");
    GemmRunner runner(device_info(0), options());
    GemmProblem problem(kCase);
    const auto gemm = problem.gemm();
    runner.prepare(problem.stream, {&gemm, 1}, 8);
    const auto report = runner.report();
    ASSERT_EQ(report.size(), 1U);
    const auto* const expected = library == 1
                                     ? "rows 1..4 n 24 k 72 bf16 -> bf16: cuBLASLt, 1.0 us"
                                     : "rows 1..4 n 24 k 72 bf16 -> bf16: own stream 8 x 16, 4 stages, 10.0 us";
    EXPECT_EQ(report.front().substr(0, std::string(expected).size()), expected) << report.front();
    log_.runs.clear();
    run(runner, problem);
    problem.check(true);
    if (library == 1) {
      ASSERT_EQ(log_.runs.size(), 1U);
      EXPECT_EQ(log_.runs[0], (std::pair<std::int64_t, std::uint64_t>{3, 1})) << "the library's fastest algorithm";
    } else {
      EXPECT_TRUE(log_.runs.empty());
    }
    EXPECT_EQ(runner.warning(), "");
  }
}

TEST_F(GemmRunnerTest, rows_between_buckets_use_the_tactic_of_the_next_bucket) {
  auto with = options();
  const auto timer = with.timer;
  with.timer = [&](Stream& stream, double expected, const std::function<void(int)>& issue) {
    const auto before = log_.runs.size();
    double time = timer(stream, expected, issue);
    // Up to 8 rows the library is slow.
    if (log_.runs.size() > before && log_.runs.back().first <= 8) time += 1000;
    return time;
  };
  GemmRunner runner(device_info(0), std::move(with));
  GemmProblem problem({.rows = 1, .n = 16, .k = 64});
  auto gemm = problem.gemm();
  gemm.rows = 24;
  runner.prepare(problem.stream, {&gemm, 1}, 8192);
  EXPECT_EQ(runner.report().size(), 3U) << "1..4, 5..8 and 9..24; the shape's rows count more than max_rows";
  for (const auto& [rows, by_library] :
       {std::pair{1, false}, {5, false}, {8, false}, {9, true}, {13, true}, {24, true}}) {
    GemmProblem some({.rows = rows, .n = 16, .k = 64});
    log_.runs.clear();
    run(runner, some);
    some.check();
    EXPECT_EQ(!log_.runs.empty(), by_library) << rows;
  }
}

TEST_F(GemmRunnerTest, measurements_are_stored_for_the_same_versions) {
  GemmProblem problem(kCase);
  const auto gemm = problem.gemm();
  std::vector<std::string> report;
  {
    GemmRunner runner(device_info(0), options());
    runner.prepare(problem.stream, {&gemm, 1}, 4);
    report = runner.report();
    EXPECT_GT(times_.measured, 0);
    times_.measured = 0;
    runner.prepare(problem.stream, {&gemm, 1}, 4);
    EXPECT_EQ(times_.measured, 0) << "the second prepare() measures nothing";
  }
  times_.library = 1000;  // must have no effect any more
  for (const auto* version : {"library 1", "library 2", "library 1"}) {
    times_.measured = 0;
    GemmRunner runner(device_info(0), options(true, version));
    runner.prepare(problem.stream, {&gemm, 1}, 4);
    const bool same = version == std::string("library 1");
    EXPECT_EQ(times_.measured == 0, same);
    EXPECT_EQ(runner.report() == report, same);
    run(runner, problem);
    problem.check(true);
  }
  // With more rows, only the new buckets are measured.
  times_.measured = 0;
  auto more = gemm;
  more.rows = 16;
  GemmRunner runner(device_info(0), options());
  runner.prepare(problem.stream, {&more, 1}, 16);
  EXPECT_GT(times_.measured, 0);
  EXPECT_EQ(runner.report().front(), report.front());
}

TEST_F(GemmRunnerTest, an_unknown_file_is_ignored) {
  GemmProblem problem(kCase);
  const auto gemm = problem.gemm();
  {
    GemmRunner runner(device_info(0), options());
    runner.prepare(problem.stream, {&gemm, 1}, 4);
  }
  nlohmann::json good;
  std::ifstream(file()) >> good;
  ASSERT_EQ(good["measured"].size(), 1U);
  std::vector<std::string> texts{"",
                                 "{",
                                 "[1, 2]",
                                 "null",
                                 R"({"format": 99, "measured": {}})",
                                 R"({"format": 4})",
                                 R"({"format": 4, "measured": [3]})",
                                 std::string(100, '\0')};
  const auto altered = [&](const auto& alter) {
    auto one = good;
    for (auto& shapes : one["measured"]) {
      for (auto& rows : shapes) {
        for (auto& tactic : rows) alter(tactic);
      }
    }
    texts.push_back(one.dump());
  };
  altered([](nlohmann::json& tactic) { tactic = 5; });
  altered([](nlohmann::json& tactic) { tactic["own"]["kernel"] = 77; });
  altered([](nlohmann::json& tactic) { tactic["own"]["tile_rows"] = "x"; });
  altered([](nlohmann::json& tactic) { tactic["own"]["k_blocks"] = 1 << 20; });
  altered([](nlohmann::json& tactic) { tactic["own"]["sums"] = 2; });  // a cluster of one block
  altered([](nlohmann::json& tactic) { tactic["own"].erase("sums"); });
  altered([](nlohmann::json& tactic) { tactic["blas"]["algorithm"] = {1, 2}; });
  altered([](nlohmann::json& tactic) { tactic["blas"]["algorithm"][0] = 4; });  // an unknown algorithm of the library
  altered([](nlohmann::json& tactic) { tactic.erase("microseconds"); });
  for (const auto& text : texts) {
    SCOPED_TRACE(text.substr(0, 300));
    std::ofstream(file()) << text;
    times_.measured = 0;
    GemmRunner runner(device_info(0), options());
    runner.prepare(problem.stream, {&gemm, 1}, 4);
    EXPECT_GT(times_.measured, 0);
    run(runner, problem);
    problem.check(true);
    nlohmann::json now;
    std::ifstream(file()) >> now;
    EXPECT_EQ(now["measured"], good["measured"]);
  }
}

TEST_F(GemmRunnerTest, a_folder_that_cannot_be_written_is_a_warning) {
  std::ofstream(folder_ / "cache") << "in the way";
  GemmRunner runner(device_info(0), options());
  GemmProblem problem(kCase);
  const auto gemm = problem.gemm();
  runner.prepare(problem.stream, {&gemm, 1}, 1);
  EXPECT_NE(runner.warning().find("CHARONIA_CACHE_DIR"), std::string::npos) << runner.warning();
  run(runner, problem);
  problem.check(true);
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
        EXPECT_EQ(now["format"], 4);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(std::distance(fs::directory_iterator(file().parent_path()), {}), 1) << "no temporary file is left";
  AutotuneCache one(file(), "device 0");
  one.keep({.n = 99, .k = 64}, 1, {.microseconds = 1});
  EXPECT_EQ(one.save(), "");
  const auto before = fs::file_size(file());
  AutotuneCache other(file(), "device 1");
  other.keep({.n = 98, .k = 64}, 1, {.microseconds = 1});
  EXPECT_EQ(other.save(), "");
  EXPECT_GT(fs::file_size(file()), before);
  EXPECT_TRUE(AutotuneCache(file(), "device 0").find({.n = 99, .k = 64}, 1)) << "entries of other processes are kept";
  EXPECT_FALSE(AutotuneCache(file(), "device 1").find({.n = 99, .k = 64}, 1));
}

// Tactics are chosen at random here, so that many are tested.
TEST_F(GemmRunnerTest, reproducible_bits_depend_only_on_the_row) {
  auto with = options();
  with.reproducible = true;
  std::mt19937 random(5);
  const auto timer = with.timer;
  with.timer = [&](Stream& stream, double expected, const std::function<void(int)>& issue) {
    timer(stream, expected, issue);
    return 1.0 + static_cast<double>(random() % 100);
  };
  GemmRunner runner(device_info(0), std::move(with));
  constexpr std::int64_t kRows = 70;
  const Case c{.out_type = DType::f32, .rows = kRows, .n = 40, .k = 520, .bias = true};
  GemmProblem all(c);
  auto gemm = all.gemm();
  runner.prepare(all.stream, {&gemm, 1}, kRows);
  EXPECT_GT(runner.report().size(), 3U);
  EXPECT_EQ(runner.warning(), "");
  all.clear_out();
  runner.run(all.stream, gemm);
  all.out.download(all.stream);
  all.check();
  for (const std::int64_t rows : {1, 2, 5, 12, 20, 40}) {
    for (const std::int64_t first : {std::int64_t{0}, kRows - rows}) {
      auto part = c;
      part.rows = rows;
      GemmProblem some(part);
      some.weight.copy(all.weight, some.stream);
      some.bias.copy(all.bias, some.stream);
      for (std::int64_t i = 0; i < rows * c.k; ++i) some.in.set(i, all.in.at(first, i));
      some.in.upload(some.stream);
      run(runner, some);
      for (std::int64_t r = 0; r < rows; ++r) ASSERT_EQ(some.row(r), all.row(first + r)) << rows << " rows";
    }
  }
  EXPECT_TRUE(log_.runs.empty()) << "the library was called";
}

TEST_F(GemmRunnerTest, without_a_library_built_in_kernels_run_with_a_warning) {
  auto with = options(false);
  with.no_blas = "cuBLASLt cannot be loaded (no such file)";
  GemmRunner runner(device_info(0), std::move(with));
  EXPECT_EQ(runner.warning().find("cuBLASLt cannot be loaded (no such file). "), 0U) << runner.warning();
  for (const std::int64_t rows : {1, 40}) {
    GemmProblem problem({.rows = rows, .n = 24, .k = 72, .bias = true});
    run(runner, problem);
    problem.check();
  }
}

TEST_F(GemmRunnerTest, gemms_that_the_library_rejects_run_on_built_in_kernels) {
  std::vector<std::pair<LogLevel, std::string>> logged;
  set_log_sink([&](LogLevel level, const std::string& line) { logged.emplace_back(level, line); });
  GemmRunner runner(device_info(0), options());
  GemmProblem problem(kCase);
  auto gemm = problem.gemm();
  gemm.rows = 8;
  runner.prepare(problem.stream, {&gemm, 1}, 8);
  const auto chosen = runner.report();
  EXPECT_EQ(runner.rejected(), 0);
  for (const std::int64_t rows : {3, 3, 2, 5}) {
    GemmProblem some({.rows = rows, .n = kCase.n, .k = kCase.k, .bias = true});
    log_.refused_rows = rows;
    log_.runs.clear();
    run(runner, some);
    EXPECT_EQ(log_.runs.size(), 1U) << "the library was not called";
    some.check();
  }
  log_.refused_rows = -1;
  run(runner, problem);
  problem.check(true);
  set_log_sink({});

  EXPECT_EQ(runner.rejected(), 4);
  auto expected = chosen;
  expected.emplace_back("n 24 k 72 bf16 -> bf16: cuBLASLt rejected 4 GEMMs of 2..5 rows, which own kernels took");
  EXPECT_EQ(runner.report(), expected) << "the line must follow the tactics of its shape";
  ASSERT_EQ(logged.size(), 1U) << "only the first rejection is logged";
  EXPECT_EQ(logged[0].first, LogLevel::warning);
  EXPECT_NE(logged[0].second.find("rejected a GEMM of 3 rows, n 24 k 72 bf16 -> bf16, with the algorithm that was "
                                  "chosen for up to 4 rows"),
            std::string::npos)
      << logged[0].second;
}

TEST_F(GemmRunnerTest, a_tactic_that_is_rejected_when_measured_is_not_chosen) {
  GemmRunner runner(device_info(0), options());
  GemmProblem problem(kCase);
  auto gemm = problem.gemm();
  gemm.rows = 4;
  log_.refused_rows = 4;
  runner.prepare(problem.stream, {&gemm, 1}, 4);
  for (const auto& line : runner.report()) {
    EXPECT_EQ(line.find("cuBLASLt") != std::string::npos, line.find("rows 1..2 ") == 0) << line;
  }
  EXPECT_EQ(runner.rejected(), 0) << "no chosen tactic was rejected";
}

// Only if the chosen kernel supports gates.
TEST_F(GemmRunnerTest, gated_gemms_run_only_in_kernels_that_support_them) {
  const auto issued = [&](GemmRunner& runner, const Case& c) {
    GemmProblem problem(c);
    problem.clear_out();
    auto gemm = problem.gemm();
    gemm.gate = Gate::silu;
    log_.runs.clear();
    const bool taken = runner.run_gated(problem.stream, gemm);
    problem.out.download(problem.stream);
    EXPECT_NE(std::isnan(problem.out.at(0, 0)), taken);
    EXPECT_TRUE(log_.runs.empty());
    return taken;
  };
  GemmRunner own(device_info(0), options(false));
  EXPECT_TRUE(issued(own, {.rows = 1, .n = 24, .k = 72}));
  EXPECT_TRUE(issued(own, {.rows = 16, .n = 24, .k = 72}));
  EXPECT_FALSE(issued(own, {.rows = 17, .n = 24, .k = 72})) << "17 rows use a tile kernel";
  EXPECT_FALSE(issued(own, {.rows = 1, .n = 24, .k = 72, .in_offset = 1}));
  EXPECT_FALSE(issued(own, {.out_type = DType::f32, .rows = 1, .n = 24, .k = 72}));
  EXPECT_FALSE(issued(own, {.type = DType::f32, .out_type = DType::f32, .rows = 1, .n = 24, .k = 72}));
  GemmRunner with(device_info(0), options());
  GemmProblem problem({.rows = 4, .n = 24, .k = 72});
  const auto gemm = problem.gemm();
  with.prepare(problem.stream, {&gemm, 1}, 4);
  EXPECT_FALSE(issued(with, {.rows = 4, .n = 24, .k = 72})) << "the library was faster";
}

TEST_F(GemmRunnerTest, the_report_names_the_library) {
  EXPECT_EQ(GemmRunner(device_info(0), options(true, "library 7")).library(), "library 7");
  auto with = options(true);
  with.reproducible = true;
  EXPECT_EQ(GemmRunner(device_info(0), std::move(with)).library(), "own kernels only, for reproducible results");
  with = options(false);
  EXPECT_EQ(GemmRunner(device_info(0), std::move(with)).library(), "own kernels only");
  with = options(false);
  with.no_blas = "cuBLASLt cannot be loaded (no such file)";
  EXPECT_EQ(GemmRunner(device_info(0), std::move(with)).library(),
            "own kernels only: cuBLASLt cannot be loaded (no such file)");
}

TEST_F(GemmRunnerTest, unprepared_or_unaligned_gemms_are_computed_too) {
  GemmRunner runner(device_info(0), options());
  GemmProblem problem(kCase);
  const auto gemm = problem.gemm();
  times_.library = 1000;
  runner.prepare(problem.stream, {&gemm, 1}, 4);
  for (const Case& c :
       {Case{.rows = 3, .n = 24, .k = 72, .in_offset = 1}, Case{.rows = 2, .n = 24, .k = 72, .in_gap = 1},
        Case{.rows = 2, .n = 11, .k = 7}, Case{.type = DType::f16, .out_type = DType::f32, .rows = 50, .n = 9, .k = 64},
        Case{.type = DType::f32, .out_type = DType::f32, .rows = 2, .n = 9, .k = 65}}) {
    GemmProblem some(c);
    run(runner, some);
    some.check();
  }
  GemmProblem none({.rows = 1, .n = 24, .k = 72});
  none.clear_out();
  auto no_rows = none.gemm();
  no_rows.rows = 0;
  runner.run(none.stream, no_rows);
  none.out.download(none.stream);
  EXPECT_TRUE(std::isnan(none.out.at(0, 0)));
}

TEST_F(GemmRunnerTest, without_time_or_timer_tactics_are_chosen_by_rule) {
  for (const bool timer : {false, true}) {
    auto with = options();
    with.seconds = 0;
    if (!timer) with.timer = nullptr;
    GemmRunner runner(device_info(0), std::move(with));
    GemmProblem problem(kCase);
    const auto gemm = problem.gemm();
    runner.prepare(problem.stream, {&gemm, 1}, 64);
    EXPECT_EQ(times_.measured, 0);
    for (const auto& line : runner.report()) EXPECT_NE(line.find("by rule"), std::string::npos) << line;
    EXPECT_FALSE(fs::exists(file())) << "tactics chosen by rule are not stored";
    run(runner, problem);
    problem.check();
  }
}

#if defined(CHARONIA_CUDA_ON_HOST)
TEST_F(GemmRunnerTest, a_gemm_can_be_captured) {
  auto with = options(false);
  GemmRunner runner(device_info(0), std::move(with));
  GemmProblem problem(kCase);
  const auto gemm = problem.gemm();
  runner.prepare(problem.stream, {&gemm, 1}, 4);
  const auto measured = times_.measured;
  problem.clear_out();
  Graph::begin(problem.stream);
  runner.run(problem.stream, gemm);
  const auto graph = Graph::end(problem.stream);
  problem.out.download(problem.stream);
  EXPECT_TRUE(std::isnan(problem.out.at(0, 0))) << "the GEMM ran too early";
  graph.launch(problem.stream, "test");
  problem.out.download(problem.stream);
  problem.check();
  EXPECT_EQ(times_.measured, measured);
}
#endif

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
