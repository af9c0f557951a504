// The operations of a step.
//
// All operations of one step are issued from one thread, in order. Rows are tokens of the step, in batch order. Every
// output row depends only on the inputs of that row, in a fixed order of operations. It does not depend on the number
// of rows, the number of threads or the row's position in the batch. On CUDA this holds bitwise in the reproducible
// mode. Operations that need host arrays (embed, rotary_store, attention, gather_rows, sample) use the arrays of the
// last begin_step().
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "ops/low_rank.h"
#include "ops/norm_params.h"
#include "ops/tensor.h"

namespace charonia::ops {

class Embedding;
class Experts;
class KvCache;
class Linear;

// How rotary_store() changes the heads of q and k before it stores k and v. Pointers are device pointers.
struct RotaryParams {
  const float* cos_sin = nullptr;  // [table rows, rotary_dim]: half cosines, half sines; null: no rotation
  int rotary_dim = 0;              // even, 2 .. head_dim: rotates pairs (d, d + rotary_dim / 2), no others
  bool interleaved = false;        // rotates pairs (2 d, 2 d + 1) of the first rotary_dim elements instead
  const float* q_norm = nullptr;   // [head_dim], together with k_norm: RMS norm of every head; null: no norm
  const float* k_norm = nullptr;
  float norm_eps = 0;
  bool norm_after = false;  // applies the norm after the rotation instead of before it
  bool v_norm = false;      // RMS norm of every head of v, without a weight; needs q_norm
  bool v_from_k = false;    // v is k before its norm and rotation; the elements of v in qkv are not read
  // [rows, 2]: sums of the squares of q and of k, from qk_squares(). The mean of the squares is then over all heads of
  // a row, q_norm is [heads * head_dim] and k_norm [kv_heads * head_dim]. Not with norm_after. Null: the mean is over
  // each head.
  const float* squares = nullptr;
  std::int64_t q_count = 0, k_count = 0;  // number of elements in each sum of `squares`
  const float* q_scale = nullptr;         // [positions]: factor of q at each position, applied last; null: none
  // [kv_heads], both or none: the scales of an FP8 cache (kv_quant.h). Other caches ignore them. Null: all are 1.
  const float* k_scales = nullptr;
  const float* v_scales = nullptr;
};

// The score of a key at position j for a query at position i >= j:
//   x = scale * q k;  x = soft_cap * tanh(x / soft_cap) if there is a cap;  x += alibi[head] * (j - i) if there are
//   slopes;  with a window, keys with i - j >= window are masked.
// The softmax of a query's scores has one more score, the head's sink, if there are sinks. A sink has no value, so it
// only takes weight from the keys.
struct AttentionParams {
  float scale = 1;
  int window = 0;                // keys that a query attends to, including its own; 0: all
  float soft_cap = 0;            // 0: no cap
  const float* alibi = nullptr;  // [heads of this rank] on the device; null: no ALiBi
  const float* sinks = nullptr;  // [heads of this rank] on the device; null: no sinks
  const float* v_scales = nullptr;  // RotaryParams::v_scales
};

// A causal depthwise convolution over the rows of each sequence, with all numbers in f32:
//   y[p, c] = bias[c] + sum over k, ascending, of weight[k, c] * u[p - kernel + 1 + k, c]
// u[p, c] is the input at position p, and 0 before position 0. The state holds the last kernel - 1 inputs, the oldest
// first. Pointers are device pointers.
struct ShortConvParams {
  const float* weight = nullptr;  // [kernel, channels]
  const float* bias = nullptr;    // [channels]; null: none
  int kernel = 0;                 // 2 to 4
  bool silu = false;              // out = silu(y); not with `gated`
  bool gated = false;             // in [rows, 3 * channels] = B, C, x: u = B * x and out = C * y
};

// A gated delta net (Yang et al., Gated Delta Networks, 2025) over the rows of each sequence, with all numbers in f32.
// v head h has the k head k_head(h), and a state s [k_dim, v_dim]. A row with q, k, v, a and b does
//   q = q / sqrt(|q|^2 + 1e-6) / sqrt(k_dim);  k = k / sqrt(|k|^2 + 1e-6)
//   alpha = exp(-decay * softplus(a + dt_bias));  s = alpha s;  s += k (sigmoid(b) (v - s^T k))^T;  o = s^T q
// Rows follow one after the other, so their bits do not depend on how a sequence is divided into steps.
struct DeltaNetParams {
  int k_heads = 0, v_heads = 0, k_dim = 0, v_dim = 0;  // of this rank; v_heads is a multiple of k_heads
  const float* decay = nullptr;                        // [v_heads] on the device, positive
  const float* dt_bias = nullptr;                      // [v_heads] on the device
  std::int64_t state = 0;                              // the first float of s in a slot, a multiple of 16
  bool tiled = false;                                  // the k heads of the v heads are 0, 1, 0, 1, not 0, 0, 1, 1

  // s is stored as [v_heads][strips of a head][k_dim][kStrip]: a strip has kStrip columns, the last one also unused
  // ones.
  static constexpr int kStrip = 32;
  constexpr int strips() const { return (v_dim + kStrip - 1) / kStrip; }
  constexpr std::int64_t state_floats() const { return std::int64_t{v_heads} * strips() * k_dim * kStrip; }
  constexpr std::int64_t columns() const {
    return std::int64_t{2} * k_heads * k_dim + std::int64_t{v_heads} * v_dim;
  }
  constexpr int k_head(int v_head) const { return tiled ? v_head % k_heads : v_head / (v_heads / k_heads); }
  static constexpr int kMaxKDim = 256;
  // Whether the numbers are in their ranges.
  constexpr bool fits() const {
    return k_heads >= 1 && v_heads >= k_heads && v_heads % k_heads == 0 && k_dim >= 1 && k_dim <= kMaxKDim &&
           v_dim >= 1 && state >= 0 && state % 16 == 0;
  }
};

// How latent_store() prepares a step of latent attention. Pointers are device pointers.
struct LatentParams {
  const float* norm = nullptr;     // [latent size]: weight of the latent's RMS norm
  float norm_eps = 0;
  const float* cos_sin = nullptr;  // [table rows, rotary_dim]: half cosines, half sines
  int rotary_dim = 0;              // even, 2 or more
  bool interleaved = false;        // rotates pairs (2 d, 2 d + 1) instead of (d, d + rotary_dim / 2)
  const float* q_scale = nullptr;  // [positions]: factor of q at each position; null: none
};

// The activation of a gated layer with outputs g of the gate and u of up.
//   silu            silu(g) * u
//   gelu_tanh       gelu_tanh(g) * u, with gelu_tanh(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
//   clamped_swiglu  g * sigmoid(alpha * g) * (u + 1), with g at most `limit`, and u in [-limit, limit]
struct Activation {
  enum Kind : std::uint8_t { silu, gelu_tanh, clamped_swiglu };

  constexpr Activation(Kind is = silu, float of_limit = 0, float of_alpha = 0)
      : kind(is), limit(of_limit), alpha(of_alpha) {}

  Kind kind;
  float limit, alpha;  // only of clamped_swiglu
};

enum class RouterScore { softmax, sigmoid };

// How a mixture-of-experts layer selects experts. An expert's score is the softmax of the logits over all experts, or
// the sigmoid of its own logit. The `top_k` experts with the largest score + bias are selected (ties: the lowest
// index). With groups, the experts form `groups` groups of equal size, and only experts of the `top_groups` best groups
// can be selected. The value of a group is the sum of its two largest score + bias (ties: the lowest group). An
// expert's weight is its score. With `renormalize` it is divided by the sum of the selected scores, or by `norm_min` if
// the sum is smaller. Then it is multiplied by `scale`.
struct RouterParams {
  int top_k = 0;
  bool renormalize = true;
  RouterScore score = RouterScore::softmax;
  const float* bias = nullptr;     // [experts] on the device; null: no bias
  int groups = 0, top_groups = 0;  // groups = 0: no groups; otherwise a group has at least 2 experts
  float norm_min = 0;              // less than 1 / experts
  float scale = 1;
  const float* expert_scale = nullptr;  // [experts] on the device: one more factor of an expert's weight; null: none

  // Whether experts can be selected by their logits, because the scores have the same order.
  bool by_logits() const { return score == RouterScore::softmax && bias == nullptr && groups == 0; }
  // Whether the parameters are valid for this number of experts.
  bool fits(std::int64_t experts) const {
    if (top_k < 1 || top_k > experts) return false;
    return groups == 0 || (groups > 0 && groups <= kMaxGroups && experts % groups == 0 && experts / groups >= 2 &&
                           top_groups > 0 && top_groups <= groups && experts / groups * top_groups >= top_k);
  }
  static constexpr int kMaxGroups = 32;
};

// How add_embedding() computes x. Pointers are device pointers.
struct EmbeddingSum {
  const float* weight = nullptr;  // [size]
  int size = 0;                   // elements of a group, which have one norm; divides the columns
  float eps = 0;
  float scale = 1, table_scale = 1;
};

// The output of a dense MLP that is added to the output of a layer's experts.
struct SharedExpert {
  Tensor out{};                 // [rows, hidden] GEMM type; without data: nothing is added
  const float* gate = nullptr;  // gate of the first row: `out` is multiplied by the gate's sigmoid; null: by 1
  std::int64_t gate_stride = 0;
};

class Operations {
 public:
  virtual ~Operations() = default;

  // out [rows, hidden] residual type = scale * the table's rows for the step's ids.
  virtual void embed(const Tensor& out, const Embedding& table, float scale) = 0;

  // x [rows, cols] GEMM type = scale * norm of each group of x + table_scale * the table's rows for the step's ids. The
  // table has the type of x, or the weight type on a CPU.
  virtual void add_embedding(const Tensor& x, const Embedding& table, const EmbeddingSum& how) = 0;

  // If delta has data: residual = residual_scale * residual + delta_scale * delta, with norm(delta, delta_weight)
  // instead of delta if there is a weight. Then out = norm(residual, weight), see NormParams. An `out` without data is
  // not written. residual [rows, hidden] residual type; delta [rows, hidden] GEMM type; out [rows, hidden] activation
  // type.
  virtual void rms_norm(const Tensor& out, const Tensor& residual, const Tensor& delta, const NormParams& how) = 0;

  // Announces that the `out` of the next rms_norm() or gated_linear() is used only as the input of linear() with this
  // weight. So a device may store it in another form for this weight, and leave `out` unchanged. The results are the
  // same.
  virtual void announce_linear(const Linear& /*weight*/) {}

  // out [rows, n] GEMM type or f32 = in [rows, k] activation type * weight^T + bias.
  virtual void linear(const Tensor& out, const Tensor& in, const Linear& weight) = 0;

  // Adds to rows of out [rows, n] GEMM type or f32 the change of a weight by LoRA adapters, for in [rows, k] activation
  // type. A row is in at most one entry of `changes`. Throws Error(unsupported) on a device without it.
  virtual void add_low_rank(const Tensor& out, const Tensor& in, std::span<const LowRankRows> changes);
  // The same on a device with adapter slots, for the adapters of StepInput::adapters. weight: its index in
  // AdapterSlots::weights.
  virtual void add_adapters(const Tensor& out, const Tensor& in, int weight);

  // sums [rows, 2] f32 = the sums of the squares of the first q_size elements of each row of qkv, and of the next
  // k_size.
  virtual void qk_squares(const Tensor& sums, const Tensor& qkv, std::int64_t q_size, std::int64_t k_size) = 0;

  // qkv [rows, (heads + 2 * kv_heads) * head_dim] GEMM type: q heads, then k heads, then v heads. Normalises, rotates
  // and scales q and k in place according to `how`. Stores k and v of every row of the step in the cache of `layer`.
  // May change the elements of v in qkv.
  virtual void rotary_store(const Tensor& qkv, const RotaryParams& how, KvCache& cache, int layer, int heads) = 0;

  // Multi-head latent attention in the absorbed form (DeepSeek-V2, https://arxiv.org/abs/2405.04434), for a layer with
  // one KV head and v_dim = 0. Its cache has one row [k_dim] for each token: the latent, then the rotated elements
  // of k. Here latent size = k_dim - rotary_dim.
  //   latent   [rows, k_dim] GEMM type: normalises the first elements, rotates the others, and stores the row
  //   q        [rows, heads * (plain_dim + rotary_dim)] GEMM type
  //   plain    [rows, heads * plain_dim] activation type = the first elements of each head of q, times q_scale
  //   queries  [rows, heads * k_dim] GEMM type: the last rotary_dim elements of each head = the last elements of each
  //            head of q, rotated, times q_scale. heads_linear() writes the others.
  // latent and q may be overwritten. Throws Error(unsupported) on a device without it.
  virtual void latent_store(const Tensor& queries, const Tensor& plain, const Tensor& q, const Tensor& latent,
                            const LatentParams& how, KvCache& cache, int layer, int heads);

  // A weight for each head. The columns of in, and those of out, are divided equally among the heads. Like linear() for
  // the columns of each head; if a weight has fewer out_features than a head has columns, the rest does not change.
  // in [rows, heads * in_features] activation type, out [rows, columns] GEMM type or activation type.
  virtual void heads_linear(const Tensor& out, const Tensor& in, std::span<const std::unique_ptr<Linear>> heads);

  // out [rows, heads * head_dim] activation type = attention over the cache, with the scores of AttentionParams; q must
  // come from rotary_store(). All layers of a model have the same number of heads; their AttentionParams may differ.
  // In a layer with v_dim = 0, qkv is `queries` of latent_store(), and the values are the first elements of a row of
  // the cache: as many as out has columns per head.
  virtual void attention(const Tensor& out, const Tensor& qkv, const KvCache& cache, int layer, int heads,
                         const AttentionParams& how) = 0;

  // out [rows, channels] activation type or f32 = the convolution of in [rows, channels] GEMM type (or with `gated`
  // [rows, 3 * channels]), which may have a larger stride. Reads and writes the first (kernel - 1) * channels floats
  // [kernel - 1, channels] of the state of `layer`, as AttentionBatch says. out must not overlap in.
  virtual void short_conv(const Tensor& out, const Tensor& in, const ShortConvParams& how, KvCache& cache,
                          int layer) = 0;

  // qkv [rows, how.columns()] GEMM type: q heads, k heads, v heads. gates [rows, 2 * v_heads] f32: b of each v head,
  // then a. Replaces v by o. q, k and gates are undefined afterwards. Reads and writes how.state_floats() floats of the
  // state of `layer`, as AttentionBatch says.
  virtual void delta_net(const Tensor& qkv, const Tensor& gates, const DeltaNetParams& how, KvCache& cache,
                         int layer) = 0;

  // out [rows, inter] activation type = the activation of gate_up[:, :inter] and gate_up[:, inter:]; gate_up GEMM type.
  virtual void gated_activation(const Tensor& out, const Tensor& gate_up, Activation activation) = 0;

  // x [rows, cols] activation type *= sigmoid(gate). gate [rows, cols] GEMM type.
  virtual void sigmoid_gate(const Tensor& x, const Tensor& gate) = 0;

  // out [rows, heads * head_dim] activation type = norm(x, weight) * silu(gate), for each head of a row, with the norm
  // of NormParams and weight [head_dim]. x, gate [rows, heads * head_dim] GEMM type.
  virtual void gated_norm(const Tensor& out, const Tensor& x, const Tensor& gate, const float* weight, float eps,
                          int head_dim) = 0;

  // linear(gate_up, in, weight), then gated_activation(out, gate_up, activation), with the same bits. A device that
  // fuses both does not write gate_up.
  virtual void gated_linear(const Tensor& out, const Tensor& gate_up, const Tensor& in, const Linear& weight,
                            Activation activation) {
    linear(gate_up, in, weight);
    gated_activation(out, gate_up, activation);
  }

  // out [rows, hidden] GEMM type = `shared`, plus the sum over the selected experts e of each row, in ascending order
  // of e, of w_e * down_e(activation of gate_e(in) and up_e(in)), with the experts' biases. in [rows, hidden]
  // activation type; router [rows, experts] f32 logits, or [rows, 2 * experts]: logit e is the sum of columns e and
  // experts + e. scratch: device memory of Device::experts_scratch_bytes() bytes.
  virtual void experts(const Tensor& out, const Tensor& in, const Tensor& router, const Experts& weights,
                       const RouterParams& how, Activation activation, void* scratch,
                       const SharedExpert& shared = {}) = 0;

  // logits [rows, cols] f32 *= scale; then, if cap > 0, logits = cap * tanh(logits / cap).
  virtual void scale_logits(const Tensor& logits, float scale, float cap) = 0;

  // out [rows, vocab] f32: column t = column columns[t] of in f32, or a logit that is never sampled if columns[t] is
  // -1. columns [vocab] on the device.
  virtual void scatter_logits(const Tensor& out, const Tensor& in, const std::int32_t* columns) = 0;
  static constexpr float kNeverSampled = -1e30F;  // finite, also after a bias, a penalty and the temperature

  // out [logits rows, cols] = in[the step's logits_rows, :], same element type.
  virtual void gather_rows(const Tensor& out, const Tensor& in) = 0;

  // out[the step's hidden_rows[r], :] = in[r, :] for each row r that has an entry, same element type. The other rows of
  // out do not change.
  virtual void store_rows(const Tensor& out, const Tensor& in) = 0;
  // out[r, :] = in[the step's hidden_rows[r], :] for each row r that has an entry, same element type.
  virtual void load_rows(const Tensor& out, const Tensor& in) = 0;

  // Samples from logits [logits rows, vocab] f32 according to the step's SampleRows. Overwrites logits. May wait for
  // the rows' token masks.
  virtual void sample(const Tensor& logits) = 0;
};

}  // namespace charonia::ops
