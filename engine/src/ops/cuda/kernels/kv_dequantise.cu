// Blocks of a quantised cache as 16-bit blocks, for attention of prompts with products of warpgroups. The numbers have
// the bits that the other kernels compute (attention_quant.h). FP8 numbers are copied without scales: attention
// multiplies its results by the scale of v.
//
// Bound: memory. A block is read once (1 or 0.5 bytes an element) and written once (2 bytes). Never measured.
#include "ops/cuda/kernels/attention_quant.h"
#include "ops/cuda/kernels/element_types.h"

namespace charonia::cuda {
namespace {

constexpr int kThreads = 256, kLoadBytes = 8;

struct Params {
  CacheLayer cache;
  const std::int32_t* blocks;  // of the cache
  void* to;                    // [blocks][k and v heads][slots][head_dim]
  std::int64_t loads;
};

// A thread takes 8 bytes of a row: 8 elements, or two times 8 with 4 bits (ops/kv_quant.h). bits: CacheLayer::quant_bits.
template <class T, int bits>
CHARONIA_KERNEL(kThreads, 4)
void dequantise_kernel(const Params p) {
  dependency_trigger();
  dependency_wait();
  const auto index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= p.loads) return;
  const int of_row = p.cache.row_bytes() / kLoadBytes, of_block = 2 * p.cache.half_rows() * of_row;
  const auto at = index / of_block;
  const int in_block = static_cast<int>(index - at * of_block), row = in_block / of_row, unit = in_block % of_row;
  const auto block = load_readonly(p.blocks + at);
  const auto* const cache = static_cast<const unsigned char*>(p.cache.data);
  const auto codes = *reinterpret_cast<const uint2*>(cache + p.cache.integers_at(block, row) + unit * kLoadBytes);
  T* const to = static_cast<T*>(p.to) + at * p.cache.block_size() + static_cast<std::int64_t>(row) * p.cache.head_dim;
  const auto store = [&](int element, const uint4& x) { *reinterpret_cast<uint4*>(to + element) = x; };
  if constexpr (ops::kv_holds_integers(bits)) {
    const ScaleZero by(*reinterpret_cast<const std::uint32_t*>(cache + p.cache.scale_at(block, row)));
    if constexpr (bits == 8) {
      store(8 * unit, widen_unit<T>(codes.x, codes.y, by));
    } else {
      store(8 * unit, widen_unit<T>(codes.x & kLowHalves, codes.y & kLowHalves, by));
      store(8 * unit + p.cache.head_dim / 2,
            widen_unit<T>(codes.x >> 4 & kLowHalves, codes.y >> 4 & kLowHalves, by));
    }
  } else {
    store(8 * unit, widen_fp8_unit<T>(codes.x, codes.y));
  }
}

}  // namespace

void dequantise_blocks(Stream& stream, const CacheLayer& cache, const std::int32_t* blocks, std::int64_t count,
                       void* to) {
  const std::int64_t loads = count * 2 * cache.half_rows() * (cache.row_bytes() / kLoadBytes);
  const Params params{.cache = cache, .blocks = blocks, .to = to, .loads = loads};
  const Launch shape{.grid_x = static_cast<unsigned>(divide_up(loads, kThreads)), .threads = kThreads};
  with_half(cache.dtype, [&]<class T>(T) {
    launch(stream, "dequantised blocks of the cache", shape,
           cache.quant_bits == 8   ? &dequantise_kernel<T, 8>
           : cache.quant_bits == 4 ? &dequantise_kernel<T, 4>
                                   : &dequantise_kernel<T, ops::kKvFp8>,
           params);
  });
}

}  // namespace charonia::cuda
