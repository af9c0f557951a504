#include "model/gguf_blocks.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <iterator>
#include <limits>

namespace charonia::model {
namespace {

using ops::Code;

constexpr int kMiddle = 8;  // the number of a u4 code is the code - 8

template <class T>
T load(const std::byte* data) {
  T out;
  std::memcpy(&out, data, sizeof out);
  return out;
}

unsigned byte(const std::byte* data, std::int64_t index = 0) { return std::to_integer<unsigned>(data[index]); }
float half(const std::byte* data) { return f16_to_float(load<std::uint16_t>(data)); }
std::uint8_t signed_code(int number) { return static_cast<std::uint8_t>(static_cast<std::int8_t>(number)); }

// The minimum of a group whose numbers are codes - 8, if its weights are scale * code + minimum.
float middle_minimum(float scale, float minimum) {
  return static_cast<float>(double{minimum} + double{scale} * kMiddle);
}

// The 4-bit numbers of 32 columns: byte i has column i in its low half, and column i + 16 in its high half.
template <class Fn>
void for_halves(const std::byte* bytes, Fn fn) {
  for (int i = 0; i < 16; ++i) {
    fn(i, byte(bytes, i) & 15U);
    fn(i + 16, byte(bytes, i) >> 4U);
  }
}

void decode_q4_0(const std::byte* block, DecodedBlock& out) {
  out.scales[0] = half(block);
  for_halves(block + 2, [&](int c, unsigned code) { out.codes[c] = static_cast<std::uint8_t>(code); });
}

void decode_q4_1(const std::byte* block, DecodedBlock& out) {
  out.scales[0] = half(block);
  out.minimums[0] = middle_minimum(out.scales[0], half(block + 2));
  for_halves(block + 4, [&](int c, unsigned code) { out.codes[c] = static_cast<std::uint8_t>(code); });
}

// The fifth bits of 32 columns are a word before their 4-bit numbers.
void decode_fives(const std::byte* bytes, int offset, DecodedBlock& out) {
  const auto high = load<std::uint32_t>(bytes);
  for_halves(bytes + 4, [&](int c, unsigned code) {
    out.codes[c] = signed_code(static_cast<int>(code | (high >> static_cast<unsigned>(c) & 1U) << 4U) - offset);
  });
}

void decode_q5_0(const std::byte* block, DecodedBlock& out) {
  out.scales[0] = half(block);
  decode_fives(block + 2, 16, out);
}

void decode_q5_1(const std::byte* block, DecodedBlock& out) {
  out.scales[0] = half(block);
  out.minimums[0] = half(block + 2);
  decode_fives(block + 4, 0, out);
}

void decode_q8_0(const std::byte* block, DecodedBlock& out) {
  out.scales[0] = half(block);
  std::memcpy(out.codes, block + 2, 32);
}

void decode_iq4_nl(const std::byte* block, DecodedBlock& out) {
  constexpr std::array kNumbers{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  out.scales[0] = half(block);
  for_halves(block + 2, [&](int c, unsigned code) { out.codes[c] = signed_code(kNumbers[code]); });
}

void decode_mxfp4(const std::byte* block, DecodedBlock& out) {
  constexpr std::uint32_t kLeast = 0x00400000U;  // 2^-127, which is a subnormal float
  const auto exponent = byte(block);
  out.scales[0] = exponent == 255 ? std::numeric_limits<float>::quiet_NaN()
                                  : std::bit_cast<float>(exponent == 0 ? kLeast : std::uint32_t{exponent} << 23U);
  for_halves(block + 1, [&](int c, unsigned code) { out.codes[c] = static_cast<std::uint8_t>(code); });
}

// The 2-bit numbers of 256 columns: 32 bytes have 128 columns, four each.
template <class Fn>
void for_quarters(const std::byte* bytes, Fn fn) {
  for (int c = 0; c < 256; ++c) {
    const int at = c / 128 * 32 + c % 32;
    fn(c, byte(bytes, at) >> static_cast<unsigned>(c % 128 / 32 * 2) & 3U);
  }
}

void decode_q2_k(const std::byte* block, DecodedBlock& out) {
  const float scale = half(block + 80), minimum = half(block + 82);
  for (int g = 0; g < 16; ++g) {
    out.scales[g] = scale * static_cast<float>(byte(block, g) & 15U);
    out.minimums[g] = middle_minimum(out.scales[g], -minimum * static_cast<float>(byte(block, g) >> 4U));
  }
  for_quarters(block + 16, [&](int c, unsigned code) { out.codes[c] = static_cast<std::uint8_t>(code); });
}

void decode_q3_k(const std::byte* block, DecodedBlock& out) {
  const auto* const packed = block + 96;  // 6 bits of each scale: the low 4 in bytes 0 to 7, the high 2 in 8 to 11
  const float scale = half(block + 108);
  for (int g = 0; g < 16; ++g) {
    const auto low = g < 8 ? byte(packed, g) & 15U : byte(packed, g - 8) >> 4U;
    const auto high = byte(packed, 8 + g % 4) >> static_cast<unsigned>(g / 4 * 2) & 3U;
    out.scales[g] = scale * static_cast<float>(static_cast<int>(low | high << 4U) - 32);
  }
  for_quarters(block + 32, [&](int c, unsigned code) {
    const auto high = byte(block, c % 32) >> static_cast<unsigned>(c / 32) & 1U;
    out.codes[c] = static_cast<std::uint8_t>(code + 4 * high + kMiddle - 4);
  });
}

// The scales and minimums of Q4_K and Q5_K: 6 bits each, in 12 bytes.
void decode_k_scales(const std::byte* block, DecodedBlock& out) {
  const float scale = half(block), minimum = half(block + 2);
  const auto* const packed = block + 4;
  for (int g = 0; g < 8; ++g) {
    auto s = byte(packed, g) & 63U, m = byte(packed, g + 4) & 63U;
    if (g >= 4) {
      s = (byte(packed, g + 4) & 15U) | byte(packed, g - 4) >> 6U << 4U;
      m = byte(packed, g + 4) >> 4U | byte(packed, g) >> 6U << 4U;
    }
    out.scales[g] = scale * static_cast<float>(s);
    out.minimums[g] = -minimum * static_cast<float>(m);
  }
}

// The 4-bit numbers of 256 columns: 32 bytes have 64 columns, the first 32 in their low halves.
template <class Fn>
void for_k_halves(const std::byte* bytes, Fn fn) {
  for (int c = 0; c < 256; ++c) {
    const auto both = byte(bytes, c / 64 * 32 + c % 32);
    fn(c, c % 64 < 32 ? both & 15U : both >> 4U);
  }
}

void decode_q4_k(const std::byte* block, DecodedBlock& out) {
  decode_k_scales(block, out);
  for (int g = 0; g < 8; ++g) out.minimums[g] = middle_minimum(out.scales[g], out.minimums[g]);
  for_k_halves(block + 16, [&](int c, unsigned code) { out.codes[c] = static_cast<std::uint8_t>(code); });
}

void decode_q5_k(const std::byte* block, DecodedBlock& out) {
  decode_k_scales(block, out);
  for_k_halves(block + 48, [&](int c, unsigned code) {
    const auto high = byte(block + 16, c % 32) >> static_cast<unsigned>(c / 32) & 1U;
    out.codes[c] = static_cast<std::uint8_t>(code | high << 4U);
  });
}

void decode_q6_k(const std::byte* block, DecodedBlock& out) {
  const float scale = half(block + 208);
  for (int g = 0; g < 16; ++g) out.scales[g] = scale * static_cast<float>(load<std::int8_t>(block + 192 + g));
  for (int c = 0; c < 256; ++c) {
    const int n = c / 128, quarter = c % 128 / 32, i = c % 32;
    const auto low = byte(block, n * 64 + quarter % 2 * 32 + i);
    const auto high = byte(block + 128, n * 32 + i) >> static_cast<unsigned>(2 * quarter) & 3U;
    const auto number = (quarter < 2 ? low & 15U : low >> 4U) | high << 4U;
    out.codes[c] = signed_code(static_cast<int>(number) - 32);
  }
}

constexpr BlockType kTypes[] = {
    {"Q4_0", 32, 18, Code::u4, 32, false, DType::f16, decode_q4_0},
    {"Q4_1", 32, 20, Code::u4, 32, true, DType::f16, decode_q4_1},
    {"Q5_0", 32, 22, Code::i8, 32, false, DType::f16, decode_q5_0},
    {"Q5_1", 32, 24, Code::i8, 32, true, DType::f16, decode_q5_1},
    {"Q8_0", 32, 34, Code::i8, 32, false, DType::f16, decode_q8_0},
    {"Q2_K", 256, 84, Code::u4, 16, true, DType::f32, decode_q2_k},
    {"Q3_K", 256, 110, Code::u4, 16, false, DType::f32, decode_q3_k},
    {"Q4_K", 256, 144, Code::u4, 32, true, DType::f32, decode_q4_k},
    {"Q5_K", 256, 176, Code::i8, 32, true, DType::f32, decode_q5_k},
    {"Q6_K", 256, 210, Code::i8, 16, false, DType::f32, decode_q6_k},
    {"IQ4_NL", 32, 18, Code::i8, 32, false, DType::f16, decode_iq4_nl},
    {"MXFP4", 32, 17, Code::f4_e2m1, 32, false, DType::f8_e8m0, decode_mxfp4},
};

}  // namespace

const BlockType* find_block_type(std::string_view name) {
  const auto* const found = std::ranges::find(kTypes, name, &BlockType::name);
  return found == std::end(kTypes) ? nullptr : found;
}

}  // namespace charonia::model
