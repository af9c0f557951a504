// The two products of LoRA adapters. Rows with one adapter are in items of up to 32 rows. The kernels find the matrices
// through the item's slot, so a captured step serves all adapters.
//
//   shrink   t [slices][rows][ranks] = A in, over slices of 2048 columns
//   expand   out += scale * B t, where t is the sum of its slices, in order
//
// Sums have float. Every number of `out` has the same operations in the same order for any rows of the step: a tensor
// core computes columns of its tile independently of each other, and slices and warps have fixed parts of K.
//
// 16 bits, on tensor cores: A and B are the operand with 16 rows, the step's rows the operand with 8. Both are read
// from memory in their order in ops/low_rank.h, 16 bytes for each lane.
//   shrink   A block has 16 ranks of a slice for an item, a warp every eighth chunk of 32 columns. Lane (g, t) has
//            the columns 8 t to 8 t + 7 of a chunk: of ranks g and g + 8, and of row g of each 8 rows. The warps' sums
//            are added in shared memory.
//   expand   A warp has 64 columns of `out` for an item: lane (g, t) has the columns 8 g to 8 g + 7 of the ranks 2 t,
//            2 t + 1, 2 t + 8 and 2 t + 9. t is the sum of two 16-bit numbers, so it keeps 16 bits (bf16) or more.
//            With fp16, a power of two for each row brings its largest number to the upper end of the range, so that
//            also small ones keep their bits.
// f32, for verification: multiplications and additions without tensor cores.
//
// Bound: memory for few rows (A and B are read once for each item), launch latency for small ranks. Not yet measured.
#include "ops/cuda/device/tensor_core.h"
#include "ops/cuda/kernels/element_types.h"
#include "ops/cuda/kernels/low_rank.h"

namespace charonia::cuda {
namespace {

using ops::SlotChange;
using ops::SlotPart;

constexpr int kShrinkWarps = 8, kExpandWarps = 4;
constexpr int kRowTiles = kAdapterTile / 8;
constexpr int kChunk = 32;                                      // columns of A: a line of 64 bytes
constexpr int kPairs = ops::LowRank::kMaxRanks / 2, kPairPitch = kPairs + 4;  // t in shared memory; no bank conflicts

struct LowRankParams {
  const void* in;  // [rows, k]
  void* out;       // [rows, n]
  std::int64_t in_stride, out_stride;
  const AdapterItem* items;
  const std::int32_t* rows;
  const std::byte* slots;
  std::int64_t slot_bytes;
  float* t;  // [slices][max_rows][max_ranks]
  std::int64_t max_rows, max_ranks;
  int weight, k, slices;
  bool in_vectors, out_vectors;  // rows can be accessed 16 bytes at a time
};

struct Change {
  const std::byte* image = nullptr;
  const SlotChange* header = nullptr;  // null: the item has no rows, or its adapter does not change the weight

  CHARONIA_DEVICE const SlotPart& part(int index) const { return reinterpret_cast<const SlotPart*>(header + 1)[index]; }
};

CHARONIA_DEVICE Change change_of(const LowRankParams& p, const AdapterItem& item) {
  Change out;
  if (item.rows == 0) return out;
  out.image = p.slots + item.slot * p.slot_bytes;
  const auto at = reinterpret_cast<const std::int64_t*>(out.image)[p.weight];
  if (at != 0) out.header = reinterpret_cast<const SlotChange*>(out.image + at);
  return out;
}

CHARONIA_DEVICE const std::byte* in_row(const LowRankParams& p, int place, int element_bytes) {
  return static_cast<const std::byte*>(p.in) + p.rows[place] * p.in_stride * element_bytes;
}

// LowRank::a_at(). line: the number of elements in 64 bytes.
CHARONIA_DEVICE std::int64_t a_at(int rank, int ranks, int k, int in_features, int line) {
  constexpr int kGroup = 4;
  const int first = rank / kGroup * kGroup, group = min(kGroup, ranks - first);
  return first * round_up(in_features, line) + std::int64_t{k / line * group + rank - first} * line + k % line;
}

// Elements k to k + 7 of a row; zeros from p.k on.
template <class T>
CHARONIA_DEVICE uint4 load_eight(const LowRankParams& p, const T* row, int k) {
  if (p.in_vectors && k + 8 <= p.k) return *reinterpret_cast<const uint4*>(row + k);
  std::uint32_t words[4];
  CHARONIA_UNROLL
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t low = k + 2 * i < p.k ? row[k + 2 * i].bits : 0U;
    const std::uint32_t high = k + 2 * i + 1 < p.k ? row[k + 2 * i + 1].bits : 0U;
    words[i] = high << 16 | low;
  }
  return uint4{words[0], words[1], words[2], words[3]};
}

template <class T>
CHARONIA_KERNEL(kShrinkWarps* kWarp, 2)
void shrink_kernel(const LowRankParams p) {
  CHARONIA_SHARED(float, sums, [kShrinkWarps * kAdapterTile * kRankTile]);
  dependency_trigger();
  dependency_wait();
  const AdapterItem item = p.items[blockIdx.y];
  const Change change = change_of(p, item);
  const int first_rank = static_cast<int>(blockIdx.x) * kRankTile, slice = static_cast<int>(blockIdx.z);
  if (change.header == nullptr || first_rank >= change.header->ranks) return;
  const int ranks = change.header->ranks;
  const T* const a = reinterpret_cast<const T*>(change.image + change.header->a);
  const int g = lane_id() / 4, t = lane_id() % 4;
  const int low_rank = first_rank + g, high_rank = low_rank + 8;
  const T* rows[kRowTiles];
  CHARONIA_UNROLL
  for (int i = 0; i < kRowTiles; ++i) {
    const int row = 8 * i + g;
    rows[i] = row < item.rows ? reinterpret_cast<const T*>(in_row(p, item.first + row, 2)) : nullptr;
  }

  constexpr uint4 kZeros{0, 0, 0, 0};
  float sum[kRowTiles][4] = {};
  const int end = min(p.k, (slice + 1) * kLowRankSlice);
  for (int k = slice * kLowRankSlice + warp_id() * kChunk; k < end; k += kShrinkWarps * kChunk) {
    const uint4 low =
        low_rank < ranks
            ? load_readonly(reinterpret_cast<const uint4*>(a + a_at(low_rank, ranks, k + 8 * t, p.k, kChunk)))
            : kZeros;
    const uint4 high =
        high_rank < ranks
            ? load_readonly(reinterpret_cast<const uint4*>(a + a_at(high_rank, ranks, k + 8 * t, p.k, kChunk)))
            : kZeros;
    const std::uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
    CHARONIA_UNROLL
    for (int i = 0; i < kRowTiles; ++i) {
      if (8 * i >= item.rows) continue;
      const uint4 x = rows[i] != nullptr ? load_eight(p, rows[i], k + 8 * t) : kZeros;
      const std::uint32_t x_first[2] = {x.x, x.y}, x_second[2] = {x.z, x.w};
      mma_m16n8k16<T>(sum[i], first, x_first);
      mma_m16n8k16<T>(sum[i], second, x_second);
    }
  }
  CHARONIA_UNROLL
  for (int i = 0; i < kRowTiles; ++i) {
    CHARONIA_UNROLL
    for (int c = 0; c < 4; ++c) {
      const int row = 8 * i + 2 * t + c % 2, rank = g + 8 * (c / 2);
      sums[(warp_id() * kAdapterTile + row) * kRankTile + rank] = sum[i][c];
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < item.rows * kRankTile; i += kShrinkWarps * kWarp) {
    float all = 0;
    CHARONIA_UNROLL
    for (int warp = 0; warp < kShrinkWarps; ++warp) all += sums[warp * kAdapterTile * kRankTile + i];
    const int row = i / kRankTile, rank = i % kRankTile;
    p.t[(slice * p.max_rows + item.first + row) * p.max_ranks + first_rank + rank] = all;
  }
}

// The sum of the slices of t.
CHARONIA_DEVICE float t_of(const LowRankParams& p, int place, int rank) {
  float sum = 0;
  for (int slice = 0; slice < p.slices; ++slice) sum += p.t[(slice * p.max_rows + place) * p.max_ranks + rank];
  return sum;
}

// A power of two for t of a row of a part. fp16: it brings the largest number to the upper end of the range of fp16.
// All lanes of a warp get it.
template <class T>
CHARONIA_DEVICE float range_factor(const LowRankParams& p, int place, const SlotPart& part) {
  if constexpr (std::is_same_v<T, f16>) {
    float largest = 0;
    for (int rank = lane_id(); rank < part.ranks; rank += kWarp) {
      largest = fmaxf(largest, fabsf(t_of(p, place, part.first_rank + rank)));
    }
    constexpr int kBias = 127, kMost = 14, kLeast = -60;  // below 2^15; the factor of zeros is finite
    const int exponent = max(static_cast<int>(__float_as_uint(warp_max(largest)) >> 23) - kBias, kLeast);
    return __uint_as_float(static_cast<unsigned>(kBias + kMost - exponent) << 23);
  }
  return 1;
}

// Adds eight sums to neighbouring columns. Only the first `count` of them exist.
template <class Out>
CHARONIA_DEVICE void add_eight(Out* out, const float (&sums)[8], float scale, int count, bool vectors) {
  if constexpr (sizeof(Out) == 2) {
    if (vectors && count == 8) {
      uint4 words = *reinterpret_cast<const uint4*>(out);
      std::uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
      CHARONIA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float low = to_float(Out{static_cast<std::uint16_t>(pairs[i])}),
                    high = to_float(Out{static_cast<std::uint16_t>(pairs[i] >> 16)});
        pairs[i] = pack<Out>(fmaf(scale, sums[2 * i], low), fmaf(scale, sums[2 * i + 1], high));
      }
      *reinterpret_cast<uint4*>(out) = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
      return;
    }
  }
  CHARONIA_UNROLL
  for (int i = 0; i < 8; ++i) {
    if (i < count) out[i] = from_float<Out>(fmaf(scale, sums[i], to_float(out[i])));
  }
}

template <class T, class Out>
CHARONIA_KERNEL(kExpandWarps* kWarp, 4)
void expand_kernel(const LowRankParams p) {
  CHARONIA_SHARED(std::uint32_t, t_high, [kAdapterTile * kPairPitch]);
  CHARONIA_SHARED(std::uint32_t, t_low, [kAdapterTile * kPairPitch]);
  CHARONIA_SHARED(float, factors, [kAdapterTile]);
  dependency_trigger();
  dependency_wait();
  const AdapterItem item = p.items[blockIdx.y];
  const Change change = change_of(p, item);
  if (change.header == nullptr) return;
  const int g = lane_id() / 4, t = lane_id() % 4, parts = change.header->parts;
  int first_block = 0;  // of the part: where the part before it has ended, so that blocks share narrow parts
  for (int index = 0; index < parts; ++index) {
    const SlotPart part = change.part(index);
    const int panels = static_cast<int>(divide_up(part.columns, ops::LowRank::kPanel));
    const int blocks = static_cast<int>(gridDim.x);
    const int block = (static_cast<int>(blockIdx.x) + blocks - first_block) % blocks;
    first_block = (first_block + static_cast<int>(divide_up(panels, kExpandWarps))) % blocks;
    if (block * kExpandWarps >= panels) continue;
    const int steps = static_cast<int>(divide_up(part.ranks, 16)), pairs = (part.ranks + 1) / 2;
    __syncthreads();
    for (int row = warp_id(); row < item.rows; row += kExpandWarps) {
      const float factor = range_factor<T>(p, item.first + row, part);
      if (lane_id() == 0) factors[row] = factor;
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kAdapterTile * steps * 8; i += kExpandWarps * kWarp) {
      const int row = i / (steps * 8), pair = i % (steps * 8), rank = 2 * pair;
      const int place = item.first + row;
      const float factor = row < item.rows ? factors[row] : 0.0F;
      const float x = row < item.rows && rank < part.ranks ? factor * t_of(p, place, part.first_rank + rank) : 0.0F;
      const float y =
          row < item.rows && rank + 1 < part.ranks ? factor * t_of(p, place, part.first_rank + rank + 1) : 0.0F;
      const T x_high = from_float<T>(x), y_high = from_float<T>(y);
      t_high[row * kPairPitch + pair] = static_cast<std::uint32_t>(y_high.bits) << 16 | x_high.bits;
      t_low[row * kPairPitch + pair] = pack<T>(x - to_float(x_high), y - to_float(y_high));
    }
    __syncthreads();
    const T* const b = reinterpret_cast<const T*>(change.image + part.b);
    for (int panel = block * kExpandWarps + warp_id(); panel < panels; panel += blocks * kExpandWarps) {
      constexpr int kPanel = static_cast<int>(ops::LowRank::kPanel);
      // Words of two ranks of a column.
      const auto* const words = reinterpret_cast<const uint4*>(b + std::int64_t{panel} * kPanel * 2 * pairs);
      float sum[4][kRowTiles][4] = {};
      for (int step = 0; step < steps; ++step) {
        std::uint32_t w[2][8];
        CHARONIA_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int pair = 8 * step + t + 4 * half;
          CHARONIA_UNROLL
          for (int four = 0; four < 2; ++four) {
            const uint4 four_words =
                pair < pairs ? load_readonly(words + (pair * kPanel + 8 * g) / 4 + four) : uint4{0, 0, 0, 0};
            w[half][4 * four] = four_words.x;
            w[half][4 * four + 1] = four_words.y;
            w[half][4 * four + 2] = four_words.z;
            w[half][4 * four + 3] = four_words.w;
          }
        }
        CHARONIA_UNROLL
        for (int i = 0; i < kRowTiles; ++i) {
          if (8 * i >= item.rows) continue;
          const int at = (8 * i + g) * kPairPitch + 8 * step + t;
          const std::uint32_t high[2] = {t_high[at], t_high[at + 4]}, low[2] = {t_low[at], t_low[at + 4]};
          CHARONIA_UNROLL
          for (int m = 0; m < 4; ++m) {  // columns 8 g + 2 m and 8 g + 2 m + 1 are rows g and g + 8 of the operand
            const std::uint32_t columns[4] = {w[0][2 * m], w[0][2 * m + 1], w[1][2 * m], w[1][2 * m + 1]};
            mma_m16n8k16<T>(sum[m][i], columns, high);
            mma_m16n8k16<T>(sum[m][i], columns, low);
          }
        }
      }
      const int column = panel * kPanel + 8 * g, first_column = part.first_column + column;
      const int count = max(0, min(8, part.columns - column));
      CHARONIA_UNROLL
      for (int i = 0; i < kRowTiles; ++i) {
        CHARONIA_UNROLL
        for (int c = 0; c < 2; ++c) {
          const int row = 8 * i + 2 * t + c;
          if (row >= item.rows) continue;
          float eight[8];
          CHARONIA_UNROLL
          for (int m = 0; m < 4; ++m) {
            eight[2 * m] = sum[m][i][c];
            eight[2 * m + 1] = sum[m][i][2 + c];
          }
          Out* const out = static_cast<Out*>(p.out) + p.rows[item.first + row] * p.out_stride + first_column;
          add_eight(out, eight, part.scale / factors[row], count, p.out_vectors && first_column % 8 == 0);
        }
      }
    }
  }
}

// A warp computes a product of a row and a rank.
CHARONIA_KERNEL(kShrinkWarps* kWarp, 2)
void shrink_f32_kernel(const LowRankParams p) {
  dependency_trigger();
  dependency_wait();
  const AdapterItem item = p.items[blockIdx.y];
  const Change change = change_of(p, item);
  if (change.header == nullptr) return;
  const int ranks = change.header->ranks;
  const auto* const a = reinterpret_cast<const float*>(change.image + change.header->a);
  const int step = static_cast<int>(gridDim.x) * kShrinkWarps;
  for (int i = static_cast<int>(blockIdx.x) * kShrinkWarps + warp_id(); i < item.rows * ranks; i += step) {
    const int place = item.first + i / ranks, rank = i % ranks;
    const auto* const row = reinterpret_cast<const float*>(in_row(p, place, 4));
    float sum = 0;
    for (int k = lane_id(); k < p.k; k += kWarp) sum = fmaf(a[a_at(rank, ranks, k, p.k, kChunk / 2)], row[k], sum);
    sum = warp_sum(sum);
    if (lane_id() == 0) p.t[place * p.max_ranks + rank] = sum;
  }
}

// A thread computes a column.
CHARONIA_KERNEL(kExpandWarps* kWarp, 4)
void expand_f32_kernel(const LowRankParams p) {
  dependency_trigger();
  dependency_wait();
  const AdapterItem item = p.items[blockIdx.y];
  const Change change = change_of(p, item);
  if (change.header == nullptr) return;
  for (int index = 0; index < change.header->parts; ++index) {
    const SlotPart part = change.part(index);
    const auto* const b = reinterpret_cast<const float*>(change.image + part.b);
    const int step = static_cast<int>(gridDim.x) * kExpandWarps * kWarp;
    for (int column = static_cast<int>(blockIdx.x * kExpandWarps * kWarp + threadIdx.x); column < part.columns;
         column += step) {
      constexpr int kPanel = static_cast<int>(ops::LowRank::kPanel);
      const auto* const panel = b + std::int64_t{column / kPanel} * kPanel * part.ranks + column % kPanel;
      for (int row = 0; row < item.rows; ++row) {
        const auto* const t = p.t + (item.first + row) * p.max_ranks + part.first_rank;
        float sum = 0;
        for (int rank = 0; rank < part.ranks; ++rank) sum = fmaf(panel[rank * kPanel], t[rank], sum);
        auto* const out = static_cast<float*>(p.out) + p.rows[item.first + row] * p.out_stride + part.first_column;
        out[column] = fmaf(part.scale, sum, out[column]);
      }
    }
  }
}

}  // namespace

void add_adapters(Stream& stream, const ops::Tensor& out, const ops::Tensor& in, const LowRankWork& work) {
  const bool f32 = in.dtype == DType::f32;
  const LowRankParams p{.in = in.data,
                        .out = out.data,
                        .in_stride = in.stride,
                        .out_stride = out.stride,
                        .items = work.items,
                        .rows = work.rows,
                        .slots = work.slots,
                        .slot_bytes = work.slot_bytes,
                        .t = work.workspace,
                        .max_rows = work.max_rows,
                        .max_ranks = round_up(work.shape.ranks, kRankTile),
                        .weight = work.weight,
                        .k = static_cast<int>(in.cols),
                        .slices = static_cast<int>(low_rank_slices(in.cols, f32)),
                        .in_vectors = aligned(in.data, in.stride, in.dtype),
                        .out_vectors = aligned(out.data, out.stride, out.dtype)};
  const auto items = static_cast<unsigned>(work.max_items);
  const Launch shrink{.grid_x = static_cast<unsigned>(p.max_ranks / kRankTile),
                      .grid_y = items,
                      .grid_z = static_cast<unsigned>(p.slices),
                      .threads = kShrinkWarps * kWarp};
  const auto columns_of_block = (f32 ? kWarp : static_cast<int>(ops::LowRank::kPanel)) * kExpandWarps;
  const Launch expand{.grid_x = static_cast<unsigned>(divide_up(out.cols, columns_of_block)),
                      .grid_y = items,
                      .threads = kExpandWarps * kWarp};
  const auto* const what_shrink = "adapters (A)";
  const auto* const what_expand = "adapters (B)";
  if (f32) {
    launch(stream, what_shrink, shrink, &shrink_f32_kernel, p);
    launch(stream, what_expand, expand, &expand_f32_kernel, p);
    return;
  }
  with_half(in.dtype, [&]<class T>(T) {
    launch(stream, what_shrink, shrink, &shrink_kernel<T>, p);
    if (out.dtype == DType::f32) {
      launch(stream, what_expand, expand, &expand_kernel<T, float>, p);
    } else {
      launch(stream, what_expand, expand, &expand_kernel<T, T>, p);
    }
  });
}

}  // namespace charonia::cuda
