// The table of this instruction set's kernels.
#include "ops/cpu/kernels.h"

namespace charonia::ops::cpu::CHARONIA_ISA {

void linear_bf16(const LinearArgs& args);
void linear_f16(const LinearArgs& args);
void linear_f32(const LinearArgs& args);
void attention_bf16(const AttentionArgs& args);
void attention_f16(const AttentionArgs& args);
void attention_f32(const AttentionArgs& args);
void rms_norm_bf16(Bf16* out, float* residual, const float* delta, const float* weight, float eps, std::int64_t n);
void rms_norm_f32(float* out, float* residual, const float* delta, const float* weight, float eps, std::int64_t n);
void silu_mul_bf16(Bf16* out, const float* gate, const float* up, std::int64_t n);
void silu_mul_f32(float* out, const float* gate, const float* up, std::int64_t n);
void rotate(float* head, const float* cos_sin, int head_dim);
void bf16_from_f32(Bf16* out, const float* in, std::int64_t n);
void f16_from_f32(F16* out, const float* in, std::int64_t n);
void f32_from_bf16(float* out, const Bf16* in, std::int64_t n);
void f32_from_f16(float* out, const F16* in, std::int64_t n);
float maximum(const float* in, std::int64_t n);
double exp_sum(float* out, const float* in, float shift, float scale, std::int64_t n);

const Kernels& kernels() {
  static constexpr Kernels table = {
      .linear_bf16 = linear_bf16,
      .linear_f16 = linear_f16,
      .linear_f32 = linear_f32,
      .attention_bf16 = attention_bf16,
      .attention_f16 = attention_f16,
      .attention_f32 = attention_f32,
      .rms_norm_bf16 = rms_norm_bf16,
      .rms_norm_f32 = rms_norm_f32,
      .silu_mul_bf16 = silu_mul_bf16,
      .silu_mul_f32 = silu_mul_f32,
      .rotate = rotate,
      .bf16_from_f32 = bf16_from_f32,
      .f16_from_f32 = f16_from_f32,
      .f32_from_bf16 = f32_from_bf16,
      .f32_from_f16 = f32_from_f16,
      .maximum = maximum,
      .exp_sum = exp_sum,
  };
  return table;
}

}  // namespace charonia::ops::cpu::CHARONIA_ISA
