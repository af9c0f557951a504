// GEMMs with a weight, by built-in kernels.
//
// Order of additions. K is divided into parts (split_k), the same for every GEMM of a weight. Each part is summed
// separately, from its first element to its last; the parts are added in order, then the bias. 16-bit types use tensor
// cores, with the weight as A operand and the input as B operand, always for the same 16 elements of K at a time. So
// all tactics of a weight that keep this order (SumOrder::fixed) give the same bits, and a row's bits do not depend on
// the number of rows or its position. Reproducible mode uses only these tactics. With SumOrder::any, a thread block
// sums its whole range of K, and only the sums of blocks that share a tile are added.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/dtype.h"
#include "ops/cuda/device/runtime.h"
#include "ops/cuda/device/host_device.h"
#include "ops/quant_weight.h"
#include "ops/tensor.h"

namespace charonia::cuda {

// Packed weights: blocks of 8 rows by 32 elements of K, 512 bytes of a 16-bit type, which is one read of a warp of the
// stream kernel. A block's rows are contiguous; then follow the blocks of the next elements of K, then the blocks of
// the next 8 rows: [n / 8][stride / 32][8][32]. Only built-in kernels read this layout; a library needs row-major
// weights.
inline constexpr int kPackedRows = 8, kPackedK = 32;
CHARONIA_HD std::int64_t packed_at(std::int64_t row, std::int64_t k, std::int64_t stride) {
  return row / kPackedRows * kPackedRows * stride + k / kPackedK * (kPackedRows * kPackedK) +
         row % kPackedRows * kPackedK + k % kPackedK;
}

// With an activation, out [rows, n / 2] = activation(first half) * second half; each half is first rounded to out's
// type. This gives the same bits as gated_activation() (rows.h) of the outputs. The stream and bulk kernels support it
// if out has the weight's type.
enum class Gate : std::uint8_t { none, silu, gelu_tanh };

// The parts of a quantised weight besides its codes (quant_layout.h, quant_gemm.h), in device memory.
struct QuantWeight {
  ops::QuantFormat format;
  const float* column_scales = nullptr;  // [n]: multiply codes in 8 bits (w8a8_gemm.h); null: see below
  const void* scales = nullptr;          // in the format's scale type
  const void* zeros = nullptr;           // null: no zeros
  const std::int32_t* order = nullptr;   // [k] the input feature of each column; null: ascending
  float input_scale = 0;                 // for i8_tensor and f8_tensor
  const float* row_scales = nullptr;     // [rows]: scales of prepared inputs; null: the outputs are not scaled
  bool prepared = false;                 // the inputs are prepared
};

// out [rows, n] = in [rows, k] * weight [n, k]^T + bias [n]. in and weight have the same type; out has this type or
// f32. Strides are in elements. weight rows are `weight_stride` apart (a multiple of 8, zero-filled beyond k), and the
// first is aligned to 16 bytes. Or the weight is packed: a 16-bit type, whole blocks, a stride that is a multiple of
// 32. Fastest if in and out and their strides are aligned to 16 bytes, and k is a multiple of 8.
struct Gemm {
  void* out = nullptr;
  DType out_type = DType::f32;
  std::int64_t out_stride = 0;
  const void* in = nullptr;
  std::int64_t in_stride = 0;
  const void* weight = nullptr;
  DType type = DType::bf16;
  std::int64_t weight_stride = 0;
  bool packed = false;
  bool ordered = false;         // only tactics that keep SumOrder::fixed, and no library
  const float* bias = nullptr;  // null: no bias
  std::int64_t rows = 0, n = 0, k = 0;
  // The rows that the memory of in and out has; 0: `rows`. A library may read and write this number of rows. The
  // contents of rows from `rows` on do not matter.
  std::int64_t row_capacity = 0;
  Gate gate = Gate::none;
  // Set if the weight is quantised: `weight` has codes, with a stride in columns that is a multiple of 64; type: the
  // type of in. Codes that are multiplied in 8 bits have the layout of 16-bit weights, with two codes per element; the
  // same applies to their prepared inputs, with a stride in bytes.
  std::optional<QuantWeight> quant{};
};

// Whether codes are multiplied in 8 bits.
inline bool is_w8a8(const Gemm& gemm) { return gemm.quant && gemm.quant->column_scales != nullptr; }

// Bytes of a weight in memory, or of the codes of a quantised weight.
std::size_t weight_bytes(const Gemm& gemm);

// Rows of the weight in memory.
inline std::int64_t weight_rows(const Gemm& gemm) { return gemm.packed ? round_up(gemm.n, kPackedRows) : gemm.n; }

// Whether the input can be read 16 bytes at a time.
bool vectors(const Gemm& gemm);

inline constexpr int kMaxKParts = 8;
inline constexpr int kKGrain = 64;  // part lengths are multiples of it; all kernels process K in chunks that divide it

// The parts of K: part i is [i * length, min((i + 1) * length, k)); none is empty.
struct KSplit {
  int parts = 1;
  std::int64_t length = 0;
};

// Enough parts to keep the memory busy with one row and few outputs, but none shorter than 256.
CHARONIA_HD KSplit split_k(std::int64_t k) {
  const std::int64_t wanted = k / 256 < 1 ? 1 : (k / 256 < kMaxKParts ? k / 256 : kMaxKParts);
  const std::int64_t length = round_up(divide_up(k, wanted), kKGrain);
  return {static_cast<int>(divide_up(k, length)), length};
}

// The parts of a GEMM; in pairs if its codes are multiplied in 8 bits.
inline KSplit split_of(const Gemm& gemm) { return split_k(is_w8a8(gemm) ? gemm.k / 2 : gemm.k); }

// A tactic: how the built-in kernels compute a GEMM.
//   stream: weights from memory into registers, a warp per part of K; up to 16 rows.
//   tile:   weights and input in stages of shared memory.
//   plain:  the same as tile in float.
//   bulk:   like stream, with weights through the TMA unit and shared memory. k_blocks thread blocks share all tiles
//           evenly. Compute capability 9, weights that are not packed.
//   wgmma:  quantised weights on compute capability 9.0 (quant_wgmma_kernel.h, w8a8_wgmma.cu). k_blocks thread blocks
//           share all tiles and their parts of K; with Sums::parts, each block computes whole tiles.
// If several thread blocks share a tile (k_blocks), their sums are combined
//   parts:   in the workspace, each part of K separately: the last block adds them.
//   blocks:  in the workspace, one sum per block.
//   cluster: in the shared memory of a cluster of blocks, one sum per block; every block stores a part of the tile.
//            Needs compute capability 9; k_blocks is a power of 2.
struct GemmTactic {
  enum class Kernel : std::uint8_t { stream, tile, plain, bulk, wgmma };
  enum class Sums : std::uint8_t { parts, blocks, cluster };
  Kernel kernel = Kernel::tile;
  int tile_rows = 0;     // rows of a thread block
  int tile_columns = 0;  // outputs of a warp (stream) or of a thread block
  int stages = 0;        // chunks of K in flight
  int k_blocks = 1;      // thread blocks that share the parts of K of a tile
  Sums sums = Sums::parts;
  bool operator==(const GemmTactic&) const = default;
};

// Whether the tactic's kernel supports gates.
inline bool supports_gates(const GemmTactic& tactic) {
  return tactic.kernel == GemmTactic::Kernel::stream || tactic.kernel == GemmTactic::Kernel::bulk;
}

// Whether no GPU has run the tactic's kernel yet. GemmRunner uses it only with CHARONIA_CUDA_UNPROVEN=1.
inline bool unproven(const GemmTactic& tactic) {
  return tactic.kernel == GemmTactic::Kernel::bulk || tactic.kernel == GemmTactic::Kernel::wgmma;
}

enum class SumOrder : std::uint8_t { fixed, any };

// The tactics for a GEMM with this number of rows, probably the best first; never empty. Each of them can compute a
// GEMM of any number of rows, if in, out and the strides have the same alignment. The first one is used where nothing
// is measured, so it must have run on a device. The others are used only after a measurement and a self-check.
std::vector<GemmTactic> gemm_tactics(const DeviceInfo& device, const Gemm& gemm, SumOrder order = SumOrder::fixed);

// Bytes of workspace that a tactic needs: for counters, and for sums of parts if several thread blocks share them.
std::size_t gemm_workspace_bytes(const GemmTactic& tactic, const Gemm& gemm);

// workspace: its first kGemmCounterBytes must be zero, and are zero again afterwards. All GEMMs of a stream share it.
inline constexpr std::size_t kGemmCounterBytes = std::size_t{16} << 10;
void gemm(Stream& stream, const DeviceInfo& device, const Gemm& gemm, const GemmTactic& tactic, void* workspace);

// out += bias, for GEMMs that a library computed.
void add_bias(Stream& stream, const Gemm& gemm);

// The tactic whose results others are compared with: a tile kernel whose sums stay in one block.
GemmTactic reference_tactic(const DeviceInfo& device, const Gemm& gemm);

// Adds to *different (device memory) the number of outputs in the first `columns` columns that differ from `reference`,
// which has the type of out, by more than rounding. The operands are those of GemmOperands::lay_out_exact(), so every
// kernel has the same sum S of products. The reference is S + b, rounded once; the bias b is at most kMaxCheckedBias. A
// library rounds S first, so it differs by at most u |S| + 2 u |S + b|, with the unit roundoff u of out's type. This is
// below 4 u |reference| + 2 u |b|. An activation in float adds less.
inline constexpr int kMaxCheckedBias = 3;
void count_different(Stream& stream, const Gemm& gemm, std::int64_t columns, const void* reference,
                     std::int64_t reference_stride, unsigned* different);
// The same for any outputs and a reference with their layout: by more than `relative` times the reference plus
// `absolute`.
void count_different(Stream& stream, const ops::Tensor& out, const void* reference, float relative, float absolute,
                     unsigned* different);

}  // namespace charonia::cuda
