// Ops::add_low_rank, compared with a product in double; and the guarantee that a row's result depends only on the row.
#include <gtest/gtest.h>

#include <memory>

#include "low_rank_change.h"
#include "ops_support.h"

namespace charonia::ops {
namespace {

class LowRankTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Device, LowRankTest, testing::ValuesIn(device_names()), [](const auto& i) { return i.param; });

// A change in the device's memory.
struct Change : HostChange {
  LowRank on_device;
  std::vector<std::unique_ptr<Buffer>> memory;

  Change(Ops& ops, Random& random, DType type, std::int64_t in, std::int64_t out, bool one_part)
      : HostChange(random, type, in, out, one_part), on_device(shape) {
    const auto upload = [&](const void* data, std::size_t bytes) {
      auto buffer = ops.allocate(bytes);
      ops.upload(buffer->data(), data, bytes);
      return memory.emplace_back(std::move(buffer))->data();
    };
    on_device.a = upload(stored_a.bytes.data(), stored_a.bytes.size());
    on_device.b = upload(stored_b.bytes.data(), stored_b.bytes.size());
    on_device.scales = static_cast<const float*>(upload(scales.data(), scales.size() * sizeof(float)));
  }
};

TEST_P(LowRankTest, equals_a_product_in_double_and_depends_only_on_the_row) {
  Random random(5);
  const auto two = make_ops(GetParam(), 2), four = make_ops(GetParam(), 4);
  for (int trial = 0; trial < 14; ++trial) {
    const bool large = trial >= 12;  // threads share the ranks and the columns of a change, even for one row
    auto& ops = large ? four : two;
    const auto type = ops->precision(trial % 2 == 0 ? DType::bf16 : DType::f32).activation;
    const std::int64_t in = large ? 2000 : uniform(random, 1, 150), out = large ? 1400 : uniform(random, 1, 300);
    const std::int64_t rows = large ? 9 : uniform(random, 1, 90);
    const Change one(*ops, random, type, in, out, large), other(*ops, random, type, in, out, large);
    const auto x = Matrix::random(random, type, rows, in, 1, uniform(random, 0, 3));
    const auto before = Matrix::random(random, DType::f32, rows, out, 1, uniform(random, 0, 3));
    const DeviceMatrix input(*ops, x), output(*ops, before);
    std::vector<std::int32_t> of_one, of_other;  // the other rows have no adapter
    for (std::int32_t row = 0; row < rows; ++row) {
      const int which = uniform(random, 0, 5);
      if (which < 3) of_one.push_back(row);
      if (which == 3) of_other.push_back(row);
    }
    const std::vector<LowRankRows> changes = {{&one.on_device, of_one}, {&other.on_device, of_other}};
    ops->add_low_rank(output.tensor(), input.tensor(), changes);
    const auto got = output.host();
    const auto owner = [&](std::int32_t row) -> const Change* {
      if (std::ranges::binary_search(of_one, row)) return &one;
      return std::ranges::binary_search(of_other, row) ? &other : nullptr;
    };
    for (std::int32_t row = 0; row < rows; ++row) {
      const auto* const change = owner(row);
      if (change == nullptr) {
        EXPECT_TRUE(got.same_bits(row, before, row)) << "a row without an adapter changed";
        continue;
      }
      const auto added = change->of(x, row);
      for (std::int64_t c = 0; c < out; ++c) {
        const double expected = before.at(row, c) + added[static_cast<std::size_t>(c)];
        ASSERT_NEAR(got.at(row, c), expected, 1e-4 * (1 + std::abs(expected))) << row << ", " << c;
      }
      const DeviceMatrix single_in(*ops, x.slice(row, row + 1)), single_out(*ops, before.slice(row, row + 1));
      const std::int32_t first = 0;
      const LowRankRows alone{&change->on_device, {&first, 1}};
      ops->add_low_rank(single_out.tensor(), single_in.tensor(), {&alone, 1});
      ASSERT_TRUE(got.same_bits(row, single_out.host(), 0)) << "row " << row << " depends on the other rows";
    }
  }
}

}  // namespace
}  // namespace charonia::ops
