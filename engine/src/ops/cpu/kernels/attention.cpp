// Attention of one tile of queries (several rows, all heads of a group) with one KV head, over the blocks of a
// sequence.
//
// Exact softmax in one pass over the context, in chunks of attention_chunk() positions that begin at the same positions
// for every query. After each chunk the running maximum m, sum l and output acc are rescaled to the new maximum
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). Every attention_split() positions start
// with an empty state. The states of the splits are merged in ascending order with the same rescaling, so that several
// threads can share a long context. Scores sum over the head's dimensions in ascending order, outputs over the
// positions in ascending order. So the result of a query depends only on its own position and context: a chunk that a
// query does not attend to does not change its state (factor 1, probabilities 0). Blocks that no query of the tile
// attends to (later positions, or before the window) are not read.
//
// With a bf16 cache both products use pairs (attention_pairs.h). Exponentials are powers of two, so the scale of the
// scores includes the factor log2 e.
//
// With a quantised cache the sums are over integers: scales and zeros are applied to the scores, and the scales of the
// values to the probabilities (kv_quant.h). The zeros of the values are summed separately.
//
// In latent attention, values are a part of k. A chunk's values are first copied from k into the layout of v.
//
// Bound: memory for decode (every k and v is read once per tile), arithmetic for prefill.
#include "ops/cpu/kernels/attention_pairs.h"

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

// Scales a query's scores and applies the rest of AttentionParams: the soft cap, and the slope for keys at `distance`,
// distance + 1, ... from the query (0 or less for keys that are not masked).
inline void modify_scores(float* scores, int n, const AttentionArgs& args, float slope, int distance) {
  alignas(64) float lanes[kWidth];
  for (int i = 0; i < kWidth; ++i) lanes[i] = static_cast<float>(i);
  const Vec lane = load(lanes), scales = set1(args.scale), slopes = set1(slope);
  const bool capped = args.soft_cap != 0;
  const Vec caps = set1(args.soft_cap), inverse = set1(capped ? 1 / args.soft_cap : 0);
  for (int i = 0; i < n; i += kWidth) {
    Vec x = mul(load(scores + i), scales);
    if (capped) x = mul(caps, tanh(mul(x, inverse)));
    x = fma(slopes, add(set1(static_cast<float>(distance + i)), lane), x);
    store(scores + i, x);
  }
}

// The state of one query: acc [d_stride], then this. offset: added to every element of acc at the end.
struct Running {
  float maximum, sum, offset;
};
inline Running& running_of(float* state, std::int64_t d_stride) {
  return *reinterpret_cast<Running*>(state + d_stride);
}

inline float exp_of(float x) {
  float lanes[kWidth];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

// If a query's weights are rounded to pairs of bf16, the sum is over the rounded weights, so that they add up to 1.
#if defined(CHARONIA_NATIVE_PAIRS)
template <bool Paired>
inline __attribute__((always_inline)) Vec store_weights(float* row, int i, Vec low, Vec high, Vec sum) {
  if constexpr (Paired) {
    const PairVec pairs = to_pairs(low, high);
    store_pairs(reinterpret_cast<Bf16*>(row) + i, pairs);
    return fma_pairs(pairs, {_mm512_set1_epi32(0x3f803f80)}, sum);
  }
#else
template <bool Paired>
inline __attribute__((always_inline)) Vec store_weights(float* row, int i, Vec low, Vec high, Vec sum) {
#endif
  store(row + i, low);
  store(row + i + kWidth, high);
  return add(add(sum, low), high);
}

// scores [n rounded up to two vectors] -> weights: e^(scale * score) relative to the running maximum. Only positions
// [unseen, seen) count. Paired: stored as PairOperands, in the row's own memory. Returns the factor for the earlier
// accumulated values.
template <bool Paired>
inline float softmax_chunk(float* scores, int n, int unseen, int seen, float scale, Running& running) {
  constexpr int kStep = 2 * kWidth;
  const int all = (n + kStep - 1) / kStep * kStep;
  const int counted = seen <= unseen ? 0 : (seen + kStep - 1) / kStep * kStep;
  float factor = 1;
  if (counted > 0) {
    for (int i = 0; i < unseen; ++i) scores[i] = -__builtin_inff();
    for (int i = seen; i < counted; ++i) scores[i] = -__builtin_inff();
    Vec greatest = set1(-__builtin_inff());
    for (int i = 0; i < counted; i += kWidth) greatest = max(load(scores + i), greatest);
    const float chunk_maximum = max_of(greatest) * scale;
    const float maximum = running.maximum > chunk_maximum ? running.maximum : chunk_maximum;
    factor = exp_of(running.maximum - maximum);
    constexpr float kLog2E = 0x1.715476p+0F;
    const Vec scales = set1(Paired ? kLog2E * scale : scale), shift = set1(Paired ? kLog2E * -maximum : maximum);
    const auto weights = [&](Vec x) {
      return Paired ? exp2(fma(x, scales, shift)) : exp(sub(mul(x, scales), shift));
    };
    Vec sum = zero();
    for (int i = 0; i < counted; i += kStep) {
      const Vec low = weights(load(scores + i)), high = weights(load(scores + i + kWidth));
      sum = store_weights<Paired>(scores, i, low, high, sum);
    }
    running.sum = running.sum * factor + sum_of(sum);
    running.offset *= factor;
    running.maximum = maximum;
  }
  for (int i = counted; i < all; i += kStep) store_weights<Paired>(scores, i, zero(), zero(), zero());
  return factor;
}

template <class Out>
void write(Out* out, const float* acc, const Running& running, float scale, int n) {
  const Vec divisor = set1(running.sum), offset = set1(running.offset), factor = set1(scale);
  const auto at = [&](int j) { return mul(div(add(load(acc + j), offset), divisor), factor); };
  int j = 0;
  for (; j + kWidth <= n; j += kWidth) store(out + j, at(j));
  if (j < n) store_n(out + j, at(j), n - j);
}

// The workspace of a tile: queries [vectors][d_stride], two states, scores [vectors][s_stride], factors [vectors]; for
// a quantised cache also the scales and zeros of a chunk, [s_stride] each, and the sums of the queries [vectors]; for
// latent attention the values of a chunk. For a bf16 cache the rows of queries and scores hold PairOperands.
struct Workspace {
  explicit Workspace(const AttentionArgs& args)
      : d_stride(round_up_to_vector(args.head_dim)),
        state_stride(attention_state(args.head_dim)),
        s_stride(round_up_to_vector(attention_chunk(args.block_len)) + kWidest),
        q(args.scratch),
        first(q + kAttentionTile * d_stride),
        second(first + kAttentionTile * state_stride),
        scores(second + kAttentionTile * state_stride),
        k_scales(scores + kAttentionTile * s_stride),
        k_zeros(k_scales + s_stride),
        v_scales(k_zeros + s_stride),
        v_zeros(v_scales + s_stride),
        q_sums(v_zeros + s_stride),
        factors(q_sums + round_up_to_vector(kAttentionTile)),
        values(factors + round_up_to_vector(kAttentionTile)) {}
  std::int64_t d_stride, state_stride, s_stride;
  float *q, *first, *second, *scores, *k_scales, *k_zeros, *v_scales, *v_zeros, *q_sums, *factors, *values;
};

template <bool Paired>
inline void take_queries(const AttentionArgs& args, const Workspace& workspace) {
  for (int i = 0; i < args.end - args.begin; ++i) {
    const int flat = args.begin + i;
    const float* from = args.q + (flat / args.group) * args.q_stride + (flat % args.group) * args.head_dim;
    float* const to = workspace.q + i * workspace.d_stride;
    if constexpr (Paired) {
      auto* const operands = reinterpret_cast<PairOperand*>(to);
      int d = 0;
      for (; d + kWidth <= args.head_dim; d += kWidth) store(operands + d, load(from + d));
      if (d < args.head_dim) store_n(operands + d, load_n(from + d, args.head_dim - d), args.head_dim - d);
    } else {
      for (int d = 0; d < args.head_dim; ++d) to[d] = from[d];
    }
  }
}

// Computes the sum of every query, for the zeros of a quantised cache.
inline void sum_queries(const AttentionArgs& args, const Workspace& workspace) {
  for (int i = 0; i < args.end - args.begin; ++i) {
    const float* const q = workspace.q + i * workspace.d_stride;
    Vec sum = zero();
    int d = 0;
    for (; d + kWidth <= args.head_dim; d += kWidth) sum = add(sum, load(q + d));
    if (d < args.head_dim) sum = add(sum, load_n(q + d, args.head_dim - d));
    workspace.q_sums[i] = sum_of(sum);
  }
}

// The positions that the tile's queries attend to: from the first of its first query to the last of its last query.
struct AttendedRange {
  explicit AttendedRange(const AttentionArgs& args)
      : first(attention_first(args.first_position + args.begin / args.group, args.window)),
        last(args.first_position + (args.end - 1) / args.group) {}
  int first, last;
};

// The layout of the cache's type in a block.
template <class T>
struct Stored {
  static constexpr bool kQuantised = false;
  static constexpr bool kPaired = false;
  static constexpr int kPerByte = 1;  // elements per T
};
template <>
struct Stored<Bf16> {
  static constexpr bool kQuantised = false;
  static constexpr bool kPaired = true;
  static constexpr int kPerByte = 1;
};
template <>
struct Stored<Q8> {
  static constexpr bool kQuantised = true;
  static constexpr bool kPaired = false;
  static constexpr int kPerByte = 1;
};
template <>
struct Stored<Q4> {
  static constexpr bool kQuantised = true;
  static constexpr bool kPaired = false;
  static constexpr int kPerByte = 2;
};

// Converts scales and zeros of positions [first, n) of a chunk to floats; writes zeros elsewhere, up to a whole vector.
// scales_at(p): the scales of the block that begins at position p of the chunk.
template <class ScalesAt>
void take_scales(const Workspace& workspace, int block_len, int first, int n, ScalesAt scales_at) {
  float* const rows[] = {workspace.k_scales, workspace.k_zeros, workspace.v_scales, workspace.v_zeros};
  for (int r = 0; r < 4; ++r) {
    float* const row = rows[r];
    for (int i = 0; i < first; ++i) row[i] = 0;
    for (int p = first; p < n; p += block_len) {
      const F16* const from = scales_at(p) + std::int64_t{r} * block_len;
      const int count = n - p < block_len ? n - p : block_len;
      int i = 0;
      for (; i + kWidth <= count; i += kWidth) store(row + p + i, load(from + i));
      if (i < count) store(row + p + i, load_n(from + i, count - i));
    }
    for (int i = n; i % kWidth != 0; ++i) row[i] = 0;
  }
}

// Converts sums over integers to scores.
inline void scale_scores(float* scores, int n, const Workspace& workspace, float q_sum) {
  const Vec sum = set1(q_sum);
  for (int i = 0; i < n; i += kWidth) {
    store(scores + i, fma(load(scores + i), load(workspace.k_scales + i), mul(sum, load(workspace.k_zeros + i))));
  }
}

// Converts probabilities to the factors of the values' integers. Returns the sum of the zeros.
inline float scale_probabilities(float* scores, int n, const Workspace& workspace) {
  Vec offset = zero();
  for (int i = 0; i < n; i += kWidth) {
    const Vec p = load(scores + i);
    offset = fma(p, load(workspace.v_zeros + i), offset);
    store(scores + i, mul(p, load(workspace.v_scales + i)));
  }
  return sum_of(offset);
}

// The blocks of a sequence, by the position where a block begins.
template <class T>
struct Context {
  explicit Context(const AttentionArgs& args)
      : args(args),
        width(args.head_dim / Stored<T>::kPerByte),
        value_width(args.value_dim() / Stored<T>::kPerByte) {}

  const T* keys(int position) const {
    return reinterpret_cast<const T*>(static_cast<const char*>(args.kv) +
                                      args.blocks[position / args.block_len] * args.block_stride);
  }
  const T* values(int position) const { return keys(position) + static_cast<std::int64_t>(width) * args.block_len; }
  const F16* scales(int position) const {
    return reinterpret_cast<const F16*>(keys(position) + std::int64_t{2} * width * args.block_len);
  }

  const AttentionArgs& args;
  int width, value_width;  // of a row of k, and of v: elements, or bytes with 4 bits
};

// Positions [begin, begin + n) of a context. No query of the tile attends to those before begin + first. next: start of
// the next chunk that the tile attends to, or -1.
struct Chunk {
  int begin, n, first, next;
};

// Converts the scales of a chunk, and prefetches the scales of the next chunk.
template <class T>
inline void take_scales(const Context<T>& context, const Workspace& workspace, const Chunk& chunk, int end) {
  const int block_len = context.args.block_len;
  take_scales(workspace, block_len, chunk.first, chunk.n, [&](int p) { return context.scales(chunk.begin + p); });
  const int next_n = end - chunk.next < attention_chunk(block_len) ? end - chunk.next : attention_chunk(block_len);
  for (int p = 0; chunk.next >= 0 && p < next_n; p += block_len) {
    const auto* const ahead = reinterpret_cast<const char*>(context.scales(chunk.next + p));
    for (int byte = 0; byte < 4 * 2 * block_len; byte += 64) __builtin_prefetch(ahead + byte, 0, kAheadLevel);
  }
}

template <class T>
inline void multiply_keys(const Context<T>& context, const Workspace& workspace, const Chunk& chunk, int vectors) {
  const int block_len = context.args.block_len;
  for (int p = chunk.first; p < chunk.n; p += block_len) {
    const T* const keys = context.keys(chunk.begin + p);
    const T* const next = p + block_len < chunk.n ? context.keys(chunk.begin + p + block_len)
                                                  : context.values(chunk.begin + chunk.first);
    const int left = chunk.n - p, columns = left < block_len ? left : block_len;
    if constexpr (Stored<T>::kPaired) {
      // Uses whole vectors if the block has them. Results for positions that were never written are ignored later.
      const int whole = (columns + kWidth - 1) / kWidth * kWidth;
      const KeyProduct product{
          .rows = vectors,
          .q = reinterpret_cast<const PairOperand*>(workspace.q),
          .q_stride = workspace.d_stride * kOperandsPerFloat,
          .keys = {keys, context.width, block_len, 0, context.width},
          .columns = whole < block_len ? whole : block_len,
          .scores = workspace.scores + p,
          .s_stride = workspace.s_stride,
          .ahead = reinterpret_cast<const char*>(next) - reinterpret_cast<const char*>(keys)};
      vectors <= kMaxRows ? product.template run<true>() : product.template run<false>();
    } else {
      multiply<T>({.rows = vectors,
                   .a = workspace.q,
                   .a_stride = workspace.d_stride,
                   .k = context.width,
                   .b = keys,
                   .b_stride = block_len,
                   .columns = columns,
                   .c = workspace.scores + p,
                   .c_stride = workspace.s_stride,
                   .accumulate = false,
                   .next = next,
                   .plane = context.width,
                   .keys = true});
    }
  }
}

// Converts scores to weights, and computes the factors for the accumulated values.
template <class T>
inline void compute_weights(const AttentionArgs& args, const Workspace& workspace, const Chunk& chunk, float* state) {
  const bool has_score_mod = args.soft_cap != 0 || args.slopes != nullptr;
  for (int i = 0; i < args.end - args.begin; ++i) {
    const int position = args.first_position + (args.begin + i) / args.group;
    const int unseen = attention_first(position, args.window) - chunk.begin;
    const int seen = position + 1 - chunk.begin < chunk.n ? position + 1 - chunk.begin : chunk.n;
    float* const scores = workspace.scores + i * workspace.s_stride;
    if constexpr (Stored<T>::kQuantised) scale_scores(scores, chunk.n, workspace, workspace.q_sums[i]);
    if (has_score_mod) {
      const float slope = args.slopes == nullptr ? 0 : args.slopes[(args.begin + i) % args.group];
      modify_scores(scores, chunk.n, args, slope, chunk.begin - position);
    }
    Running& running = running_of(state + i * workspace.state_stride, workspace.d_stride);
    workspace.factors[i] = softmax_chunk<Stored<T>::kPaired>(scores, chunk.n, unseen > 0 ? unseen : 0, seen,
                                                             has_score_mod ? 1 : args.scale, running);
    if constexpr (Stored<T>::kQuantised) running.offset += scale_probabilities(scores, chunk.n, workspace);
  }
}

// v [columns][width] = the first elements of k, in the layouts of the cache.
template <class T>
inline void copy_values(T* v, int width, const T* k, int block_len, int columns) {
  constexpr int kSide = 16;  // of a square that is transposed at a time
  for (int d = 0; d < width; d += kSide) {
    const int d_end = d + kSide < width ? d + kSide : width;
    for (int p = 0; p < columns; p += kSide) {
      const int p_end = p + kSide < columns ? p + kSide : columns;
      for (int i = p; i < p_end; ++i) {
        for (int j = d; j < d_end; ++j) {
          v[static_cast<std::int64_t>(i) * width + j] = k[static_cast<std::int64_t>(j) * block_len + i];
        }
      }
    }
  }
}

// In pairs of rows: transposes squares of two rows and two columns, which are 8 bytes of both.
inline void copy_values(Bf16* v, int width, const Bf16* k, int block_len, int columns) {
  constexpr int kSide = 8;
  const int paired = (columns + 1) / 2 * 2 <= block_len ? (columns + 1) / 2 : columns / 2;
  for (int d = 0; d < width; d += 2 * kSide) {
    const int d_end = d + 2 * kSide < width ? d + 2 * kSide : width;
    for (int p = 0; p < paired; p += kSide) {
      const int p_end = p + kSide < paired ? p + kSide : paired;
      for (int i = p; i < p_end; ++i) {
        for (int j = d; j < d_end; j += 2) {
          std::uint64_t square;
          __builtin_memcpy(&square, k + static_cast<std::int64_t>(j) * block_len + 4 * i, sizeof square);
          const std::uint64_t second = square >> 16 & 0xffff0000, third = (square & 0xffff0000) << 16;
          square = (square & 0xffff00000000ffff) | second | third;
          __builtin_memcpy(v + static_cast<std::int64_t>(2 * i) * width + 2 * j, &square, sizeof square);
        }
      }
    }
  }
  if (2 * paired == columns + columns % 2) return;
  const int last = columns - 1;  // of a block of an odd number of tokens
  for (int j = 0; j < width; ++j) {
    v[static_cast<std::int64_t>(last) * width + j] =
        k[static_cast<std::int64_t>(j / 2 * 2) * block_len + 2 * last + j % 2];
  }
}

// Copies the values of a chunk's latents into the workspace.
template <class T>
inline void take_values(const Context<T>& context, const Workspace& workspace, const Chunk& chunk) {
  const int block_len = context.args.block_len, width = context.value_width;
  for (int p = chunk.first; p < chunk.n; p += block_len) {
    copy_values(reinterpret_cast<T*>(workspace.values) + static_cast<std::int64_t>(p) * width, width,
                context.keys(chunk.begin + p), block_len, chunk.n - p < block_len ? chunk.n - p : block_len);
  }
}

// state = state * factors + weights * values.
template <class T>
inline void add_values(const Context<T>& context, const Workspace& workspace, const Chunk& chunk, int vectors,
                       float* state) {
  const int block_len = context.args.block_len;
  const auto values_at = [&](int p) -> const T* {
    if (context.args.latent_dim > 0) {
      return reinterpret_cast<const T*>(workspace.values) +
             static_cast<std::int64_t>(p < chunk.n ? p : chunk.first) * context.value_width;
    }
    if (p < chunk.n) return context.values(chunk.begin + p);
    return chunk.next >= 0 ? context.keys(chunk.next) : context.values(chunk.begin + chunk.first);
  };
  if constexpr (Stored<T>::kPaired) {
    const auto block = [&](int b) { return values_at(b * block_len); };
    const ValueProduct<decltype(block)> product{
        .rows = vectors,
        .p = reinterpret_cast<const PairOperand*>(workspace.scores),
        .p_stride = workspace.s_stride * kOperandsPerFloat,
        .first_block = chunk.first / block_len,
        .positions = chunk.n,
        .block_len = block_len,
        .dim = context.value_width,
        .factors = workspace.factors,
        .acc = state,
        .acc_stride = workspace.state_stride,
        .values_at = block};
    vectors <= kMaxRows ? product.template run<true>() : product.template run<false>();
  } else {
    for (int i = 0; i < vectors; ++i) {
      if (workspace.factors[i] == 1) continue;
      float* const acc = state + i * workspace.state_stride;
      const Vec factors = set1(workspace.factors[i]);
      for (std::int64_t d = 0; d < workspace.d_stride; d += kWidth) store(acc + d, mul(load(acc + d), factors));
    }
    for (int p = chunk.first; p < chunk.n; p += block_len) {
      multiply<T>({.rows = vectors,
                   .a = workspace.scores + p,
                   .a_stride = workspace.s_stride,
                   .k = chunk.n - p < block_len ? chunk.n - p : block_len,
                   .b = values_at(p),
                   .b_stride = context.value_width,
                   .columns = context.value_width,
                   .c = state,
                   .c_stride = workspace.state_stride,
                   .accumulate = true,
                   .next = values_at(p + block_len),
                   .plane = context.width,
                   .keys = false});
    }
  }
}

// Computes the state [vectors][state_stride] of split `split` alone.
template <class T>
void attend(const AttentionArgs& args, const Workspace& workspace, int split, float* state) {
  const int vectors = args.end - args.begin;
  for (int i = 0; i < vectors; ++i) {
    float* const acc = state + i * workspace.state_stride;
    for (std::int64_t d = 0; d < workspace.d_stride; d += kWidth) store(acc + d, zero());
    running_of(acc, workspace.d_stride) = {-__builtin_inff(), 0, 0};
  }

  const Context<T> context(args);
  const AttendedRange seen(args);
  const int length = attention_chunk(args.block_len);
  const int split_begin = split * attention_split(args.block_len);
  const int split_end = split_begin + attention_split(args.block_len);
  const int end = seen.last + 1 < split_end ? seen.last + 1 : split_end;
  int begin = split_begin;
  if (seen.first > begin) begin += (seen.first - begin) / length * length;
  for (; begin < end; begin += length) {
    const Chunk chunk{.begin = begin,
                      .n = end - begin < length ? end - begin : length,
                      .first = seen.first > begin ? (seen.first - begin) / args.block_len * args.block_len : 0,
                      .next = begin + length <= seen.last ? begin + length : -1};
    if constexpr (Stored<T>::kQuantised) take_scales(context, workspace, chunk, end);
    multiply_keys(context, workspace, chunk, vectors);
    compute_weights<T>(args, workspace, chunk, state);
    if constexpr (!Stored<T>::kQuantised) {
      if (args.latent_dim > 0) take_values(context, workspace, chunk);
    }
    add_values(context, workspace, chunk, vectors, state);
  }
}

// Merges `next` into `total`. A split that a query does not attend to changes nothing.
inline void merge(float* total, const float* next, int vectors, std::int64_t d_stride, std::int64_t state_stride) {
  for (int i = 0; i < vectors; ++i, total += state_stride, next += state_stride) {
    Running& sum = running_of(total, d_stride);
    const Running added = *reinterpret_cast<const Running*>(next + d_stride);
    if (added.sum == 0) continue;
    if (sum.sum == 0) {
      for (std::int64_t d = 0; d < state_stride; d += kWidth) store(total + d, load(next + d));
      continue;
    }
    const float maximum = sum.maximum > added.maximum ? sum.maximum : added.maximum;
    const float before = exp_of(sum.maximum - maximum), factor = exp_of(added.maximum - maximum);
    const Vec befores = set1(before), factors = set1(factor);
    for (std::int64_t d = 0; d < d_stride; d += kWidth) {
      store(total + d, fma(load(next + d), factors, mul(load(total + d), befores)));
    }
    sum = {maximum, sum.sum * before + added.sum * factor, sum.offset * before + added.offset * factor};
  }
}

inline void write_tile(const AttentionArgs& args, const Workspace& workspace, float* state) {
  for (int i = 0; i < args.end - args.begin; ++i) {
    const int flat = args.begin + i;
    const std::int64_t at = (flat / args.group) * args.out_stride + (flat % args.group) * args.value_dim();
    float* const acc = state + i * workspace.state_stride;
    Running running = running_of(acc, workspace.d_stride);
    if (args.sinks != nullptr) running.sum += exp_of(args.sinks[flat % args.group] - running.maximum);
    if (args.out_dtype == DType::bf16) {
      write(static_cast<Bf16*>(args.out) + at, acc, running, args.value_scale, args.value_dim());
    } else {
      write(static_cast<float*>(args.out) + at, acc, running, args.value_scale, args.value_dim());
    }
  }
}

template <class T>
void attention(const AttentionArgs& args) {
  const Workspace workspace(args);
  take_queries<Stored<T>::kPaired>(args, workspace);
  if constexpr (Stored<T>::kQuantised) sum_queries(args, workspace);
  const AttendedRange seen(args);
  const int split = attention_split(args.block_len);
  const int first = seen.first / split, last = seen.last / split;
  attend<T>(args, workspace, first, workspace.first);
  for (int p = first + 1; p <= last; ++p) {
    attend<T>(args, workspace, p, workspace.second);
    merge(workspace.first, workspace.second, args.end - args.begin, workspace.d_stride, workspace.state_stride);
  }
  write_tile(args, workspace, workspace.first);
}

template <class T>
void one_split(const AttentionArgs& args, int split, float* state) {
  const Workspace workspace(args);
  take_queries<Stored<T>::kPaired>(args, workspace);
  if constexpr (Stored<T>::kQuantised) sum_queries(args, workspace);
  attend<T>(args, workspace, split, state);
}

}  // namespace

void attention_bf16(const AttentionArgs& args) { attention<Bf16>(args); }
void attention_f16(const AttentionArgs& args) { attention<F16>(args); }
void attention_f32(const AttentionArgs& args) { attention<float>(args); }
void attention_f8(const AttentionArgs& args) { attention<F8>(args); }
void attention_q8(const AttentionArgs& args) { attention<Q8>(args); }
void attention_q4(const AttentionArgs& args) { attention<Q4>(args); }
void attention_split_bf16(const AttentionArgs& args, int split, float* state) { one_split<Bf16>(args, split, state); }
void attention_split_f16(const AttentionArgs& args, int split, float* state) { one_split<F16>(args, split, state); }
void attention_split_f32(const AttentionArgs& args, int split, float* state) { one_split<float>(args, split, state); }
void attention_split_f8(const AttentionArgs& args, int split, float* state) { one_split<F8>(args, split, state); }
void attention_split_q8(const AttentionArgs& args, int split, float* state) { one_split<Q8>(args, split, state); }
void attention_split_q4(const AttentionArgs& args, int split, float* state) { one_split<Q4>(args, split, state); }

void attention_merge(const AttentionArgs& args, float* states, int splits) {
  const Workspace workspace(args);
  const int vectors = args.end - args.begin;
  for (int p = 1; p < splits; ++p) {
    merge(states, states + p * vectors * workspace.state_stride, vectors, workspace.d_stride, workspace.state_stride);
  }
  write_tile(args, workspace, states);
}

}  // namespace charonia::ops::cpu::CHARONIA_ISA
