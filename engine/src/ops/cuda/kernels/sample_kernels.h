// Samples tokens from rows of logits without sorting them.
//
// Tokens are ordered by their codes, ascending. A code has 32 bits that decrease as the logit increases, then 18 bits
// of id. So the smallest code is the greedy choice, ties go to the lower id, and a range of codes is a range of the
// most-likely-first order. A token's mass is e^((logit - greatest) / temperature) as an integer multiple of 2^-44. Sums
// of masses do not depend on the order of additions, so they do not depend on thread blocks, their number, or other
// rows. (A token with less than 2^-44 times the probability of the most likely has no mass and is never drawn.)
//
//   scan        grid (vocab / 4096, rows), a warp per group of 512 logits, all loads in flight: the group's lowest
//               code; for rows that request log probabilities its sum of e^x, in an order that depends only on the
//               vocabulary
//   histogram   grid (parts of the vocabulary, rows), sampled rows only: mass and number of tokens per bin. A bin is
//               1/64 of the temperature wide in logits; the last one takes everything beyond 16 temperatures. The last
//               bin, usually most of the vocabulary, is summed in registers, the rest in shared memory, then once in
//               global memory.
//   finish      a block per row. Greedy: the minimum of the groups' codes. Sampled: top_k, top_p and the draw each find
//               the first token where the count, or the mass, reaches a number, in most-likely-first order. A filter
//               keeps a prefix of the order, and the next filter needs only its mass. The histogram has summed min_p's
//               prefix. The bin gives the token's range of codes; the tokens in that range are collected and sorted in
//               shared memory. With filters, all tokens that they can keep are collected once if there are at most
//               1024. A bin with more tokens (flat rows) is divided further by histograms over its range of codes. Only
//               groups whose smallest code is in the range are read.
//
// If a row has bias, bans, penalties or a mask, other kernels run before: history (fills slots of the table of counts),
// scan for the rows that request log probabilities, and scatter, which adds the entries to the logits and saves the
// original values; finish restores them before it computes log probabilities. Penalties and masks are applied to every
// logit when it is read, with 2 more bytes and one more bit each. If a row has a target, finish takes that token.
//
// Bound: memory. Greedy rows are read once (4 bytes per token); sampled rows twice, the second time mostly from L2, and
// a few groups of them a third time.
#pragma once

#include <cmath>

#include "ops/cuda/device/portable.h"
#include "ops/cuda/kernels/sample.h"

namespace charonia::cuda::sampling {

using u64 = unsigned long long;

constexpr int kPerLane = kSampleGroup / kWarp;  // logits of a group
constexpr int kVectors = kPerLane / 4;
constexpr int kScanThreads = 256, kHistogramThreads = 512, kFinishThreads = 1024;
constexpr int kScanned = kScanThreads / kWarp * kSampleGroup;  // per block
constexpr float kBinsPerTemperature = 64;
constexpr float kLastBin = kSampleBins - 1;
constexpr float kMassOfOne = 17592186044416.0F;  // 2^44: the sum of 2^18 of them fits 64 bits
constexpr float kInfinity = INFINITY;
constexpr float kMaxFloat = 3.402823466e38F;
constexpr u64 kNoCode = ~0ULL;
static_assert(kSampleBins == kFinishThreads, "a thread is a bin");
static_assert(kMaxSampledVocab / kSampleGroup <= kHistogramThreads, "a thread is a group");

// Codes and masses.

// 32 bits that decrease as x increases; NaN and +infinity give 0, before all others.
CHARONIA_DEVICE unsigned falling(float x) {
  const unsigned bits = __float_as_uint(x + 0.0F);  // -0 becomes 0
  const unsigned out = (bits & 0x80000000U) != 0 ? bits : bits ^ 0x7fffffffU;
  return x < kInfinity ? out : 0;
}
CHARONIA_DEVICE float logit_of_falling(unsigned x) {
  return __uint_as_float((x & 0x80000000U) != 0 ? x : x ^ 0x7fffffffU);
}
CHARONIA_DEVICE u64 code_of(float logit, int id) {
  return static_cast<u64>(falling(logit)) << kSampleIdBits | static_cast<unsigned>(id);
}
CHARONIA_DEVICE unsigned falling_of(u64 code) { return static_cast<unsigned>(code >> kSampleIdBits); }
CHARONIA_DEVICE float logit_of(u64 code) { return logit_of_falling(falling_of(code)); }
CHARONIA_DEVICE int id_of(u64 code) { return static_cast<int>(code & (kMaxSampledVocab - 1)); }
CHARONIA_DEVICE bool broken(u64 code) { return falling_of(code) == 0; }

// The conversion of a row's logits to bins and masses.
struct Scale {
  float greatest, bins_per_logit, per_logit;
};
CHARONIA_DEVICE Scale scale_of(float greatest, float temperature) {
  return {greatest, fminf(kBinsPerTemperature / temperature, kMaxFloat), fminf(1 / temperature, kMaxFloat)};
}
// Does not decrease as the logit decreases.
CHARONIA_DEVICE int bin_of(const Scale& scale, float logit) {
  return static_cast<int>(fminf((scale.greatest - logit) * scale.bins_per_logit, kLastBin));
}
CHARONIA_DEVICE u64 mass_of(const Scale& scale, float logit) {
  return static_cast<u64>(expf((logit - scale.greatest) * scale.per_logit) * kMassOfOne);
}
// The smallest logit that min_p keeps.
CHARONIA_DEVICE float min_logit(const SampleParams& row, float greatest) {
  return greatest + row.temperature * logf(row.min_p);
}

// Adds to a sum of masses in shared memory, in two words, because 32-bit additions are native there.
CHARONIA_DEVICE void add_mass(unsigned* low, unsigned* high, u64 mass) {
  const auto below = static_cast<unsigned>(mass);
  const unsigned before = atomicAdd(low, below);
  const unsigned above = static_cast<unsigned>(mass >> 32) + (before + below < below ? 1 : 0);
  if (above != 0) atomicAdd(high, above);
}

// The logits of a row.

struct Logits {
  const float* logits = nullptr;          // [vocab]
  const std::uint16_t* counts = nullptr;  // [vocab]; null: no penalties
  const std::uint32_t* masks = nullptr;   // of all rows
  int mask_at = -1;                       // the row's words in masks; -1: all tokens are allowed
  float repetition = 1, presence = 0, frequency = 0;
  int vocab = 0;
  bool aligned = false;  // to 16 bytes
};

struct SampleKernelParams {
  SampleBatch batch;
  SampleMemory memory;
  int groups = 0;
  int part = 0;  // part of the vocabulary, for a block of the histogram
  bool aligned = false;
  bool originals = false;  // scan: of rows that request log probabilities, into original_best
};

CHARONIA_DEVICE Logits original_logits(const SampleKernelParams& p, std::int64_t row) {
  Logits out;
  out.logits = p.batch.logits + row * p.batch.stride;
  out.vocab = p.batch.vocab;
  out.aligned = p.aligned;
  return out;
}
template <bool changes>
CHARONIA_DEVICE Logits logits_of(const SampleKernelParams& p, std::int64_t row, const SampleParams& params) {
  Logits out = original_logits(p, row);
  if (changes && params.mask >= 0) {  // an index takes fewer registers than a pointer
    out.masks = p.batch.masks;
    out.mask_at = params.mask * static_cast<int>(mask_words(p.batch.vocab));
  }
  if (changes && params.slot >= 0) {
    out.counts = p.memory.table + params.slot * count_stride(p.batch.vocab);
    out.repetition = params.repetition_penalty;
    out.presence = params.presence_penalty;
    out.frequency = params.frequency_penalty;
  }
  return out;
}

CHARONIA_DEVICE float penalised(const Logits& row, float x, unsigned count) {
  if (count == 0) return x;
  x = x > 0 ? x / row.repetition : x * row.repetition;
  const unsigned sampled = count & kMaxCounted;
  return sampled == 0 ? x : x - row.presence - row.frequency * static_cast<float>(sampled);
}

// Loads logits [at, at + 4), with `at` a multiple of 4; -infinity beyond the end, and if the mask does not allow the
// token. NaN and +infinity do not change.
template <bool changes>
CHARONIA_DEVICE void load_logits(const Logits& row, int at, float (&x)[4]) {
  if (row.aligned && at + 4 <= row.vocab) {
    const float4 four = *reinterpret_cast<const float4*>(row.logits + at);
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  } else {
    CHARONIA_UNROLL
    for (int i = 0; i < 4; ++i) x[i] = at + i < row.vocab ? row.logits[at + i] : -kInfinity;
  }
  if (changes && row.counts != nullptr && at < row.vocab) {
    const uint2 counts = *reinterpret_cast<const uint2*>(row.counts + at);
    x[0] = penalised(row, x[0], counts.x & 0xffffU);
    x[1] = penalised(row, x[1], counts.x >> 16);
    x[2] = penalised(row, x[2], counts.y & 0xffffU);
    x[3] = penalised(row, x[3], counts.y >> 16);
  }
  if (changes && row.mask_at >= 0 && at < row.vocab) {
    const unsigned allowed = row.masks[row.mask_at + at / kMaskBits] >> (at % kMaskBits);
    CHARONIA_UNROLL
    for (int i = 0; i < 4; ++i) {
      if ((allowed >> i & 1U) == 0 && x[i] < kInfinity) x[i] = -kInfinity;
    }
  }
}

// The index of a lane's vector j in a group.
CHARONIA_DEVICE int vector_at(int group, int j) { return group * kSampleGroup + j * 4 * kWarp + lane_id() * 4; }

// Loads a group's logits, 16 per lane, all in flight together.
template <bool changes>
CHARONIA_DEVICE void load_group(const Logits& row, int group, float (&x)[kVectors][4]) {
  CHARONIA_UNROLL
  for (int j = 0; j < kVectors; ++j) load_logits<changes>(row, vector_at(group, j), x[j]);
}

CHARONIA_DEVICE u64 warp_min(u64 x) {
  CHARONIA_UNROLL
  for (int mask = kWarp / 2; mask > 0; mask /= 2) x = min(x, shuffle_xor(x, mask));
  return x;
}
CHARONIA_DEVICE u64 warp_total(u64 x) {
  CHARONIA_UNROLL
  for (int mask = kWarp / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}
// scratch: 32 codes of shared memory, which may be reused after the call.
CHARONIA_DEVICE u64 block_min(u64 x, u64* scratch) {
  x = warp_min(x);
  if (lane_id() == 0) scratch[warp_id()] = x;
  __syncthreads();
  x = warp_min(lane_id() < static_cast<int>(blockDim.x) / kWarp ? scratch[lane_id()] : kNoCode);
  __syncthreads();
  return x;
}

// Scan kernel.

template <bool changes>
CHARONIA_KERNEL(kScanThreads, 4)
void scan_kernel(const SampleKernelParams p) {
  dependency_trigger();
  dependency_wait();
  const auto row = static_cast<std::int64_t>(blockIdx.y);
  const SampleParams& params = p.batch.params[row];
  const int tid = static_cast<int>(threadIdx.x);
  const bool asks = params.logprobs >= 0;
  if (params.active == 0 || (p.originals && !asks)) return;
  if (!p.originals && params.temperature > 0) {
    for (int i = static_cast<int>(blockIdx.x) * kScanThreads + tid; i < kSampleBins;
         i += static_cast<int>(gridDim.x) * kScanThreads) {
      p.memory.masses[row * kSampleBins + i] = 0;
      p.memory.counts[row * kSampleBins + i] = 0;
      if (i == 0) p.memory.likely_mass[row] = 0;
    }
  }
  const int group = static_cast<int>(blockIdx.x) * (kScanThreads / kWarp) + warp_id();
  if (group >= p.groups) return;
  float x[kVectors][4];
  load_group<changes>(logits_of<changes>(p, row, params), group, x);
  const int first = vector_at(group, 0);
  float greatest = -kInfinity;
  int id = first, bad = kMaxSampledVocab;
  CHARONIA_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    CHARONIA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int at = first + j * 4 * kWarp + i;
      if (x[j][i] > greatest) greatest = x[j][i], id = at;
      if (!(x[j][i] < kInfinity)) bad = min(bad, at);
    }
  }
  u64 code = first < p.batch.vocab ? code_of(greatest, id) : kNoCode;
  if (bad < kMaxSampledVocab) code = static_cast<u64>(bad);
  code = warp_min(code);
  if (lane_id() == 0) (p.originals ? p.memory.original_best : p.memory.best)[row * p.groups + group] = code;
  if (changes || !asks) return;
  const float most = logit_of(code);
  float sum = 0;
  if (most > -kInfinity) {
    CHARONIA_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      CHARONIA_UNROLL
      for (int i = 0; i < 4; ++i) sum += expf(x[j][i] - most);
    }
  }
  sum = warp_sum(sum);
  if (lane_id() == 0) p.memory.exp_sums[row * p.groups + group] = sum;
}

// Histogram kernel.

template <bool changes>
CHARONIA_KERNEL(kHistogramThreads, 2)
void histogram_kernel(const SampleKernelParams p) {
  constexpr int kStep = kHistogramThreads * 4;
  CHARONIA_SHARED(unsigned, low, [kSampleBins]);
  CHARONIA_SHARED(unsigned, high, [kSampleBins]);
  CHARONIA_SHARED(unsigned, count, [kSampleBins]);
  CHARONIA_SHARED(u64, scratch, [kWarp]);
  dependency_trigger();
  dependency_wait();
  const auto row = static_cast<std::int64_t>(blockIdx.y);
  const SampleParams& params = p.batch.params[row];
  if (params.active == 0 || params.temperature == 0) return;
  const int tid = static_cast<int>(threadIdx.x);
  for (int i = tid; i < kSampleBins; i += kHistogramThreads) low[i] = high[i] = count[i] = 0;
  const u64 best = block_min(tid < p.groups ? p.memory.best[row * p.groups + tid] : kNoCode, scratch);
  const float greatest = logit_of(best);
  if (broken(best) || greatest == -kInfinity) return;
  const Scale scale = scale_of(greatest, params.temperature);
  const bool has_min_p = params.min_p > 0;
  const float minimum = has_min_p ? min_logit(params, greatest) : kInfinity;
  const Logits logits = logits_of<changes>(p, row, params);

  u64 tail_mass = 0, likely_mass = 0;
  unsigned tail_count = 0;
  const int begin = static_cast<int>(blockIdx.x) * p.part, end = min(begin + p.part, p.batch.vocab);
  for (int from = begin + tid * 4; from < end; from += kVectors * kStep) {
    float x[kVectors][4];
    CHARONIA_UNROLL
    for (int j = 0; j < kVectors; ++j) load_logits<changes>(logits, from + j * kStep, x[j]);
    CHARONIA_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      CHARONIA_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (from + j * kStep + i >= end) continue;
        const u64 mass = mass_of(scale, x[j][i]);
        const int bin = bin_of(scale, x[j][i]);
        if (x[j][i] >= minimum) likely_mass += mass;
        if (bin == kSampleBins - 1) {
          tail_mass += mass;
          ++tail_count;
        } else {
          add_mass(&low[bin], &high[bin], mass);
          atomicAdd(&count[bin], 1U);
        }
      }
    }
  }
  tail_mass = warp_total(tail_mass);
  const u64 tokens = warp_total(tail_count);
  if (has_min_p) likely_mass = warp_total(likely_mass);
  if (lane_id() == 0) {
    add_mass(&low[kSampleBins - 1], &high[kSampleBins - 1], tail_mass);
    atomicAdd(&count[kSampleBins - 1], static_cast<unsigned>(tokens));
    if (likely_mass != 0) atomicAdd(&p.memory.likely_mass[row], likely_mass);
  }
  __syncthreads();
  for (int i = tid; i < kSampleBins; i += kHistogramThreads) {
    if (count[i] == 0) continue;
    atomicAdd(&p.memory.masses[row * kSampleBins + i], static_cast<u64>(high[i]) << 32 | low[i]);
    atomicAdd(&p.memory.counts[row * kSampleBins + i], count[i]);
  }
}

// Finish kernel.

constexpr int kMaxListed = kFinishThreads;  // a thread is an entry

struct Range {
  u64 first, last;
};

// A part of the order, and the mass and count of everything before it.
struct Stretch {
  Range range;
  u64 before_mass, before_count;
};

// Two sums, because both are usually needed.
struct Sums {
  u64 mass, count;
};

struct Shared {
  union {
    struct {
      u64 codes[kMaxListed];   // ascending
      u64 masses[kMaxListed];  // inclusive prefix sums over the list
    } list;
    struct {
      unsigned low[kSampleBins], high[kSampleBins], count[kSampleBins];
    } finer;
  };
  Sums bins[kSampleBins];  // inclusive prefix sums over the bins
  Sums warps[kWarp];
  u64 scratch[kWarp];
  u64 edges[2];
  int found[2];
  unsigned listed;  // number of tokens found for the list; only kMaxListed of them are stored
  Stretch stretch;  // the part that is listed, or being divided
  Scale scale;      // of masses and bins
};

// The sums over this thread and all earlier threads.
CHARONIA_DEVICE Sums block_inclusive_sums(Sums x, Shared& s) {
  CHARONIA_UNROLL
  for (int delta = 1; delta < kWarp; delta *= 2) {
    const u64 mass = shuffle_up(x.mass, delta), count = shuffle_up(x.count, delta);
    if (lane_id() >= delta) x.mass += mass, x.count += count;
  }
  if (lane_id() == kWarp - 1) s.warps[warp_id()] = x;
  __syncthreads();
  for (int warp = 0; warp < warp_id(); ++warp) x.mass += s.warps[warp].mass, x.count += s.warps[warp].count;
  __syncthreads();
  return x;
}

// Finds the thread with before < need <= up_to; the last thread if all sums are below need. before and up_to increase
// with the thread. turn: alternately 0 and 1, so that one barrier is enough.
CHARONIA_DEVICE int block_find(u64 before, u64 up_to, u64 need, int& turn, Shared& s) {
  const int tid = static_cast<int>(threadIdx.x);
  if (before < need && (need <= up_to || tid == kFinishThreads - 1)) s.found[turn] = tid;
  __syncthreads();
  const int found = s.found[turn];
  turn = 1 - turn;
  return found;
}

// Calls f(logit, code) for the row's tokens in the range, in any order, by whole groups. best [groups]: their smallest
// codes.
template <bool changes, class F>
CHARONIA_DEVICE void for_range(const Logits& row, const u64* best, int groups, Range range, F f) {
  constexpr int kAtOnce = changes ? 1 : kVectors;  // limited by registers
  for (int group = warp_id(); group < groups; group += kFinishThreads / kWarp) {
    if (best[group] > range.last) continue;
    for (int from = 0; from < kVectors; from += kAtOnce) {
      float x[kAtOnce][4];
      CHARONIA_UNROLL
      for (int j = 0; j < kAtOnce; ++j) load_logits<changes>(row, vector_at(group, from + j), x[j]);
      CHARONIA_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        CHARONIA_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int id = vector_at(group, from + j) + i;
          const u64 code = code_of(x[j][i], id);
          if (id < row.vocab && code >= range.first && code <= range.last) f(x[j][i], code);
        }
      }
    }
  }
}

// Bitonic sort, one code per thread: exchanges within a warp by shuffles, others through list.codes, which is sorted at
// the end.
CHARONIA_DEVICE void sort_list(Shared& s, int n) {
  const int tid = static_cast<int>(threadIdx.x);
  int padded = kWarp;
  while (padded < n) padded *= 2;
  u64 x = tid < n ? s.list.codes[tid] : kNoCode;
  for (int run = 2; run <= padded; run *= 2) {
    for (int apart = run / 2; apart > 0; apart /= 2) {
      u64 other = x;
      if (apart >= kWarp) {
        __syncthreads();
        if (tid < padded) s.list.codes[tid] = x;
        __syncthreads();
        if (tid < padded) other = s.list.codes[tid ^ apart];
      } else if (tid < padded) {
        other = shuffle_xor(x, apart);
      }
      x = ((tid & run) == 0) == ((tid & apart) == 0) ? min(x, other) : max(x, other);
    }
  }
  __syncthreads();
  s.list.codes[tid] = x;
  __syncthreads();
}

// Collects the tokens of the range, sorted.
template <bool changes>
CHARONIA_DEVICE void list_range(const Logits& row, const u64* best, int groups, Range range, Shared& s) {
  if (threadIdx.x == 0) s.listed = 0;
  __syncthreads();
  for_range<changes>(row, best, groups, range, [&](float, u64 code) {
    const unsigned at = atomicAdd(&s.listed, 1U);
    if (at < kMaxListed) s.list.codes[at] = code;
  });
  __syncthreads();
  if (s.listed <= kMaxListed) sort_list(s, static_cast<int>(s.listed));
}

// Reduces s.stretch to a part of at most kMaxListed tokens in which the count (or the mass), from the row's first token
// on, reaches `need`. Overwrites the list.
template <bool changes>
CHARONIA_DEVICE void narrow(const Logits& row, const u64* best, int groups, bool by_count, u64 need, int& turn,
                            Shared& s) {
  const int tid = static_cast<int>(threadIdx.x);
  for (bool first = true;; first = false) {
    const Range range = s.stretch.range;
    if (first) {
      // Uses the actual range of the tokens, because bins and their ranges of codes have very different sizes.
      u64 minimum = kNoCode, inverted_most = kNoCode;
      for_range<changes>(row, best, groups, range, [&](float, u64 code) {
        minimum = min(minimum, code);
        inverted_most = min(inverted_most, ~code);
      });
      minimum = block_min(minimum, s.scratch);
      inverted_most = block_min(inverted_most, s.scratch);
      if (tid == 0) s.stretch.range = {minimum, ~inverted_most};
      __syncthreads();
      continue;
    }
    int shift = 0;
    while ((range.last - range.first) >> shift >= kSampleBins) ++shift;
    s.finer.low[tid] = s.finer.high[tid] = s.finer.count[tid] = 0;
    __syncthreads();
    for_range<changes>(row, best, groups, range, [&](float logit, u64 code) {
      const auto bin = static_cast<int>((code - range.first) >> shift);
      add_mass(&s.finer.low[bin], &s.finer.high[bin], mass_of(s.scale, logit));
      atomicAdd(&s.finer.count[bin], 1U);
    });
    __syncthreads();
    const u64 mass = static_cast<u64>(s.finer.high[tid]) << 32 | s.finer.low[tid];
    const unsigned count = s.finer.count[tid];
    const Sums sums = block_inclusive_sums({mass, count}, s);
    const u64 masses = s.stretch.before_mass + sums.mass, counts = s.stretch.before_count + sums.count;
    const int bin = block_find(by_count ? counts - count : masses - mass, by_count ? counts : masses, need, turn, s);
    if (tid == bin) {
      const u64 begin = range.first + (static_cast<u64>(bin) << shift);
      s.stretch = {{begin, min(range.last, begin + (1ULL << shift) - 1)}, masses - mass, counts - count};
    }
    const unsigned left = s.finer.count[bin];
    __syncthreads();
    if (left <= kMaxListed) return;
  }
}

// The first code in bin `bin` or a later one, by repeated division into the 33 parts that a warp can distinguish.
CHARONIA_DEVICE u64 first_code(const Scale& scale, int bin) {
  if (bin >= kSampleBins) return kNoCode;
  if (bin <= 0) return 0;
  u64 low = falling(scale.greatest), high = falling(-kInfinity);  // low is in an earlier bin, high is not
  while (high - low > 1) {
    const u64 span = high - low, at = low + span * static_cast<unsigned>(lane_id() + 1) / (kWarp + 1);
    const unsigned in = ballot(bin_of(scale, logit_of_falling(static_cast<unsigned>(at))) >= bin);
    // number of lanes whose codes are in an earlier bin
    const int before = in == 0 ? kWarp : __ffs(static_cast<int>(in)) - 1;
    high = before == kWarp ? high : low + span * static_cast<unsigned>(before + 1) / (kWarp + 1);
    low = low + span * static_cast<unsigned>(before) / (kWarp + 1);
  }
  return high << kSampleIdBits;
}

// The common operations of top_k, top_p, min_p and the draw. All threads of the block make the same calls.
template <bool changes>
class Draw {
 public:
  CHARONIA_DEVICE Draw(const SampleKernelParams& p, std::int64_t row, const SampleParams& params, float greatest,
                       Shared& s)
      : p_(p), params_(params), row_(row), s_(s) {
    const int tid = static_cast<int>(threadIdx.x);
    const auto at = row * kSampleBins + tid;
    s.bins[tid] = block_inclusive_sums({p.memory.masses[at], p.memory.counts[at]}, s);
    if (tid == 0) s.listed = 0, s.scale = scale_of(greatest, params.temperature);
    __syncthreads();
  }

  CHARONIA_DEVICE int run() {
    const auto top_k = static_cast<u64>(params_.top_k);
    const bool has_top_k = params_.top_k > 0 && top_k < s_.bins[kSampleBins - 1].count;
    const bool has_top_p = params_.top_p < 1, has_min_p = params_.min_p > 0;
    if (has_top_k || has_top_p || has_min_p) {
      int last = kSampleBins - 1;
      if (has_top_k) last = min(last, bin_by(true, top_k));
      if (has_top_p) last = min(last, bin_by(false, top_p_of(s_.bins[last].mass)));
      if (has_min_p) last = min(last, bin_of(s_.scale, min_logit(params_, s_.scale.greatest)));
      if (s_.bins[last].count <= kMaxListed) {
        take_bins(0, last);
        list();
      }
    }
    u64 mass = s_.bins[kSampleBins - 1].mass;  // mass of the remaining prefix
    for (int step = has_top_k ? 0 : has_top_p ? 1 : 2;; step = step == 0 && has_top_p ? 1 : 2) {
      u64 need = top_k;
      if (step == 1) need = top_p_of(mass);
      if (step == 2) {
        if (has_min_p) mass = min(mass, p_.memory.likely_mass[row_]);
        need = min(static_cast<u64>(params_.unit * static_cast<double>(mass)) + 1, mass);
      }
      const int at = find(step == 0, need);
      if (step == 2) return min(id_of(s_.list.codes[at]), p_.batch.vocab - 1);
      mass = s_.stretch.before_mass + s_.list.masses[at];
    }
  }

 private:
  // The smallest mass that is at least the share top_p of `mass`, and not zero.
  CHARONIA_DEVICE u64 top_p_of(u64 mass) const {
    const double minimum = ceil(static_cast<double>(params_.top_p) * static_cast<double>(mass));
    return min(max(static_cast<u64>(minimum), 1ULL), mass);
  }

  CHARONIA_DEVICE int bin_by(bool by_count, u64 need) {
    const int tid = static_cast<int>(threadIdx.x);
    const Sums up_to = s_.bins[tid], before = tid == 0 ? Sums{0, 0} : s_.bins[tid - 1];
    return block_find(by_count ? before.count : before.mass, by_count ? up_to.count : up_to.mass, need, turn_, s_);
  }

  // Sets the stretch to bins [first, last].
  CHARONIA_DEVICE void take_bins(int first, int last) {
    if (warp_id() < 2) {
      const u64 edge = first_code(s_.scale, warp_id() == 0 ? first : last + 1);
      if (lane_id() == 0) s_.edges[warp_id()] = edge;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      const Sums before = first == 0 ? Sums{0, 0} : s_.bins[first - 1];
      s_.stretch = {{s_.edges[0], last + 1 < kSampleBins ? s_.edges[1] - 1 : kNoCode}, before.mass, before.count};
    }
    __syncthreads();
  }

  // Lists the stretch, with masses.
  CHARONIA_DEVICE void list() {
    const int tid = static_cast<int>(threadIdx.x);
    list_range<changes>(logits_of<changes>(p_, row_, params_), best(), p_.groups, s_.stretch.range, s_);
    const u64 mass = tid < static_cast<int>(s_.listed) ? mass_of(s_.scale, logit_of(s_.list.codes[tid])) : 0;
    s_.list.masses[tid] = block_inclusive_sums({mass, 0}, s_).mass;
    __syncthreads();
  }

  CHARONIA_DEVICE bool listed(bool by_count, u64 need) const {
    if (s_.listed == 0) return false;
    const u64 before = by_count ? s_.stretch.before_count : s_.stretch.before_mass;
    return need > before && need - before <= (by_count ? s_.listed : s_.list.masses[kMaxListed - 1]);
  }

  // The index in the list of the first token where the count, or the mass, reaches `need`; need is >= 1 and at most the
  // total.
  CHARONIA_DEVICE int find(bool by_count, u64 need) {
    const int tid = static_cast<int>(threadIdx.x);
    if (!listed(by_count, need)) {
      const int bin = bin_by(by_count, need);  // after its barrier the list may be overwritten
      take_bins(bin, bin);
      if (s_.bins[bin].count - s_.stretch.before_count > kMaxListed) {
        narrow<changes>(logits_of<changes>(p_, row_, params_), best(), p_.groups, by_count, need, turn_, s_);
      }
      list();
    }
    const int last = static_cast<int>(s_.listed) - 1;
    if (by_count) return min(static_cast<int>(need - s_.stretch.before_count) - 1, last);
    const u64 before = tid == 0 ? 0 : s_.list.masses[tid - 1];
    return max(min(block_find(before, s_.list.masses[tid], need - s_.stretch.before_mass, turn_, s_), last), 0);
  }

  CHARONIA_DEVICE const u64* best() const { return p_.memory.best + row_ * p_.groups; }

  const SampleKernelParams& p_;
  const SampleParams& params_;
  std::int64_t row_;
  Shared& s_;
  int turn_ = 0;
};

// Computes the token's log probability and the most likely tokens, from the unmodified logits.
template <bool changes>
CHARONIA_DEVICE void log_probabilities(const SampleKernelParams& p, std::int64_t row, int token, int top,
                                       SampleResult& result, Shared& s) {
  const int tid = static_cast<int>(threadIdx.x);
  const Logits logits = original_logits(p, row);
  const u64* const best = (p.batch.plain ? p.memory.best : p.memory.original_best) + row * p.groups;
  const u64 mine = tid < p.groups ? best[tid] : kNoCode;
  const float greatest = logit_of(block_min(mine, s.scratch));
  float sum = 0;
  if (tid < p.groups) sum = p.memory.exp_sums[row * p.groups + tid] * expf(logit_of(mine) - greatest);
  sum = block_sum(sum, reinterpret_cast<float*>(s.scratch));
  const double log_sum = static_cast<double>(greatest) + log(static_cast<double>(sum));
  const auto logprob = [&](float logit) { return static_cast<float>(static_cast<double>(logit) - log_sum); };
  if (tid == 0) result.logprob = logprob(logits.logits[token]);

  const int n = min(min(top, ops::kMaxTopLogprobs), p.batch.vocab);
  if (tid == 0) result.num_top = n;
  if (n == 0) return;
  int turn = 0;
  // At least n tokens have codes up to the n-th smallest of the groups' smallest codes, so the n most likely are among
  // them.
  if (tid == 0) s.stretch = {{0, kNoCode}, 0, 0}, s.scale = scale_of(greatest, 1);
  if (n <= p.groups) {
    s.list.codes[tid] = mine;
    __syncthreads();
    sort_list(s, p.groups);
    if (tid == 0) s.stretch.range.last = s.list.codes[n - 1];
  }
  __syncthreads();
  for (;;) {
    list_range<changes>(logits, best, p.groups, {0, s.stretch.range.last}, s);
    if (s.listed <= kMaxListed) break;
    __syncthreads();
    narrow<changes>(logits, best, p.groups, true, static_cast<u64>(n), turn, s);
  }
  if (tid < n) {
    result.top_ids[tid] = id_of(s.list.codes[tid]);
    result.top_logprobs[tid] = logprob(logit_of(s.list.codes[tid]));
  }
}

template <bool changes>
CHARONIA_KERNEL(kFinishThreads, 1)
void finish_kernel(const SampleKernelParams p) {
  CHARONIA_SHARED(Shared, s, );
  dependency_trigger();
  dependency_wait();
  const auto row = static_cast<std::int64_t>(blockIdx.x);
  const SampleParams& params = p.batch.params[row];
  if (params.active == 0) return;
  const int tid = static_cast<int>(threadIdx.x);
  SampleResult& result = p.memory.results[row];
  if (warp_id() == 0) {
    u64 minimum = kNoCode;
    for (int group = lane_id(); group < p.groups; group += kWarp) {
      minimum = min(minimum, p.memory.best[row * p.groups + group]);
    }
    minimum = warp_min(minimum);
    if (lane_id() == 0) s.edges[0] = minimum;
  }
  __syncthreads();
  const u64 best = s.edges[0];
  const float greatest = logit_of(best);
  if (broken(best) || greatest == -kInfinity || params.target >= p.batch.vocab) {
    if (tid != 0) return;
    float at[4];
    load_logits<changes>(logits_of<changes>(p, row, params), id_of(best) / 4 * 4, at);
    result.status = broken(best) ? SampleStatus::broken : SampleStatus::nothing_left;
    result.bad_id = id_of(best);
    const int lane = id_of(best) % 4;
    result.bad_logit = lane == 0 ? at[0] : lane == 1 ? at[1] : lane == 2 ? at[2] : at[3];
    result.token = p.memory.sampled[row] = -1;
    return;
  }
  int token = params.target >= 0 ? params.target : id_of(best);
  if (params.temperature > 0) {
    token = Draw<changes>(p, row, params, greatest, s).run();
  }
  if (tid == 0) {
    result.token = p.memory.sampled[row] = token;
    result.status = SampleStatus::sampled;
    result.logprob = 0;
    result.num_top = 0;
    if (changes && params.slot >= 0) {
      auto& count = p.memory.table[params.slot * count_stride(p.batch.vocab) + token];
      if ((count & kMaxCounted) < kMaxCounted) ++count;
    }
  }
  if (params.logprobs < 0) return;
  for (int i = params.list_begin + tid; i < params.list_end; i += kFinishThreads) {
    const SampleEntry entry = p.batch.entries[i];
    p.batch.logits[row * p.batch.stride + entry.id] = entry.value;
  }
  __syncthreads();
  log_probabilities<changes>(p, row, token, params.logprobs, result, s);
}

// changes: the rows may have penalties and masks.
template <bool changes>
void run(Stream& stream, const SampleKernelParams& p, const Launch& scan, const Launch& histogram) {
  const Launch finish{.grid_x = static_cast<unsigned>(p.batch.rows), .threads = kFinishThreads};
  launch(stream, "sample: scan", scan, scan_kernel<changes>, p);
  launch(stream, "sample: histogram", histogram, histogram_kernel<changes>, p);
  launch(stream, "sample: finish", finish, finish_kernel<changes>, p);
}

// run() for both cases, in separate source files, so that they compile in parallel.
void run_plain(Stream& stream, const SampleKernelParams& p, const Launch& scan, const Launch& histogram);
void run_changed(Stream& stream, const SampleKernelParams& p, const Launch& scan, const Launch& histogram);
// Scans the unmodified logits, for the rows that request log probabilities.
void scan_originals(Stream& stream, SampleKernelParams p, const Launch& scan);

}  // namespace charonia::cuda::sampling
