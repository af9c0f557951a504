// What is done to rows between the GEMMs: norms, rotation, gates, copies, sums.
#include <algorithm>
#include <numeric>

#include "base/text.h"
#include "cuda_bench.h"
#include "ops/cuda/kernels/collective.h"
#include "ops/cuda/kernels/gemm.h"
#include "ops/cuda/kernels/rows.h"

namespace charonia::bench {
namespace {

using cuda::CacheLayer;
using cuda::DeviceMemory;
using ops::Tensor;

constexpr int kBlockLen = 64, kRanks = 2;
constexpr auto kType = DType::bf16;

// A row of operands for each copy; the i-th launch takes the copy i % copies.
class Operands {
 public:
  Operands(Bench& bench, DType type, std::int64_t rows, std::int64_t cols, int copies)
      : type_(type),
        rows_(rows),
        cols_(cols),
        copies_(copies),
        memory_(bench.random_values(type, copies * rows * cols)) {}
  Tensor at(int index) const {
    const auto bytes = static_cast<std::size_t>(rows_ * cols_) * size_of(type_);
    return {memory_.as<std::byte>() + static_cast<std::size_t>(index % copies_) * bytes, type_, rows_, cols_, cols_};
  }

 private:
  DType type_;
  std::int64_t rows_, cols_;
  int copies_;
  DeviceMemory memory_;
};

struct Measured {
  Bench& bench;
  const ModelShape& model;
  std::int64_t rows;

  Case what(std::string kernel, const Shape& shape, double bytes, std::string variant = "bf16") const {
    Shape all{{"model", model.name}, {"rows", rows}};
    all.insert(all.end(), shape.begin(), shape.end());
    return {.kernel = std::move(kernel), .shape = std::move(all), .variant = std::move(variant), .bytes = bytes};
  }
  int copies(double bytes) const { return bench.copies(static_cast<std::size_t>(bytes)); }
  double elements(std::int64_t cols) const { return static_cast<double>(rows * cols); }

  void embed() const {
    const double bytes = elements(model.hidden) * (2 + 4);
    const auto of = what("embed", {{"hidden", model.hidden}}, bytes);
    const auto table = bench.random_values(kType, model.vocab * model.hidden);
    std::vector<std::int32_t> ids;
    const int n = copies(bytes);
    for (std::int64_t i = 0; i < n * rows; ++i)
      ids.push_back(static_cast<std::int32_t>(bench.random() % static_cast<unsigned>(model.vocab)));
    const auto ids_there = bench.uploaded(ids);
    const DeviceMemory sampled(sizeof(std::int32_t));
    const Operands out(bench, DType::f32, rows, model.hidden, n);
    bench.measure(of, [&](int i) {
      cuda::embed(bench.stream, out.at(i), table.data(), kType, ids_there.as<std::int32_t>() + i % n * rows,
                  sampled.as<std::int32_t>());
    });
  }

  void norm() const {
    const double bytes = elements(model.hidden) * (4 + 4 + 2 + 2) + 4.0 * static_cast<double>(model.hidden);
    const int n = copies(bytes);
    const Operands residual(bench, DType::f32, rows, model.hidden, n), delta(bench, kType, rows, model.hidden, n),
        out(bench, kType, rows, model.hidden, n);
    const auto weight = bench.random_values(DType::f32, model.hidden);
    bench.measure(what("rms_norm", {{"hidden", model.hidden}}, bytes), [&](int i) {
      cuda::rms_norm(bench.stream, out.at(i), residual.at(i), delta.at(i),
                     {.weight = weight.as<float>(), .eps = 1e-5F});
    });
  }

  void gate() const {
    const double bytes = elements(model.inter) * (4 + 2);
    const int n = copies(bytes);
    const Operands in(bench, kType, rows, 2 * model.inter, n), out(bench, kType, rows, model.inter, n);
    bench.measure(what("gated_activation", {{"inter", model.inter}}, bytes),
                  [&](int i) { cuda::gated_activation(bench.stream, out.at(i), in.at(i), ops::Activation::silu); });
  }

  // The same where the next weight takes int8 codes.
  void norm_codes() const {
    const double bytes =
        elements(model.hidden) * (4 + 4 + 2 + 1) + elements(1) * 4 + 4.0 * static_cast<double>(model.hidden);
    const int n = copies(bytes);
    const Operands residual(bench, DType::f32, rows, model.hidden, n), delta(bench, kType, rows, model.hidden, n),
        out(bench, kType, rows, model.hidden, n);
    const auto weight = bench.random_values(DType::f32, model.hidden);
    const auto codes = room_for_codes(model.hidden);
    bench.measure(what("rms_norm_codes", {{"hidden", model.hidden}}, bytes), [&](int i) {
      cuda::rms_norm_codes(bench.stream, codes.of(), out.at(i), residual.at(i), delta.at(i),
                           {.weight = weight.as<float>(), .eps = 1e-5F});
    });
  }

  void gate_codes() const {
    const double bytes = elements(model.inter) * (4 + 1) + elements(1) * 4;
    const int n = copies(bytes);
    const Operands in(bench, kType, rows, 2 * model.inter, n), out(bench, kType, rows, model.inter, n);
    const auto codes = room_for_codes(model.inter);
    bench.measure(what("gate_codes", {{"inter", model.inter}}, bytes), [&](int i) {
      cuda::gated_activation_codes(bench.stream, codes.of(), out.at(i), in.at(i), ops::Activation::silu);
    });
  }

  struct RoomForCodes {
    DeviceMemory codes, scales;
    cuda::RowCodes of() const { return {.codes = codes.as<unsigned char>(), .scales = scales.as<float>()}; }
  };
  RoomForCodes room_for_codes(std::int64_t cols) const {
    return {DeviceMemory(static_cast<std::size_t>(rows * cols)), DeviceMemory(static_cast<std::size_t>(rows) * 4)};
  }

  void rotary(int quant_bits) const {
    const auto heads = model.heads + 2 * model.kv_heads;
    CacheLayer layer{nullptr,   kType,     static_cast<int>(model.kv_heads), static_cast<int>(model.head_dim),
                     kBlockLen, quant_bits};
    const double stored = elements(1) * static_cast<double>(layer.block_bytes()) / kBlockLen;
    const double table_row = 4.0 * static_cast<double>(model.head_dim);
    const double bytes = elements(heads * model.head_dim) * 2 + elements(model.heads * model.head_dim) * 2 + stored +
                         elements(1) * table_row;
    const int n = copies(bytes);
    const Operands qkv(bench, kType, rows, heads * model.head_dim, n);
    const auto blocks = cuda::divide_up(rows, kBlockLen);
    const auto layer_bytes = static_cast<std::size_t>(blocks * layer.block_bytes());
    const DeviceMemory cache(layer_bytes * static_cast<std::size_t>(n));
    const auto cos_sin = bench.random_values(DType::f32, rows * model.head_dim, 0.5F);
    std::vector<std::int32_t> positions(static_cast<std::size_t>(rows));
    std::iota(positions.begin(), positions.end(), 0);
    const auto there = bench.uploaded(positions);
    const auto* const numbers = there.as<std::int32_t>();
    const ops::RotaryParams how{.cos_sin = cos_sin.as<float>(), .rotary_dim = static_cast<int>(model.head_dim)};
    const auto of = what(quant_bits == 0 ? "rotary_store" : "rotary_store_quantised",
                         {{"heads", model.heads},
                          {"kv_heads", model.kv_heads},
                          {"head_dim", model.head_dim},
                          {"kv_bits", quant_bits == 0 ? 16 : quant_bits}},
                         bytes, quant_bits == 0 ? "bf16" : cat("int", quant_bits));
    bench.measure(of, [&](int i) {
      layer.data = cache.as<std::byte>() + static_cast<std::size_t>(i % n) * layer_bytes;
      cuda::rotary_store(bench.stream, qkv.at(i), how, layer, static_cast<int>(model.heads), numbers, numbers, numbers);
    });
  }

  void gather() const {
    const double bytes = elements(model.hidden) * (4 + 4);
    const int n = copies(bytes);
    const Operands in(bench, DType::f32, rows, model.hidden, n), out(bench, DType::f32, rows, model.hidden, n);
    std::vector<std::int32_t> order(static_cast<std::size_t>(rows));
    std::iota(order.rbegin(), order.rend(), 0);
    const auto there = bench.uploaded(order);
    bench.measure(what("gather_rows", {{"cols", model.hidden}}, bytes, "fp32"),
                  [&](int i) { cuda::gather_rows(bench.stream, out.at(i), in.at(i), there.as<std::int32_t>()); });
  }

  void bias() const {
    const auto n_out = (model.heads + 2 * model.kv_heads) * model.head_dim;
    const double bytes = elements(n_out) * (2 + 2) + 4.0 * static_cast<double>(n_out);
    const int n = copies(bytes);
    const Operands out(bench, kType, rows, n_out, n);
    const auto bias = bench.random_values(DType::f32, n_out);
    bench.measure(what("add_bias", {{"n", n_out}}, bytes), [&](int i) {
      const auto to = out.at(i);
      cuda::add_bias(bench.stream, {.out = to.data,
                                    .out_type = kType,
                                    .out_stride = to.stride,
                                    .type = kType,
                                    .bias = bias.as<float>(),
                                    .rows = rows,
                                    .n = n_out,
                                    .k = model.hidden});
    });
  }

  void collectives() const {
    const double sum_bytes = elements(model.hidden) * 2 * (kRanks + 1);
    const int n = copies(sum_bytes);
    const Operands shards(bench, kType, kRanks * rows, model.hidden, n), sum(bench, kType, rows, model.hidden, n);
    bench.measure(what("sum_shards", {{"ranks", kRanks}, {"cols", model.hidden}}, sum_bytes),
                  [&](int i) { cuda::sum_shards(bench.stream, sum.at(i), shards.at(i).data, kRanks); });
  }

  // Of logits: the rows that are sampled.
  void logits() const {
    const double bytes = elements(model.vocab) * (4 + 4);
    const int n = copies(bytes);
    const Operands in(bench, DType::f32, rows, model.vocab, n), out(bench, DType::f32, rows, model.vocab, n);
    bench.measure(what("soft_cap", {{"vocab", model.vocab}}, bytes, "fp32"),
                  [&](int i) { cuda::scale_logits(bench.stream, out.at(i), 1, 30); });
    bench.measure(what("side_by_side", {{"ranks", kRanks}, {"cols", model.vocab / kRanks}}, bytes, "fp32"),
                  [&](int i) { cuda::side_by_side(bench.stream, out.at(i), in.at(i).data, kRanks); });
  }
};

void copy_blocks(Bench& bench, const ModelShape& model) {
  const int layers = bench.size == Size::tiny ? 2 : 32, blocks = bench.size == Size::tiny ? 4 : 64;
  CacheLayer layer{nullptr, kType, static_cast<int>(model.kv_heads), static_cast<int>(model.head_dim), kBlockLen, 0};
  const auto layer_bytes = static_cast<std::size_t>(blocks * layer.block_bytes());
  const auto cache =
      bench.random_values(kType, static_cast<std::int64_t>(static_cast<std::size_t>(layers) * layer_bytes / 2));
  layer.data = cache.data();
  const Case what{
      .kernel = "copy_block",
      .shape = {{"model", model.name}, {"layers", layers}, {"kv_heads", model.kv_heads}, {"head_dim", model.head_dim}},
      .variant = "bf16",
      .bytes = 2.0 * layers * static_cast<double>(layer.block_bytes())};
  bench.measure(what, [&](int i) {
    cuda::copy_block(bench.stream, layer, layers, layer_bytes, 2 * i % blocks, (2 * i + 1) % blocks);
  });
}

}  // namespace

void measure_rows(Bench& bench) {
  std::vector<std::int64_t> rows{1, 8, 64, 256, 2048};
  if (bench.size == Size::quick) rows = {1, 64, 2048};
  if (bench.size == Size::tiny) rows = {1, 3};
  for (const auto& model : model_shapes(bench.size)) {
    for (const auto count : rows) {
      const Measured of{bench, model, count};
      of.embed();
      of.norm();
      of.norm_codes();
      of.gate();
      of.gate_codes();
      for (const int bits : {0, 8, 4}) of.rotary(bits);
      of.gather();
      of.bias();
      of.collectives();
      if (count <= 256) of.logits();
    }
    copy_blocks(bench, model);
  }
}

}  // namespace charonia::bench
