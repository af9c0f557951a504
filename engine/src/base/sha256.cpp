#include "base/sha256.h"

#include <algorithm>
#include <bit>
#include <cstddef>

namespace charonia {
namespace {

constexpr std::size_t kChunk = 64;  // bytes
using State = std::array<std::uint32_t, 8>;

// The first 32 bits of the fractional parts of the square roots of the first 8 primes.
constexpr State kBegin{
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
// The same of the cube roots of the first 64 primes.
constexpr std::array<std::uint32_t, 64> kRounds{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

void add(State& state, std::string_view chunk) {
  std::array<std::uint32_t, kRounds.size()> words{};
  for (std::size_t i = 0; i < kChunk; ++i) words[i / 4] = words[i / 4] << 8U | static_cast<unsigned char>(chunk[i]);
  for (std::size_t i = 16; i < words.size(); ++i) {
    const auto a = words[i - 15], b = words[i - 2];
    words[i] = words[i - 16] + words[i - 7] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3U) +
               (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10U);
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const auto one = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) + kRounds[i] +
                     words[i];
    const auto two = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
  }
  const State sums{a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < state.size(); ++i) state[i] += sums[i];
}

}  // namespace

std::array<std::uint64_t, 4> sha256(std::string_view bytes) {
  auto state = kBegin;
  const std::uint64_t bits = std::uint64_t{bytes.size()} * 8;
  for (; bytes.size() >= kChunk; bytes = bytes.substr(kChunk)) add(state, bytes);
  std::array<char, 2 * kChunk> end{};  // the rest, a one bit, and the number of bits in the last 8 bytes
  std::ranges::copy(bytes, end.begin());
  end[bytes.size()] = '\x80';
  const auto size = bytes.size() < kChunk - sizeof bits ? kChunk : 2 * kChunk;
  for (std::size_t i = 0; i < sizeof bits; ++i) end[size - 1 - i] = static_cast<char>(bits >> (8 * i));
  for (std::size_t at = 0; at < size; at += kChunk) add(state, {end.data() + at, kChunk});
  std::array<std::uint64_t, 4> out{};
  for (std::size_t i = 0; i < state.size(); ++i) out[i / 2] = out[i / 2] << 32U | state[i];
  return out;
}

std::string sha256_hex(std::string_view bytes) {
  std::string out;
  for (const auto number : sha256(bytes)) {
    for (int digit = 15; digit >= 0; --digit) out += "0123456789abcdef"[number >> (4 * digit) & 15];
  }
  return out;
}

}  // namespace charonia
