#include "model/activations.h"

#include <algorithm>
#include <utility>

namespace charonia::model {

DeviceRules rules_of(const ops::Device& device) {
  return {[&device](DType weight) { return device.precision(weight); },
          [&device](const ops::ExpertsShape& shape, std::int64_t rows) {
            return device.experts_scratch_bytes(shape, rows);
          }};
}

void Activations::begin_block() {
  if (!std::exchange(in_block_, true)) kept_ = next_;
  next_ = kept_;
}

Activations::Part Activations::experts_scratch(const ops::ExpertsShape& shape) {
  return {.offset = take(rules_.experts_scratch_bytes(shape, limits_.max_rows))};
}

Activations::Part Activations::place(int rows, std::int64_t cols, DType dtype) {
  return {take(static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols) * size_of(dtype)), dtype, cols};
}

std::size_t Activations::take(std::size_t size) {
  constexpr std::size_t kAlignment = 256;
  const auto offset = next_;
  next_ += (size + kAlignment - 1) / kAlignment * kAlignment;
  bytes_ = std::max(bytes_, next_);
  return offset;
}

}  // namespace charonia::model
