#include "model/weight_loader.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::model {
namespace {

template <class Part>
Part single(std::vector<Part> parts, const std::string& name) {
  if (parts.size() != 1) throw Error(ErrorCode::unsupported, cat(name, " is split into ", parts.size(), " parts"));
  return std::move(parts.front());
}

using QuantParts = std::vector<std::unique_ptr<QuantPart>>;

std::vector<QuantPart*> pointers(const QuantParts& parts) {
  std::vector<QuantPart*> out;
  for (const auto& part : parts) out.push_back(part.get());
  return out;
}

// Converts parts that must have one format to one form of it. `why` names them in the error.
void make_one_format(const std::vector<QuantPart*>& parts, const char* why) {
  QuantPart::unify(parts);
  const auto& first = *parts.front();
  for (const auto* part : parts) {
    if (part->format() == first.format()) continue;
    throw Error(ErrorCode::unsupported,
                cat("tensor ", first.name(), " is quantised to ", ops::to_string(first.format()), ", but ",
                    part->name(), " to ", ops::to_string(part->format()), ": ", why, " must have the same format"));
  }
}

// Calls fn with each row of a quantised weight, dequantised.
template <class Fn>
void for_each_row(const ops::QuantSource& part, Fn fn) {
  ops::DequantisedRows rows(part);
  for (std::int64_t row = 0; row < part.rows(); ++row) fn(rows.at(row));
}

// The same for each row of a weight that may be quantised.
template <class Fn>
void for_each_row(const WeightFiles& files, const WeightLoader::Wanted& wanted, Fn fn) {
  if (files.quantised(wanted.name)) {
    for (const auto& part : files.get_quantised(wanted.name, wanted.rows, wanted.cols)) for_each_row(*part, fn);
    return;
  }
  std::vector<float> values(static_cast<std::size_t>(wanted.cols));
  for (const auto& part : files.get(wanted.name, wanted.rows, wanted.cols)) {
    for (std::int64_t row = 0; row < part.rows; ++row) {
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = float_at(part.row(row), i, part.dtype);
      fn(values);
    }
  }
}

void check_one_order(const QuantPart& a, const QuantPart& b) {
  if (std::ranges::equal(a.order(), b.order())) return;
  throw Error(ErrorCode::unsupported,
              cat("tensor ", a.name(), " and ", b.name(),
                  " have the same inputs, but their columns have different orders (desc_act): ",
                  "use a checkpoint that was quantised with desc_act = false or ", "static_groups = true"));
}

[[noreturn]] void refuse_mixed(const WeightFiles& files, const std::string& a, const std::string& b) {
  const auto& [quantised, other] = files.quantised(a) ? std::pair{a, b} : std::pair{b, a};
  throw Error(ErrorCode::unsupported,
              cat("tensor ", quantised, " is quantised, but ", other,
                  " is not, and they are computed together. Use a checkpoint that quantises both or neither"));
}

// Makes a matrix with a row for each row of `parts`; add_row(values, out) appends its values.
template <class AddRow>
MadeMatrix made(const std::vector<ops::HostMatrix>& parts, DType type, AddRow add_row) {
  MadeMatrix out{.type = type, .cols = parts.front().cols, .data = {}};
  for (const auto& part : parts) out.rows += part.rows;
  out.data.reserve(static_cast<std::size_t>(out.rows * out.cols) * size_of(type));
  std::vector<float> values(static_cast<std::size_t>(out.cols));
  for (const auto& part : parts) {
    for (std::int64_t row = 0; row < part.rows; ++row) {
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = float_at(part.row(row), i, part.dtype);
      add_row(values, out);
    }
  }
  return out;
}

}  // namespace

float rounded(float value, DType type) {
  if (type == DType::bf16) return bf16_to_float(float_to_bf16(value));
  if (type == DType::f16) return f16_to_float(float_to_f16(value));
  return value;
}

void MadeMatrix::append(float value) {
  const std::uint16_t half = type == DType::bf16 ? float_to_bf16(value) : float_to_f16(value);
  const void* const from = type == DType::f32 ? static_cast<const void*>(&value) : &half;
  const auto* const bytes = static_cast<const std::byte*>(from);
  data.insert(data.end(), bytes, bytes + size_of(type));
}

std::array<MadeMatrix, 2> halves(const std::vector<ops::HostMatrix>& parts, DType type) {
  return {made(parts, type,
               [](const auto& values, MadeMatrix& out) {
                 for (const float value : values) out.append(value);
               }),
          made(parts, type, [type](const auto& values, MadeMatrix& out) {
            for (const float value : values) out.append(value - rounded(value, type));
          })};
}

std::vector<ops::HostMatrix> stacked(std::vector<ops::HostMatrix> first, const std::vector<ops::HostMatrix>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

WeightLoader::WeightLoader(const WeightFiles& from, ops::Ops& ops, DType type, bool unit_offset,
                           const PositionTables& position_tables)
    : files(from), tables(position_tables), weight(type), ops_(ops), unit_offset_(unit_offset) {}

std::unique_ptr<ops::Linear> WeightLoader::count(std::unique_ptr<ops::Linear> made) {
  bytes += static_cast<std::int64_t>(made->bytes());
  bytes_per_step += static_cast<std::int64_t>(made->bytes());
  return made;
}

std::unique_ptr<ops::Linear> WeightLoader::placed(std::unique_ptr<ops::Linear> made, std::span<const Wanted> weights) {
  std::int64_t row = 0;
  for (const auto& one : weights) {
    places[one.name] = {made.get(), row, one.rows, one.cols};
    row += one.rows;
  }
  return count(std::move(made));
}

std::unique_ptr<ops::Linear> WeightLoader::linear(std::span<const Wanted> weights,
                                                  const std::vector<ops::HostMatrix>& bias) {
  const bool quantised = files.quantised(weights.front().name);
  for (const auto& one : weights) {
    if (files.quantised(one.name) != quantised) refuse_mixed(files, weights.front().name, one.name);
  }
  if (!quantised) {
    std::vector<ops::HostMatrix> parts;
    for (const auto& one : weights) parts = stacked(std::move(parts), files.get(one.name, one.rows, one.cols));
    return placed(ops_.make_linear(parts, bias, weight), weights);
  }
  QuantParts parts;
  for (const auto& one : weights) {
    for (auto& part : files.get_quantised(one.name, one.rows, one.cols)) parts.push_back(std::move(part));
  }
  make_one_format(pointers(parts), "stacked weights");
  for (const auto& part : parts) check_one_order(*parts.front(), *part);
  std::vector<const ops::QuantSource*> sources;
  for (const auto& part : parts) sources.push_back(part.get());
  return placed(ops_.make_quantised_linear(sources, bias, weight), weights);
}

std::unique_ptr<ops::Linear> WeightLoader::dense_linear(std::span<const ops::HostMatrix> parts,
                                                        std::span<const ops::HostMatrix> bias) {
  return count(ops_.make_linear(parts, bias, weight));
}

ops::HostMatrix WeightLoader::bias(const std::string& name, std::int64_t rows) const {
  return single(files.get(name, rows, 1), name);
}

Vector WeightLoader::conv(const std::string& name, std::int64_t channels, int kernel) const {
  std::vector<float> out(static_cast<std::size_t>(channels * kernel));
  std::int64_t channel = 0;
  for (const auto& part : files.get(name, channels, kernel)) {
    for (std::int64_t row = 0; row < part.rows; ++row, ++channel) {
      for (int k = 0; k < kernel; ++k) {
        out[static_cast<std::size_t>(k * channels + channel)] =
            float_at(part.row(row), static_cast<std::size_t>(k), part.dtype);
      }
    }
  }
  return vector(out);
}

std::unique_ptr<ops::Embedding> WeightLoader::embedding(const Wanted& table, bool in_host_memory) {
  MadeMatrix dequantised{.type = weight, .rows = table.rows, .cols = table.cols, .data = {}};
  ops::HostMatrix values;
  if (files.quantised(table.name)) {
    dequantised.data.reserve(static_cast<std::size_t>(table.rows * table.cols) * size_of(weight));
    for_each_row(*single(files.get_quantised(table.name, table.rows, table.cols), table.name), [&](const auto& row) {
      for (const float value : row) dequantised.append(value);
    });
    values = dequantised.matrix();
  } else {
    values = single(files.get(table.name, table.rows, table.cols), table.name);
  }
  auto out = ops_.make_embedding(values, weight, in_host_memory);
  if (in_host_memory && ops_.device() == "cuda") return out;  // not in the device's memory
  bytes += static_cast<std::int64_t>(out->bytes());
  return out;
}

std::vector<float> WeightLoader::norm_values(const std::string& name, std::int64_t n) const {
  auto values = files.get_vector(name, n);
  if (unit_offset_) {
    for (auto& value : values) value += 1;
  }
  return values;
}

std::vector<float> WeightLoader::values(const std::string& name, std::int64_t rows, std::int64_t cols) const {
  std::vector<float> out;
  out.reserve(static_cast<std::size_t>(rows * cols));
  for_each_row(files, {name, rows, cols}, [&](const auto& row) { out.insert(out.end(), row.begin(), row.end()); });
  return out;
}

MadeMatrix WeightLoader::unit_rows(const Wanted& wanted) const {
  MadeMatrix out{.type = weight, .rows = wanted.rows, .cols = wanted.cols, .data = {}};
  out.data.reserve(static_cast<std::size_t>(out.rows * out.cols) * size_of(weight));
  for_each_row(files, wanted, [&](const auto& values) {
    double sum = 0;
    for (const float value : values) sum += double{value} * value;
    constexpr float kMin = 1e-12F;  // a row of zeros stays zero
    const float length = std::max(rounded(static_cast<float>(std::sqrt(sum)), weight), kMin);
    for (const float value : values) out.append(value / length);
  });
  return out;
}

Vector WeightLoader::vector(std::span<const float> values) const {
  auto buffer = ops_.allocate(values.size_bytes());
  ops_.upload(buffer->data(), values.data(), values.size_bytes());
  return buffer;
}

std::unique_ptr<ops::Experts> WeightLoader::experts(std::span<const std::array<Wanted, 3>> experts,
                                                    std::span<const ops::ExpertBiases> biases, int top_k) {
  const auto& first = experts.front().front().name;
  const bool quantised = files.quantised(first);
  for (const auto& expert : experts) {
    for (const auto& one : expert) {
      if (files.quantised(one.name) != quantised) refuse_mixed(files, first, one.name);
    }
  }
  auto out = quantised ? quantised_experts(experts, biases) : dense_experts(experts, biases);
  const auto of_all = static_cast<std::int64_t>(out->bytes());
  bytes += of_all;
  bytes_per_step += of_all / std::ssize(experts) * top_k;
  return out;
}

std::unique_ptr<ops::Experts> WeightLoader::dense_experts(std::span<const std::array<Wanted, 3>> experts,
                                                          std::span<const ops::ExpertBiases> biases) {
  std::vector<ops::ExpertSource> sources;
  const auto get = [&](const Wanted& one) { return single(files.get(one.name, one.rows, one.cols), one.name); };
  for (const auto& [gate, up, down] : experts) {
    sources.push_back({get(gate), get(up), get(down), biases[sources.size()]});
  }
  return ops_.make_experts(sources, weight);
}

std::unique_ptr<ops::Experts> WeightLoader::quantised_experts(std::span<const std::array<Wanted, 3>> experts,
                                                              std::span<const ops::ExpertBiases> biases) {
  QuantParts gate_up, down;
  const auto get = [&](const Wanted& one) {
    return single(files.get_quantised(one.name, one.rows, one.cols), one.name);
  };
  for (const auto& expert : experts) {
    gate_up.push_back(get(expert[0]));
    gate_up.push_back(get(expert[1]));
    down.push_back(get(expert[2]));
    check_one_order(*gate_up[gate_up.size() - 2], *gate_up.back());
  }
  make_one_format(pointers(gate_up), "gate and up of a layer's experts");
  make_one_format(pointers(down), "the last matrices of a layer's experts");
  std::vector<ops::QuantExpertSource> sources;
  for (std::size_t e = 0; e < experts.size(); ++e) {
    sources.push_back({gate_up[2 * e].get(), gate_up[2 * e + 1].get(), down[e].get(), biases[e]});
  }
  return ops_.make_quantised_experts(sources, weight);
}

}  // namespace charonia::model
