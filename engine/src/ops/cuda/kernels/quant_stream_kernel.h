// GEMMs of few rows with a quantised weight: codes flow from memory through registers, where they are converted to
// 16-bit numbers, into the tensor cores.
//
//   out [rows, n] = in [rows, k] * weight [n, k]^T + bias, in in bf16 or f16, weight in the layout of quant_layout.h.
//
// Like gemm_stream_kernel.h: a warp computes 16 * kM outputs of 8 * kN rows over one part of K (split_k), and the sums
// of the parts are combined in shared memory. A step is 64 columns. Blocks are persistent: a block computes several
// tiles of outputs, and the ring of codes in flight continues across them, so that memory stays busy while a tile ends
// and the next begins. A part of 4096 columns has only 8 steps.
//
// Arithmetic, which quant_tile_kernel.h repeats bit for bit: codes minus their zero are exact 16-bit numbers, so the
// tensor cores multiply the exact numbers of the file with the inputs. The products of every kClose columns (64, or 32
// with groups of 32) are summed from 0 in float; then one fused multiply-add adds them, times the group's scale, to the
// part's sum. Scales are neither rounded nor multiplied into weights. A row's bits depend only on the row and the
// weight.
//
// Bound: memory. For a step of 16 outputs (512 bytes of int4) a lane issues 44 instructions for codes, 4 GEMMs, and
// about 20 for scales, sums and copies; 30 more for inputs and the loop serve all kM units. At 4.4 TB/s an SM gets such
// a step every 27 cycles, and can issue 108 instructions in them. The ring has kRing - 1 steps in flight: 48 to 120 KB
// on a full SM, where 29 KB are needed.
//
// Measured on an H200 (llama3-8b, one row, in percent of the bandwidth of a read-only kernel): int4 in groups of 128 68
// % for 28672 x 4096 and 47 % for 4096 x 14336, int8 85 and 71 %. An earlier version, with rings in registers, blocks
// of one tile, and scale types that the compiler did not know, reached 41 and 30 %, 62 and 53 %: 599 of a warp's 2080
// instructions came before its first product, and products waited for inputs. Remaining loss for weights with few
// outputs: two blocks per SM have 16 warps, and each step of a warp waits for the inputs of its first product. The
// figures of the second shape are for launches that do not overlap. If one such GEMM follows another, the blocks of the
// next are distributed unevenly over the SMs, and it takes 20 us instead of 14.
#pragma once

#include <algorithm>
#include <type_traits>

#include "ops/cuda/kernels/quant_device.h"

namespace charonia::cuda::quant_stream {

inline constexpr int kWarps = 8, kThreads = kWarps * kWarp;

// Compile-time facts about scales and zeros. own: scales have the inputs' type, and all zeros are the code's zero (8
// for int4, otherwise 0); own_with_zeros: the same with explicit zeros; any: decided at run time.
enum class Terms : std::uint8_t { any, own, own_with_zeros };

template <class T_, ops::Code kCode_, int kClose_, Terms kTerms_, int kM_, int kN_, int kBlocks_>
struct Shape {
  using T = T_;
  static constexpr ops::Code kCode = kCode_;
  static constexpr Terms kTerms = kTerms_;
  static constexpr int kClose = kClose_, kM = kM_, kN = kN_, kBlocks = kBlocks_;
  static constexpr int kRing = quant_stream_ring(kCodeBits<kCode>, kClose, kM);
  static constexpr int kLoads = kCodeBits<kCode> / 4;  // loads of a lane for a unit of 16 rows by 64 columns
  static constexpr int kCloses = kQuantK / kClose;     // per step
  static constexpr int kOutputs = kQuantRows * kM_, kRows = 8 * kN;
  static constexpr int kPitch = kOutputs + 4;  // padded, so that the lanes of a store use different banks
  static constexpr int kSums = kWarps * kRows * kPitch;
  static constexpr bool kHasZeros = (kCode == ops::Code::u4 || kCode == ops::Code::i8) && kTerms != Terms::own;
  // Words of scales and zeros of a lane for each group of kClose columns.
  static constexpr int kScaleWords = kTerms == Terms::any ? 2 : 1, kWords = kScaleWords + (kHasZeros ? 1 : 0);
  static constexpr int kCodeBytes = kM * kLoads * kWarp * 16;
  static constexpr int kSlotBytes = kCodeBytes + kM * kCloses * kWords * kWarp * 4;
  static constexpr int kTurns = kN == 1 ? 2 : 1;  // tiles with separate memory for their sums
  static constexpr std::size_t kSharedBytes =
      std::size_t{kTurns * kSums} * sizeof(float) + std::size_t{kWarps * kRing * kSlotBytes};
  static_assert(kSharedBytes <= (std::size_t{99} << 10), "what a block has on compute capability 8.9");
};

// A lane's copy of scales and zeros, for one unit and kClose columns.
template <class S>
struct LaneTerms {
  using T = typename S::T;
  std::uint32_t words[S::kWords];

  // place: the lane's first word; its other words follow at the distance of a warp. at: index for row g, in elements.
  CHARONIA_DEVICE static void copy(const QuantParams& p, SharedAddress place, int at) {
    if (S::kTerms == Terms::any && p.scale_type == DType::f32) {
      const float* const from = static_cast<const float*>(p.scales) + at;
      copy_async_4(place, from);
      copy_async_4(place + (S::kScaleWords - 1) * kWarp * 4, from + 1);
    } else {
      copy_async_4(place, static_cast<const std::uint16_t*>(p.scales) + at);
    }
    if constexpr (S::kHasZeros) {
      if (S::kTerms != Terms::any || p.zeros != nullptr) {  // the zeros of two pairs of rows
        copy_async_4(place + S::kScaleWords * kWarp * 4, static_cast<const std::uint8_t*>(p.zeros) + (at & ~3));
      }
    }
  }
  CHARONIA_DEVICE void read(SharedAddress place) {
    CHARONIA_UNROLL
    for (int i = 0; i < S::kWords; ++i) words[i] = read_shared_4(place + i * kWarp * 4);
  }
  CHARONIA_DEVICE void zero_terms(const QuantParams& p, std::uint32_t (&out)[2]) const {
    if constexpr (S::kHasZeros) {
      const bool own = S::kTerms != Terms::any || p.zeros != nullptr;
      // selects the byte, 0, the byte, 0
      const std::uint32_t first = own && lane_id() / 4 % 2 != 0 ? 0x4242U : 0x4040U;
      const std::uint32_t word = own ? words[S::kScaleWords] : p.zero_pair;
      out[0] = zero_term_of_both<T, S::kCode>(permute_bytes(word, first));
      out[1] = zero_term_of_both<T, S::kCode>(permute_bytes(word, first + 0x0101U));
    } else {
      out[0] = out[1] = zero_term<T, S::kCode>(S::kCode == ops::Code::u4 ? 8 : 0);
    }
  }
  CHARONIA_DEVICE void scales(const QuantParams& p, float (&out)[2]) const {
    if constexpr (S::kTerms == Terms::any) {
      decode_scales(p, ScalePair{{words[0], words[1]}}, out);
    } else {
      out[0] = to_float(T{static_cast<std::uint16_t>(words[0])});
      out[1] = to_float(T{static_cast<std::uint16_t>(words[0] >> 16)});
    }
  }
};

template <class S>
CHARONIA_KERNEL(kThreads, S::kBlocks)
void stream_kernel(const QuantParams p) {
  using T = typename S::T;
  constexpr int kM = S::kM, kN = S::kN, kRing = S::kRing;
  float* const sums = reinterpret_cast<float*>(dynamic_shared());  // of a tile and of the next: see below

  const int lane = lane_id(), g = lane / 4, t = lane % 4;
  const int group = warp_id() / p.parts, part = warp_id() - group * p.parts;
  const int groups = static_cast<int>(blockDim.x) / kWarp / p.parts;
  // Each lane reads only the data that it copied, so no barrier is needed.
  const SharedAddress ring = shared_address(dynamic_shared() + S::kTurns * S::kSums * sizeof(float)) +
                             warp_id() * kRing * S::kSlotBytes + lane * 16;
  const SharedAddress last_slot = ring + (kRing - 1) * S::kSlotBytes;
  const int terms_at = S::kCodeBytes - lane * 12;  // offset from a lane's codes to its words, which have 4 bytes
  QuantRows tile{static_cast<int>(blockIdx.y) * S::kRows, 0};
  int block = static_cast<int>(blockIdx.x), to_next = static_cast<int>(gridDim.x);  // block: a tile of outputs
  std::int64_t codes_at = 0;                                                        // offset of the expert's codes
  int scales_at = 0;
  if (p.tiles != nullptr) {
    if (!p.late_trigger) dependency_trigger();
    dependency_wait();
    const ExpertTile of = p.tiles[blockIdx.x];
    if (of.rows == 0) return;
    tile = {of.first, of.rows};
    block = static_cast<int>(blockIdx.y), to_next = static_cast<int>(gridDim.y);
    codes_at = of.expert * p.expert_codes;
    scales_at = static_cast<int>(of.expert * p.expert_scales);
  } else {
    tile.rows = min(S::kRows, p.rows - tile.first_row);
  }
  const int blocks = (p.n + groups * S::kOutputs - 1) / (groups * S::kOutputs);
  const int k_begin = part * p.part_length;
  const int k_left = min(p.part_length, p.k - k_begin);
  const int steps = static_cast<int>(divide_up(k_left, kQuantK));

  // The next copy: a step of the tile `block_ahead`.
  int block_ahead = block, step_ahead = 0;
  const uint4* codes[kM];
  int scale_row[kM];  // for row g, in elements; all scales of a weight are fewer than 2^31
  const auto go_to_block = [&] {
    const int all_steps = p.weight_stride / kQuantK, last_unit = (p.n - 1) / kQuantRows;
    CHARONIA_UNROLL
    for (int i = 0; i < kM; ++i) {
      // Outputs beyond n recompute the last outputs.
      const int unit = min((block_ahead * groups + group) * kM + i, last_unit);
      codes[i] = reinterpret_cast<const uint4*>(static_cast<const unsigned char*>(p.weight) + codes_at) +
                 (static_cast<std::int64_t>(unit) * all_steps + k_begin / kQuantK) * (S::kLoads * kWarp) + lane;
      scale_row[i] = scales_at + unit * p.groups * kQuantRows + 2 * g;
    }
  };
  const auto copy_ahead = [&](SharedAddress to) {
    if (block_ahead < blocks) {
      CHARONIA_UNROLL
      for (int i = 0; i < kM; ++i) {
        CHARONIA_UNROLL
        for (int j = 0; j < S::kLoads; ++j) {
          copy_async_16(to + (i * S::kLoads + j) * kWarp * 16, codes[i] + j * kWarp);
        }
        codes[i] += S::kLoads * kWarp;
        CHARONIA_UNROLL
        for (int j = 0; j < S::kCloses; ++j) {
          const int of = (k_begin + step_ahead * kQuantK + j * S::kClose) >> p.group_shift;
          LaneTerms<S>::copy(p, to + terms_at + (i * S::kCloses + j) * S::kWords * kWarp * 4,
                             scale_row[i] + of * kQuantRows);
        }
      }
      if (++step_ahead == steps) {
        step_ahead = 0;
        block_ahead += to_next;
        if (block_ahead < blocks) {
          go_to_block();
        } else if (p.late_trigger) {
          dependency_trigger();
        }
      }
    }
    copy_commit();
  };
  go_to_block();
  CHARONIA_UNROLL_BY(1)
  for (int i = 0; i + 1 < kRing; ++i) copy_ahead(ring + i * S::kSlotBytes);

  if (p.tiles == nullptr) {
    if (!p.late_trigger) dependency_trigger();
    dependency_wait();
  }

  // Lanes beyond the rows read the first row; their results are dropped.
  const T* in[kN];
  CHARONIA_UNROLL
  for (int j = 0; j < kN; ++j) {
    const int row = 8 * j + g;
    in[j] = static_cast<const T*>(p.in) +
            static_cast<std::int64_t>(tile.in_row(p, row < tile.rows ? row : 0)) * p.in_stride + k_begin + 8 * t;
  }
  // Inputs of the two halves of a step. After use, each is loaded again for the next step.
  uint4 x[2][kN];
  const auto load_in = [&](int half, int step) {
    const int k = step * kQuantK + 32 * half;
    if ((step + 1) * kQuantK <= k_left) {
      CHARONIA_UNROLL
      for (int j = 0; j < kN; ++j) x[half][j] = load_cached(reinterpret_cast<const uint4*>(in[j] + k));
    } else {
      CHARONIA_UNROLL
      for (int j = 0; j < kN; ++j) {
        x[half][j] = k + 8 * t < k_left ? load_cached(reinterpret_cast<const uint4*>(in[j] + k)) : uint4{0, 0, 0, 0};
      }
    }
  };
  load_in(0, 0);
  load_in(1, 0);

  SharedAddress slot = ring, before = last_slot;  // the slot that is read, and the previous slot, which is filled
  for (int turn = 0; block < blocks; block += to_next, ++turn) {
    float total[kM][kN][4];
    CHARONIA_UNROLL
    for (int i = 0; i < kM; ++i) {
      CHARONIA_UNROLL
      for (int j = 0; j < kN; ++j) {
        CHARONIA_UNROLL
        for (int c = 0; c < 4; ++c) total[i][j][c] = 0;
      }
    }
    CHARONIA_UNROLL_BY(1)
    for (int step = 0; step < steps; ++step) {
      copy_wait<kRing - 2>();
      copy_ahead(before);
      float sum[kM][kN][4];
      CHARONIA_UNROLL
      for (int half = 0; half < 2; ++half) {
        CHARONIA_UNROLL
        for (int i = 0; i < kM; ++i) {
          const int close = half * S::kCloses / 2;
          if (S::kCloses == 2 || half == 0) {
            CHARONIA_UNROLL
            for (int j = 0; j < kN; ++j) {
              CHARONIA_UNROLL
              for (int c = 0; c < 4; ++c) sum[i][j][c] = 0;
            }
          }
          uint4 of_unit[S::kLoads];
          CHARONIA_UNROLL
          for (int j = 0; j < S::kLoads; ++j) {
            of_unit[j] = read_shared_16(slot + (i * S::kLoads + j) * kWarp * 16);
          }
          LaneTerms<S> terms;
          terms.read(slot + terms_at + (i * S::kCloses + close) * S::kWords * kWarp * 4);
          std::uint32_t zero[2], upper[4], lower[4];
          terms.zero_terms(p, zero);
          unit_numbers<T, S::kCode>(of_unit, half, zero, upper, lower);
          CHARONIA_UNROLL
          for (int quarter = 0; quarter < 2; ++quarter) {
            const std::uint32_t a[4] = {upper[2 * quarter], lower[2 * quarter], upper[2 * quarter + 1],
                                        lower[2 * quarter + 1]};
            CHARONIA_UNROLL
            for (int j = 0; j < kN; ++j) {
              const uint4& of = x[half][j];
              const std::uint32_t b[2] = {quarter == 0 ? of.x : of.z, quarter == 0 ? of.y : of.w};
              mma_m16n8k16<T>(sum[i][j], a, b);
            }
          }
          if (S::kCloses == 2 || half == 1) {
            float scale[2];
            terms.scales(p, scale);
            CHARONIA_UNROLL
            for (int j = 0; j < kN; ++j) {
              CHARONIA_UNROLL
              for (int c = 0; c < 4; ++c) total[i][j][c] = fmaf(scale[c / 2], sum[i][j][c], total[i][j][c]);
            }
          }
        }
        load_in(half, step + 1 < steps ? step + 1 : 0);
      }
      before = slot;
      slot = slot == last_slot ? ring : slot + S::kSlotBytes;
    }
    float* const of_turn = sums + turn % S::kTurns * S::kSums;
    if constexpr (S::kTurns == 1) __syncthreads();  // the sums of the previous tile have been read
    float* const mine = of_turn + warp_id() * S::kRows * S::kPitch;
    CHARONIA_UNROLL
    for (int i = 0; i < kM; ++i) {
      CHARONIA_UNROLL
      for (int j = 0; j < kN; ++j) {
        CHARONIA_UNROLL
        for (int c = 0; c < 4; ++c) mine[(8 * j + 2 * t + c % 2) * S::kPitch + 16 * i + g + c / 2 * 8] = total[i][j][c];
      }
    }
    // After this barrier the sums of this tile are complete. With two buffers, the next tile's buffer was read before
    // it.
    __syncthreads();
    // The threads of a group's warps store its outputs.
    const float* const of_group = of_turn + group * p.parts * S::kRows * S::kPitch;
    store_quant_outputs<T, S::kOutputs>(p, tile, (block * groups + group) * S::kOutputs,
                                        static_cast<int>(threadIdx.x) - group * p.parts * kWarp, p.parts * kWarp,
                                        [&](int row, int column) {
                                          const float* const from = of_group + row * S::kPitch + column;
                                          float whole = from[0];
                                          for (int i = 1; i < p.parts; ++i) whole += from[i * S::kRows * S::kPitch];
                                          return whole;
                                        });
  }
}

template <class S>
bool launch_if(Stream& stream, const QuantParams& p, const GemmTactic& tactic) {
  if (tactic.tile_rows != S::kRows || tactic.tile_columns != S::kOutputs || tactic.stages != S::kRing) return false;
  const int groups = kWarps / p.parts;
  const auto columns = static_cast<unsigned>(divide_up(p.n, groups * S::kOutputs));
  const auto rows = static_cast<unsigned>(p.row_tiles);
  // A block takes 1 KB of shared memory in addition to its own.
  const auto fit = (p.sm_shared_bytes + 1024) / (S::kSharedBytes + 1024);
  const auto resident = static_cast<unsigned>(p.sms) * static_cast<unsigned>(std::min<std::size_t>(fit, S::kBlocks));
  launch(stream, p.tiles != nullptr ? "experts: quantised GEMM (stream)" : "quantised GEMM (stream)",
         {.grid_x = p.tiles != nullptr ? rows : std::min(columns, resident),
          .grid_y = p.tiles != nullptr ? columns : rows,
          .threads = static_cast<unsigned>(groups * p.parts * kWarp),
          .dynamic_shared_bytes = S::kSharedBytes},
         &stream_kernel<S>, p);
  return true;
}

template <class T, ops::Code code, int kClose, Terms kTerms>
bool launch_terms(Stream& stream, const QuantParams& p, const GemmTactic& tactic) {
  return launch_if<Shape<T, code, kClose, kTerms, 1, 1, 4>>(stream, p, tactic) ||
         launch_if<Shape<T, code, kClose, kTerms, 2, 1, 3>>(stream, p, tactic) ||
         launch_if<Shape<T, code, kClose, kTerms, 2, 2, 2>>(stream, p, tactic);
}

// Returns false if the kernel does not exist.
template <class T, ops::Code code, int kClose>
bool launch_typed(Stream& stream, const QuantParams& p, const GemmTactic& tactic) {
  if constexpr (kClose == kQuantK) {
    const bool own = p.scale_type == (std::is_same_v<T, bf16> ? DType::bf16 : DType::f16);
    if (own && p.zeros == nullptr) return launch_terms<T, code, kClose, Terms::own>(stream, p, tactic);
    if constexpr (code == ops::Code::u4) {
      if (own) return launch_terms<T, code, kClose, Terms::own_with_zeros>(stream, p, tactic);
    }
  }
  return launch_terms<T, code, kClose, Terms::any>(stream, p, tactic);
}

}  // namespace charonia::cuda::quant_stream

namespace charonia::cuda {

template <ops::Code code>
bool launch_quant_stream(Stream& stream, const QuantParams& params, const GemmTactic& tactic, DType type, int closes) {
  return with_closes<code>(type, closes, [&]<class T>(T, auto close) {
    return quant_stream::launch_typed<T, code, close()>(stream, params, tactic);
  });
}

}  // namespace charonia::cuda
