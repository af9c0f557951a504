// The engine's report of chosen kernels and of GEMMs that the library rejects, on the host, with a library that rejects
// everything instead of cuBLASLt.
#include <gtest/gtest.h>

#if defined(CHARONIA_CUDA_ON_HOST)

#include <atomic>
#include <filesystem>
#include <mutex>

#include "base/log.h"
#include "charonia/engine.h"
#include "emulator/emulated_device.h"
#include "engine_support.h"
#include "test_folder.h"
#include "tiny_workspace.h"

namespace charonia {
namespace {

class RejectingLibrary final : public cuda::Blas {
 public:
  explicit RejectingLibrary(std::atomic<int>& asked) : asked_(asked) {}
  std::string version() const override { return "a library that rejects"; }
  std::vector<cuda::BlasTactic> tactics(const cuda::Gemm&, std::size_t) override { return {cuda::BlasTactic{}}; }
  bool serves(const cuda::Gemm&, const cuda::BlasTactic&, std::size_t) override { return true; }
  bool run(cuda::Stream&, const cuda::Gemm&, const cuda::BlasTactic&, void*, std::size_t) override {
    ++asked_;
    return false;
  }

 private:
  std::atomic<int>& asked_;
};

class RejectionSink final : public MetricsSink {
 public:
  void add(Metric counter, double value, int) override {
    if (counter == Metric::gemms_rejected) rejected_ += static_cast<int>(value);
  }
  void set(Metric, double) override {}
  void observe(Metric, double) override {}
  int rejected() const { return rejected_; }

 private:
  std::atomic<int> rejected_ = 0;
};

class KernelReportTest : public ::testing::Test {
 protected:
  KernelReportTest() {
    testing::write_tiny_workspace(folder_ / "weights", {});
    set_log_sink([this](LogLevel level, const std::string& line) {
      const std::lock_guard lock(mutex_);
      logged_.emplace_back(level, line);
    });
  }
  ~KernelReportTest() override {
    set_log_sink({});
    cuda::set_host_blas({});
    std::filesystem::remove_all(folder_);
  }

  // The number of log lines of a level that contain the text.
  int logged(LogLevel level, std::string_view text) {
    const std::lock_guard lock(mutex_);
    return static_cast<int>(std::ranges::count_if(
        logged_, [&](const auto& one) { return one.first == level && one.second.find(text) != std::string::npos; }));
  }

  const std::filesystem::path folder_ = testing::test_folder();
  std::mutex mutex_;
  std::vector<std::pair<LogLevel, std::string>> logged_;
};

bool any_line(const std::vector<std::string>& lines, std::string_view text) {
  return std::ranges::any_of(lines, [&](const std::string& line) { return line.find(text) != std::string::npos; });
}

const Settings kCuda = {{"device", "cuda"}, {"max_batch_size", "8"}};

TEST_F(KernelReportTest, the_engine_says_which_kernels_were_chosen) {
  Engine engine(folder_ / "weights", kCuda);
  const auto& lines = engine.info().kernel_report;
  ASSERT_GT(lines.size(), 2U);
  EXPECT_EQ(lines[0].find("device 0: host, sm_90, 6 SMs; GEMMs: own kernels only: "), 0U) << lines[0];
  EXPECT_EQ(lines[1], "decode steps are captured for 1, 2, 4, 8 rows");
  EXPECT_TRUE(any_line(lines, "n 64 k 32 fp32 -> fp32: own plain ")) << "the GEMM of q, k and v of the tiny model";
  EXPECT_EQ(engine.kernel_report(), lines) << "the report must not change";
  EXPECT_EQ(logged(LogLevel::info, "EngineInfo::kernel_report"), 1) << "one log line must name the report";
}

TEST_F(KernelReportTest, every_rank_has_its_own_lines) {
  auto model = testing::TinyModel{};
  model.ranks = 2;
  testing::write_tiny_workspace(folder_ / "two", model);
  auto settings = kCuda;
  settings["device_ids"] = "0,0";
  Engine engine(folder_ / "two", settings);
  for (const auto* rank : {"rank 0: device 0: host", "rank 1: device 0: host"}) {
    EXPECT_TRUE(any_line(engine.info().kernel_report, rank)) << rank;
  }
}

TEST_F(KernelReportTest, the_cpu_has_no_kernel_report) {
  Engine engine(folder_ / "weights", {{"device", "cpu"}, {"threads", "1"}});
  EXPECT_TRUE(engine.info().kernel_report.empty());
  EXPECT_TRUE(engine.kernel_report().empty());
  EXPECT_EQ(engine.stats().gemms_rejected, 0);
  EXPECT_EQ(logged(LogLevel::info, "kernel_report"), 0);
}

TEST_F(KernelReportTest, rejections_are_counted_in_a_metric) {
  std::atomic<int> asked = 0;
  cuda::set_host_blas([&] { return std::make_unique<RejectingLibrary>(asked); });
  const auto sink = std::make_shared<RejectionSink>();
  Engine engine(folder_ / "weights", kCuda, sink);
  EXPECT_TRUE(any_line(engine.info().kernel_report, "GEMMs: a library that rejects"));
  std::vector<TokenId> prompt;
  // With this number of rows, GEMMs go to the library if nothing is measured.
  for (int i = 0; i < 40; ++i) prompt.push_back(i);
  testing::Collector collector;
  engine.submit(testing::request(prompt, 3), collector.callback());
  EXPECT_EQ(collector.tokens().size(), 3U) << "built-in kernels compute what the library rejected";
  engine.check_integrity();

  EXPECT_GT(asked, 0);
  EXPECT_EQ(engine.stats().gemms_rejected, asked);
  EXPECT_EQ(sink->rejected(), asked);
  const auto lines = engine.kernel_report();
  EXPECT_TRUE(any_line(lines, "n 64 k 32 fp32 -> fp32: cuBLASLt rejected 2 GEMMs of 40..40 rows"))
      << "one GEMM in each of two layers";
  EXPECT_FALSE(any_line(engine.info().kernel_report, "rejected 2 GEMMs")) << "info() has the report of the start";
  EXPECT_EQ(logged(LogLevel::warning, "cuBLASLt rejected a GEMM of 40 rows"), 1);
}

}  // namespace
}  // namespace charonia

#endif
