// Operations on one row: norms, gated activation, rotation, conversions, and the sums over logits for sampling. All are
// bound by memory, or orders of magnitude smaller than a GEMM.
#include "ops/cpu/kernels/vec.h"

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

// Calls whole(i) for whole vectors, and part(i, n) for the n remaining elements.
template <class Whole, class Part>
inline __attribute__((always_inline)) void for_vectors(std::int64_t n, Whole whole, Part part) {
  std::int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) whole(i);
  if (i < n) part(i, static_cast<int>(n - i));
}

template <class To, class From>
void convert(To* out, const From* in, std::int64_t n) {
  for_vectors(
      n, [&](std::int64_t i) { store(out + i, load(in + i)); },
      [&](std::int64_t i, int m) { store_n(out + i, load_n(in + i, m), m); });
}

// The sum of term(v, lanes) over the vectors v of a row. lanes: number of elements in v; the other lanes are zeros.
template <class Term>
inline __attribute__((always_inline)) float sum_over(const float* x, std::int64_t n, Term term) {
  // Four sums, so that additions do not depend on each other.
  Vec sums[4] = {zero(), zero(), zero(), zero()};
  std::int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) sums[s] = term(sums[s], load(x + i + s * kWidth), kWidth);
  }
  for (; i < n; i += kWidth) {
    const int lanes = n - i >= kWidth ? kWidth : static_cast<int>(n - i);
    sums[0] = term(sums[0], lanes == kWidth ? load(x + i) : load_n(x + i, lanes), lanes);
  }
  return sum_of(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

inline float squares_of(const float* x, std::int64_t n) {
  return sum_over(x, n, [](Vec sum, Vec v, int) { return fma(v, v, sum); });
}

inline float mean_of(const float* x, std::int64_t n) {
  return sum_over(x, n, [](Vec sum, Vec v, int) { return add(sum, v); }) / static_cast<float>(n);
}

// The sum of (x - mean)^2.
inline float squares_around(const float* x, float mean, std::int64_t n) {
  float means[kWidth];
  store(means, set1(mean));
  return sum_over(x, n, [&](Vec sum, Vec v, int lanes) {
    const Vec from_mean = sub(v, lanes == kWidth ? load(means) : load_n(means, lanes));
    return fma(from_mean, from_mean, sum);
  });
}

inline float rms_factor(float squares, float eps, std::int64_t n) {
  return 1.0F / __builtin_sqrtf(squares / static_cast<float>(n) + eps);
}

template <class Out>
void rms_norm(Out* out, float* residual, const float* delta, const NormParams& how, std::int64_t n) {
  const Vec scale = set1(how.delta_scale), kept = set1(how.residual_scale);
  const auto before = [&](Vec x) { return how.residual_scale == 0 ? zero() : mul(x, kept); };
  if (delta != nullptr && how.delta_weight != nullptr) {
    const Vec factor = set1(rms_factor(squares_of(delta, n), how.eps, n));
    const float* const weight = how.delta_weight;
    for_vectors(
        n,
        [&](std::int64_t i) {
          const Vec normed = mul(mul(load(delta + i), factor), load(weight + i));
          store(residual + i, fma(normed, scale, before(load(residual + i))));
        },
        [&](std::int64_t i, int m) {
          const Vec normed = mul(mul(load_n(delta + i, m), factor), load_n(weight + i, m));
          store_n(residual + i, fma(normed, scale, before(load_n(residual + i, m))), m);
        });
  } else if (delta != nullptr) {
    for_vectors(
        n, [&](std::int64_t i) { store(residual + i, fma(load(delta + i), scale, before(load(residual + i)))); },
        [&](std::int64_t i, int m) {
          store_n(residual + i, fma(load_n(delta + i, m), scale, before(load_n(residual + i, m))), m);
        });
  }
  if (out == nullptr) return;
  if (how.weight == nullptr) return convert(out, residual, n);
  const float* const weight = how.weight;
  if (how.subtract_mean) {
    const float mean = mean_of(residual, n);
    const Vec means = set1(mean), factor = set1(rms_factor(squares_around(residual, mean, n), how.eps, n));
    for_vectors(
        n, [&](std::int64_t j) { store(out + j, mul(mul(sub(load(residual + j), means), factor), load(weight + j))); },
        [&](std::int64_t j, int m) {
          store_n(out + j, mul(mul(sub(load_n(residual + j, m), means), factor), load_n(weight + j, m)), m);
        });
    return;
  }
  const Vec factor = set1(rms_factor(squares_of(residual, n), how.eps, n));
  for_vectors(
      n, [&](std::int64_t j) { store(out + j, mul(mul(load(residual + j), factor), load(weight + j))); },
      [&](std::int64_t j, int m) {
        store_n(out + j, mul(mul(load_n(residual + j, m), factor), load_n(weight + j, m)), m);
      });
}

inline Vec silu(Vec x) { return div(x, add(set1(1.0F), exp(sub(zero(), x)))); }

// x / 2 * (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3).
inline Vec gelu_tanh(Vec x) {
  constexpr float kMinusTwice = -0x1.988454p+0F;  // -2 sqrt(2 / pi)
  const Vec x_squared = mul(x, x);
  const Vec cubic = fma(mul(x_squared, set1(0.044715F)), x, x);
  return div(x, add(set1(1.0F), exp(mul(cubic, set1(kMinusTwice)))));
}

// out = activation(gate) * up.
template <class Out, class Activation>
inline __attribute__((always_inline)) void gated(Out* out, const float* gate, const float* up, std::int64_t n,
                                                 Activation activation) {
  for_vectors(
      n, [&](std::int64_t i) { store(out + i, mul(activation(load(gate + i)), load(up + i))); },
      [&](std::int64_t i, int m) { store_n(out + i, mul(activation(load_n(gate + i, m)), load_n(up + i, m)), m); });
}
template <class Out>
void silu_mul(Out* out, const float* gate, const float* up, std::int64_t n) {
  gated(out, gate, up, n, [](Vec x) { return silu(x); });
}
template <class Out>
void gelu_tanh_mul(Out* out, const float* gate, const float* up, std::int64_t n) {
  gated(out, gate, up, n, [](Vec x) { return gelu_tanh(x); });
}

// Operations::Activation::clamped_swiglu. NaN stays NaN.
template <class Out>
void clamped_swiglu(Out* out, const float* gate, const float* up, float limit, float alpha, std::int64_t n) {
  const Vec most = set1(limit), least = set1(-limit), minus_alpha = set1(-alpha), one = set1(1.0F);
  const auto value = [&](Vec g, Vec u) {
    const Vec x = min(most, g), factor = add(max(least, min(most, u)), one);
    return mul(div(x, add(one, exp(mul(x, minus_alpha)))), factor);
  };
  for_vectors(
      n, [&](std::int64_t i) { store(out + i, value(load(gate + i), load(up + i))); },
      [&](std::int64_t i, int m) { store_n(out + i, value(load_n(gate + i, m), load_n(up + i, m)), m); });
}

template <class T>
void sigmoid_gate(T* x, const float* gate, std::int64_t n) {
  const auto value = [](Vec v, Vec g) { return div(v, add(set1(1.0F), exp(sub(zero(), g)))); };
  for_vectors(
      n, [&](std::int64_t i) { store(x + i, value(load(x + i), load(gate + i))); },
      [&](std::int64_t i, int m) { store_n(x + i, value(load_n(x + i, m), load_n(gate + i, m)), m); });
}

template <class Out>
void gated_norm(Out* out, const float* x, const float* gate, const float* weight, float eps, std::int64_t n) {
  const Vec factor = set1(rms_factor(squares_of(x, n), eps, n));
  const auto value = [&](Vec v, Vec w, Vec g) { return mul(mul(mul(v, factor), w), silu(g)); };
  for_vectors(
      n, [&](std::int64_t i) { store(out + i, value(load(x + i), load(weight + i), load(gate + i))); },
      [&](std::int64_t i, int m) {
        store_n(out + i, value(load_n(x + i, m), load_n(weight + i, m), load_n(gate + i, m)), m);
      });
}

// One row of ShortConvArgs at channel i. state_out has the last inputs, and gets this one.
template <class Load, class Store, class StoreOut>
inline __attribute__((always_inline)) void short_conv_at(const ShortConvArgs& args, const float* in, std::int64_t i,
                                                         Load get, Store put, StoreOut put_out) {
  const auto distance = args.gate_distance, stride = args.column_stride;
  const int last = args.kernel - 1;
  const float* const weight = args.weight + i;
  float* const state = args.state_out + i;
  const Vec input = distance > 0 ? mul(get(in + i), get(in + 2 * distance + i)) : get(in + i);
  Vec sum = args.bias != nullptr ? get(args.bias + i) : zero();
  for (int k = 0; k < last; ++k) {
    sum = fma(get(weight + k * stride), get(state + k * stride), sum);
    if (k > 0) put(state + (k - 1) * stride, get(state + k * stride));
  }
  sum = fma(get(weight + last * stride), input, sum);
  put(state + (last - 1) * stride, input);
  if (distance > 0) sum = mul(get(in + distance + i), sum);
  put_out(i, args.silu ? silu(sum) : sum);
}

template <class Out>
void short_conv(const ShortConvArgs& args) {
  for (int k = 0; k + 1 < args.kernel; ++k) {
    float* const to = args.state_out + k * args.column_stride;
    if (args.state_in == nullptr) {
      __builtin_memset(to, 0, static_cast<std::size_t>(args.channels) * sizeof(float));
    } else if (args.state_in != args.state_out) {
      __builtin_memcpy(to, args.state_in + k * args.column_stride,
                       static_cast<std::size_t>(args.channels) * sizeof(float));
    }
  }
  for (std::int64_t row = 0; row < args.rows; ++row) {
    const float* const in = args.in + row * args.in_stride;
    Out* const out = static_cast<Out*>(args.out) + row * args.out_stride;
    for_vectors(
        args.channels,
        [&](std::int64_t i) {
          short_conv_at(
              args, in, i, [](const float* x) { return load(x); }, [](float* to, Vec x) { store(to, x); },
              [&](std::int64_t at, Vec x) { store(out + at, x); });
        },
        [&](std::int64_t i, int m) {
          short_conv_at(
              args, in, i, [m](const float* x) { return load_n(x, m); }, [m](float* to, Vec x) { store_n(to, x, m); },
              [&](std::int64_t at, Vec x) { store_n(out + at, x, m); });
        });
  }
}

}  // namespace

void rms_norm_bf16(Bf16* out, float* residual, const float* delta, const NormParams& how, std::int64_t n) {
  rms_norm(out, residual, delta, how, n);
}
void rms_norm_f32(float* out, float* residual, const float* delta, const NormParams& how, std::int64_t n) {
  rms_norm(out, residual, delta, how, n);
}

float sum_of_squares(const float* x, std::int64_t n) { return squares_of(x, n); }

void normalise(float* x, float factor, const float* weight, std::int64_t n) {
  const Vec factors = set1(factor);
  for_vectors(
      n, [&](std::int64_t i) { store(x + i, mul(mul(load(x + i), factors), load(weight + i))); },
      [&](std::int64_t i, int m) { store_n(x + i, mul(mul(load_n(x + i, m), factors), load_n(weight + i, m)), m); });
}

void silu_mul_bf16(Bf16* out, const float* gate, const float* up, std::int64_t n) { silu_mul(out, gate, up, n); }
void silu_mul_f32(float* out, const float* gate, const float* up, std::int64_t n) { silu_mul(out, gate, up, n); }
void gelu_tanh_mul_bf16(Bf16* out, const float* gate, const float* up, std::int64_t n) {
  gelu_tanh_mul(out, gate, up, n);
}
void gelu_tanh_mul_f32(float* out, const float* gate, const float* up, std::int64_t n) {
  gelu_tanh_mul(out, gate, up, n);
}
void clamped_swiglu_bf16(Bf16* out, const float* gate, const float* up, float limit, float alpha, std::int64_t n) {
  clamped_swiglu(out, gate, up, limit, alpha, n);
}
void clamped_swiglu_f32(float* out, const float* gate, const float* up, float limit, float alpha, std::int64_t n) {
  clamped_swiglu(out, gate, up, limit, alpha, n);
}

void sigmoid_gate_bf16(Bf16* x, const float* gate, std::int64_t n) { sigmoid_gate(x, gate, n); }
void sigmoid_gate_f32(float* x, const float* gate, std::int64_t n) { sigmoid_gate(x, gate, n); }
void gated_norm_bf16(Bf16* out, const float* x, const float* gate, const float* weight, float eps, std::int64_t n) {
  gated_norm(out, x, gate, weight, eps, n);
}
void gated_norm_f32(float* out, const float* x, const float* gate, const float* weight, float eps, std::int64_t n) {
  gated_norm(out, x, gate, weight, eps, n);
}
void short_conv_bf16(const ShortConvArgs& args) { short_conv<Bf16>(args); }
void short_conv_f32(const ShortConvArgs& args) { short_conv<float>(args); }

void soft_cap(float* x, float cap, std::int64_t n) {
  const Vec caps = set1(cap);
  for_vectors(
      n, [&](std::int64_t i) { store(x + i, mul(caps, tanh(div(load(x + i), caps)))); },
      [&](std::int64_t i, int m) { store_n(x + i, mul(caps, tanh(div(load_n(x + i, m), caps))), m); });
}

void scale(float* x, float factor, std::int64_t n) {
  const Vec factors = set1(factor);
  for_vectors(
      n, [&](std::int64_t i) { store(x + i, mul(load(x + i), factors)); },
      [&](std::int64_t i, int m) { store_n(x + i, mul(load_n(x + i, m), factors), m); });
}

void add_scaled(float* out, const float* x, float factor, std::int64_t n) {
  const Vec factors = set1(factor);
  for_vectors(
      n, [&](std::int64_t i) { store(out + i, fma(load(x + i), factors, load(out + i))); },
      [&](std::int64_t i, int m) { store_n(out + i, fma(load_n(x + i, m), factors, load_n(out + i, m)), m); });
}

void rotate(float* head, const float* cos_sin, int rotary_dim) {
  const int half = rotary_dim / 2;
  float* const first = head;
  float* const second = head + half;
  const float* const cosines = cos_sin;
  const float* const sines = cos_sin + half;
  const auto turn = [](Vec a, Vec b, Vec c, Vec s, Vec& x, Vec& y) {
    x = sub(mul(a, c), mul(b, s));
    y = add(mul(b, c), mul(a, s));
  };
  for_vectors(
      half,
      [&](std::int64_t i) {
        Vec x, y;
        turn(load(first + i), load(second + i), load(cosines + i), load(sines + i), x, y);
        store(first + i, x);
        store(second + i, y);
      },
      [&](std::int64_t i, int m) {
        Vec x, y;
        turn(load_n(first + i, m), load_n(second + i, m), load_n(cosines + i, m), load_n(sines + i, m), x, y);
        store_n(first + i, x, m);
        store_n(second + i, y, m);
      });
}

// Gives the same bits as rotate() for the same pairs.
void rotate_interleaved(float* head, const float* cos_sin, int rotary_dim) {
  const int half = rotary_dim / 2;
  for (int i = 0; i < half; ++i) {
    const float a = head[2 * i], b = head[2 * i + 1], cosine = cos_sin[i], sine = cos_sin[half + i];
    head[2 * i] = a * cosine - b * sine;
    head[2 * i + 1] = b * cosine + a * sine;
  }
}

void bf16_from_f32(Bf16* out, const float* in, std::int64_t n) { convert(out, in, n); }
void f16_from_f32(F16* out, const float* in, std::int64_t n) { convert(out, in, n); }
void f32_from_bf16(float* out, const Bf16* in, std::int64_t n) { convert(out, in, n); }
void f32_from_f16(float* out, const F16* in, std::int64_t n) { convert(out, in, n); }

void min_and_max(const float* in, std::int64_t n, float* minimum, float* greatest) {
  Vec low = set1(in[0]), high = low, odd = zero();  // x * 0 is NaN if x is not finite
  std::int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const Vec x = load(in + i);
    low = min(x, low);
    high = max(x, high);
    odd = add(odd, mul(x, zero()));
  }
  float most = max_of(high), few = -max_of(sub(zero(), low));
  bool finite = !any_nan(odd);
  for (; i < n; ++i) {
    few = in[i] < few ? in[i] : few;
    most = in[i] > most ? in[i] : most;
    finite = finite && in[i] - in[i] == 0;
  }
  *minimum = finite ? few : __builtin_nanf("");
  *greatest = finite ? most : __builtin_nanf("");
}

void quantise(std::uint8_t* out, const float* in, float scale, float zeros, int most, std::int64_t n) {
  const Vec divisor = set1(scale > 0 ? scale : __builtin_inff()), minimum = set1(zeros);
  const Vec greatest = set1(static_cast<float>(most));
  const auto integers = [&](Vec x) { return round(min(max(div(sub(x, minimum), divisor), zero()), greatest)); };
  const auto put = [](std::uint8_t* to, Vec x, int m) {
    float lanes[kWidth];
    store(lanes, x);
    for (int j = 0; j < m; ++j) to[j] = static_cast<std::uint8_t>(static_cast<int>(lanes[j]));
  };
  for_vectors(
      n, [&](std::int64_t i) { put(out + i, integers(load(in + i)), kWidth); },
      [&](std::int64_t i, int m) { put(out + i, integers(load_n(in + i, m)), m); });
}

float maximum(const float* in, std::int64_t n) {
  const float minimum = -__builtin_inff();
  Vec greatest = set1(minimum);
  Vec nan = zero();  // x - x is NaN for NaN (and for infinities, which are checked again below)
  bool suspicious = false;
  std::int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const Vec x = load(in + i);
    greatest = max(x, greatest);
    nan = add(nan, mul(x, zero()));
  }
  suspicious = any_nan(nan);
  float out = max_of(greatest);
  for (; i < n; ++i) {
    if (in[i] != in[i]) return in[i];
    out = in[i] > out ? in[i] : out;
  }
  if (suspicious) {
    for (i = 0; i < n; ++i) {
      if (in[i] != in[i]) return in[i];
    }
  }
  return out;
}

double exp_sum(float* out, const float* in, float shift, float scale, std::int64_t n) {
  constexpr std::int64_t kRun = 1024;
  const Vec shifts = set1(shift), scales = set1(scale);
  double total = 0;
  for (std::int64_t begin = 0; begin < n; begin += kRun) {
    const std::int64_t end = begin + kRun < n ? begin + kRun : n;
    Vec sum = zero();
    std::int64_t i = begin;
    for (; i + kWidth <= end; i += kWidth) {
      const Vec e = exp(mul(sub(load(in + i), shifts), scales));
      if (out != nullptr) store(out + i, e);
      sum = add(sum, e);
    }
    total += static_cast<double>(sum_of(sum));
    if (i < end) {
      const int m = static_cast<int>(end - i);
      float rest[kWidth];
      store(rest, exp(mul(sub(load_n(in + i, m), shifts), scales)));
      for (int j = 0; j < m; ++j) {
        if (out != nullptr) out[i + j] = rest[j];
        total += static_cast<double>(rest[j]);
      }
    }
  }
  return total;
}

}  // namespace charonia::ops::cpu::CHARONIA_ISA
