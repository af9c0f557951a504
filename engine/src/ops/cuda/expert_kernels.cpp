#include "ops/cuda/expert_kernels.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "base/dtype.h"
#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/experts_workspace.h"
#include "ops/cuda/gemm/dequantised_parts.h"
#include "ops/cuda/gemm/gemm_operands.h"
#include "ops/cuda/kernels/quant_gemm.h"

namespace charonia::cuda {
namespace {

constexpr std::string_view kWhat = "a measurement of experts";
// Experts of a check, if there are as many: enough for tiles with every number of rows. Their weights are copies.
constexpr int kCheckedExperts = 8;
// The scale of inputs: of int8 codes, and of gated GEMMs in a check, so that values before the activation are small.
constexpr float kInputScale = 0x1p-7F;

// The index of kAverages for this number of rows; -1: wgmma is not a candidate.
int range_of(std::int64_t rows, int top_k, int experts) {
  constexpr auto& averages = ExpertKernels::kAverages;
  const auto average = rows * top_k / experts;
  if (average <= ExpertKernels::kStreamAverage) return -1;
  const auto at = std::ranges::lower_bound(averages, average) - averages.begin();
  return static_cast<int>(std::min<std::ptrdiff_t>(at, averages.size() - 1));
}

// The most rows up to max_rows of a step in this range; 0: there are none.
int rows_of_range(std::size_t range, int max_rows, int top_k, int experts) {
  const auto most = ((std::int64_t{ExpertKernels::kAverages.at(range)} + 1) * experts - 1) / top_k;
  const auto rows = std::min<std::int64_t>(max_rows, most);
  return range_of(rows, top_k, experts) == static_cast<int>(range) ? static_cast<int>(rows) : 0;
}

// Whether the input has a row per row of the step, otherwise one per place: each expert may have its own order of columns.
bool gathers(const ExpertGemm& gemm) { return gemm.gated && gemm.quant->order == nullptr; }

// Rows that are assigned to experts by logits, whose means differ by expert: so experts have different numbers of rows.
class Assigned {
 public:
  Assigned(Stream& stream, int rows, int experts, int top_k, int tile_rows)
      : space_({experts, top_k, kExpertVector, kExpertVector, DType::bf16}, rows), memory_(space_.bytes, kWhat) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> mean(static_cast<std::size_t>(experts)), logits;
    for (auto& one : mean) one = 0.7F * normal(random);
    for (int row = 0; row < rows; ++row) {
      for (const auto of_expert : mean) logits.push_back(of_expert + normal(random));
    }
    const DeviceMemory on_device(logits.size() * sizeof(float), kWhat);
    stream.upload(on_device.data(), logits.data(), on_device.bytes(), kWhat);
    route_ = route_params(space_, memory_.data(), experts, {.top_k = top_k}, tile_rows);
    route_.logits = on_device.as<float>();
    route_.stride = experts;
    route_rows(stream, route_);
    stream.wait(kWhat);
  }

  void set(ExpertGemm& gemm) const {
    gemm.rows_of = gathers(gemm) ? route_.rows_of : nullptr;
    gemm.tiles = route_.tiles;
    gemm.num_tiles = route_.num_tiles;
    gemm.tile_rows = route_.tile_rows;
  }

 private:
  ExpertsWorkspace space_;
  DeviceMemory memory_;
  RouteParams route_;
};

// Fills an input with repetitions of a block of normal numbers.
void fill_inputs(Stream& stream, DType type, const DeviceMemory& in) {
  constexpr std::size_t kNumbers = 65521;  // a prime, so that rows differ
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  std::vector<std::byte> block(kNumbers * sizeof(std::uint16_t));
  for (std::size_t i = 0; i < kNumbers; ++i) {
    const auto x = normal(random);
    const auto bits = type == DType::f16 ? float_to_f16(x) : float_to_bf16(x);
    std::memcpy(block.data() + i * sizeof bits, &bits, sizeof bits);
  }
  repeat(stream, in.as<std::byte>(), block, in.bytes());
}

// Scales of inputs; without memory, so null, if the kernels take none.
DeviceMemory make_scales(Stream& stream, bool wanted, std::int64_t rows) {
  if (!wanted) return {};
  const std::vector<float> scales(static_cast<std::size_t>(rows), kInputScale);
  DeviceMemory out(scales.size() * sizeof(float), kWhat);
  stream.upload(out.data(), scales.data(), out.bytes(), kWhat);
  return out;
}

ExpertGemm gemm_of(const CudaExperts& layer, bool down, ops::Activation activation) {
  auto gemm = down ? layer.down_gemm() : layer.gate_up_gemm();
  gemm.activation = activation;
  return gemm;
}

std::int64_t out_columns(const ExpertGemm& gemm) { return gemm.gated ? gemm.n / 2 : gemm.n; }

// A GEMM with the operands of one expert, for GemmOperands.
Gemm plain_gemm(const ExpertGemm& gemm, std::int64_t rows) {
  return {.out_type = gemm.type,
          .out_stride = gemm.n,
          .in_stride = gemm.in_stride,
          .weight = gemm.weight,
          .type = gemm.type,
          .weight_stride = round_up(gemm.k, kQuantK),
          .bias = gemm.bias,
          .rows = rows,
          .n = gemm.n,
          .k = gemm.k,
          .quant = gemm.quant};
}

}  // namespace

ExpertKernels::Shape ExpertKernels::shape_of(const CudaExperts& layer, int top_k) {
  return {layer.type(),
          layer.count(),
          top_k,
          layer.hidden(),
          layer.inter(),
          layer.gate_up_quant()->format,
          layer.down_quant()->format,
          layer.gate_up_bias() != nullptr,
          layer.down_bias() != nullptr,
          layer.gate_up_quant()->order != nullptr};
}

void ExpertKernels::add(std::vector<ExpertLayers>& all, const CudaExperts& layer, int top_k,
                        ops::Activation activation) {
  const auto shape = shape_of(layer, top_k);
  for (auto& one : all) {
    if (shape_of(*one.layers.front(), one.top_k) != shape) continue;
    if (std::ranges::find(one.layers, &layer) == one.layers.end()) one.layers.push_back(&layer);
    return;
  }
  all.push_back({{&layer}, top_k, activation});
}

ExpertKernels::Use ExpertKernels::use(const CudaExperts& layer, int top_k, std::int64_t rows) const {
  if (reproducible_ || !layer.gate_up_quant()) return {};
  if (asked_) return {*asked_, *asked_};
  if (chosen_.empty()) return {};
  const auto found = chosen_.find(shape_of(layer, top_k));
  const auto range = range_of(rows, top_k, layer.count());
  return found == chosen_.end() || range < 0 ? Use{} : found->second.at(static_cast<std::size_t>(range));
}

// The weights have whole numbers, so both kernels have the same sums (GemmOperands::lay_out_exact()). Experts have
// different numbers of rows, so tiles are full, or not. The launch in front multiplies other inputs.
bool ExpertKernels::agrees(Stream& stream, const Case& one) const {
  const auto& layer = *one.of->layers.front();
  auto gemm = gemm_of(layer, one.down, one.of->activation);
  auto experts = std::min(kCheckedExperts, layer.count());
  const auto rows_of = [&] { return std::int64_t{kAverages.at(one.range)} * experts; };
  const auto bytes = [&] { return GemmOperands::exact_bytes(plain_gemm(gemm, rows_of()), experts); };
  while (experts > 1 && bytes() > kGemmOperandBytes) --experts;
  const auto rows = rows_of();
  GemmOperands operands(bytes());
  const auto plain = operands.lay_out_exact(stream, plain_gemm(gemm, rows), experts);
  const bool scaled = gemm.gated || has_integer_inputs(gemm.quant->format);
  const auto scales = make_scales(stream, scaled, rows + 1);
  gemm.weight = plain.weight;
  gemm.bias = plain.bias;
  gemm.quant = plain.quant;
  gemm.quant->row_scales = scales.as<float>();
  const Assigned assigned(stream, static_cast<int>(rows), experts, 1, one.tile_rows);
  assigned.set(gemm);
  const auto issue = [&](const void* in, void* out, bool wgmma) {
    gemm.in = in;
    gemm.out = out;
    gemm.wgmma = wgmma;
    multiply_(stream, device_, gemm);
  };
  stream.fill_zero(plain.out, operands.out_bytes(), kWhat);
  stream.fill_zero(operands.counter(), sizeof(unsigned), kWhat);
  issue(plain.in, operands.second_out(), false);
  stream.wait("experts by the kernel for all devices");
  issue(GemmOperands::second_row(plain), plain.out, true);
  issue(plain.in, plain.out, true);
  const auto columns = out_columns(gemm);
  const float roundoff = gemm.type == DType::f16 ? 0x1p-11F : 0x1p-8F;
  count_different(stream, {plain.out, gemm.type, rows, columns, columns}, operands.second_out(), 4 * roundoff, 0x1p-20F,
                  operands.counter());
  unsigned different = 0;
  stream.download(&different, operands.counter(), sizeof different, kWhat);
  stream.wait(kWhat);
  return different == 0;
}

namespace {

std::size_t measured_bytes(const ExpertGemm& gemm, std::int64_t rows, std::int64_t places) {
  const auto elements = (gathers(gemm) ? rows : places) * gemm.in_stride + places * out_columns(gemm);
  return static_cast<std::size_t>(elements) * size_of(gemm.type);
}

}  // namespace

// The layers' own weights are multiplied in turn, so the weights of the next launch are not in the caches if the model
// is larger than them.
KernelTimes ExpertKernels::measure(Stream& stream, const Case& one, int rows) const {
  const auto& first = *one.of->layers.front();
  const int top_k = one.of->top_k;
  const auto shape = gemm_of(first, one.down, one.of->activation);
  const auto places = std::int64_t{rows} * top_k, in_rows = gathers(shape) ? rows : places;
  const Assigned assigned(stream, rows, first.count(), top_k, one.tile_rows);
  const auto in_bytes = static_cast<std::size_t>(in_rows * shape.in_stride) * size_of(shape.type);
  const DeviceMemory in(in_bytes, kWhat);
  const DeviceMemory out(static_cast<std::size_t>(places * out_columns(shape)) * size_of(shape.type), kWhat);
  const auto scales = make_scales(stream, has_integer_inputs(shape.quant->format), in_rows);
  fill_inputs(stream, shape.type, in);
  const auto bytes = static_cast<double>(quant_code_bytes(shape.quant->format, shape.n, shape.k)) * first.count();
  const double expected = 2 + bytes / 3e6 + 2.0 * static_cast<double>(places * shape.n) * static_cast<double>(shape.k) / 5e8;
  const auto time_of = [&](bool wgmma) {
    return choice_.timer()(stream, expected, [&](int index) {
      const auto& layer = *one.of->layers[static_cast<std::size_t>(index) % one.of->layers.size()];
      auto gemm = gemm_of(layer, one.down, one.of->activation);
      assigned.set(gemm);
      gemm.in = in.data();
      gemm.out = out.data();
      gemm.quant->row_scales = scales.as<float>();
      gemm.wgmma = wgmma;
      multiply_(stream, device_, gemm);
    });
  };
  KernelTimes times{.tiles = time_of(false)};
  times.wgmma = time_of(true);
  return times;
}

bool ExpertKernels::choose(Stream& stream, const Case& one, bool& wrong) {
  const auto& layer = *one.of->layers.front();
  const auto gemm = gemm_of(layer, one.down, one.of->activation);
  const int top_k = one.of->top_k, least = one.range == 0 ? kStreamAverage + 1 : kAverages.at(one.range - 1) + 1;
  const auto averages = one.range + 1 < kAverages.size() ? cat(least, " to ", kAverages.at(one.range), " rows each")
                                                         : cat(least, " rows or more each");
  int rows = one.rows;
  while (rows > 1 && measured_bytes(gemm, rows, std::int64_t{rows} * top_k) > kGemmOperandBytes) rows /= 2;
  return choice_.choose(
      stream,
      {.name = cat("experts, ", top_k, " of ", layer.count(), ", ", averages, ", ", one.down ? "down" : "gate and up",
                   " n ", gemm.n, " k ", gemm.k, " ", charonia::to_string(gemm.type), ", ",
                   ops::to_string(gemm.quant->format), gemm.bias != nullptr ? ", biases" : "",
                   gathers(gemm) || one.down ? "" : ", ordered columns"),
       .rows = rows,
       .agrees =
           [&] {
             const bool right = agrees(stream, one);
             wrong = !right;
             return right;
           },
       .measure = [&] { return std::optional(measure(stream, one, rows)); }});
}

void ExpertKernels::prepare(Stream& stream, std::span<const ExpertLayers> all, int max_rows, double seconds) {
  chosen_.clear();
  choice_.begin(seconds);
  if (reproducible_ || asked_ || !choice_.considers_wgmma() || !device_.wgmma) return;
  std::map<std::pair<const ExpertLayers*, bool>, bool> wrong;
  for (std::size_t range = 0; range < kAverages.size(); ++range) {  // few rows first, as in decode steps
    for (const auto& of : all) {
      const auto& layer = *of.layers.front();
      const auto gate_up = layer.gate_up_gemm(), down = layer.down_gemm();
      const int rows = rows_of_range(range, max_rows, of.top_k, layer.count());
      const int tile_rows =
          quant_expert_tile_rows(layer.type(), {gate_up.quant->format, gate_up.k}, {down.quant->format, down.k},
                                 std::int64_t{rows} * of.top_k, layer.count());
      if (rows == 0 || tile_rows <= kMinExpertTile) continue;  // few rows, or formats for the plain kernel
      auto& uses = chosen_[shape_of(layer, of.top_k)];
      for (const bool is_down : {false, true}) {
        auto& is_wrong = wrong[{&of, is_down}];
        if (is_wrong) continue;
        const auto member = is_down ? &Use::down : &Use::gate_up;
        uses.at(range).*member = choose(stream, {&of, is_down, range, rows, tile_rows}, is_wrong);
        if (!is_wrong) continue;
        for (auto& one : uses) one.*member = false;
      }
    }
  }
  choice_.end();
}

}  // namespace charonia::cuda
