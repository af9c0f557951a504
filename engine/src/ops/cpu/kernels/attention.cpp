// Attention of one tile of queries (several rows, all heads of a group) with one k/v head, over the blocks of a
// sequence.
//
// Exact softmax in one pass over the context: chunks of attention_chunk() positions that begin at the same positions
// for every query; after each chunk the running maximum m, sum l and output acc are rescaled to the new maximum
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). Scores sum over the head's dimensions in
// ascending order, outputs over the positions in ascending order, so a query's result depends on its own position and
// context alone: for queries of the tile that do not see a chunk it changes nothing (factor 1, probabilities 0).
//
// Bound: memory for decode (every k and v is read once per tile), arithmetic for prefill.
#include "ops/cpu/kernels/vec.h"

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kMaxRows = 6, kMaxVectors = 4;
#elif defined(__AVX2__)
constexpr int kMaxRows = 4, kMaxVectors = 2;
#else
constexpr int kMaxRows = 4, kMaxVectors = 2;
#endif
constexpr int kAheadLevel = 2;  // of the caches: the second, where a block finds room beside the one in use

// c [M][V vectors] (+)= a [M][k] * b [k][V vectors]. tail > 0: b has that many columns instead (V is 1).
// Ahead: `ahead` bytes behind b lies what is read next; memory is asked for it meanwhile.
template <int M, int V, bool Ahead, class T>
inline __attribute__((always_inline)) void tile(const float* a, std::int64_t a_stride, int k, const T* b,
                                                std::int64_t b_stride, float* c, std::int64_t c_stride, bool accumulate,
                                                int tail, std::int64_t ahead) {
  constexpr int kLine_bytes = 64;
  Vec acc[M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[m][v] = accumulate ? load(c + m * c_stride + v * kWidth) : zero();
  }
  for (int i = 0; i < k; ++i) {
    Vec columns[V];
    if constexpr (Ahead) {
#pragma GCC unroll 8
      for (int byte = 0; byte < V * kWidth * static_cast<int>(sizeof(T)); byte += kLine_bytes) {
        __builtin_prefetch(reinterpret_cast<const char*>(b) + ahead + byte, 0, kAheadLevel);
      }
    }
    if (V == 1 && tail > 0) {
      columns[0] = load_n(b, tail);
    } else {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) columns[v] = load(b + v * kWidth);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Vec x = set1(a[m * a_stride + i]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) acc[m][v] = fma(x, columns[v], acc[m][v]);
    }
    b += b_stride;
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(c + m * c_stride + v * kWidth, acc[m][v]);
  }
}

template <class T>
struct Product {
  int rows;
  const float* a;  // [rows][k]
  std::int64_t a_stride;
  int k;
  const T* b;  // [k][columns]
  std::int64_t b_stride;
  int columns;
  float* c;  // [rows][columns]; whole vectors are written: up to kWidth - 1 elements behind a row
  std::int64_t c_stride;
  bool accumulate;
  const T* next;  // the b that comes after this one
};

template <int M, bool Ahead, class T>
void multiply_rows(const Product<T>& p, int row) {
  const float* const a = p.a + row * p.a_stride;
  float* const c = p.c + row * p.c_stride;
  const auto ahead = reinterpret_cast<const char*>(p.next) - reinterpret_cast<const char*>(p.b);
  int j = 0;
  for (; j + kMaxVectors * kWidth <= p.columns; j += kMaxVectors * kWidth) {
    tile<M, kMaxVectors, Ahead>(a, p.a_stride, p.k, p.b + j, p.b_stride, c + j, p.c_stride, p.accumulate, 0, ahead);
  }
  for (; j + kWidth <= p.columns; j += kWidth) {
    tile<M, 1, Ahead>(a, p.a_stride, p.k, p.b + j, p.b_stride, c + j, p.c_stride, p.accumulate, 0, ahead);
  }
  if (j < p.columns) {
    tile<M, 1, Ahead>(a, p.a_stride, p.k, p.b + j, p.b_stride, c + j, p.c_stride, p.accumulate, p.columns - j, ahead);
  }
}

// c (+)= a * b. With one tile of rows (decode) memory is the bound, and is asked ahead; with more, b comes from the
// cache.
template <bool Ahead, class T>
void multiply_tiles(const Product<T>& p) {
  const int tiles = (p.rows + kMaxRows - 1) / kMaxRows;
  for (int t = 0, row = 0; t < tiles; ++t) {
    const int n = p.rows / tiles + (t < p.rows % tiles ? 1 : 0);
    switch (n) {
      case 1:
        multiply_rows<1, Ahead>(p, row);
        break;
      case 2:
        multiply_rows<2, Ahead>(p, row);
        break;
      case 3:
        multiply_rows<3, Ahead>(p, row);
        break;
      case 4:
        multiply_rows<4, Ahead>(p, row);
        break;
      default:
        if constexpr (kMaxRows == 6) {
          if (n == 5) {
            multiply_rows<5, Ahead>(p, row);
          } else {
            multiply_rows<6, Ahead>(p, row);
          }
        }
    }
    row += n;
  }
}

template <class T>
void multiply(const Product<T>& p) {
  if (p.rows <= kMaxRows) return multiply_tiles<true>(p);
  multiply_tiles<false>(p);
}

// The running state of one query.
struct Running {
  float maximum = -__builtin_inff();
  float sum = 0;
};

// scores [n rounded up to a vector] -> probabilities relative to the running maximum, of which the first `seen` count.
// Returns the factor for what was accumulated before.
inline float softmax_chunk(float* scores, int n, int seen, float scale, Running& running) {
  const int padded = (n + kWidth - 1) / kWidth * kWidth;
  if (seen <= 0) {
    for (int i = 0; i < padded; i += kWidth) store(scores + i, zero());
    return 1;
  }
  for (int i = seen; i < padded; ++i) scores[i] = -__builtin_inff();
  const Vec scales = set1(scale);
  Vec greatest = set1(-__builtin_inff());
  for (int i = 0; i < padded; i += kWidth) {
    const Vec s = mul(load(scores + i), scales);
    store(scores + i, s);
    greatest = max(s, greatest);
  }
  const float chunk_maximum = max_of(greatest);
  const float maximum = running.maximum > chunk_maximum ? running.maximum : chunk_maximum;
  float factors[kWidth];
  store(factors, exp(set1(running.maximum - maximum)));
  const Vec shift = set1(maximum);
  Vec sum = zero();
  for (int i = 0; i < padded; i += kWidth) {
    const Vec p = exp(sub(load(scores + i), shift));
    store(scores + i, p);
    sum = add(sum, p);
  }
  running.sum = running.sum * factors[0] + sum_of(sum);
  running.maximum = maximum;
  return factors[0];
}

template <class Out>
void write(Out* out, const float* acc, float sum, int n) {
  const Vec divisor = set1(sum);
  int j = 0;
  for (; j + kWidth <= n; j += kWidth) store(out + j, div(load(acc + j), divisor));
  if (j < n) store_n(out + j, div(load(acc + j), divisor), n - j);
}

template <class T>
void attention(const AttentionArgs& args) {
  const int vectors = args.end - args.begin;
  const int dim = args.head_dim;
  const std::int64_t d_stride = round_up_to_vector(dim);
  const int chunk = attention_chunk(args.block_len);
  const std::int64_t s_stride = round_up_to_vector(chunk) + kWidest;
  float* q = args.scratch;                          // [vectors][d_stride]
  float* acc = q + kAttentionTile * d_stride;       // [vectors][d_stride]
  float* scores = acc + kAttentionTile * d_stride;  // [vectors][s_stride]
  Running running[kAttentionTile];

  for (int i = 0; i < vectors; ++i) {
    const int flat = args.begin + i;
    const float* from = args.q + (flat / args.group) * args.q_stride + (flat % args.group) * dim;
    for (int d = 0; d < dim; ++d) q[i * d_stride + d] = from[d];
    for (std::int64_t d = 0; d < d_stride; d += kWidth) store(acc + i * d_stride + d, zero());
  }

  const int last = args.first_position + (args.end - 1) / args.group;
  const auto* kv = static_cast<const T*>(args.kv);
  const auto block_at = [&](int position) {
    return kv + static_cast<std::int64_t>(args.blocks[position / args.block_len]) * args.block_stride;
  };
  const auto values_at = [&](int position) {
    return block_at(position) + static_cast<std::int64_t>(dim) * args.block_len;
  };
  for (int begin = 0; begin <= last; begin += chunk) {
    const int n = last + 1 - begin < chunk ? last + 1 - begin : chunk;
    for (int p = 0; p < n; p += args.block_len) {
      const int after = p + args.block_len;
      multiply<T>({.rows = vectors,
                   .a = q,
                   .a_stride = d_stride,
                   .k = dim,
                   .b = block_at(begin + p),
                   .b_stride = args.block_len,
                   .columns = n - p < args.block_len ? n - p : args.block_len,
                   .c = scores + p,
                   .c_stride = s_stride,
                   .accumulate = false,
                   .next = after < n ? block_at(begin + after) : values_at(begin)});
    }
    for (int i = 0; i < vectors; ++i) {
      const int position = args.first_position + (args.begin + i) / args.group;
      const int seen = position + 1 - begin < n ? position + 1 - begin : n;
      const float factor = softmax_chunk(scores + i * s_stride, n, seen, args.scale, running[i]);
      if (factor != 1) {
        const Vec factors = set1(factor);
        float* row = acc + i * d_stride;
        for (std::int64_t d = 0; d < d_stride; d += kWidth) store(row + d, mul(load(row + d), factors));
      }
    }
    for (int p = 0; p < n; p += args.block_len) {
      const int after = p + args.block_len;
      const T* const values = values_at(begin + p);
      multiply<T>({.rows = vectors,
                   .a = scores + p,
                   .a_stride = s_stride,
                   .k = n - p < args.block_len ? n - p : args.block_len,
                   .b = values,
                   .b_stride = dim,
                   .columns = dim,
                   .c = acc,
                   .c_stride = d_stride,
                   .accumulate = true,
                   .next = after < n               ? values_at(begin + after)
                           : begin + chunk <= last ? block_at(begin + chunk)
                                                   : values});
    }
  }

  for (int i = 0; i < vectors; ++i) {
    const int flat = args.begin + i;
    const std::int64_t at = (flat / args.group) * args.out_stride + (flat % args.group) * dim;
    if (args.out_dtype == DType::bf16) {
      write(static_cast<Bf16*>(args.out) + at, acc + i * d_stride, running[i].sum, dim);
    } else {
      write(static_cast<float*>(args.out) + at, acc + i * d_stride, running[i].sum, dim);
    }
  }
}

}  // namespace

void attention_bf16(const AttentionArgs& args) { attention<Bf16>(args); }
void attention_f16(const AttentionArgs& args) { attention<F16>(args); }
void attention_f32(const AttentionArgs& args) { attention<float>(args); }

}  // namespace charonia::ops::cpu::CHARONIA_ISA
