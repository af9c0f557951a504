// The kernel table of this instruction set.
#include "ops/cpu/kernels.h"

namespace charonia::ops::cpu::CHARONIA_ISA {

void linear_bf16(const LinearArgs& args);
void linear_bf16_widened(const LinearArgs& args);
void linear_f16(const LinearArgs& args);
void linear_f32(const LinearArgs& args);
void quant_linear_bf16(const QuantLinearArgs& args);
void quant_linear_f32(const QuantLinearArgs& args);
#if defined(__AVX2__) && !defined(__AVX512BF16__)
void quant_linear_fixed(const QuantLinearArgs& args);
void fixed_from_bf16(std::byte* out, const Bf16* in, const QuantPanel& shape);
#endif
void group_sums_bf16(float* sums, const Bf16* a, std::int64_t group, std::int64_t groups);
void group_sums_f32(float* sums, const float* a, std::int64_t group, std::int64_t groups);
void linear_i8(const IntegerLinearArgs& args);
#if defined(__AVX2__)
void linear_i8_vnni(const IntegerLinearArgs& args);
#endif
#if defined(CHARONIA_ISA_amx)
void linear_i8_tiles(const IntegerLinearArgs& args);
#endif
float integers_from_bf16(std::int8_t* out, const Bf16* in, float scale, std::int64_t n);
float integers_from_f32(std::int8_t* out, const float* in, float scale, std::int64_t n);
void sum_integers(std::int32_t* out, const std::int8_t* codes, std::int64_t group, std::int64_t groups);
void attention_bf16(const AttentionArgs& args);
void attention_f16(const AttentionArgs& args);
void attention_f32(const AttentionArgs& args);
void attention_f8(const AttentionArgs& args);
void attention_q8(const AttentionArgs& args);
void attention_q4(const AttentionArgs& args);
void attention_split_bf16(const AttentionArgs& args, int split, float* state);
void attention_split_f16(const AttentionArgs& args, int split, float* state);
void attention_split_f32(const AttentionArgs& args, int split, float* state);
void attention_split_f8(const AttentionArgs& args, int split, float* state);
void attention_split_q8(const AttentionArgs& args, int split, float* state);
void attention_split_q4(const AttentionArgs& args, int split, float* state);
void attention_merge(const AttentionArgs& args, float* states, int splits);
void rms_norm_bf16(Bf16* out, float* residual, const float* delta, const NormParams& how, std::int64_t n);
void rms_norm_f32(float* out, float* residual, const float* delta, const NormParams& how, std::int64_t n);
float sum_of_squares(const float* x, std::int64_t n);
void normalise(float* x, float factor, const float* weight, std::int64_t n);
void silu_mul_bf16(Bf16* out, const float* gate, const float* up, std::int64_t n);
void silu_mul_f32(float* out, const float* gate, const float* up, std::int64_t n);
void gelu_tanh_mul_bf16(Bf16* out, const float* gate, const float* up, std::int64_t n);
void gelu_tanh_mul_f32(float* out, const float* gate, const float* up, std::int64_t n);
void clamped_swiglu_bf16(Bf16* out, const float* gate, const float* up, float limit, float alpha, std::int64_t n);
void clamped_swiglu_f32(float* out, const float* gate, const float* up, float limit, float alpha, std::int64_t n);
void sigmoid_gate_bf16(Bf16* x, const float* gate, std::int64_t n);
void sigmoid_gate_f32(float* x, const float* gate, std::int64_t n);
void gated_norm_bf16(Bf16* out, const float* x, const float* gate, const float* weight, float eps, std::int64_t n);
void gated_norm_f32(float* out, const float* x, const float* gate, const float* weight, float eps, std::int64_t n);
void delta_net(const DeltaArgs& args);
void low_rank_down_bf16(const LowRankArgs& args);
void low_rank_down_f32(const LowRankArgs& args);
void low_rank_up_bf16(const LowRankArgs& args);
void low_rank_up_f32(const LowRankArgs& args);
void short_conv_bf16(const ShortConvArgs& args);
void short_conv_f32(const ShortConvArgs& args);
void soft_cap(float* x, float cap, std::int64_t n);
void scale(float* x, float factor, std::int64_t n);
void add_scaled(float* out, const float* x, float factor, std::int64_t n);
void rotate(float* head, const float* cos_sin, int rotary_dim);
void rotate_interleaved(float* head, const float* cos_sin, int rotary_dim);
void bf16_from_f32(Bf16* out, const float* in, std::int64_t n);
void f16_from_f32(F16* out, const float* in, std::int64_t n);
void f32_from_bf16(float* out, const Bf16* in, std::int64_t n);
void f32_from_f16(float* out, const F16* in, std::int64_t n);
void min_and_max(const float* in, std::int64_t n, float* minimum, float* greatest);
void quantise(std::uint8_t* out, const float* in, float scale, float zero, int most, std::int64_t n);
float maximum(const float* in, std::int64_t n);
double exp_sum(float* out, const float* in, float shift, float scale, std::int64_t n);

#if defined(__AVX512F__) && !defined(CHARONIA_ISA_amx)
constexpr int kTwoPanelRows = 3;
#else
constexpr int kTwoPanelRows = 0;  // not enough registers; or tiles, which read four streams
#endif
#if defined(__AVX512F__)
constexpr int kTwoIntegerPanelRows = 3;
#else
constexpr int kTwoIntegerPanelRows = 0;
#endif

#if defined(__AVX2__)
static constexpr decltype(Kernels::linear_i8_vnni) kLinearI8Vnni = linear_i8_vnni;
#else
static constexpr decltype(Kernels::linear_i8_vnni) kLinearI8Vnni = nullptr;
#endif
#if defined(CHARONIA_ISA_amx)
static constexpr decltype(Kernels::linear_i8_tiles) kLinearI8Tiles = linear_i8_tiles;
#else
static constexpr decltype(Kernels::linear_i8_tiles) kLinearI8Tiles = nullptr;
#endif

namespace {
constexpr Kernels kTable = {
    .linear_bf16 = linear_bf16,
    .two_panel_rows = kTwoPanelRows,
#if defined(__AVX512BF16__)
    .linear_bf16_widened = nullptr,
#else
    .linear_bf16_widened = linear_bf16_widened,
#endif
    .linear_f16 = linear_f16,
    .linear_f32 = linear_f32,
#if defined(__AVX512BF16__)
    .quant_linear_bf16 = quant_linear_bf16,
#else
    .quant_linear_bf16 = nullptr,
#endif
    .quant_linear_f32 = quant_linear_f32,
// If bf16 dot products are as fast, or there are tiles, those are used for all numbers of rows.
#if defined(__AVX2__) && !defined(__AVX512BF16__)
    .quant_linear_fixed = quant_linear_fixed,
    .fixed_from_bf16 = fixed_from_bf16,
#else
    .quant_linear_fixed = nullptr,
    .fixed_from_bf16 = nullptr,
#endif
    .group_sums_bf16 = group_sums_bf16,
    .group_sums_f32 = group_sums_f32,
    .linear_i8 = linear_i8,
    .linear_i8_vnni = kLinearI8Vnni,
    .linear_i8_tiles = kLinearI8Tiles,
    .two_integer_panel_rows = kTwoIntegerPanelRows,
    .integers_from_bf16 = integers_from_bf16,
    .integers_from_f32 = integers_from_f32,
    .sum_integers = sum_integers,
    .attention_bf16 = attention_bf16,
    .attention_f16 = attention_f16,
    .attention_f32 = attention_f32,
    .attention_f8 = attention_f8,
    .attention_q8 = attention_q8,
    .attention_q4 = attention_q4,
    .attention_split_bf16 = attention_split_bf16,
    .attention_split_f16 = attention_split_f16,
    .attention_split_f32 = attention_split_f32,
    .attention_split_f8 = attention_split_f8,
    .attention_split_q8 = attention_split_q8,
    .attention_split_q4 = attention_split_q4,
    .attention_merge = attention_merge,
    .rms_norm_bf16 = rms_norm_bf16,
    .rms_norm_f32 = rms_norm_f32,
    .sum_of_squares = sum_of_squares,
    .normalise = normalise,
    .silu_mul_bf16 = silu_mul_bf16,
    .silu_mul_f32 = silu_mul_f32,
    .gelu_tanh_mul_bf16 = gelu_tanh_mul_bf16,
    .gelu_tanh_mul_f32 = gelu_tanh_mul_f32,
    .clamped_swiglu_bf16 = clamped_swiglu_bf16,
    .clamped_swiglu_f32 = clamped_swiglu_f32,
    .sigmoid_gate_bf16 = sigmoid_gate_bf16,
    .sigmoid_gate_f32 = sigmoid_gate_f32,
    .gated_norm_bf16 = gated_norm_bf16,
    .gated_norm_f32 = gated_norm_f32,
    .delta_net = delta_net,
    .low_rank_down_bf16 = low_rank_down_bf16,
    .low_rank_down_f32 = low_rank_down_f32,
    .low_rank_up_bf16 = low_rank_up_bf16,
    .low_rank_up_f32 = low_rank_up_f32,
    .short_conv_bf16 = short_conv_bf16,
    .short_conv_f32 = short_conv_f32,
    .soft_cap = soft_cap,
    .scale = scale,
    .add_scaled = add_scaled,
    .rotate = rotate,
    .rotate_interleaved = rotate_interleaved,
    .bf16_from_f32 = bf16_from_f32,
    .f16_from_f32 = f16_from_f32,
    .f32_from_bf16 = f32_from_bf16,
    .f32_from_f16 = f32_from_f16,
    .min_and_max = min_and_max,
    .quantise = quantise,
    .maximum = maximum,
    .exp_sum = exp_sum,
};
}  // namespace

const Kernels& kernels() { return kTable; }

}  // namespace charonia::ops::cpu::CHARONIA_ISA
