#include "ops/quant_weight.h"

#include <algorithm>
#include <array>

#include "base/text.h"

namespace charonia::ops {

std::string_view to_string(Code code) {
  switch (code) {
    case Code::u4:
      return "int4";
    case Code::i8:
      return "int8";
    case Code::f8_e4m3:
      return "fp8";
    case Code::f4_e2m1:
      return "mxfp4";
  }
  return "";
}

float number_of(Code code, std::uint8_t bits) {
  switch (code) {
    case Code::u4:
      return static_cast<float>(bits & 15U);
    case Code::i8:
      return static_cast<float>(static_cast<std::int8_t>(bits));
    case Code::f8_e4m3:
      return e4m3_to_float(bits);
    case Code::f4_e2m1: {
      constexpr std::array kMagnitudes{0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
      const float magnitude = kMagnitudes[bits & 7U];
      return (bits & 8U) != 0 ? -magnitude : magnitude;
    }
  }
  return 0;
}

std::string to_string(const QuantFormat& format) {
  std::string out = cat(to_string(format.code), ", groups of ", format.group);
  if (format.zeros) out += ", zeros";
  if (format.minimums) out += ", minimums";
  switch (format.activations) {
    case Activations::as_is:
      break;
    case Activations::i8_token:
      out += ", int8 activations";
      break;
    case Activations::i8_tensor:
      out += ", int8 activations with one scale";
      break;
    case Activations::f8_token:
      out += ", fp8 activations";
      break;
    case Activations::f8_tensor:
      out += ", fp8 activations with one scale";
      break;
  }
  return out;
}

DequantisedRows::DequantisedRows(const QuantSource& source)
    : source_(&source),
      columns_(static_cast<std::size_t>(source.cols())),
      row_(source.order().empty() ? 0 : columns_.size()) {
  for (std::size_t i = 0; i < numbers_.size(); ++i) {
    numbers_[i] = number_of(source.format().code, static_cast<std::uint8_t>(i));
  }
}

std::span<const float> DequantisedRows::at(std::int64_t row) {
  constexpr std::int64_t kRows = 64;  // read together
  const auto& format = source_->format();
  const auto cols = source_->cols(), groups = source_->groups();
  if (row < first_ || row >= first_ + count_) {
    first_ = row;
    count_ = std::min(kRows, source_->rows() - row);
    const auto all = static_cast<std::size_t>(count_ * groups);
    codes_.resize(static_cast<std::size_t>(count_ * cols));
    scales_.resize(all);
    minimums_.resize(all);
    zeros_.assign(all, format.code == Code::u4 ? 8 : 0);
    source_->read(first_, count_, codes_.data(), scales_.data(), zeros_.data());
    source_->read_minimums(first_, count_, minimums_.data());
  }
  const auto* code = codes_.data() + (row - first_) * cols;
  auto* to = columns_.data();
  for (auto g = (row - first_) * groups; g < (row - first_ + 1) * groups; ++g) {
    const auto group = static_cast<std::size_t>(g);
    const double scale = scales_[group], minimum = minimums_[group], zero = zeros_[group];
    for (std::int64_t c = 0; c < format.group; ++c) {
      *to++ = static_cast<float>(scale * (double{numbers_[*code++]} - zero) + minimum);
    }
  }
  const auto order = source_->order();
  if (order.empty()) return columns_;
  for (std::size_t c = 0; c < order.size(); ++c) row_[static_cast<std::size_t>(order[c])] = columns_[c];
  return row_;
}

}  // namespace charonia::ops
