// The operations that a step is made of.
//
// All operations of one step are issued from one thread, in order. Rows are tokens of the step, in batch order. Every
// output row depends on that row's inputs alone, in an order of operations fixed by the row, never by the number of
// rows, the number of threads or a row's place in the batch (DESIGN.md section 3); on CUDA that holds bitwise in the
// reproducible mode. Operations that need host arrays (embed, rotary_store, attention, gather_rows, sample) take those
// of the step that was begun last.
#pragma once

#include <cstdint>

#include "ops/norm_params.h"
#include "ops/tensor.h"

namespace charonia::ops {

class Embedding;
class Experts;
class KvCache;
class Linear;

// What rotary_store() does to the heads of q and k before k and v are stored. Pointers are the device's.
struct RotaryParams {
  const float* cos_sin = nullptr;  // [table rows, rotary_dim]: cosines in the first half of a row, sines in the second;
                                   // null: nothing is rotated
  int rotary_dim = 0;              // even, 2 .. head_dim: pairs (d, d + rotary_dim / 2); the elements beyond stay
  bool interleaved = false;        // pairs (2 d, 2 d + 1) of the first rotary_dim elements instead
  const float* q_norm = nullptr;   // [head_dim] with k_norm: RMS norm of every head; null: none
  const float* k_norm = nullptr;
  float norm_eps = 0;
  bool norm_after = false;  // the norm comes after the rotation, not before it
  // [rows, 2]: sums of the squares of q and of k, by qk_squares(). The mean of the squares is then over all heads of a
  // row, and q_norm is [heads * head_dim], k_norm [kv_heads * head_dim]. Not with norm_after. null: over each head.
  const float* squares = nullptr;
  std::int64_t q_count = 0, k_count = 0;  // elements that `squares` are the sums of
  const float* q_scale = nullptr;         // [positions]: q at position p is multiplied by q_scale[p], last; null: none
};

// How attention() weighs a key at position j for a query at position i >= j:
//   x = scale * q k;  x = soft_cap * tanh(x / soft_cap) where there is a cap;  x += alibi[head] * (j - i) where there
//   are slopes;  a key with i - j >= window is not seen where there is a window.
struct AttentionParams {
  float scale = 1;
  int window = 0;                // keys that a query sees, itself among them; 0: all
  float soft_cap = 0;            // 0: none
  const float* alibi = nullptr;  // [heads of this rank] on the device; null: none
};

enum class Activation { silu, gelu_tanh };

enum class RouterScore { softmax, sigmoid };

// How a mixture-of-experts layer chooses. An expert's score is the softmax of the logits over all experts, or the
// sigmoid of its own logit. The `top_k` experts with the largest score + bias are chosen (ties: the lowest index). With
// groups, experts are first put into `groups` runs of equal size, and only the experts of the `top_groups` best groups
// can be chosen. A group's value is the sum of its two largest score + bias (ties: the lowest group).
// An expert's weight is its score. With `renormalize` it is divided by the sum of the chosen scores, or by `norm_min`
// where the sum is less. Then it is multiplied by `scale`.
struct RouterParams {
  int top_k = 0;
  bool renormalize = true;
  RouterScore score = RouterScore::softmax;
  const float* bias = nullptr;     // [experts] on the device; null: none
  int groups = 0, top_groups = 0;  // groups 0: none; else a group has 2 experts or more
  float norm_min = 0;              // less than 1 / experts
  float scale = 1;

  // Whether experts are chosen by their logits, which are ordered as the scores are.
  bool by_logits() const { return score == RouterScore::softmax && bias == nullptr && groups == 0; }
  // Whether a router of so many experts can choose so.
  bool fits(std::int64_t experts) const {
    if (top_k < 1 || top_k > experts) return false;
    return groups == 0 || (groups > 0 && groups <= kMaxGroups && experts % groups == 0 && experts / groups >= 2 &&
                           top_groups > 0 && top_groups <= groups && experts / groups * top_groups >= top_k);
  }
  static constexpr int kMaxGroups = 32;
};

// The output of a dense MLP beside a layer's experts: it is added to theirs.
struct SharedExpert {
  Tensor out{};                 // [rows, hidden] GEMM type; without data: nothing is added
  const float* gate = nullptr;  // the first row's; `out` is multiplied by its sigmoid; null: by 1
  std::int64_t gate_stride = 0;
};

class Operations {
 public:
  virtual ~Operations() = default;

  // out [rows, hidden] residual type <- table rows of the step's ids, times `scale`.
  virtual void embed(const Tensor& out, const Embedding& table, float scale) = 0;

  // residual += delta_scale * delta (when delta has data), or residual += delta_scale * norm(delta, delta_weight);
  // out = norm(residual, weight), as NormParams says. An `out` without data is not written.
  // residual [rows, hidden] residual type; delta [rows, hidden] GEMM type; out [rows, hidden] activation type.
  virtual void rms_norm(const Tensor& out, const Tensor& residual, const Tensor& delta, const NormParams& how) = 0;

  // What the next rms_norm() or gated_linear() leaves in `out` is the input of linear() with this weight, and of
  // nothing else. So a device may keep it in another form that this weight takes, and leave `out` as it is; numbers are
  // the same.
  virtual void feeds(const Linear& /*weight*/) {}

  // out [rows, n] GEMM type or f32 = in [rows, k] activation type * weight^T + bias.
  virtual void linear(const Tensor& out, const Tensor& in, const Linear& weight) = 0;

  // sums [rows, 2] f32 = the sums of the squares of the first q_size elements of a row of qkv, and of the next k_size.
  virtual void qk_squares(const Tensor& sums, const Tensor& qkv, std::int64_t q_size, std::int64_t k_size) = 0;

  // qkv [rows, (heads + 2 * kv_heads) * head_dim] GEMM type: q heads, then k heads, then v heads. Normalises, rotates
  // and scales q and k in place as `how` says. Stores k and v of every row of the step into the cache of `layer`.
  virtual void rotary_store(const Tensor& qkv, const RotaryParams& how, KvCache& cache, int layer, int heads) = 0;

  // out [rows, heads * head_dim] activation type = the values, weighted by the softmax of what AttentionParams says,
  // over the cache; q as rotary_store left it. All layers of a model have the same heads; their AttentionParams may
  // differ.
  virtual void attention(const Tensor& out, const Tensor& qkv, const KvCache& cache, int layer, int heads,
                         const AttentionParams& how) = 0;

  // out [rows, inter] activation type = activation(gate_up[:, :inter]) * gate_up[:, inter:]; gate_up GEMM type.
  // gelu_tanh(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).
  virtual void gated_activation(const Tensor& out, const Tensor& gate_up, Activation activation) = 0;

  // linear(gate_up, in, weight) and gated_activation(out, gate_up, activation), with their bits. A device that does
  // both at once leaves gate_up as it is.
  virtual void gated_linear(const Tensor& out, const Tensor& gate_up, const Tensor& in, const Linear& weight,
                            Activation activation) {
    linear(gate_up, in, weight);
    gated_activation(out, gate_up, activation);
  }

  // out [rows, hidden] GEMM type = what `shared` says, and to it the sum over the experts e that the router chooses for
  // a row, in the order of e, of w_e * down_e(activation(gate_e(in)) * up_e(in)). in [rows, hidden] activation type;
  // router [rows, experts] f32 logits, or [rows, 2 * experts]: logit e is the sum of columns e and experts + e.
  // scratch: Device::experts_scratch_bytes() of the device's memory.
  virtual void experts(const Tensor& out, const Tensor& in, const Tensor& router, const Experts& weights,
                       const RouterParams& how, Activation activation, void* scratch,
                       const SharedExpert& shared = {}) = 0;

  // logits [rows, cols] f32 *= scale; then, where cap > 0, logits = cap * tanh(logits / cap).
  virtual void scale_logits(const Tensor& logits, float scale, float cap) = 0;

  // out [logits rows, cols] = in[the step's logits_rows, :], same element type.
  virtual void gather_rows(const Tensor& out, const Tensor& in) = 0;

  // logits [logits rows, vocab] f32, by the step's SampleRows. Overwrites logits. May wait for the rows' masks.
  virtual void sample(const Tensor& logits) = 0;
};

}  // namespace charonia::ops
