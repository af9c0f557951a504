// A device that stores each quantised weight as a dense weight: its computations use exactly the values from the file,
// in fp32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "forwarding_ops.h"
#include "ops/quant_weight.h"

namespace charonia::testing {

class DequantisingOps : public ForwardingOps {
 public:
  using ForwardingOps::ForwardingOps;
  std::unique_ptr<ops::Linear> make_quantised_linear(std::span<const ops::QuantSource* const> parts,
                                                     std::span<const ops::HostMatrix> bias, DType data) override {
    std::vector<std::vector<float>> values;
    std::vector<ops::HostMatrix> dense;
    for (const auto* part : parts) dense.push_back(dequantised(*part, values));
    return make_linear(dense, bias, data);
  }
  std::unique_ptr<ops::Experts> make_quantised_experts(std::span<const ops::QuantExpertSource> experts,
                                                       DType data) override {
    std::vector<std::vector<float>> values;
    std::vector<ops::ExpertSource> dense;
    for (const auto& one : experts) {
      dense.push_back({dequantised(*one.gate, values), dequantised(*one.up, values), dequantised(*one.down, values)});
    }
    return make_experts(dense, data);
  }

 private:
  // Stores the values in `values`.
  static ops::HostMatrix dequantised(const ops::QuantSource& source, std::vector<std::vector<float>>& values) {
    const auto rows = source.rows(), cols = source.cols(), groups = source.groups();
    const auto& format = source.format();
    const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    std::vector<std::uint8_t> codes(size(rows * cols));
    std::vector<float> scales(size(rows * groups));
    std::vector<std::int8_t> zeros(scales.size(), format.code == ops::Code::u4 ? 8 : 0);
    std::vector<float> minimums(scales.size());
    source.read(0, rows, codes.data(), scales.data(), zeros.data());
    source.read_minimums(0, rows, minimums.data());
    auto& out = values.emplace_back(codes.size());
    for (std::int64_t i = 0; i < rows * cols; ++i) {
      const auto row = i / cols, col = i % cols;
      const auto group = size(row * groups + col / format.group);
      const auto feature = source.order().empty() ? col : source.order()[size(col)];
      const double number = ops::number_of(format.code, codes[size(i)]);
      out[size(row * cols + feature)] = static_cast<float>(double{scales[group]} * (number - zeros[group]) + minimums[group]);
    }
    return {out.data(), DType::f32, rows, cols, 0};
  }
};

}  // namespace charonia::testing
