#include "ops/cuda/device/cuda_settings.h"

#include <gtest/gtest.h>

#include "errors.h"

namespace charonia::cuda {
namespace {

TEST(CudaSettingsTest, values_are_parsed) {
  for (const auto* const early : {"", "1", "early"}) EXPECT_EQ(parse_overlap(early), Overlap::early);
  for (const auto* const off : {"0", "off"}) EXPECT_EQ(parse_overlap(off), Overlap::off);
  EXPECT_EQ(parse_overlap("late"), Overlap::late);
  EXPECT_EQ(parse_decode_split(""), 256);
  EXPECT_EQ(parse_decode_split("64"), 64);
  EXPECT_EQ(parse_prefetch(""), 0U);
  EXPECT_EQ(parse_prefetch("16"), std::size_t{16} << 20);
  EXPECT_EQ(parse_carveout(""), 100);
  for (const int percent : {-1, 0, 75, 100}) EXPECT_EQ(parse_carveout(std::to_string(percent)), percent);
  for (const auto* const off : {"", "0"}) EXPECT_FALSE(parse_unproven(off));
  EXPECT_TRUE(parse_unproven("1"));
}

TEST(CudaSettingsTest, other_values_are_rejected) {
  expect_error({"CHARONIA_CUDA_PDL = later: expected off, early or late"}, [] { parse_overlap("later"); });
  expect_error({"CHARONIA_CUDA_UNPROVEN = yes: expected 0 or 1"}, [] { parse_unproven("yes"); });
  for (const auto* const split : {"32", "96", "x", "-64"}) {
    expect_error({"CHARONIA_CUDA_DECODE_SPLIT = ", "expected 64, 128 or 256"}, [&] { parse_decode_split(split); });
  }
  for (const auto* const mib : {"-1", "65", "x"}) {
    expect_error({"CHARONIA_CUDA_PREFETCH = ", "expected 0 to 64 MiB"}, [&] { parse_prefetch(mib); });
  }
  for (const auto* const percent : {"-2", "101", "50%", "all", " 50", "1e2"}) {
    expect_error({"CHARONIA_CUDA_CARVEOUT = ", "expected a percentage, 0 to 100, or -1"},
                 [&] { parse_carveout(percent); });
  }
}

}  // namespace
}  // namespace charonia::cuda
