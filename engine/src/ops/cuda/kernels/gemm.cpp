// Lists the tactics of a GEMM, and launches one.
#include "ops/cuda/kernels/gemm.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/kernels/gemm_params.h"
#include "ops/cuda/kernels/quant_gemm.h"
#include "ops/cuda/kernels/w8a8_gemm.h"

namespace charonia::cuda {
namespace {

using Kernel = GemmTactic::Kernel;
using Sums = GemmTactic::Sums;
constexpr std::int64_t kMaxSharedTiles = kGemmCounterBytes / sizeof(int);

std::int64_t tiles(const GemmTactic& tactic, const Gemm& gemm) {
  return divide_up(gemm.rows, tactic.tile_rows) * divide_up(gemm.n, tactic.tile_columns);
}

// Number of thread blocks that share the parts of K of a tile. There are counters only for a limited number of tiles.
std::int64_t k_blocks(const GemmTactic& tactic, const Gemm& gemm) {
  const auto parts = split_of(gemm).parts;
  if (tactic.k_blocks <= 1 || tiles(tactic, gemm) > kMaxSharedTiles) return 1;
  return divide_up(parts, divide_up(parts, tactic.k_blocks));
}

// Number of sums that are combined for each tile: of parts, or of blocks.
std::int64_t sums_of_tile(const GemmTactic& tactic, const Gemm& gemm) {
  return tactic.sums == Sums::parts ? split_of(gemm).parts : k_blocks(tactic, gemm);
}

}  // namespace

void add_tile_tactics(std::vector<GemmTactic>& tactics, GemmTactic tactic, const DeviceInfo& device, const Gemm& gemm,
                      SumOrder order) {
  const auto parts = split_of(gemm).parts;
  const auto count = tiles(tactic, gemm);
  std::vector<GemmTactic> found;
  for (int blocks = 1; blocks <= parts; blocks *= 2) {
    tactic.k_blocks = blocks;
    tactic.k_blocks = static_cast<int>(k_blocks(tactic, gemm));
    if (blocks > 1 && count * blocks / 2 >= 2 * device.sms) break;
    const bool of_parts = tactic.k_blocks == 1 || tactic.k_blocks == parts;
    if (!found.empty() && found.back().k_blocks == tactic.k_blocks) continue;
    tactic.sums = of_parts || order == SumOrder::fixed ? Sums::parts : Sums::blocks;
    found.push_back(tactic);
    const auto size = static_cast<unsigned>(tactic.k_blocks);
    if (size > 1 && std::has_single_bit(size) && device.clusters && (of_parts || order == SumOrder::any)) {
      tactic.sums = Sums::cluster;
      found.push_back(tactic);
    }
  }
  std::ranges::stable_sort(found, {}, [&](const GemmTactic& one) {
    const auto blocks = count * one.k_blocks;
    return blocks >= device.sms ? blocks : std::numeric_limits<std::int64_t>::max() - blocks;
  });
  tactics.insert(tactics.end(), found.begin(), found.end());
}

std::vector<int> wgmma_blocks(const DeviceInfo& device, std::int64_t tiles, std::int64_t k) {
  constexpr std::int64_t kMinGrains = 4;  // of a thread block
  constexpr auto kMaxBlocks = static_cast<std::int64_t>(kGemmCounterBytes / sizeof(int)) / kWgmmaWarps;
  const auto at_once = std::min<std::int64_t>(device.sms, kMaxBlocks), waves = divide_up(tiles, at_once);
  const auto most = std::clamp<std::int64_t>(tiles * divide_up(k, kKGrain) / kMinGrains, 1, at_once);
  std::vector<int> out;
  for (const int parts : {1, 2, 4}) {
    const auto blocks = tiles / waves * parts;
    if (tiles % waves != 0 || blocks >= most) break;
    out.push_back(static_cast<int>(blocks));
  }
  out.push_back(static_cast<int>(most));
  return out;
}

GemmParams gemm_params(const Gemm& gemm, const GemmTactic& tactic, void* workspace) {
  GemmParams p{};
  p.out = gemm.out;
  p.in = gemm.in;
  p.weight = gemm.weight;
  p.bias = gemm.bias;
  p.counters = static_cast<int*>(workspace);
  p.sums = reinterpret_cast<float*>(static_cast<unsigned char*>(workspace) + kGemmCounterBytes);
  p.out_stride = gemm.out_stride;
  p.in_stride = static_cast<int>(gemm.in_stride);
  p.weight_stride = static_cast<int>(gemm.weight_stride);
  p.rows = static_cast<int>(gemm.rows);
  p.n = static_cast<int>(gemm.n);
  p.k = static_cast<int>(gemm.k);
  p.packed = gemm.packed;
  p.gate = gemm.gate;
  p.out_f32 = gemm.out_type == DType::f32;
  p.out_vectors = aligned(gemm.out, gemm.out_stride, gemm.out_type);
  const auto split = split_of(gemm);
  p.parts = split.parts;
  p.part_length = static_cast<int>(split.length);
  p.k_blocks = static_cast<int>(k_blocks(tactic, gemm));
  p.parts_of_block = static_cast<int>(divide_up(split.parts, p.k_blocks));
  p.cluster = tactic.sums == Sums::cluster && p.k_blocks > 1;
  if (tactic.sums != Sums::parts && p.k_blocks > 1) {  // all parts of a block form one part
    p.part_length *= p.parts_of_block;
    p.parts = p.k_blocks;
    p.parts_of_block = 1;
  }
  p.row_tiles = static_cast<int>(divide_up(gemm.rows, tactic.tile_rows));
  p.column_tiles = static_cast<int>(divide_up(gemm.n, tactic.tile_columns));
  return p;
}

bool vectors(const Gemm& gemm) { return aligned(gemm.in, gemm.in_stride, gemm.type) && gemm.k % 8 == 0; }

std::size_t weight_bytes(const Gemm& gemm) {
  if (is_w8a8(gemm)) return static_cast<std::size_t>(weight_rows(gemm) * gemm.weight_stride);
  if (gemm.quant) return quant_code_bytes(gemm.quant->format, gemm.n, gemm.k);
  return static_cast<std::size_t>(weight_rows(gemm) * gemm.weight_stride) * size_of(gemm.type);
}

std::vector<GemmTactic> gemm_tactics(const DeviceInfo& device, const Gemm& gemm, SumOrder order) {
  if (is_w8a8(gemm)) return w8a8_tactics(device, gemm, order);
  if (gemm.quant) return quant_tactics(device, gemm, order);
  std::vector<GemmTactic> tactics;
  const auto rows = gemm.rows;
  const auto tile = [&](int tile_rows, int columns, int stages) {
    const auto bytes = static_cast<std::size_t>(stages) * static_cast<std::size_t>(columns + tile_rows) * 128;
    if (bytes <= device.shared_bytes)
      add_tile_tactics(tactics, {Kernel::tile, tile_rows, columns, stages, 1}, device, gemm, order);
  };
  if (gemm.type == DType::f32) {
    add_tile_tactics(tactics, {Kernel::plain, rows <= 16 ? 8 : 64, 64, 3, 1}, device, gemm, order);
    return tactics;
  }
  if (!vectors(gemm)) {
    tile(32, 64, 6);
    return tactics;
  }
  if (rows <= 4) {
    tactics.push_back({Kernel::stream, 8, 16, 4, 1});
    tactics.push_back({Kernel::stream, 8, 16, 8, 1});
    tactics.push_back({Kernel::stream, 8, 32, 4, 1});
  } else if (rows <= 8) {
    tactics.push_back({Kernel::stream, 8, 32, 4, 1});
    tactics.push_back({Kernel::stream, 8, 16, 4, 1});
    tactics.push_back({Kernel::stream, 8, 16, 8, 1});
  } else if (rows <= 16) {
    tactics.push_back({Kernel::stream, 16, 32, 4, 1});
    tactics.push_back({Kernel::stream, 16, 16, 4, 1});
  }
  if (rows > 2 && rows <= 16) tile(16, 64, 6);
  if (rows > 256) tile(128, 128, device.shared_bytes >= (std::size_t{128} << 10) ? 4 : 3);
  if (rows > 32) tile(64, 128, 4);
  if (rows > 64 && rows <= 256) tile(128, 128, device.shared_bytes >= (std::size_t{128} << 10) ? 4 : 3);
  if (rows > 8 && rows <= 64) tile(32, 128, device.shared_bytes >= (std::size_t{100} << 10) ? 5 : 4);
  if (rows > 16 && rows <= 128) tile(32, 64, 6);
  const auto bulk = bulk_tactics(device, gemm);
  tactics.insert(tactics.end(), bulk.begin(), bulk.end());
  return tactics;
}

GemmTactic reference_tactic(const DeviceInfo& device, const Gemm& gemm) {
  auto wide = gemm;
  wide.gate = Gate::none;
  wide.rows = std::max<std::int64_t>(gemm.rows, 24);  // more than stream kernels take
  const auto tactics = gemm_tactics(device, wide, SumOrder::fixed);
  const auto found = std::ranges::find_if(tactics, [](const GemmTactic& one) {
    return one.k_blocks == 1 && (one.kernel == Kernel::tile || one.kernel == Kernel::plain);
  });
  return found == tactics.end() ? tactics.front() : *found;
}

std::size_t gemm_workspace_bytes(const GemmTactic& tactic, const Gemm& gemm) {
  if (tactic.kernel == Kernel::bulk) {  // a tile for each block
    const auto sums = tactic.k_blocks * split_of(gemm).parts * tactic.tile_rows * tactic.tile_columns;
    return kGemmCounterBytes + static_cast<std::size_t>(sums) * sizeof(float);
  }
  if (tactic.kernel == Kernel::wgmma) {  // a block has sums of at most two tiles that it shares
    if (tactic.sums == Sums::parts) return kGemmCounterBytes;
    const auto sums = std::int64_t{2} * tactic.k_blocks * tactic.tile_rows * tactic.tile_columns;
    return kGemmCounterBytes + static_cast<std::size_t>(sums) * sizeof(float);
  }
  if (k_blocks(tactic, gemm) == 1 || tactic.sums == Sums::cluster) return kGemmCounterBytes;
  const auto sums = tiles(tactic, gemm) * sums_of_tile(tactic, gemm) * tactic.tile_rows * tactic.tile_columns;
  return kGemmCounterBytes + static_cast<std::size_t>(sums) * sizeof(float);
}

void gemm(Stream& stream, const DeviceInfo& device, const Gemm& gemm, const GemmTactic& tactic, void* workspace) {
  constexpr std::int64_t kMax = std::numeric_limits<int>::max();
  if (gemm.rows == 0 || gemm.n == 0) return;
  if (is_w8a8(gemm)) return w8a8_gemm(stream, gemm, tactic, workspace);
  if (gemm.quant) return quant_gemm(stream, device, gemm, tactic, workspace);
  if (gemm.rows > kMax / 2 || gemm.n > kMax / 2 || gemm.k < 1 || gemm.k > kMax / 2 || gemm.in_stride > kMax ||
      gemm.weight_stride > kMax || gemm.weight_stride % (gemm.packed ? kPackedK : 8) != 0 ||
      (gemm.packed && gemm.type == DType::f32) ||
      (gemm.gate != Gate::none && (!supports_gates(tactic) || gemm.out_type != gemm.type || gemm.n % 2 != 0)) ||
      (gemm.out_type != gemm.type && gemm.out_type != DType::f32)) {
    throw Error(ErrorCode::internal, cat("a GEMM of ", gemm.rows, " x ", gemm.k, " with ", gemm.n, " x ", gemm.k,
                                         " (stride ", gemm.weight_stride, gemm.packed ? ", packed" : "",
                                         gemm.gate != Gate::none ? ", gated" : "", ") is not supported by any kernel"));
  }
  const auto p = gemm_params(gemm, tactic, workspace);
  bool known = false;
  switch (tactic.kernel) {
    case Kernel::stream:
      known = gemm.type != DType::f32 && vectors(gemm) && launch_stream(stream, p, tactic, gemm.type);
      break;
    case Kernel::bulk:
      known = gemm.type != DType::f32 && vectors(gemm) && launch_bulk(stream, p, tactic, gemm.type);
      break;
    case Kernel::tile:
      known = gemm.type == DType::bf16  ? launch_tile_bf16(stream, p, tactic, vectors(gemm))
              : gemm.type == DType::f16 ? launch_tile_f16(stream, p, tactic, vectors(gemm))
                                        : false;
      break;
    case Kernel::wgmma:
      break;
    case Kernel::plain:
      known = gemm.type == DType::f32 && launch_plain(stream, p, tactic, vectors(gemm));
      break;
  }
  if (!known) {
    throw Error(ErrorCode::internal, cat("no kernel for a GEMM in tiles of ", tactic.tile_rows, " x ",
                                         tactic.tile_columns, " with ", tactic.stages, " stages"));
  }
}

}  // namespace charonia::cuda
