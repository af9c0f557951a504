// Measures single operations on one device for `charonia benchmark kernels`: GEMMs with weights of every format, layers
// of experts, and attention over a KV cache. The same code measures the CPU and CUDA, because it uses the interface of
// the devices.
#include "kernel_bench.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/text.h"
#include "charonia/error.h"
#include "ops/cpu/make_cpu_ops.h"
#include "ops/cuda/make_cuda_ops.h"

namespace py = pybind11;
using namespace charonia;

namespace {

using Seconds = std::vector<double>;

constexpr int kBlockLen = 64;  // tokens of a KV block
constexpr std::int64_t kChunk = 512;  // tokens of a step that fills the cache

struct Format {
  std::string_view name;
  ops::QuantFormat quant;  // group 0: one scale per row
};
constexpr Format kFormats[] = {
    {"w4a16", {ops::Code::u4, 128, false, DType::f16}},
    {"mxfp4", {ops::Code::f4_e2m1, 32, false, DType::f8_e8m0}},
    {"w8a16", {ops::Code::i8, 0, false, DType::f32}},
    {"w8a8", {ops::Code::i8, 0, false, DType::f32, ops::Activations::i8_token}},
    {"fp8", {ops::Code::f8_e4m3, 0, false, DType::f32, ops::Activations::f8_token}},
};

// Random codes; every scale is 2^-7.
class RandomSource : public ops::QuantSource {
 public:
  RandomSource(const ops::QuantFormat& format, std::int64_t rows, std::int64_t cols) {
    rows_ = rows, cols_ = cols, format_ = format;
    if (format_.group == 0) format_.group = cols;
    std::mt19937 random(1);
    codes_.resize(static_cast<std::size_t>(rows * cols));
    for (auto& code : codes_) {
      do {
        code = static_cast<std::uint8_t>(random() & ((1U << bits_of(format.code)) - 1));
      } while (std::isnan(number_of(format.code, code)));
    }
  }
  void read(std::int64_t first, std::int64_t n, std::uint8_t* codes, float* scales, std::int8_t*) const override {
    std::copy_n(codes_.begin() + static_cast<std::ptrdiff_t>(first * cols_), n * cols_, codes);
    std::fill_n(scales, n * groups(), 0.0078125F);
  }
  std::string name() const override { return "random"; }

 private:
  std::vector<std::uint8_t> codes_;
};

class KernelBench {
 public:
  KernelBench(const std::string& device, int threads, bool reproducible, std::optional<bool> wgmma_experts) {
    if (device == "cpu") {
      ops_ = ops::make_cpu_ops(threads);
    } else if (device == "cuda") {
      ops_ = ops::make_cuda_ops({.reproducible = reproducible, .wgmma_experts = wgmma_experts});
    } else {
      throw Error(ErrorCode::invalid_argument, cat("device = '", device, "' is not valid: expected cpu or cuda"));
    }
  }

  // The kernels that a GPU has chosen so far (GemmRunner::report()).
  std::vector<std::string> report() const { return ops_->report(); }

  // Measures out [rows, n] = in [rows, k] * weight^T for each number of rows. A step has `layers` GEMMs, each with its
  // own weight, so that caches do not help. Returns the bytes of a weight, and for each number of rows the mean seconds
  // of a GEMM in each of `rounds` steps.
  std::pair<std::size_t, std::map<std::int64_t, Seconds>> gemm(std::int64_t n, std::int64_t k,
                                                               const std::string& format,
                                                               const std::vector<std::int64_t>& rows, int layers,
                                                               int rounds) {
    if (rows.empty()) return {};
    const auto weights = make_weights(n, k, format, layers);
    const auto precision = ops_->precision(is_dense(format) ? weight_dtype(format) : DType::bf16);
    const auto most = *std::ranges::max_element(rows);
    const auto in = random(precision.activation, most * k);
    const auto out = ops_->allocate(static_cast<std::size_t>(most * n) * size_of(precision.gemm_out));
    const auto issue = [&](const ops::StepShape& shape) {
      for (const auto& weight : weights) {
        ops_->linear({out->data(), precision.gemm_out, shape.rows, n, n},
                     {in->data(), precision.activation, shape.rows, k, k}, *weight);
      }
    };
    return {weights[0]->bytes(), times_by_rows(rows, issue, layers, rounds)};
  }

  // Measures layers of `count` experts of [inter, hidden], top_k for each row. Experts have different numbers of rows.
  // Returns the bytes of a layer's weights, and the times as above.
  std::pair<std::size_t, std::map<std::int64_t, Seconds>> experts(int count, int top_k, std::int64_t hidden,
                                                                  std::int64_t inter, const std::string& format,
                                                                  const std::vector<std::int64_t>& rows, int layers,
                                                                  int rounds) {
    if (rows.empty()) return {};
    const auto& quant = known_format(format).quant;
    const RandomSource gate(quant, inter, hidden), down(quant, hidden, inter);
    const std::vector<ops::QuantExpertSource> sources(static_cast<std::size_t>(count), {&gate, &gate, &down});
    std::vector<std::unique_ptr<ops::Experts>> weights;
    for (int i = 0; i < layers; ++i) weights.push_back(ops_->make_quantised_experts(sources, DType::bf16));
    const auto precision = ops_->precision(DType::bf16);
    const auto most = *std::ranges::max_element(rows);
    const auto in = random(precision.activation, most * hidden);
    const auto out = ops_->allocate(static_cast<std::size_t>(most * hidden) * size_of(precision.gemm_out));
    const auto scratch = ops_->allocate(
        ops_->experts_scratch_bytes({count, top_k, hidden, inter, precision.weight}, most));
    auto logits = random_numbers(most * count, 1);
    const auto means = random_numbers(count, 0.7F);
    for (std::size_t i = 0; i < logits.size(); ++i) logits[i] += means[i % means.size()];
    const auto router = ops_->allocate(logits.size() * sizeof(float));
    ops_->upload(router->data(), logits.data(), logits.size() * sizeof(float));
    const auto issue = [&](const ops::StepShape& shape) {
      for (const auto& weight : weights) {
        ops_->experts({out->data(), precision.gemm_out, shape.rows, hidden, hidden},
                      {in->data(), precision.activation, shape.rows, hidden, hidden},
                      {router->data(), DType::f32, shape.rows, count, count}, *weight, {.top_k = top_k}, {},
                      scratch->data(), {});
      }
    };
    return {weights[0]->bytes(), times_by_rows(rows, issue, layers, rounds)};
  }

  // Measures the attention of `batch` sequences with `context` positions each. The last `fresh` positions are queries.
  // quant_policy: as the setting; an FP8 cache has scale 1. A step computes `layers` layers, each with its own cache.
  // Returns the bytes of keys and values that a layer reads, and the mean seconds of a layer in each of `rounds` steps.
  std::pair<double, Seconds> attention(int heads, int kv_heads, int head_dim, int quant_policy, int batch, int fresh,
                                       int context, int layers, int rounds) {
    const auto precision = ops_->precision(DType::bf16);
    const ops::KvLayer layer{.kv_heads = kv_heads, .k_dim = head_dim, .v_dim = head_dim};
    const ops::KvLayout layout{.layers = std::vector(static_cast<std::size_t>(layers), layer),
                               .block_len = kBlockLen,
                               .dtype = precision.kv,
                               .quant_bits = quant_policy};
    const int blocks_each = (context + kBlockLen - 1) / kBlockLen;
    const auto cache = ops_->make_kv_cache(layout, {batch * blocks_each});
    const std::int64_t most = std::max<std::int64_t>(kChunk, std::int64_t{batch} * fresh);
    const std::int64_t columns = std::int64_t{heads + 2 * kv_heads} * head_dim, width = std::int64_t{heads} * head_dim;
    const auto qkv = random(precision.gemm_out, most * columns);
    const auto out = ops_->allocate(static_cast<std::size_t>(most * width) * size_of(precision.activation));
    bool store = true, attend = true;
    const auto issue = [&](const ops::StepShape& shape) {
      const ops::Tensor inputs{qkv->data(), precision.gemm_out, shape.rows, columns, columns};
      const ops::Tensor outputs{out->data(), precision.activation, shape.rows, width, width};
      for (int layer = 0; layer < layers; ++layer) {
        if (store) ops_->rotary_store(inputs, {}, *cache, layer, heads);
        if (attend) {
          ops_->attention(outputs, inputs, *cache, layer, heads,
                          {.scale = 1 / std::sqrt(static_cast<float>(head_dim))});
        }
      }
    };
    ops_->prepare({.max_rows = static_cast<int>(most), .max_sequences = batch, .max_positions = context,
                   .block_len = kBlockLen, .kv_quant_bits = layout.quant_bits},
                  issue);
    std::vector<std::int32_t> table(static_cast<std::size_t>(batch * blocks_each));
    std::iota(table.begin(), table.end(), 0);
    std::ranges::shuffle(table, std::mt19937(1));  // as in a cache that has been used
    const auto step = [&](int first, int sequences, int begin, int count, int steps) {
      std::vector<std::int32_t> starts{0}, positions;
      for (int s = 0; s < sequences; ++s) {
        for (int i = 0; i < count; ++i) positions.push_back(begin + i);
        starts.push_back(static_cast<std::int32_t>(positions.size()));
      }
      const std::vector<std::int32_t> ids(positions.size());
      const std::span<const std::int32_t> tables(table.begin() + std::ptrdiff_t{first} * blocks_each, table.end());
      return time_of(
          {.ids = ids, .attention = {starts, positions, {tables}, blocks_each}, .logits_rows = {}, .sample = {}}, issue,
          layers, steps);
    };
    attend = false;
    for (int s = 0; s < batch; ++s) {
      for (int begin = 0; begin < context; begin += kChunk) {
        step(s, 1, begin, std::min(static_cast<int>(kChunk), context - begin), 0);
      }
    }
    store = false, attend = true;
    const double block_bytes = static_cast<double>(layout.layer_bytes(layer));
    return {block_bytes * batch * context / kBlockLen, step(0, batch, context - fresh, fresh, rounds)};
  }

 private:
  static bool is_dense(std::string_view format) { return format == "bf16" || format == "fp16" || format == "fp32"; }

  static const Format& known_format(const std::string& format) {
    const auto* const known = std::ranges::find(kFormats, format, &Format::name);
    if (known == std::end(kFormats)) {
      throw Error(ErrorCode::invalid_argument,
                  cat("format '", format, "' is not known: expected w4a16, mxfp4, w8a16, w8a8 or fp8, and for single "
                      "GEMMs bf16, fp16 or fp32"));
    }
    return *known;
  }

  std::vector<std::unique_ptr<ops::Linear>> make_weights(std::int64_t n, std::int64_t k, const std::string& format,
                                                         int layers) {
    std::vector<std::unique_ptr<ops::Linear>> weights;
    if (is_dense(format)) {
      const auto values = random_numbers(n * k, 0.02F);
      const ops::HostMatrix source{values.data(), DType::f32, n, k};
      for (int i = 0; i < layers; ++i) weights.push_back(ops_->make_linear({&source, 1}, {}, weight_dtype(format)));
      return weights;
    }
    const RandomSource source(known_format(format).quant, n, k);
    const ops::QuantSource* const part = &source;
    for (int i = 0; i < layers; ++i) weights.push_back(ops_->make_quantised_linear({&part, 1}, {}, DType::bf16));
    return weights;
  }

  // Returns numbers from N(0, deviation). Repeats a block of numbers, because drawing all of them would take minutes.
  static std::vector<float> random_numbers(std::int64_t count, float deviation) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, deviation);
    std::vector<float> values(static_cast<std::size_t>(count));
    constexpr std::size_t kDrawn = 1 << 20;
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = i < kDrawn ? normal(random) : values[i - kDrawn];
    return values;
  }

  std::unique_ptr<ops::Buffer> random(DType type, std::int64_t count) {
    const auto values = random_numbers(count, 1);
    auto buffer = ops_->allocate(values.size() * size_of(type));
    if (type == DType::f32) {
      ops_->upload(buffer->data(), values.data(), values.size() * sizeof(float));
    } else {
      std::vector<std::uint16_t> bits(values.size());
      std::ranges::transform(values, bits.begin(), type == DType::bf16 ? float_to_bf16 : float_to_f16);
      ops_->upload(buffer->data(), bits.data(), bits.size() * sizeof(std::uint16_t));
    }
    return buffer;
  }

  // Prepares steps of up to the most rows, and measures a step with each number of rows.
  std::map<std::int64_t, Seconds> times_by_rows(const std::vector<std::int64_t>& rows, const ops::Steps::Issue& issue,
                                                int layers, int rounds) {
    const auto most = *std::ranges::max_element(rows);
    ops_->prepare({.max_rows = static_cast<int>(most), .max_sequences = 1, .max_positions = 1}, issue);
    std::map<std::int64_t, Seconds> times;
    for (const auto count : rows) {
      const std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
      times[count] = time_of({.ids = ids, .attention = {}, .logits_rows = {}, .sample = {}}, issue, layers, rounds);
    }
    return times;
  }

  // Runs the step once to warm up, then `rounds` times with the clock. Returns the mean seconds of a layer in each
  // round.
  Seconds time_of(const ops::StepInput& input, const ops::Steps::Issue& issue, int layers, int rounds) {
    Seconds times;
    for (int i = 0; i <= rounds; ++i) {
      const auto before = std::chrono::steady_clock::now();
      ops_->begin_step(input);
      ops_->run_step(issue);
      ops_->collect();
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - before;
      if (i > 0) times.push_back(elapsed.count() / layers);
    }
    return times;
  }

  std::unique_ptr<ops::Ops> ops_;
};

}  // namespace

void bind_kernel_bench(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> release;
  py::class_<KernelBench>(m, "KernelBench", "Times single operations on a device.")
      .def(py::init<const std::string&, int, bool, std::optional<bool>>(), py::arg("device"), py::arg("threads") = 0,
           py::arg("reproducible") = false, py::arg("wgmma_experts") = std::nullopt, release,
           "wgmma_experts: whether experts use wgmma on a GPU; None: as an engine chooses.")
      .def("report", &KernelBench::report, release, "The kernels that a GPU has chosen so far, one in a line.")
      .def("gemm", &KernelBench::gemm, py::arg("n"), py::arg("k"), py::arg("format"), py::arg("rows"),
           py::arg("layers"), py::arg("rounds"), release,
           "Bytes of a weight, and for each number of rows the seconds of a GEMM in each round.")
      .def("experts", &KernelBench::experts, py::arg("count"), py::arg("top_k"), py::arg("hidden"), py::arg("inter"),
           py::arg("format"), py::arg("rows"), py::arg("layers"), py::arg("rounds"), release,
           "Bytes of a layer's weights, and for each number of rows the seconds of a layer in each round.")
      .def("attention", &KernelBench::attention, py::arg("heads"), py::arg("kv_heads"), py::arg("head_dim"),
           py::arg("quant_policy"), py::arg("batch"), py::arg("fresh"), py::arg("context"), py::arg("layers"),
           py::arg("rounds"), release, "Bytes of keys and values of a layer, and its seconds in each round.");
}
