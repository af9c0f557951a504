// Prints the order of the emulated device's kernels for a failing test, so that it can be repeated.
#if defined(CHARONIA_CUDA_ON_HOST)
#include <gtest/gtest.h>

#include <cstdio>

#include "emulator/host_grid.h"
#include "emulator/host_stream.h"

namespace charonia::cuda {
namespace {

class Listener : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo&) override {
    mode_ = host_stream::mode();
    seed_ = host_grid::seed();
  }
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.failed()) std::printf("The emulated device: %s\n", host_grid::order_text().c_str());
  }
  // Restores the settings after each test.
  void OnTestEnd(const testing::TestInfo&) override {
    host_stream::set_mode(mode_);
    host_grid::set_seed(seed_);
    host_grid::set_order(host_grid::Order::ascending);
  }

  host_stream::Mode mode_{};
  std::uint64_t seed_ = 0;
};

[[maybe_unused]] const bool added = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new Listener);
  return true;
}();

}  // namespace
}  // namespace charonia::cuda
#endif
