// The gated delta rule (DeltaNetParams): the recurrence over the rows of each sequence.
//
//   grid (sequences, v heads * strips of a head)
//
// A block has a strip of kStrip columns of the state of a head. Columns do not depend on each other. The state stays in
// registers: kParts neighbouring threads share a column, and thread `part` has rows 16 i + 4 part + 0..3 of it. Rows of
// the sequence come in tiles of kTile. For a tile, each warp normalises q and k of its rows, and stores them as floats
// in shared memory; then all threads process the tile's rows one after the other, without another barrier. Sums over a
// column have four accumulators per thread, then the threads are added by shuffles. This order depends neither on the
// tiles nor on the number of rows. With kRowStates, a row with a slot of its own also stores the state after it.
//
// Bound: a decode step reads and writes the state once (memory). A long prefill is bound by the latency of a row: two
// sums over k_dim / 16 dependent operations with two shuffles each, about 300 cycles with k_dim = 128 by counting, for
// all heads and strips at the same time. State, q and k of a row stay on the chip.
#include "ops/cuda/kernels/delta_net.h"

#include "ops/cuda/device/portable.h"
#include "ops/cuda/kernels/activation.h"
#include "ops/cuda/kernels/element_types.h"

namespace charonia::cuda {
namespace {

constexpr int kStrip = ops::DeltaNetParams::kStrip;
constexpr int kParts = 4;  // threads of a column
constexpr int kThreads = kStrip * kParts, kWarps = kThreads / kWarp;
constexpr int kTile = 8;
constexpr float kLeastSquares = 1e-6F;

struct DeltaParams {
  void* qkv = nullptr;
  std::int64_t stride = 0;
  const float* gates = nullptr;
  std::int64_t gates_stride = 0;
  const float* decay = nullptr;
  const float* dt_bias = nullptr;
  float* states = nullptr;  // of slot 0, from the first float of s on
  std::int64_t slot_floats = 0;
  const StateItem* items = nullptr;
  const std::int32_t* row_states = nullptr;
  int k_heads = 0, v_heads = 0, k_dim = 0, v_dim = 0, strips = 0;
  bool tiled = false;
};

// Stores n elements as floats, multiplied by scale / sqrt(sum of squares + kLeastSquares), then zeros up to kPadded.
template <int kPadded, class T>
CHARONIA_DEVICE void normalise(float* to, const T* from, int n, float scale) {
  constexpr int kPerLane = kPadded / kWarp;
  float x[kPerLane], sum = 0;
  CHARONIA_UNROLL
  for (int i = 0; i < kPerLane; ++i) {
    const int at = i * kWarp + lane_id();
    x[i] = at < n ? to_float(from[at]) : 0.0F;
    sum = fmaf(x[i], x[i], sum);
  }
  const float factor = scale * reciprocal_sqrt(warp_sum(sum) + kLeastSquares);
  CHARONIA_UNROLL
  for (int i = 0; i < kPerLane; ++i) to[i * kWarp + lane_id()] = x[i] * factor;
}

// The sum over the threads of a column; each of them has the result.
CHARONIA_DEVICE float column_sum(const float (&parts)[4]) {
  float sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
  CHARONIA_UNROLL
  for (int mask = 1; mask < kParts; mask *= 2) sum += shuffle_xor(sum, mask);
  return sum;
}

CHARONIA_DEVICE void elements_of(const float4& four, float (&x)[4]) {
  x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}

// Updates a thread's rows s of the state, of one column, with a row's k (k_tile), v, beta and alpha. Returns the sum of q
// (q_tile) times the column over all threads of it. The tiles begin with the thread's first four rows.
template <int kRows>
CHARONIA_DEVICE float update(float (&s)[kRows], const float4* k_tile, const float4* q_tile, const float* v, float beta,
                             float alpha) {
  float sums[4] = {0, 0, 0, 0}, k[4], q[4];
  CHARONIA_UNROLL
  for (int i = 0; i < kRows / 4; ++i) {
    elements_of(k_tile[i * kParts], k);
    CHARONIA_UNROLL
    for (int j = 0; j < 4; ++j) sums[j] = fmaf(k[j], s[4 * i + j], sums[j]);
  }
  const float delta = beta * fmaf(-alpha, column_sum(sums), *v);
  CHARONIA_UNROLL
  for (int j = 0; j < 4; ++j) sums[j] = 0;
  CHARONIA_UNROLL
  for (int i = 0; i < kRows / 4; ++i) {
    elements_of(k_tile[i * kParts], k);
    elements_of(q_tile[i * kParts], q);
    CHARONIA_UNROLL
    for (int j = 0; j < 4; ++j) {
      s[4 * i + j] = fmaf(k[j], delta, multiply_rounded(alpha, s[4 * i + j]));
      sums[j] = fmaf(q[j], s[4 * i + j], sums[j]);
    }
  }
  return column_sum(sums);
}

// kRows: rows of the state in a thread, so k_dim is at most kRows * kParts. kRowStates: p.row_states is set. A template,
// because it takes 16 to 24 registers.
template <class T, int kRows, bool kRowStates>
CHARONIA_KERNEL(kThreads, 2)
void delta_kernel(const DeltaParams p) {
  constexpr int kPadded = kRows * kParts;
  CHARONIA_SHARED(float4, q_tile, [kTile * kPadded / 4]);
  CHARONIA_SHARED(float4, k_tile, [kTile * kPadded / 4]);
  CHARONIA_SHARED(float, v_tile, [kTile * kStrip]);
  CHARONIA_SHARED(float, gate_tile, [kTile * 2]);
  dependency_trigger();
  dependency_wait();
  const StateItem item = p.items[blockIdx.x];
  if (item.num_rows == 0) return;
  const int unit = static_cast<int>(blockIdx.y), head = unit / p.strips, first_column = unit % p.strips * kStrip;
  const int columns = min(kStrip, p.v_dim - first_column);
  const int k_head = p.tiled ? head % p.k_heads : head / (p.v_heads / p.k_heads);
  const int thread = static_cast<int>(threadIdx.x), part = thread % kParts, column = thread / kParts;
  const auto at = static_cast<std::int64_t>(unit) * p.k_dim * kStrip + column;
  const auto row_of = [part](int i) { return 16 * (i / 4) + 4 * part + i % 4; };
  float s[kRows];
  const float* const old = item.in < 0 ? nullptr : p.states + item.in * p.slot_floats + at;
  CHARONIA_UNROLL
  for (int i = 0; i < kRows; ++i) {
    s[i] = old != nullptr && row_of(i) < p.k_dim ? old[static_cast<std::int64_t>(row_of(i)) * kStrip] : 0.0F;
  }
  const auto store = [&](std::int64_t slot) {
    float* const to = p.states + slot * p.slot_floats + at;
    CHARONIA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      if (row_of(i) < p.k_dim) to[static_cast<std::int64_t>(row_of(i)) * kStrip] = s[i];
    }
  };
  const float q_scale = reciprocal_sqrt(static_cast<float>(p.k_dim));
  T* const heads = static_cast<T*>(p.qkv) + item.first_row * p.stride;
  const std::int64_t k_at = static_cast<std::int64_t>(p.k_heads) * p.k_dim;
  const std::int64_t v_at = 2 * k_at + static_cast<std::int64_t>(head) * p.v_dim + first_column;
  for (int first = 0; first < item.num_rows; first += kTile) {
    const int count = min(kTile, item.num_rows - first);
    for (int t = warp_id(); t < count; t += kWarps) {
      const T* const row = heads + (first + t) * p.stride;
      const T* const q = row + static_cast<std::int64_t>(k_head) * p.k_dim;
      normalise<kPadded>(reinterpret_cast<float*>(q_tile) + t * kPadded, q, p.k_dim, q_scale);
      normalise<kPadded>(reinterpret_cast<float*>(k_tile) + t * kPadded, q + k_at, p.k_dim, 1);
      v_tile[t * kStrip + lane_id()] = lane_id() < columns ? to_float(row[v_at + lane_id()]) : 0.0F;
      if (lane_id() == 0) {
        const float* const gates = p.gates + (static_cast<std::int64_t>(item.first_row) + first + t) * p.gates_stride;
        const float a = gates[p.v_heads + head] + p.dt_bias[head];
        gate_tile[2 * t] = 1 / (1 + expf(-gates[head]));
        gate_tile[2 * t + 1] = expf(-p.decay[head] * (fmaxf(a, 0.0F) + log1pf(expf(-fabsf(a)))));
      }
    }
    __syncthreads();
    for (int t = 0; t < count; ++t) {
      const float o = update(s, k_tile + t * kPadded / 4 + part, q_tile + t * kPadded / 4 + part,
                             v_tile + t * kStrip + column, gate_tile[2 * t], gate_tile[2 * t + 1]);
      if (part == 0 && column < columns) heads[(first + t) * p.stride + v_at + column] = from_float<T>(o);
      if (kRowStates && first + t + 1 < item.num_rows) {
        if (const int slot = p.row_states[item.first_row + first + t]; slot >= 0) store(slot);
      }
    }
    __syncthreads();
  }
  store(item.out);
}

}  // namespace

void delta_net(Stream& stream, const ops::Tensor& qkv, const ops::Tensor& gates, const ops::DeltaNetParams& how,
               const StateLayer& layer, const StateRows& rows) {
  if (rows.num_items == 0) return;
  const DeltaParams p{.qkv = qkv.data,
                      .stride = qkv.stride,
                      .gates = static_cast<const float*>(gates.data),
                      .gates_stride = gates.stride,
                      .decay = how.decay,
                      .dt_bias = how.dt_bias,
                      .states = layer.data + how.state,
                      .slot_floats = layer.slot_floats,
                      .items = rows.items,
                      .row_states = rows.row_states,
                      .k_heads = how.k_heads,
                      .v_heads = how.v_heads,
                      .k_dim = how.k_dim,
                      .v_dim = how.v_dim,
                      .strips = how.strips(),
                      .tiled = how.tiled};
  const Launch shape{.grid_x = static_cast<unsigned>(rows.num_items),
                     .grid_y = static_cast<unsigned>(how.v_heads * how.strips()),
                     .threads = kThreads};
  const auto issue = [&]<class T, bool kRowStates>() {
    launch(stream, "delta_net", shape,
           how.k_dim <= 64    ? delta_kernel<T, 16, kRowStates>
           : how.k_dim <= 128 ? delta_kernel<T, 32, kRowStates>
                              : delta_kernel<T, 64, kRowStates>,
           p);
  };
  with_type(qkv.dtype, [&]<class T>(T) {
    if (rows.row_states == nullptr) {
      issue.template operator()<T, false>();
    } else {
      issue.template operator()<T, true>();
    }
  });
}

}  // namespace charonia::cuda
