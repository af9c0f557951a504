// Samples tokens from rows of logits: the input and output of the kernels. kernels/sample_kernels.h has the algorithm;
// sampler.h is the caller.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ops/cuda/device/runtime.h"
#include "ops/cuda/device/host_device.h"
#include "ops/step.h"

namespace charonia::cuda {

// One row, in the form of the upload.
struct SampleParams : RowSampling {
  std::int32_t logprobs = -1;
  double unit = 0;                            // the random number, [0, 1)
  std::int32_t slot = -1;                     // in the table of counts; -1: the row has no penalties
  std::int32_t list_begin = 0, list_end = 0;  // range in the entries
  std::int32_t active = 0;                    // 0: padding
  std::int32_t mask = -1;                     // row of SampleBatch::masks; -1: all tokens are allowed
  std::int32_t target = -1;                   // >= 0: the token to return, for a greedy row without other parameters
};
static_assert(std::is_trivially_copyable_v<SampleParams>);  // it is uploaded as raw bytes

// Added to the logit of `id` (-infinity: a ban). A row has an id at most once. While a row that returns log
// probabilities is sampled, `value` holds the original logit; such a row has its own entries, other rows may share
// entries.
struct SampleEntry {
  std::int32_t id = 0;
  float value = 0;
};

// A slot for a new sequence: the kernel clears it, writes counts[begin, end), then counts the ids of
// counts[more_begin, more_end), and the sample of row `pending` of the previous step (-1: none). So rows after proposals
// share the counts of their sequence.
struct SampleHistory {
  std::int32_t slot = 0, begin = 0, end = 0, more_begin = 0, more_end = 0, pending = -1;
};

// An element of the table of counts: kInPrompt, and how often the token was sampled (up to kMaxCounted).
struct SampleCount {
  std::int32_t id = 0;
  std::uint32_t value = 0;
};
inline constexpr std::uint32_t kInPrompt = 0x8000, kMaxCounted = 0x7fff;

enum class SampleStatus : std::int32_t { sampled, broken, nothing_left };

struct SampleResult {
  std::int32_t token = 0;  // -1: the row failed
  float logprob = 0;       // if the row requested it
  SampleStatus status = SampleStatus::sampled;
  std::int32_t bad_id = 0;  // broken: the first id with NaN or +infinity, and its logit
  float bad_logit = 0;
  std::int32_t num_top = 0;
  std::int32_t top_ids[ops::kMaxTopLogprobs] = {};
  float top_logprobs[ops::kMaxTopLogprobs] = {};
};

// Token ids have kSampleIdBits bits. A group is the number of logits that one warp processes at a time.
inline constexpr int kSampleIdBits = 18;
inline constexpr int kMaxSampledVocab = 1 << kSampleIdBits;
inline constexpr int kSampleGroup = 512;
inline constexpr int kSampleBins = 1024;
inline constexpr int kMaskBits = 32;  // per word

CHARONIA_HD constexpr int sample_groups(int vocab) { return static_cast<int>(divide_up(vocab, kSampleGroup)); }
CHARONIA_HD constexpr std::int64_t mask_words(int vocab) { return divide_up(vocab, kMaskBits); }
// Stride of the table of counts, in elements: rows are read 16 bytes at a time.
CHARONIA_HD constexpr std::int64_t count_stride(int vocab) { return round_up(vocab, 8); }

struct SampleBatch {
  float* logits = nullptr;  // [rows, vocab]
  std::int64_t stride = 0;
  int rows = 0, vocab = 0;               // vocab <= kMaxSampledVocab
  const SampleParams* params = nullptr;  // [rows]
  bool plain = true;                     // no row has a slot, entries or a mask
  bool any_logprobs = true;              // used only if not plain
  SampleEntry* entries = nullptr;
  std::int64_t num_entries = 0;
  const SampleHistory* histories = nullptr;
  std::int64_t num_histories = 0;
  const SampleCount* history_counts = nullptr;
  const std::uint32_t* masks = nullptr;  // [masked rows, mask_words(vocab)]: bit t % 32 of word t / 32 allows token t
};

// Device memory that is kept between steps. groups = sample_groups(vocab).
struct SampleMemory {
  unsigned long long* best = nullptr;           // [rows, groups] of the modified logits
  unsigned long long* original_best = nullptr;  // [rows, groups] of the unmodified logits
  float* exp_sums = nullptr;                    // [rows, groups] of e^(unmodified logit - the group's largest)
  unsigned long long* masses = nullptr;         // [rows, kSampleBins]
  unsigned* counts = nullptr;                   // [rows, kSampleBins]
  unsigned long long* likely_mass = nullptr;    // [rows] mass of the tokens that min_p keeps
  std::uint16_t* table = nullptr;               // [slots, count_stride(vocab)]
  std::int32_t* sampled = nullptr;              // [rows]
  SampleResult* results = nullptr;              // [rows]
};

void sample(Stream& stream, const SampleBatch& batch, const SampleMemory& memory);

}  // namespace charonia::cuda
