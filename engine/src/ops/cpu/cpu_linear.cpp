#include "ops/cpu/cpu_linear.h"

#include <algorithm>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cpu/packed_linear.h"

namespace charonia::ops::cpu {

void CpuLinear::read_row(std::int64_t /*row*/, float* /*out*/) const {
  throw Error(ErrorCode::unsupported, "an embedding cannot share a weight with 8-bit activations");
}

void CpuLinear::set_bias(std::span<const std::int64_t> rows, std::span<const HostMatrix> bias) {
  if (!bias.empty() && bias.size() != rows.size()) {
    throw Error(ErrorCode::invalid_argument,
                cat("a linear weight has ", rows.size(), " parts but ", bias.size(), " biases: each part needs one"));
  }
  if (std::none_of(bias.begin(), bias.end(), [](const auto& b) { return b.data != nullptr; })) return;
  bias_.assign(static_cast<std::size_t>(n_), 0.0F);
  std::int64_t first = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (bias[i].data != nullptr) {
      if (bias[i].rows * bias[i].cols != rows[i]) {
        throw Error(ErrorCode::invalid_argument, cat("a bias has ", bias[i].rows * bias[i].cols,
                                                     " elements, but its weight has ", rows[i], " output features"));
      }
      for (std::int64_t row = 0; row < bias[i].rows; ++row) {
        convert(bias_.data() + first + row * bias[i].cols, bias[i].row(row), bias[i].dtype, bias[i].cols);
      }
    }
    first += rows[i];
  }
}

}  // namespace charonia::ops::cpu
