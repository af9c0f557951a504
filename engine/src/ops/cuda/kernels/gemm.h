// GEMMs with a weight, by our own kernels.
//
// Order of adding. K is cut into parts (split_k), the same for every GEMM of a weight. A part is added up on its
// own, from its first element to its last, and the parts are added in their order, then the bias. 16-bit types go over
// tensor cores, which take the weight as their A and the input as their B operand, always 16 elements of K at a time,
// the same 16. So all tactics of a weight that keep this order (SumOrder::fixed) give the same bits, and a row's bits
// do not depend on the number of rows or on its place. Reproducible mode takes no others. With SumOrder::any a thread
// block adds up all of K that it has, and only the sums of blocks that share a tile are added together.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/dtype.h"
#include "ops/cuda/device/runtime.h"
#include "ops/cuda/emulated/host_device.h"
#include "ops/quant_weight.h"

namespace charonia::cuda {

// Packed weights: blocks of 8 rows by 32 elements of K, 512 bytes of a 16-bit type, which is what a warp of the stream
// kernel reads at once. A block's rows lie one after the other, then come the blocks of the next elements of K, then
// those of the next 8 rows: [n / 8][stride / 32][8][32]. Only our own kernels read this; a library wants rows.
inline constexpr int kPackedRows = 8, kPackedK = 32;
CHARONIA_HD std::int64_t packed_at(std::int64_t row, std::int64_t k, std::int64_t stride) {
  return row / kPackedRows * kPackedRows * stride + k / kPackedK * (kPackedRows * kPackedK) +
         row % kPackedRows * kPackedK + k % kPackedK;
}

// What becomes of the outputs: with an activation, out [rows, n / 2] = activation(first half) * second half, each half
// rounded to out's type before, as gated_activation() (rows.h) has it from the outputs: with its bits. The stream
// kernel does that, where out has the weight's type.
enum class Gate : std::uint8_t { none, silu, gelu_tanh };

// What a quantised weight has beside its codes (quant_layout.h, quant_gemm.h). Device memory.
struct QuantWeight {
  ops::QuantFormat format;
  const float* column_scales = nullptr;  // [n]: codes are multiplied in 8 bits (w8a8_gemm.h); null: what follows holds
  const void* scales = nullptr;          // of the format's scale type
  const void* zeros = nullptr;           // null: none
  const std::int32_t* order = nullptr;   // [k] the input feature of each column; null: in order
  float input_scale = 0;                 // of i8_tensor and f8_tensor
  const float* row_scales = nullptr;     // [rows]: the inputs were prepared, and are to be multiplied by it; null: not
  bool prepared = false;                 // the inputs were
};

// out [rows, n] = in [rows, k] * weight [n, k]^T + bias [n]. in and weight have the same type; out that type or f32.
// Strides in elements. weight rows are `weight_stride` apart (a multiple of 8, zero-filled beyond k), the first one
// aligned to 16 bytes; or the weight is packed, of a 16-bit type, whole blocks of it, its stride a multiple of 32.
// Fastest where in and out are aligned to 16 bytes, their strides too, and k is a multiple of 8.
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
  const float* bias = nullptr;  // null: none
  std::int64_t rows = 0, n = 0, k = 0;
  Gate gate = Gate::none;
  // The weight is quantised: `weight` are codes, their stride in columns, a multiple of 64; type: that of in. What is
  // multiplied in 8 bits lies as 16-bit weights do, with two codes for an element; prepared inputs do likewise, their
  // stride in bytes.
  std::optional<QuantWeight> quant{};
};

// Whether codes are multiplied in 8 bits.
inline bool is_w8a8(const Gemm& gemm) { return gemm.quant && gemm.quant->column_scales != nullptr; }

// Bytes of a weight in memory, the codes of one that is quantised.
std::size_t weight_bytes(const Gemm& gemm);

// Rows of the weight that lie in memory.
inline std::int64_t weight_rows(const Gemm& gemm) { return gemm.packed ? round_up(gemm.n, kPackedRows) : gemm.n; }

// Whether the input can be read 16 bytes at a time.
bool vectors(const Gemm& gemm);

inline constexpr int kMaxKParts = 8;
inline constexpr int kKGrain = 64;  // a part's length is a multiple of it; all kernels walk K in chunks that divide it

// Parts of K: part i is [i * length, min((i + 1) * length, k)); none is empty.
struct KSplit {
  int parts = 1;
  std::int64_t length = 0;
};

// As many parts as keep the memory busy when one row meets a weight of few outputs, but none shorter than 256.
CHARONIA_HD KSplit split_k(std::int64_t k) {
  const std::int64_t wanted = k / 256 < 1 ? 1 : (k / 256 < kMaxKParts ? k / 256 : kMaxKParts);
  const std::int64_t length = round_up(divide_up(k, wanted), kKGrain);
  return {static_cast<int>(divide_up(k, length)), length};
}

// That of a GEMM: of pairs, where its codes are multiplied in 8 bits.
inline KSplit split_of(const Gemm& gemm) { return split_k(is_w8a8(gemm) ? gemm.k / 2 : gemm.k); }

// A tactic: how our own kernels compute it.
//   stream: weights from memory into registers, a warp per part of K; up to 16 rows.
//   tile:   weights and input in stages of shared memory.
//   plain:  tile's counterpart in float.
// Where several thread blocks share a tile (k_blocks), their sums meet
//   parts:   in the workspace, each part of K by itself: the last block adds them up.
//   blocks:  in the workspace, one of each block.
//   cluster: in the shared memory of a cluster of blocks, one of each, and every block stores its share of the tile.
//            Compute capability 9; k_blocks a power of 2.
struct GemmTactic {
  enum class Kernel : std::uint8_t { stream, tile, plain };
  enum class Sums : std::uint8_t { parts, blocks, cluster };
  Kernel kernel = Kernel::tile;
  int tile_rows = 0;     // rows of a thread block
  int tile_columns = 0;  // outputs of a warp (stream) or of a thread block
  int stages = 0;        // chunks of K that are under way at a time
  int k_blocks = 1;      // thread blocks that share the parts of K of a tile
  Sums sums = Sums::parts;
  bool operator==(const GemmTactic&) const = default;
};

enum class SumOrder : std::uint8_t { fixed, any };

// The tactics for a GEMM of so many rows, likely the best first; never empty. Every one of them computes a GEMM
// of any number of rows, if in, out and the strides are aligned as they are here.
std::vector<GemmTactic> gemm_tactics(const DeviceInfo& device, const Gemm& gemm, SumOrder order = SumOrder::fixed);

// Bytes of workspace that a tactic needs: for counters, and for sums of parts where several thread blocks share them.
std::size_t gemm_workspace_bytes(const GemmTactic& tactic, const Gemm& gemm);

// workspace: its first kGemmCounterBytes are zero, and are zero again afterwards. GEMMs of one stream share it.
inline constexpr std::size_t kGemmCounterBytes = std::size_t{16} << 10;
void gemm(Stream& stream, const DeviceInfo& device, const Gemm& gemm, const GemmTactic& tactic, void* workspace);

// out += bias, for GEMMs that were computed elsewhere.
void add_bias(Stream& stream, const Gemm& gemm);

}  // namespace charonia::cuda
