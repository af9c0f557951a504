// The engine's report of chosen kernels and of GEMMs that the library rejects, on the host, with a library that rejects
// everything instead of cuBLASLt.
#include <gtest/gtest.h>

#if defined(CHARONIA_CUDA_ON_HOST)

#include <atomic>
#include <filesystem>
#include <mutex>

#include "base/log.h"
#include "charonia/engine.h"
#include "cuda/fake_blas.h"
#include "emulator/emulated_device.h"
#include "engine_support.h"
#include "test_folder.h"
#include "tiny_workspace.h"

namespace charonia {
namespace {

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

  std::unique_ptr<Engine> engine(int ranks = 1, std::shared_ptr<MetricsSink> sink = nullptr) {
    testing::TinyModel model;
    model.ranks = ranks;
    testing::write_tiny_workspace(folder_, model);
    return std::make_unique<Engine>(
        folder_, Settings{{"device", "cuda"}, {"max_batch_size", "8"}, {"device_ids", ranks == 1 ? "0" : "0,0"}}, sink);
  }
  // The number of log lines of a level that contain the text.
  int logged(LogLevel level, std::string_view text) {
    const std::lock_guard lock(mutex_);
    return static_cast<int>(std::ranges::count_if(
        logged_, [&](const auto& one) { return one.first == level && one.second.find(text) != std::string::npos; }));
  }

 private:
  const std::filesystem::path folder_ = testing::test_folder();
  std::mutex mutex_;
  std::vector<std::pair<LogLevel, std::string>> logged_;
};

bool any_line(const std::vector<std::string>& lines, std::string_view text) {
  return std::ranges::any_of(lines, [&](const std::string& line) { return line.find(text) != std::string::npos; });
}

TEST_F(KernelReportTest, the_engine_says_which_kernels_were_chosen) {
  const auto one = engine();
  const auto& lines = one->info().kernel_report;
  ASSERT_GT(lines.size(), 2U);
  EXPECT_TRUE(lines[0].starts_with("device 0: host, sm_90, 6 SMs; GEMMs: own kernels only: ")) << lines[0];
  EXPECT_EQ(lines[1], "decode steps are captured for 1, 2, 4, 8 rows");
  EXPECT_TRUE(any_line(lines, "n 64 k 32 fp32 -> fp32: own plain ")) << "the GEMM of q, k and v of the tiny model";
  EXPECT_EQ(one->kernel_report(), lines) << "the report must not change";
  EXPECT_EQ(logged(LogLevel::info, "EngineInfo::kernel_report"), 1) << "one log line must name the report";
}

TEST_F(KernelReportTest, every_rank_has_its_own_lines) {
  const auto two = engine(2);
  for (const auto* rank : {"rank 0: device 0: host", "rank 1: device 0: host"}) {
    EXPECT_TRUE(any_line(two->info().kernel_report, rank)) << rank;
  }
}

TEST_F(KernelReportTest, rejections_are_counted_in_a_metric) {
  std::atomic<int> asked = 0;
  cuda::FakeBlas::Log log{.runs = {}, .rejects = [&](const cuda::Gemm&) { return ++asked > 0; }};
  cuda::set_host_blas([&] { return std::make_unique<cuda::FakeBlas>(log, "a library that rejects"); });
  const auto sink = std::make_shared<RejectionSink>();
  const auto one = engine(1, sink);
  EXPECT_TRUE(any_line(one->info().kernel_report, "GEMMs: a library that rejects"));
  std::vector<TokenId> prompt;
  // With this number of rows, GEMMs go to the library if nothing is measured.
  for (int i = 0; i < 40; ++i) prompt.push_back(i);
  testing::Collector collector(*one, testing::request(prompt, 3));
  EXPECT_EQ(collector.tokens().size(), 3U) << "built-in kernels compute what the library rejected";
  one->check_integrity();

  EXPECT_GT(asked, 0);
  EXPECT_EQ(one->stats().gemms_rejected, asked);
  EXPECT_EQ(sink->rejected(), asked);
  EXPECT_TRUE(any_line(one->kernel_report(), "n 64 k 32 fp32 -> fp32: own kernels computed 2 GEMMs of 40..40 rows"))
      << "one GEMM in each of two layers";
  EXPECT_FALSE(any_line(one->info().kernel_report, "rejected 2 GEMMs")) << "info() has the report of the start";
  EXPECT_EQ(logged(LogLevel::warning, "cuBLASLt rejected a GEMM of 40 rows"), 1);
}

}  // namespace
}  // namespace charonia

#endif
