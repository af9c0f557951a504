// Common parts of the tests of the operations: random matrices, their transfer to a device and back, and the devices.
//
// A test that takes its devices from device_names() does not depend on the location of their memory, their element
// types, or their precision: it asks for these. ops_devices.cpp defines them for the CPU, cuda/ops_devices.cpp for
// CUDA; the same tests are linked with each.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/safetensors.h"
#include "charonia/error.h"
#include "ops/ops.h"

namespace charonia::ops {

using Random = std::mt19937;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline int uniform(Random& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

// A cache of equal layers.
inline KvLayout kv_layout(int layers, int kv_heads, int head_dim, int block_len, DType dtype, int quant_bits = 0) {
  const KvLayer layer{.kv_heads = kv_heads, .k_dim = head_dim, .v_dim = head_dim};
  return {.layers = std::vector(static_cast<std::size_t>(layers), layer),
          .block_len = block_len,
          .dtype = dtype,
          .quant_bits = quant_bits};
}

// A row-major matrix in an element type, with its values rounded to that type.
struct Matrix {
  DType dtype = DType::f32;
  std::int64_t rows = 0, cols = 0, stride = 0;
  std::vector<std::byte> bytes;

  Matrix() = default;
  Matrix(DType type, std::int64_t r, std::int64_t c, std::int64_t gap = 0)
      : dtype(type),
        rows(r),
        cols(c),
        stride(c + gap),
        bytes(static_cast<std::size_t>(r * (c + gap)) * size_of(type)) {}

  static Matrix random(Random& random, DType type, std::int64_t rows, std::int64_t cols, float scale = 1,
                       std::int64_t gap = 0) {
    Matrix m(type, rows, cols, gap);
    std::normal_distribution<float> normal(0, scale);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) m.set(r, c, normal(random));
    }
    return m;
  }

  float at(std::int64_t r, std::int64_t c) const {
    return float_at(bytes.data(), static_cast<std::size_t>(r * stride + c), dtype);
  }
  void set(std::int64_t r, std::int64_t c, float value) {
    const auto i = static_cast<std::size_t>(r * stride + c);
    const std::uint16_t half = dtype == DType::f16 ? float_to_f16(value) : float_to_bf16(value);
    if (dtype == DType::f32) {
      std::memcpy(&bytes[4 * i], &value, 4);
    } else {
      std::memcpy(&bytes[2 * i], &half, 2);
    }
  }
  // A copy of rows [begin, end), with another gap between them.
  Matrix slice(std::int64_t begin, std::int64_t end, std::int64_t gap = 0) const {
    Matrix out(dtype, end - begin, cols, gap);
    for (std::int64_t r = begin; r < end; ++r) {
      std::memcpy(out.bytes.data() + static_cast<std::size_t>((r - begin) * out.stride) * size_of(dtype),
                  bytes.data() + static_cast<std::size_t>(r * stride) * size_of(dtype),
                  static_cast<std::size_t>(cols) * size_of(dtype));
    }
    return out;
  }
  std::span<const float> floats(std::int64_t r) const {  // of an f32 matrix
    return {reinterpret_cast<const float*>(bytes.data()) + r * stride, static_cast<std::size_t>(cols)};
  }
  void fill(float value) {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) set(r, c, value);
    }
  }
  HostMatrix host() const { return {bytes.data(), dtype, rows, cols, stride}; }
  Tensor tensor() { return {bytes.data(), dtype, rows, cols, stride}; }  // if device memory is host memory
  bool same_bits(std::int64_t r, const Matrix& other, std::int64_t other_row) const {
    return std::memcmp(bytes.data() + static_cast<std::size_t>(r * stride) * size_of(dtype),
                       other.bytes.data() + static_cast<std::size_t>(other_row * other.stride) * size_of(dtype),
                       static_cast<std::size_t>(cols) * size_of(dtype)) == 0;
  }
};

// Half a unit in the last place, relative: the maximum change by one rounding to the type.
inline double rounding(DType type) { return type == DType::f32 ? 0x1p-24 : type == DType::f16 ? 0x1p-11 : 0x1p-8; }

inline double rounded(DType type, double x) {
  const auto value = static_cast<float>(x);
  if (type == DType::bf16) return bf16_to_float(float_to_bf16(value));
  if (type == DType::f16) return f16_to_float(float_to_f16(value));
  return value;
}

// The output of a gated layer in double.
inline double gated_value(const Activation& how, double gate, double up) {
  const double inner = std::sqrt(2 / std::acos(-1.0)) * (gate + 0.044715 * gate * gate * gate);
  switch (how.kind) {
    case Activation::silu:
      return gate / (1 + std::exp(-gate)) * up;
    case Activation::gelu_tanh:
      return gate / 2 * (1 + std::tanh(inner)) * up;
    case Activation::clamped_swiglu:
      gate = std::min<double>(gate, how.limit);
      return gate / (1 + std::exp(-how.alpha * gate)) * (std::clamp<double>(up, -how.limit, how.limit) + 1);
  }
  return 0;
}

inline constexpr std::array kWeightTypes = {DType::bf16, DType::f16, DType::f32};

// A matrix on a device.
class DeviceMatrix {
 public:
  DeviceMatrix(Ops& ops, const Matrix& host)
      : ops_(ops), shape_(host.dtype, 0, 0), buffer_(ops.allocate(host.bytes.size())) {
    shape_.rows = host.rows, shape_.cols = host.cols, shape_.stride = host.stride;
    ops_.upload(buffer_->data(), host.bytes.data(), host.bytes.size());
  }
  DeviceMatrix(Ops& ops, DType type, std::int64_t rows, std::int64_t cols, std::int64_t gap = 0)
      : DeviceMatrix(ops, Matrix(type, rows, cols, gap)) {}

  Tensor tensor() const { return slice(0, shape_.rows); }
  // Rows [begin, end), in the same memory.
  Tensor slice(std::int64_t begin, std::int64_t end) const {
    auto* const at = buffer_->as<std::byte>() + static_cast<std::size_t>(begin * shape_.stride) * size_of(shape_.dtype);
    return {at, shape_.dtype, end - begin, shape_.cols, shape_.stride};
  }
  const float* floats() const { return buffer_->as<float>(); }
  Matrix host() const {
    Matrix out(shape_.dtype, shape_.rows, shape_.cols, shape_.stride - shape_.cols);
    ops_.download(out.bytes.data(), buffer_->data(), out.bytes.size());
    return out;
  }

 private:
  Ops& ops_;
  Matrix shape_;  // without data
  std::unique_ptr<Buffer> buffer_;
};

// The properties of a device that the tests need.
struct DeviceTraits {
  bool bitwise = true;  // a row's bits do not depend on the other rows
  // Maximum error of attention, in units of the rounding of its KV type, for values of about 1.
  double attention_roundings = 0.1;
  // Attention over a bf16 cache rounds queries and weights to bf16; weights are rounded before they are summed.
  bool attention_in_bf16 = false;
  // Rows of bf16 become fixed-point numbers for integer weights.
  bool fixed_point_rows = false;
  // The share of the usual number of random trials, because emulated kernels are slow.
  double effort = 1;
};

std::vector<std::string> device_names();  // for parametrised tests
std::unique_ptr<Ops> make_ops(std::string_view device, int threads);
DeviceTraits traits(std::string_view device);

inline int trials(std::string_view device, int usual) {
  return std::max(1, static_cast<int>(std::ceil(traits(device).effort * usual)));
}

// The smallest limits that allow the step.
inline StepLimits limits_of(const StepInput& input) {
  const auto& batch = input.attention;
  const auto sequences = std::max<std::ptrdiff_t>(std::ssize(batch.query_start) - 1, std::ssize(input.logits_rows));
  const auto last = batch.positions.empty() ? 0 : *std::max_element(batch.positions.begin(), batch.positions.end());
  return {.max_rows = std::max(1, static_cast<int>(input.ids.size())),
          .max_sequences = std::max(1, static_cast<int>(sequences)),
          .max_positions = std::max(1, last + 1)};
}

// Runs a prepared step: `issue` calls operations on tensors with the input's numbers of rows.
template <class Issue>
std::vector<Sampled> run_prepared_step(Ops& ops, const StepInput& input, Issue issue) {
  ops.begin_step(input);
  ops.run_step([&](const StepShape&) { issue(); });
  return ops.collect();
}

// Prepares for a single step and runs it. It does not know the samples of the previous step.
template <class Issue>
std::vector<Sampled> run_step(Ops& ops, const StepInput& input, Issue issue) {
  ops.prepare(limits_of(input), [&](const StepShape&) { issue(); });
  return run_prepared_step(ops, input, issue);
}

// Steps that only sample. They are prepared again only for another vocabulary or more rows, so that the device keeps
// the samples of a sequence between steps.
class SamplingSteps {
 public:
  explicit SamplingSteps(Ops& ops) : ops_(ops) {}

  // logits: [rows, vocab]
  std::vector<Sampled> run(const Matrix& logits, std::span<const SampleRow> rows) {
    const DeviceMatrix device(ops_, logits);
    const int count = static_cast<int>(rows.size());
    if (logits.cols != vocab_ || count > max_rows_) {
      vocab_ = logits.cols;
      max_rows_ = std::max(max_rows_, count);
      ops_.prepare({.max_rows = max_rows_, .max_sequences = max_rows_, .max_positions = 1},
                   [&](const StepShape& shape) {
                     ops_.sample({device.tensor().data, DType::f32, shape.logits_rows, logits.cols, logits.stride});
                   });
    }
    std::vector<std::int32_t> all(rows.size());
    std::iota(all.begin(), all.end(), 0);
    return run_prepared_step(ops_, {.ids = all, .attention = {}, .logits_rows = all, .sample = rows},
                             [&] { ops_.sample(device.tensor()); });
  }

 private:
  Ops& ops_;
  std::int64_t vocab_ = 0;
  int max_rows_ = 64;
};

}  // namespace charonia::ops
