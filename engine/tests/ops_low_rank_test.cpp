// Ops::add_low_rank, compared with a product in double; and the guarantee that a row's result depends only on the row.
#include <gtest/gtest.h>

#include <memory>

#include "ops_support.h"

namespace charonia::ops {
namespace {

class LowRankTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Device, LowRankTest, testing::ValuesIn(device_names()), [](const auto& i) { return i.param; });

// A change of a weight, with its matrices on the host.
struct Change {
  LowRank on_device;
  Matrix a;                // [ranks, in_features]
  std::vector<Matrix> bs;  // of each part: [columns, ranks of the part]
  std::vector<float> scales;
  std::vector<std::unique_ptr<Buffer>> memory;

  Change(Ops& ops, Random& random, DType type, std::int64_t in, std::int64_t out, bool one_part) {
    on_device.type = type;
    on_device.in_features = in;
    on_device.out_features = out;
    std::int64_t column = uniform(random, 0, 3), elements = 0;
    while (column < out) {
      LowRank::Part part{.first_column = column,
                         .columns = std::min<std::int64_t>(one_part ? out : uniform(random, 1, 200), out - column),
                         .first_rank = on_device.ranks,
                         .ranks = one_part ? 37 : uniform(random, 1, 40),
                         .b = elements};
      column += part.columns + uniform(random, 0, 5);
      on_device.ranks += part.ranks;
      elements += on_device.b_elements(part);
      bs.push_back(Matrix::random(random, type, part.columns, part.ranks, 0.3F));
      on_device.parts.push_back(part);
    }
    a = Matrix::random(random, type, on_device.ranks, in, 0.3F);
    Matrix stored_a(type, 1, on_device.a_elements()), b(type, 1, elements);
    for (std::int64_t j = 0; j < on_device.ranks; ++j) {
      for (std::int64_t k = 0; k < in; ++k) stored_a.set(0, on_device.a_at(j, k), a.at(j, k));
    }
    for (std::size_t p = 0; p < bs.size(); ++p) {
      const auto& part = on_device.parts[p];
      for (std::int64_t c = 0; c < part.columns; ++c) {
        for (std::int64_t j = 0; j < part.ranks; ++j) {
          b.set(0, on_device.b_at(part, j, c), bs[p].at(c, j));
        }
      }
    }
    for (std::int64_t j = 0; j < on_device.ranks; ++j) scales.push_back(static_cast<float>(uniform(random, 1, 4)));
    const auto upload = [&](const void* data, std::size_t bytes) {
      auto buffer = ops.allocate(bytes);
      ops.upload(buffer->data(), data, bytes);
      return memory.emplace_back(std::move(buffer))->data();
    };
    on_device.a = upload(stored_a.bytes.data(), stored_a.bytes.size());
    on_device.b = upload(b.bytes.data(), b.bytes.size());
    on_device.scales = static_cast<const float*>(upload(scales.data(), scales.size() * sizeof(float)));
  }

  // Of all columns.
  std::vector<double> of(const Matrix& in, std::int64_t row) const {
    std::vector<double> out(static_cast<std::size_t>(on_device.out_features));
    for (std::size_t p = 0; p < bs.size(); ++p) {
      const auto& part = on_device.parts[p];
      for (std::int64_t j = 0; j < part.ranks; ++j) {
        double t = 0;
        for (std::int64_t k = 0; k < in.cols; ++k) t += double{in.at(row, k)} * a.at(part.first_rank + j, k);
        t *= scales[static_cast<std::size_t>(part.first_rank + j)];
        for (std::int64_t c = 0; c < part.columns; ++c) {
          out[static_cast<std::size_t>(part.first_column + c)] += t * bs[p].at(c, j);
        }
      }
    }
    return out;
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
