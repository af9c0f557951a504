#include "ops/cuda/expert_kernels.h"

#include <algorithm>
#include <cstring>
#include <limits>
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
// A check has this many experts or more, if there are as many, so that tiles have different numbers of rows.
constexpr int kCheckedExperts = 8;
// It has as many that an SM computes about this number of tiles one after the other.
constexpr std::int64_t kCheckedWaves = 3;
constexpr std::int64_t kTileColumns = 256;  // of the largest tiles

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
      : space_(space_for(rows, experts, top_k)), memory_(space_.bytes, kWhat) {
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

  static std::size_t bytes(std::int64_t rows, int experts, int top_k) {
    return space_for(rows, experts, top_k).bytes + static_cast<std::size_t>(rows * experts) * sizeof(float);
  }

 private:
  static ExpertsWorkspace space_for(std::int64_t rows, int experts, int top_k) {
    return {{experts, top_k, kExpertVector, kExpertVector, DType::bf16}, rows};
  }

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

// Scales of inputs: of int8 codes, and of gated GEMMs in a check, so that values before the activation are small. Without
// memory, so null, if the kernels take none.
DeviceMemory make_scales(Stream& stream, bool wanted, std::int64_t rows) {
  if (!wanted) return {};
  const auto scales = measured_scales(static_cast<std::size_t>(rows));
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
  if (reproducible_ || !device_.wgmma || !layer.gate_up_quant()) return {};
  if (asked_) return {*asked_, *asked_};
  if (chosen_.empty()) return {};
  const auto found = chosen_.find(shape_of(layer, top_k));
  const auto range = range_of(rows, top_k, layer.count());
  return found == chosen_.end() || range < 0 ? Use{} : found->second.at(static_cast<std::size_t>(range));
}

// The weights are copies, of whole numbers, so both kernels have the same sums (GemmOperands::lay_out_exact()). Experts
// have different numbers of rows, so tiles are full, or not. The launch in front multiplies other inputs.
bool ExpertKernels::agrees(Stream& stream, const Case& one) const {
  const auto& layer = *one.of->layers.front();
  auto gemm = gemm_of(layer, one.down, one.of->activation);
  const std::int64_t average = kAverages.at(one.range);
  const auto blocks = std::max<std::int64_t>(1, average / one.tile_rows) * divide_up(gemm.n, kTileColumns);
  const auto wanted = std::max<std::int64_t>(kCheckedExperts, divide_up(kCheckedWaves * device_.sms, blocks));
  auto experts = static_cast<int>(std::min<std::int64_t>(wanted, layer.count()));
  const auto operand_bytes = [&] { return GemmOperands::exact_bytes(plain_gemm(gemm, average * experts), experts); };
  const auto others = [&] {
    return Assigned::bytes(average * experts, experts, 1) + static_cast<std::size_t>(average * experts + 1) * sizeof(float);
  };
  while (experts > 1 && operand_bytes() + others() > kGemmOperandBytes) --experts;
  const auto rows = average * experts;
  GemmOperands operands(operand_bytes());
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

std::size_t measured_bytes(const ExpertGemm& gemm, std::int64_t rows, int experts, int top_k) {
  const auto places = rows * top_k, in_rows = gathers(gemm) ? rows : places;
  const auto elements = in_rows * gemm.in_stride + places * out_columns(gemm);
  return static_cast<std::size_t>(elements) * size_of(gemm.type) + Assigned::bytes(rows, experts, top_k) +
         static_cast<std::size_t>(in_rows) * sizeof(float);
}

}  // namespace

// The layers' own weights are multiplied in turn, so the weights of the next launch are not in the caches if the model
// is larger than them.
KernelTimes ExpertKernels::measure(Stream& stream, const Case& one) const {
  const auto& first = *one.of->layers.front();
  const int top_k = one.of->top_k, rows = one.rows;
  const auto shape = gemm_of(first, one.down, one.of->activation);
  const auto places = std::int64_t{rows} * top_k, in_rows = gathers(shape) ? rows : places;
  const Assigned assigned(stream, rows, first.count(), top_k, one.tile_rows);
  const auto in_bytes = static_cast<std::size_t>(in_rows * shape.in_stride) * size_of(shape.type);
  const DeviceMemory in(in_bytes, kWhat);
  const DeviceMemory out(static_cast<std::size_t>(places * out_columns(shape)) * size_of(shape.type), kWhat);
  const auto scales = make_scales(stream, has_integer_inputs(shape.quant->format), in_rows);
  fill_inputs(stream, shape.type, in);
  const auto bytes = static_cast<double>(quant_code_bytes(shape.quant->format, shape.n, shape.k)) * first.count();
  const double operations = 2.0 * static_cast<double>(places * shape.n) * static_cast<double>(shape.k);
  const double expected = 2 + bytes / 3e6 + operations / 5e8;
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
  KernelTimes times{.usual = time_of(false)};
  times.candidate = time_of(true);
  return times;
}

std::string ExpertKernels::name_of(const ExpertLayers& of, bool down, const std::string& averages) {
  const auto& layer = *of.layers.front();
  const auto gemm = gemm_of(layer, down, of.activation);
  return cat("experts, ", of.top_k, " of ", layer.count(), ", ", averages, down ? "down" : "gate and up", " n ", gemm.n,
             " k ", gemm.k, " ", charonia::to_string(gemm.type), ", ", ops::to_string(gemm.quant->format),
             gemm.bias != nullptr ? ", biases" : "", gathers(gemm) || down ? "" : ", ordered columns");
}

// For each range of averages that steps of up to max_rows can have; none for formats of the plain kernel.
std::vector<ExpertKernels::Case> ExpertKernels::cases_of(const ExpertLayers& of, bool down, int max_rows) {
  const auto& layer = *of.layers.front();
  const auto gate_up = layer.gate_up_gemm(), of_down = layer.down_gemm();
  std::vector<Case> cases;
  for (std::size_t range = 0; range < kAverages.size(); ++range) {
    int rows = rows_of_range(range, max_rows, of.top_k, layer.count());
    const int tile_rows =
        quant_expert_tile_rows(layer.type(), {gate_up.quant->format, gate_up.k}, {of_down.quant->format, of_down.k},
                               std::int64_t{rows} * of.top_k, layer.count());
    if (rows == 0 || tile_rows <= kMinExpertTile) continue;
    const auto gemm = gemm_of(layer, down, of.activation);
    while (rows > 1 && measured_bytes(gemm, rows, layer.count(), of.top_k) > kGemmOperandBytes) rows /= 2;
    cases.push_back({&of, down, range, rows, tile_rows});
  }
  return cases;
}

KernelChoice::Computation ExpertKernels::computation(Stream& stream, const Case& one) const {
  const int least = one.range == 0 ? kStreamAverage + 1 : kAverages.at(one.range - 1) + 1;
  return {.name = name_of(*one.of, one.down,
                          one.range + 1 < kAverages.size() ? cat(least, " to ", kAverages.at(one.range), " rows each, ")
                                                           : cat(least, " rows or more each, ")),
          .rows = one.rows,
          .agrees = [this, &stream, one] { return agrees(stream, one); },
          .measure = [this, &stream, one] { return std::optional(measure(stream, one)); }};
}

// Without a comparison: wgmma is asked for, or the device does not have it.
void ExpertKernels::report_asked(Stream& stream, const ExpertLayers& of) {
  const char* const lacks = device_.wgmma ? "" : "it needs compute capability 9.0, and an engine that is compiled for 90a";
  for (const bool down : {false, true}) {
    const bool fast = !cases_of(of, down, std::numeric_limits<int>::max()).empty();
    choice_.choose(stream, {{.name = name_of(of, down, ""),
                             .unsupported = *lacks != '\0' || fast ? lacks : "it does not support the format"}});
  }
}

void ExpertKernels::prepare(Stream& stream, std::span<const ExpertLayers> all, int max_rows, double seconds) {
  chosen_.clear();
  choice_.begin(seconds);
  if (reproducible_ || !choice_.considers_candidates()) return;
  std::vector<std::vector<Case>> cases;  // of each GEMM; few rows first, as in decode steps
  std::vector<KernelChoice::Sizes> gemms;
  for (const auto& of : all) {
    if (asked_ || !device_.wgmma) {
      report_asked(stream, of);
      continue;
    }
    for (const bool down : {false, true}) {
      auto& sizes = gemms.emplace_back();
      for (const auto& one : cases.emplace_back(cases_of(of, down, max_rows))) {
        sizes.push_back(computation(stream, one));
      }
    }
  }
  const auto wgmma = choice_.choose_all(stream, gemms);
  for (std::size_t gemm = 0; gemm < cases.size(); ++gemm) {
    for (std::size_t i = 0; i < cases[gemm].size(); ++i) {
      const auto& one = cases[gemm][i];
      auto& use = chosen_[shape_of(*one.of->layers.front(), one.of->top_k)].at(one.range);
      (one.down ? use.down : use.gate_up) = wgmma[gemm][i];
    }
  }
  choice_.end();
}

}  // namespace charonia::cuda
