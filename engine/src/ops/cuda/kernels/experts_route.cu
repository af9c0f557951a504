// Routes rows to experts, and sums the outputs of a row's experts.
//
//   route    a warp per row. Finds the experts in the order of their logits (ties: the lower index first), each as the
//            largest after the previous one, then sorts them by index. Sums of exponentials run over lanes, then over
//            the warp, in an order that depends only on the number of experts. If the selection does not use the
//            logits, the warp first writes the selection values to shared memory, and finds the best groups with a lane
//            per group.
//   group    a block per expert counts the assignments of all experts, so it knows the offset of its own. It writes its
//            assignments in ascending order of rows, and divides them into tiles. Nothing depends on the order of
//            blocks.
//   pad      copies rows of an input that cannot be read 16 bytes at a time.
//   add      a thread per 8 elements of a row: the shared expert's output, and one fused multiply-add for each of the
//            row's experts, in their order.
//
// Bound: latency. For 1 row the four launches read and write a few KB. For 8192 rows of 8 out of 128 experts, group
// reads the 256 KB of assignments twice in each of 128 blocks, 64 MB from the L2 cache: about 15 us, next to GEMMs of a
// millisecond. add reads top_k * hidden elements of a row and writes hidden: at hidden 2048, 16 bits and 8 experts 36
// KB per row.
#include "ops/cuda/device/portable.h"
#include "ops/cuda/kernels/element_types.h"
#include "ops/cuda/kernels/experts.h"
#include "ops/cuda/kernels/row_vectors.h"

namespace charonia::cuda {
namespace {

using u64 = unsigned long long;

constexpr int kRouteThreads = 128, kGroupThreads = 256, kRowThreads = 128;
static_assert(kVector == kExpertVector);

// Route kernels.

// A sort key: greater for the greater value, then for the lower index; never 0 or ~0. NaN has a position too.
CHARONIA_DEVICE u64 order_of(float value, int index) {
  const unsigned bits = __float_as_uint(value + 0.0F);  // -0 becomes 0
  const unsigned rising = (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
  return static_cast<u64>(rising) << 32 | (0xfffffffeU - static_cast<unsigned>(index));
}
CHARONIA_DEVICE int index_of(u64 order) { return static_cast<int>(0xfffffffeU - static_cast<unsigned>(order)); }

CHARONIA_DEVICE u64 warp_greatest(u64 x) {
  CHARONIA_UNROLL
  for (int mask = kWarp / 2; mask > 0; mask /= 2) x = max(x, shuffle_xor(x, mask));
  return x;
}

// Returns the expert with the i-th greatest key in lane i < top_k, and the last of them in later lanes. order(e): 0 if
// e cannot be selected; at least top_k experts can.
template <class Order>
CHARONIA_DEVICE int best_expert(const RouteParams& p, Order order) {
  const int lane = lane_id();
  u64 before = ~0ULL, mine = 0;
  for (int i = 0; i < p.how.top_k; ++i) {
    u64 best = 0;
    for (int e = lane; e < p.experts; e += kWarp) {
      const u64 own = order(e);
      if (own < before) best = max(best, own);
    }
    before = warp_greatest(best);
    if (lane == i) mine = before;
  }
  return index_of(lane < p.how.top_k ? mine : before);
}

// Whether the row is padding, which gets no expert.
CHARONIA_DEVICE bool is_padding(const RouteParams& p, int row) {
  if (p.real_rows == nullptr || row < *p.real_rows) return false;
  const int lane = lane_id();
  const auto first = static_cast<std::int64_t>(row) * p.how.top_k;
  if (lane < p.how.top_k) p.chosen[first + lane] = p.experts;
  if (lane < p.how.top_k) p.weights[first + lane] = 0;
  return true;
}

// Writes the lanes' experts and weights, in the order of the indices.
CHARONIA_DEVICE void write_chosen(const RouteParams& p, int row, int expert, float weight) {
  int at = 0;
  for (int i = 0; i < p.how.top_k; ++i) at += shuffle_from(expert, i) < expert ? 1 : 0;
  if (lane_id() >= p.how.top_k) return;
  const auto first = static_cast<std::int64_t>(row) * p.how.top_k;
  p.chosen[first + at] = expert;
  p.weights[first + at] = weight;
}

CHARONIA_DEVICE float factor_of(const RouteParams& p, int expert) {
  return p.how.expert_scale == nullptr ? p.how.scale : p.how.scale * p.how.expert_scale[expert];
}

CHARONIA_KERNEL(kRouteThreads, 4) void route_kernel(const RouteParams p) {
  dependency_trigger();
  dependency_wait();
  const int row = static_cast<int>(blockIdx.x) * (kRouteThreads / kWarp) + warp_id(), lane = lane_id();
  if (row >= p.rows || is_padding(p, row)) return;
  const float* const logits = p.logits + row * p.stride;
  const int expert = best_expert(p, [&](int e) { return order_of(logits[e], e); });
  const float maximum = logits[shuffle_from(expert, 0)];
  const float exponential = expf(logits[expert] - maximum);
  float sum = 0;
  if (p.how.renormalize) {
    sum = lane < p.how.top_k ? exponential : 0;
  } else {
    for (int e = lane; e < p.experts; e += kWarp) sum += expf(logits[e] - maximum);
  }
  write_chosen(p, row, expert, exponential / warp_sum(sum) * factor_of(p, expert));
}

// Selects the largest scores, or sums of score and bias, in the best groups.
CHARONIA_KERNEL(kRouteThreads, 4) void route_by_scores_kernel(const RouteParams p) {
  CHARONIA_SHARED(float, all_ranks, [kRouteThreads / kWarp][kMaxExperts]);
  dependency_trigger();
  dependency_wait();
  const int row = static_cast<int>(blockIdx.x) * (kRouteThreads / kWarp) + warp_id(), lane = lane_id();
  if (row >= p.rows || is_padding(p, row)) return;
  const float* const logits = p.logits + row * p.stride;
  const auto logit = [&](int e) { return p.in_halves ? logits[e] + logits[p.experts + e] : logits[e]; };
  const bool sigmoid = p.how.score == ops::RouterScore::sigmoid;
  float maximum = logit(0), sum = 0;
  if (!sigmoid) {
    for (int e = lane; e < p.experts; e += kWarp) maximum = fmaxf(maximum, logit(e));
    maximum = warp_max(maximum);
    for (int e = lane; e < p.experts; e += kWarp) sum += expf(logit(e) - maximum);
    sum = warp_sum(sum);
  }
  const auto score = [&](int e) { return sigmoid ? 1.0F / (1.0F + expf(-logit(e))) : expf(logit(e) - maximum) / sum; };
  float* const ranks = all_ranks[warp_id()];
  const bool by_logits = !sigmoid && p.how.bias == nullptr && p.how.groups == 0;  // the logits are then in halves
  for (int e = lane; e < p.experts; e += kWarp) {
    const float own = by_logits ? logit(e) : score(e);
    ranks[e] = p.how.bias == nullptr ? own : own + p.how.bias[e];
  }
  __syncwarp();
  // Without groups, all experts form one group.
  unsigned groups = 1;
  int size = p.experts;
  if (p.how.groups > 0) {
    size = p.experts / p.how.groups;
    u64 mine = 0;
    if (lane < p.how.groups) {
      const float* const own = ranks + lane * size;
      float first = own[0] < own[1] ? own[1] : own[0], second = own[0] < own[1] ? own[0] : own[1];
      for (int e = 2; e < size; ++e) {
        if (own[e] > first) {
          second = first, first = own[e];
        } else if (own[e] > second) {
          second = own[e];
        }
      }
      mine = order_of(first + second, lane);
    }
    groups = 0;
    u64 before = ~0ULL;
    for (int i = 0; i < p.how.top_groups; ++i) {
      before = warp_greatest(mine < before ? mine : 0);
      groups |= 1U << index_of(before);
    }
  }
  const auto allowed = [&](int e) { return (groups >> (e / size) & 1U) != 0; };
  const int expert = best_expert(p, [&](int e) { return allowed(e) ? order_of(ranks[e], e) : 0; });
  const float own = score(expert);
  float divisor = 1;
  if (p.how.renormalize) divisor = fmaxf(warp_sum(lane < p.how.top_k ? own : 0), p.how.norm_min);
  write_chosen(p, row, expert, own / divisor * factor_of(p, expert));
}

// Group kernel.

// The sum over this thread and all earlier threads.
CHARONIA_DEVICE int block_inclusive(int x, int* scratch) {
  CHARONIA_UNROLL
  for (int delta = 1; delta < kWarp; delta *= 2) {
    const int other = shuffle_up(x, delta);
    if (lane_id() >= delta) x += other;
  }
  if (lane_id() == kWarp - 1) scratch[warp_id()] = x;
  __syncthreads();
  for (int warp = 0; warp < warp_id(); ++warp) x += scratch[warp];
  __syncthreads();
  return x;
}

CHARONIA_KERNEL(kGroupThreads, 2) void group_kernel(const RouteParams p) {
  CHARONIA_SHARED(int, counts, [kMaxExperts]);
  CHARONIA_SHARED(int, scratch, [kWarp]);
  CHARONIA_SHARED(int, before, [2]);  // numbers of places and tiles of earlier experts
  dependency_trigger();
  dependency_wait();
  const int tid = static_cast<int>(threadIdx.x), expert = static_cast<int>(blockIdx.x);
  const int assignments = p.rows * p.how.top_k;
  for (int e = tid; e < p.experts; e += kGroupThreads) counts[e] = 0;
  if (tid < 2) before[tid] = 0;
  __syncthreads();
  for (int i = tid; i < assignments; i += kGroupThreads) {
    const int e = p.chosen[i];
    if (e < p.experts) atomicAdd(&counts[e], 1);
  }
  __syncthreads();
  int places = 0, tiles = 0;
  for (int e = tid; e < expert; e += kGroupThreads) {
    places += counts[e];
    tiles += (counts[e] + p.tile_rows - 1) / p.tile_rows;
  }
  if (places > 0) {
    atomicAdd(&before[0], places);
    atomicAdd(&before[1], tiles);
  }
  const int run = (assignments + kGroupThreads - 1) / kGroupThreads;
  const int begin = min(tid * run, assignments), end = min(begin + run, assignments);
  int own = 0;
  for (int i = begin; i < end; ++i) own += p.chosen[i] == expert ? 1 : 0;
  const int up_to = block_inclusive(own, scratch);  // after its barriers `before` is valid
  const int first = before[0], first_tile = before[1], count = counts[expert];
  int place = first + up_to - own;
  for (int i = begin; i < end; ++i) {
    const int e = p.chosen[i];
    if (e == expert) {
      p.rows_of[place] = i / p.how.top_k;
      p.places[i] = place++;
    }
    if (e >= p.experts && expert == 0) p.places[i] = -1;
  }
  const int own_tiles = (count + p.tile_rows - 1) / p.tile_rows;
  for (int i = tid; i < own_tiles; i += kGroupThreads) {
    const int at = i * p.tile_rows;
    p.tiles[first_tile + i] = ExpertTile{expert, first + at, min(p.tile_rows, count - at), 0};
  }
  if (expert + 1 < p.experts) return;
  for (int i = first_tile + own_tiles + tid; i < p.num_tiles; i += kGroupThreads) p.tiles[i] = ExpertTile{0, 0, 0, 0};
}

// Pad kernel.

struct PadParams {
  const void* in = nullptr;
  void* out = nullptr;
  std::int64_t in_stride = 0;
  int cols = 0, padded = 0;
};

template <class T>
CHARONIA_KERNEL(kRowThreads, 4)
void pad_kernel(const PadParams p) {
  dependency_trigger();
  dependency_wait();
  const auto row = static_cast<std::int64_t>(blockIdx.x);
  const T* const from = static_cast<const T*>(p.in) + row * p.in_stride;
  T* const to = static_cast<T*>(p.out) + row * p.padded;
  for (int i = static_cast<int>(threadIdx.x); i < p.padded; i += kRowThreads) to[i] = i < p.cols ? from[i] : T{};
}

// Add kernel.

struct AddParams {
  void* out = nullptr;
  std::int64_t out_stride = 0;
  const void* down = nullptr;
  const std::int32_t* places = nullptr;
  const float* weights = nullptr;
  int cols = 0, padded = 0, top_k = 0;
  bool aligned = false;
  const void* shared = nullptr;  // null: no shared expert
  std::int64_t shared_stride = 0;
  bool shared_aligned = false;
  const float* gate = nullptr;  // null: 1
  std::int64_t gate_stride = 0;
};

template <class T>
CHARONIA_KERNEL(kRowThreads, 4)
void add_kernel(const AddParams p) {
  dependency_trigger();
  dependency_wait();
  const auto row = static_cast<std::int64_t>(blockIdx.x);
  const int at = static_cast<int>(blockIdx.y * kRowThreads + threadIdx.x) * kVector;
  if (at >= p.padded) return;
  float sum[kVector] = {};
  if (p.shared != nullptr) {
    const float factor = p.gate == nullptr ? 1.0F : 1.0F / (1.0F + expf(-p.gate[row * p.gate_stride]));
    to_floats(load_raw(static_cast<const T*>(p.shared) + row * p.shared_stride, at, p.cols, p.shared_aligned), sum);
    CHARONIA_UNROLL
    for (int j = 0; j < kVector; ++j) sum[j] *= factor;
  }
  for (int i = 0; i < p.top_k; ++i) {
    const int place = p.places[row * p.top_k + i];
    if (place < 0) continue;
    const float weight = p.weights[row * p.top_k + i];
    float x[kVector];
    to_floats(load_raw(static_cast<const T*>(p.down) + std::int64_t{place} * p.padded, at, p.padded, true), x);
    CHARONIA_UNROLL
    for (int j = 0; j < kVector; ++j) sum[j] = fmaf(weight, x[j], sum[j]);
  }
  store_floats(static_cast<T*>(p.out) + row * p.out_stride, at, p.cols, p.aligned, sum);
}

}  // namespace

void route_rows(Stream& stream, const RouteParams& params) {
  const bool by_logits = params.how.by_logits() && !params.in_halves;
  launch(stream, by_logits ? "experts: route" : "experts: route by scores",
         {.grid_x = static_cast<unsigned>(divide_up(params.rows, kRouteThreads / kWarp)), .threads = kRouteThreads},
         by_logits ? route_kernel : route_by_scores_kernel, params);
  launch(stream, "experts: group", {.grid_x = static_cast<unsigned>(params.experts), .threads = kGroupThreads},
         group_kernel, params);
}

void pad_rows(Stream& stream, const ops::Tensor& in, void* out, std::int64_t padded) {
  const PadParams params{in.data, out, in.stride, static_cast<int>(in.cols), static_cast<int>(padded)};
  with_type(in.dtype, [&]<class T>(T) {
    launch(stream, "experts: pad", {.grid_x = static_cast<unsigned>(in.rows), .threads = kRowThreads}, pad_kernel<T>,
           params);
  });
}

void add_experts(Stream& stream, const ExpertSums& sums) {
  const auto& out = sums.out;
  const auto aligned = [&](const ops::Tensor& tensor) {
    return out.cols % kVector == 0 && cuda::aligned(tensor.data, tensor.stride, sums.type);
  };
  const AddParams params{
      .out = out.data,
      .out_stride = out.stride,
      .down = sums.down,
      .places = sums.places,
      .weights = sums.weights,
      .cols = static_cast<int>(out.cols),
      .padded = static_cast<int>(sums.padded),
      .top_k = sums.top_k,
      .aligned = aligned(out),
      .shared = sums.shared.out.data,
      .shared_stride = sums.shared.out.stride,
      .shared_aligned = aligned(sums.shared.out),
      .gate = sums.shared.gate,
      .gate_stride = sums.shared.gate_stride};
  with_type(sums.type, [&]<class T>(T) {
    launch(stream, "experts: add",
           {.grid_x = static_cast<unsigned>(out.rows),
            .grid_y = static_cast<unsigned>(divide_up(sums.padded, kRowThreads * kVector)),
            .threads = kRowThreads},
           add_kernel<T>, params);
  });
}

}  // namespace charonia::cuda
