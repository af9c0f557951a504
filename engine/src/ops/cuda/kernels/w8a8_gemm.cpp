// Lists the tactics of a GEMM of 8-bit numbers, and launches one.
#include "ops/cuda/kernels/w8a8_gemm.h"

#include <limits>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/kernels/w8a8_params.h"

namespace charonia::cuda {
namespace {

using Kernel = GemmTactic::Kernel;
using ops::Activations;
using ops::Code;

constexpr std::int64_t kVector = 16;                          // codes that are read together
constexpr std::int64_t kMostColumns = std::int64_t{1} << 17;  // for int8: 128 * 127 times this number is less than 2^31

constexpr GemmTactic kSmallTile{Kernel::tile, 32, 64, 6}, kTile{Kernel::tile, 64, 128, 4},
    kLargeTile{Kernel::tile, 128, 128, 3};
// Those of w8a8_wgmma.cu.
constexpr GemmTactic kSmallWgmma{Kernel::wgmma, 64, 256, 5}, kWgmma{Kernel::wgmma, 128, 128, 6},
    kLargeWgmma{Kernel::wgmma, 128, 256, 4};

// Whole tiles first, then tiles that several numbers of thread blocks share; not the largest tile.
void add_wgmma_tactics(std::vector<GemmTactic>& tactics, GemmTactic tactic, const DeviceInfo& device,
                       const Gemm& gemm) {
  const auto tiles = divide_up(gemm.rows, tactic.tile_rows) * divide_up(gemm.n, tactic.tile_columns);
  const bool shares = tactic != kLargeWgmma;
  tactic.k_blocks = device.sms;
  tactics.push_back(tactic);
  if (!shares) return;
  tactic.sums = GemmTactic::Sums::blocks;
  for (const int blocks : wgmma_blocks(device, tiles, gemm.k / 2)) {
    if (tiles % blocks == 0) continue;  // the same as whole tiles
    tactic.k_blocks = blocks;
    tactics.push_back(tactic);
  }
}

}  // namespace

bool is_w8a8(const ops::QuantFormat& format, DType type, std::int64_t k, const DeviceInfo& device) {
  if (format.group != k || format.zeros || k % kVector != 0) return false;
  switch (format.activations) {
    case Activations::i8_token:
    case Activations::i8_tensor:
      return format.code == Code::i8 && k <= kMostColumns;
    case Activations::f8_token:
    case Activations::f8_tensor:
      return format.code == Code::f8_e4m3 && device.fp8 && type != DType::f32;
    case Activations::as_is:
      break;
  }
  return false;
}

std::vector<GemmTactic> w8a8_tactics(const DeviceInfo& device, const Gemm& gemm, SumOrder order) {
  std::vector<GemmTactic> tactics;
  const auto tile = [&](const GemmTactic& one) { add_tile_tactics(tactics, one, device, gemm, order); };
  const auto rows = gemm.rows;
  const bool integers = gemm.quant->format.code == Code::i8;
  if (rows <= 8) {
    tactics.push_back({Kernel::stream, 8, 16, 4, 1});
    if (integers) tactics.push_back({Kernel::stream, 8, 32, 4, 1});
  } else if (rows <= 16) {
    tactics.push_back({Kernel::stream, 16, integers ? 32 : 16, 4, 1});
  }
  if (integers && rows > 256) tile(kLargeTile);
  if (rows > 32) tile(kTile);
  if (integers && rows > 64 && rows <= 256) tile(kLargeTile);
  if (rows > 4 && rows <= 64) tile(kSmallTile);
  if (integers && device.wgmma && rows > 16) {
    const auto wgmma = [&](const GemmTactic& one) { add_wgmma_tactics(tactics, one, device, gemm); };
    if (rows <= 64) wgmma(kSmallWgmma);
    if (rows > 64) wgmma(kWgmma);
    if (rows > 128) wgmma(kLargeWgmma);
  }
  return tactics;
}

void w8a8_gemm(Stream& stream, const Gemm& gemm, const GemmTactic& tactic, void* workspace) {
  constexpr std::int64_t kMax = std::numeric_limits<int>::max();
  const auto& quant = *gemm.quant;
  if (gemm.rows > kMax / 2 || gemm.n > kMax / 2 || gemm.k < 1 || gemm.k > kMax / 2 || gemm.k % kVector != 0 ||
      gemm.weight_stride > kMax || gemm.weight_stride % (gemm.packed ? 2 * kPackedK : kVector) != 0 ||
      !quant.prepared || quant.row_scales == nullptr || gemm.in_stride > kMax ||
      !aligned(gemm.in, gemm.in_stride, DType::i8) || gemm.gate != Gate::none ||
      (gemm.out_type != gemm.type && gemm.out_type != DType::f32)) {
    throw Error(ErrorCode::internal, cat("a GEMM of ", gemm.rows, " x ", gemm.k, " with ", gemm.n, " x ", gemm.k, ", ",
                                         ops::to_string(quant.format), ", in 8 bits, is not supported by any kernel"));
  }
  PairParams p{};
  static_cast<GemmParams&>(p) = gemm_params(gemm, tactic, workspace);
  p.in_stride /= 2;  // in pairs
  p.weight_stride /= 2;
  p.k /= 2;
  p.out_f16 = gemm.out_type == DType::f16;
  p.column_scales = quant.column_scales;
  p.row_scales = quant.row_scales;
  const auto code = quant.format.code;
  bool known = false;
  if (tactic.kernel == Kernel::stream) {
    known = launch_w8a8_stream(stream, p, tactic, code);
  } else if (tactic.kernel == Kernel::wgmma) {
    known = code == Code::i8 && launch_w8a8_wgmma(stream, p, tactic);
  } else if (tactic.kernel == Kernel::tile) {
    known = code == Code::i8 ? launch_w8a8_tile_i8(stream, p, tactic) : launch_w8a8_tile_f8(stream, p, tactic);
  }
  if (!known) {
    throw Error(ErrorCode::internal, cat("no kernel for a GEMM of 8-bit numbers in tiles of ", tactic.tile_rows, " x ",
                                         tactic.tile_columns, " with ", tactic.stages, " stages"));
  }
}

}  // namespace charonia::cuda
