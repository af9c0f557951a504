// Lists the tactics of a GEMM with a quantised weight, and launches one.
#include "ops/cuda/kernels/quant_gemm.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/kernels/quant_layout.h"
#include "ops/cuda/kernels/quant_params.h"

namespace charonia::cuda {
namespace {

using ops::Activations;
using ops::Code;
using Kernel = GemmTactic::Kernel;

// The tile kernel's shapes: up to 64 rows, for more rows, and for many rows; the last needs kLargeTileBytes of shared
// memory.
constexpr GemmTactic kSmallTile{Kernel::tile, 32, 64, 6}, kTile{Kernel::tile, 64, 64, 4},
    kLargeTile{Kernel::tile, 128, 128, 4};
constexpr std::size_t kLargeTileBytes = std::size_t{160} << 10;
constexpr int kStreamRows = 8, kPlainRows = 8, kPlainColumns = 32;
// For more rows, dequantised weights are probably faster.
constexpr std::int64_t kMaxWgmmaRows = 512;

// After this number of columns, the fast kernels multiply their sums by the scale.
int closing_columns(const ops::QuantFormat& format) {
  const bool halves = format.code == Code::f4_e2m1 || (format.code != Code::f8_e4m3 && format.group == kQuantK / 2);
  return halves ? kQuantK / 2 : kQuantK;
}

GemmTactic stream_tactic(const ops::QuantFormat& format, int rows, int columns) {
  const int ring = quant_stream_ring(ops::bits_of(format.code), closing_columns(format), columns / 16);
  return {Kernel::stream, rows, columns, ring, 1};
}

// The wgmma kernel's tile of 32, 64 or 128 rows (quant_wgmma_kernel.h).
GemmTactic wgmma_tactic(const ops::QuantFormat& format, int rows, std::int64_t blocks) {
  const bool large = rows == 32 || (rows == 64 && closing_columns(format) == kQuantK);
  return {Kernel::wgmma, rows, large ? 256 : 128, kWgmmaStages, static_cast<int>(blocks), GemmTactic::Sums::blocks};
}
void add_wgmma_tactics(std::vector<GemmTactic>& tactics, const DeviceInfo& device, const Gemm& gemm) {
  const auto add = [&](int rows) {
    auto tactic = wgmma_tactic(gemm.quant->format, rows, 1);
    const auto tiles = divide_up(gemm.rows, rows) * divide_up(gemm.n, tactic.tile_columns);
    for (const int blocks : wgmma_blocks(device, tiles, gemm.k)) {
      tactic.k_blocks = blocks;
      tactics.push_back(tactic);
    }
  };
  if (gemm.rows <= 2 * kStreamRows || gemm.rows > kMaxWgmmaRows) return;
  if (gemm.rows > 64 && closing_columns(gemm.quant->format) == kQuantK) add(128);
  add(gemm.rows <= 32 ? 32 : 64);
}

// The common parameters of GEMMs and of experts' GEMMs.
QuantParams quant_params(const QuantWeight& quant, std::int64_t k, const GemmParams& operands = {}) {
  const auto& format = quant.format;
  QuantParams p{};
  static_cast<GemmParams&>(p) = operands;
  p.scales = quant.scales;
  p.zeros = quant.zeros;
  p.row_scales = quant.row_scales;
  p.zero_pair = format.code == Code::u4 ? 0x0808U : 0;
  p.groups = static_cast<int>(quant_groups(format, k));
  p.group = static_cast<int>(format.group);
  p.group_shift = p.groups == 1 ? 31 : std::countr_zero(static_cast<unsigned>(p.group));
  p.scale_type = format.scale_type;
  p.k = static_cast<int>(k);
  p.weight_stride = static_cast<int>(round_up(k, kQuantK));
  return p;
}

bool launch_quant(Stream& stream, const DeviceInfo& device, QuantParams& p, const GemmTactic& tactic, DType type,
                  const ops::QuantFormat& format) {
  p.sms = device.sms;
  p.sm_shared_bytes = device.shared_bytes;
  if (tactic.kernel == Kernel::plain) return launch_quant_plain(stream, p, tactic, type, format.code);
  if (!is_fast(format, type, p.k)) return false;
  const int closes = closing_columns(format);
  return with_code(format.code, [&](auto code) {
    if (tactic.kernel == Kernel::wgmma) {
      return device.wgmma && launch_quant_wgmma<code()>(stream, p, tactic, type, closes);
    }
    return tactic.kernel == Kernel::tile ? launch_quant_tile<code()>(stream, p, tactic, type, closes)
                                         : launch_quant_stream<code()>(stream, p, tactic, type, closes);
  });
}

[[noreturn]] void refuse(const ops::QuantFormat& format, const GemmTactic& tactic) {
  throw Error(ErrorCode::internal,
              cat("no kernel for a GEMM with ", ops::to_string(format), " in tiles of ", tactic.tile_rows, " x ",
                  tactic.tile_columns, " with ", tactic.stages, " stages"));
}

}  // namespace

std::int64_t quant_groups(const ops::QuantFormat& format, std::int64_t k) {
  return format.group == k ? 1 : divide_up(round_up(k, kQuantK), format.group);
}

bool has_integer_inputs(const ops::QuantFormat& format) {
  return format.activations == Activations::i8_token || format.activations == Activations::i8_tensor;
}

bool is_fast(const ops::QuantFormat& format, DType type, std::int64_t k) {
  if (type == DType::f32) return false;
  return format.group == k ||
         (std::has_single_bit(static_cast<std::uint64_t>(format.group)) && format.group >= closing_columns(format));
}

bool needs_prepared_inputs(const Gemm& gemm) {
  const auto& quant = *gemm.quant;
  if (quant.prepared) return false;
  if (is_w8a8(gemm)) return true;
  return quant.order != nullptr || has_integer_inputs(quant.format) ||
         (is_fast(quant.format, gemm.type, gemm.k) && !vectors(gemm));
}

bool can_dequantise(const Gemm& gemm) {
  constexpr std::int64_t kVector = 8;  // columns of a lane that share one scale
  if (!gemm.quant || is_w8a8(gemm) || gemm.type == DType::f32) return false;
  const auto& format = gemm.quant->format;
  return !has_integer_inputs(format) && (format.group == gemm.k || format.group % kVector == 0);
}

void dequantise(Stream& stream, const Gemm& gemm, std::int64_t first_row, std::int64_t rows, void* out) {
  const auto& quant = *gemm.quant;
  const auto& format = quant.format;
  const auto groups = quant_groups(format, gemm.k);
  if (!can_dequantise(gemm) || first_row % kQuantRows != 0 || gemm.weight_stride != round_up(gemm.k, kQuantK) ||
      groups * round_up(gemm.n, kQuantRows) > std::numeric_limits<int>::max()) {
    throw Error(ErrorCode::internal, cat("no kernel dequantises ", ops::to_string(format), " of ", gemm.n, " x ",
                                         gemm.k, " from row ", first_row, " on"));
  }
  const auto at = [](const void* memory, std::size_t bytes) { return static_cast<const std::byte*>(memory) + bytes; };
  const auto scales = static_cast<std::size_t>(first_row * groups);  // before the first row's scales
  auto p = quant_params(quant, gemm.k);
  p.out = out;
  p.weight = at(gemm.weight, quant_code_bytes(format, first_row, gemm.k));
  p.scales = at(quant.scales, scales * size_of(format.scale_type));
  if (quant.zeros != nullptr) p.zeros = at(quant.zeros, scales);
  p.row_tiles = static_cast<int>(divide_up(rows, kQuantRows));
  if (groups > 1 && !std::has_single_bit(static_cast<std::uint64_t>(format.group))) p.group_shift = -1;
  launch_dequantise(stream, p, gemm.type, format.code);
}

std::vector<GemmTactic> quant_tactics(const DeviceInfo& device, const Gemm& gemm, SumOrder order) {
  const auto& format = gemm.quant->format;
  if (!is_fast(format, gemm.type, gemm.k)) return {{Kernel::plain, kPlainRows, kPlainColumns, 1, 1}};
  std::vector<GemmTactic> tactics;
  auto without_clusters = device;  // the sums of the blocks of a tile are combined in the workspace
  without_clusters.clusters = false;
  const auto tile = [&](const GemmTactic& one) { add_tile_tactics(tactics, one, without_clusters, gemm, order); };
  const auto rows = gemm.rows;
  if (rows <= kStreamRows) {
    tactics.push_back(stream_tactic(format, kStreamRows, 16));
    tactics.push_back(stream_tactic(format, kStreamRows, 32));
  } else if (rows <= 2 * kStreamRows) {
    tactics.push_back(stream_tactic(format, 2 * kStreamRows, 32));
  }
  if (rows > 128 && device.shared_bytes >= kLargeTileBytes && closing_columns(format) == kQuantK)
    tactics.push_back(kLargeTile);
  if (rows > kStreamRows && rows <= 64) tile(kSmallTile);
  if (rows > 32) tile(kTile);
  if (order == SumOrder::any && device.wgmma) add_wgmma_tactics(tactics, device, gemm);
  return tactics;
}

void quant_gemm(Stream& stream, const DeviceInfo& device, const Gemm& gemm, const GemmTactic& tactic, void* workspace) {
  constexpr std::int64_t kMax = std::numeric_limits<int>::max();
  const auto& quant = *gemm.quant;
  if (gemm.rows > kMax / 2 || gemm.n > kMax / 2 || gemm.k < 1 || gemm.k > kMax / 2 || gemm.in_stride > kMax ||
      gemm.weight_stride != round_up(gemm.k, kQuantK) || gemm.packed || gemm.gate != Gate::none ||
      needs_prepared_inputs(gemm) || (has_integer_inputs(quant.format) && quant.row_scales == nullptr) ||
      quant_groups(quant.format, gemm.k) * round_up(gemm.n, kQuantRows) > kMax ||
      (gemm.out_type != gemm.type && gemm.out_type != DType::f32)) {
    throw Error(ErrorCode::internal, cat("a GEMM of ", gemm.rows, " x ", gemm.k, " with ", gemm.n, " x ", gemm.k, ", ",
                                         ops::to_string(quant.format), " is not supported by any kernel"));
  }
  auto p = quant_params(quant, gemm.k, gemm_params(gemm, tactic, workspace));
  if (!launch_quant(stream, device, p, tactic, gemm.type, quant.format)) refuse(quant.format, tactic);
}

int quant_expert_tile_rows(DType type, const ExpertFormat& gate_up, const ExpertFormat& down, std::int64_t assignments,
                           int experts) {
  if (!is_fast(gate_up.format, type, gate_up.k) || !is_fast(down.format, type, down.k)) return kPlainRows;
  const auto average = assignments / experts;
  return average <= 4 ? kStreamRows : average <= 32 ? kSmallTile.tile_rows : kTile.tile_rows;
}

void multiply_quant_experts(Stream& stream, const DeviceInfo& device, const ExpertGemm& gemm) {
  const auto& quant = *gemm.quant;
  const auto split = split_k(gemm.k);
  auto p = quant_params(quant, gemm.k);
  p.in = gemm.in;
  p.rows_of = gemm.rows_of;
  p.weight = gemm.weight;
  p.out = gemm.out;
  p.tiles = gemm.tiles;
  p.expert_codes = static_cast<std::int64_t>(quant_code_bytes(quant.format, gemm.n, gemm.k));
  p.expert_scales = round_up(gemm.n, kQuantRows) * p.groups;
  p.in_stride = static_cast<int>(gemm.in_stride);
  p.out_stride = gemm.gated ? gemm.n / 2 : gemm.n;
  p.n = static_cast<int>(gemm.n);
  p.parts = split.parts;
  p.part_length = static_cast<int>(split.length);
  p.k_blocks = 1;
  p.parts_of_block = split.parts;
  p.row_tiles = gemm.num_tiles;
  p.gated = gemm.gated;
  p.activation = gemm.activation;
  p.expert_bias = gemm.bias;
  const auto tactic = !is_fast(quant.format, gemm.type, gemm.k)
                          ? GemmTactic{Kernel::plain, kPlainRows, kPlainColumns, 1}
                      : gemm.tile_rows == kStreamRows          ? stream_tactic(quant.format, kStreamRows, 16)
                      : gemm.wgmma && device.wgmma             ? wgmma_tactic(quant.format, gemm.tile_rows, 1)
                      : gemm.tile_rows == kSmallTile.tile_rows ? kSmallTile
                                                               : kTile;
  p.column_tiles = static_cast<int>(divide_up(gemm.n, tactic.tile_columns));
  if (!launch_quant(stream, device, p, tactic, gemm.type, quant.format)) refuse(quant.format, tactic);
}

std::size_t quant_code_bytes(const ops::QuantFormat& format, std::int64_t n, std::int64_t k) {
  return static_cast<std::size_t>(round_up(n, kQuantRows) * round_up(k, kQuantK) * ops::bits_of(format.code) / 8);
}

}  // namespace charonia::cuda
