#include "ops/cuda/sampling/sampler.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <tuple>
#include <unordered_map>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/broken_logits.h"
#include "ops/cpu/sample.h"
#include "ops/cuda/kernels/sample.h"
#include "ops/generated/penalties.h"

namespace charonia::cuda {
namespace {

constexpr std::int64_t kUploadAlignment = 16;

// The sequence of a row of the table of counts.
struct Slot {
  bool taken = false;
  std::uint64_t sequence = 0;
  std::int64_t counted = -1;    // number of counted tokens after all packed steps are launched
  std::uint64_t last_used = 0;  // step
};

// The range of the entries of a bias and ban list.
struct SharedList {
  std::span<const std::pair<std::int32_t, float>> bias;
  std::span<const std::int32_t> banned;
  std::int32_t begin = 0, end = 0;

  bool is_of(const ops::SampleRow& row) const {
    return bias.data() == row.bias.data() && bias.size() == row.bias.size() && banned.data() == row.banned.data() &&
           banned.size() == row.banned.size();
  }
};

template <class T>
DeviceMemory elements(std::int64_t n, std::string_view what) {
  return DeviceMemory(static_cast<std::size_t>(n) * sizeof(T), what);
}

// Copies the elements of `from` to byte offset `at` of `to`.
template <class T>
void put(std::byte* to, std::size_t at, const std::vector<T>& from) {
  if (!from.empty()) std::memcpy(to + at, from.data(), from.size() * sizeof(T));
}

}  // namespace

struct Sampler::Impl {
  Impl(int vocab_size, int rows)
      : vocab(vocab_size),
        max_rows(rows),
        best(elements<unsigned long long>(2 * rows * groups(), "maxima of logits")),
        exp_sums(elements<float>(rows * groups(), "sums of logits")),
        masses(elements<unsigned long long>(std::int64_t{rows} * (kSampleBins + 1), "histograms of logits")),
        counts(elements<unsigned>(std::int64_t{rows} * kSampleBins, "histograms of logits")),
        table(elements<std::uint16_t>(rows * count_stride(vocab_size), "counts of tokens for penalties")),
        sampled(elements<std::int32_t>(rows, "sampled tokens")),
        results(elements<SampleResult>(rows, "results of sampling")),
        masks(elements<std::uint32_t>(rows * mask_words(vocab_size), "token masks")),
        host_masks(masks.bytes()),
        slots(static_cast<std::size_t>(rows)),
        seen(static_cast<std::size_t>(vocab_size), 0) {}

  std::int64_t groups() const { return sample_groups(vocab); }

  SampleMemory memory() const {
    const auto of_rows = max_rows * groups();
    return {.best = best.as<unsigned long long>(),
            .original_best = best.as<unsigned long long>() + of_rows,
            .exp_sums = exp_sums.as<float>(),
            .masses = masses.as<unsigned long long>(),
            .counts = counts.as<unsigned>(),
            .likely_mass = masses.as<unsigned long long>() + std::int64_t{max_rows} * kSampleBins,
            .table = table.as<std::uint16_t>(),
            .sampled = sampled.as<std::int32_t>(),
            .results = results.as<SampleResult>()};
  }

  std::int32_t checked(std::int32_t id) const {
    if (id < 0 || id >= vocab) {
      throw Error(ErrorCode::internal, cat("token id ", id, " to sample with is not in [0, ", vocab, ")"));
    }
    return id;
  }

  void list(const ops::SampleRow& row, SampleParams& params);
  void append(const ops::SampleRow& row);
  std::int32_t free_slot();
  std::int32_t slot_of(const ops::SampleRow& row, bool is_first);
  void add_history(const ops::SampleRow& row, std::int32_t slot);

  int vocab, max_rows;
  DeviceMemory best, exp_sums, masses, counts, table, sampled, results, masks;
  PinnedMemory host_masks;
  Event masks_copied;

  std::vector<Slot> slots;
  std::unordered_map<std::uint64_t, std::int32_t> slot_of_sequence;
  std::uint64_t step = 0;

  // For the step that is being packed.
  std::vector<SampleParams> params;
  std::vector<SampleEntry> entries;
  std::vector<SharedList> shared;
  std::vector<SampleHistory> histories;
  std::vector<SampleCount> history_counts;
  const ops::SampleRow* counted = nullptr;  // the row whose counts later rows of its sequence share
  SampleHistory counts_of_counted;

  std::vector<std::uint16_t> seen;  // [vocab] scratch; zero between uses
};

// Sets the row's entries. Rows with the same lists, such as rows of one request, share entries, unless they return log
// probabilities (see SampleEntry).
void Sampler::Impl::list(const ops::SampleRow& row, SampleParams& params) {
  params.list_begin = params.list_end = static_cast<std::int32_t>(entries.size());
  if (row.bias.empty() && row.banned.empty()) return;
  const bool shares = row.logprobs < 0;
  const auto same = [&](const SharedList& one) { return one.is_of(row); };
  const auto found = shares ? std::ranges::find_if(shared, same) : shared.end();
  if (found != shared.end()) {
    params.list_begin = found->begin;
    params.list_end = found->end;
    return;
  }
  append(row);
  params.list_end = static_cast<std::int32_t>(entries.size());
  if (shares) shared.push_back({row.bias, row.banned, params.list_begin, params.list_end});
}

// Appends the row's bias and bans to the entries, each token once.
void Sampler::Impl::append(const ops::SampleRow& row) {
  const auto begin = entries.size();
  for (const auto& [id, bias] : row.bias) entries.push_back({checked(id), bias});
  for (const auto id : row.banned) entries.push_back({checked(id), -std::numeric_limits<float>::infinity()});
  const auto first = entries.begin() + static_cast<std::ptrdiff_t>(begin);
  const auto banned = first + std::ssize(row.bias);
  std::inplace_merge(first, banned, entries.end(),
                     [](const SampleEntry& a, const SampleEntry& b) { return a.id < b.id; });
  auto end = first;
  for (auto entry = first; entry != entries.end(); ++entry) {
    if (end != first && end[-1].id == entry->id) {
      end[-1].value += entry->value;
    } else {
      *end++ = *entry;
    }
  }
  entries.erase(end, entries.end());
}

// Returns a slot that is not used in this step: one without a sequence, or else the one that was used longest ago.
std::int32_t Sampler::Impl::free_slot() {
  const auto oldest = std::ranges::min_element(
      slots, {}, [&](const Slot& slot) { return std::tuple(slot.last_used == step, slot.taken, slot.last_used); });
  if (oldest->taken) slot_of_sequence.erase(oldest->sequence);
  *oldest = {};
  return static_cast<std::int32_t>(oldest - slots.begin());
}

// Returns the slot of the row. The slot then has the counts of the row's sampled tokens, and will count one more.
// is_first: of its sequence in the step. Only this row uses the slot that the sequence keeps.
std::int32_t Sampler::Impl::slot_of(const ops::SampleRow& row, bool is_first) {
  const auto sampled_tokens = static_cast<std::int64_t>(row.output.size()) + (row.pending >= 0 ? 1 : 0);
  const auto found = is_first ? slot_of_sequence.find(row.sequence) : slot_of_sequence.end();
  const auto at = found == slot_of_sequence.end() ? free_slot() : found->second;
  auto& slot = slots[static_cast<std::size_t>(at)];
  if (is_first && !slot.taken) {
    slot = {.taken = true, .sequence = row.sequence};
    slot_of_sequence.emplace(row.sequence, at);
  }
  if (slot.counted != sampled_tokens) add_history(row, at);
  slot.counted = sampled_tokens + 1;
  slot.last_used = step;
  return at;
}

void Sampler::Impl::add_history(const ops::SampleRow& row, std::int32_t slot) {
  const auto begin = history_counts.size();
  if (counted != nullptr && counted->sequence == row.sequence && counted->pending < 0) {
    for (const auto id : row.output.subspan(counted->output.size())) history_counts.push_back({.id = checked(id)});
    auto& history = histories.emplace_back(counts_of_counted);
    history.slot = slot;
    history.more_begin = static_cast<std::int32_t>(begin);
    history.more_end = static_cast<std::int32_t>(history_counts.size());
    return;
  }
  for (const auto tokens : {row.prompt, row.output})
    std::for_each(tokens.begin(), tokens.end(), [&](auto id) { checked(id); });
  const auto note = [&](std::int32_t id, bool in_prompt) {
    auto& count = seen[static_cast<std::size_t>(id)];
    if (count == 0) history_counts.push_back({.id = id});
    if (in_prompt) {
      count |= kInPrompt;
    } else if ((count & kMaxCounted) < kMaxCounted) {
      ++count;
    }
  };
  for (const auto id : row.prompt) note(id, true);
  for (const auto id : row.output) note(id, false);
  for (auto i = begin; i < history_counts.size(); ++i) {
    auto& count = seen[static_cast<std::size_t>(history_counts[i].id)];
    history_counts[i].value = count;
    count = 0;
  }
  histories.push_back({.slot = slot,
                       .begin = static_cast<std::int32_t>(begin),
                       .end = static_cast<std::int32_t>(history_counts.size()),
                       .pending = row.pending});
  counted = &row;
  counts_of_counted = histories.back();
}

Sampler::Sampler(int vocab, int max_rows) {
  if (vocab < 1 || vocab > kMaxSampledVocab) {
    throw Error(ErrorCode::unsupported,
                cat("a vocabulary of ", vocab, " tokens; on CUDA it may have 1 to ", kMaxSampledVocab));
  }
  impl_ = std::make_unique<Impl>(vocab, max_rows);
}

Sampler::~Sampler() = default;

SamplePacked Sampler::pack(std::span<const ops::SampleRow> rows, std::int64_t padded, std::vector<std::byte>& to,
                           SampleNotes& notes) {
  auto& own = *impl_;
  if (padded < static_cast<std::int64_t>(rows.size()) || padded > own.max_rows) {
    throw Error(ErrorCode::internal,
                cat(rows.size(), " rows to sample, padded to ", padded, ", with room for ", own.max_rows));
  }
  ++own.step;
  own.params.assign(static_cast<std::size_t>(padded), {});
  own.entries.clear();
  own.shared.clear();
  own.histories.clear();
  own.history_counts.clear();
  own.counted = nullptr;
  notes.take(rows, own.vocab);
  SamplePacked packed{.rows = padded, .masks = notes.masks()};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto& row = rows[i];
    auto& params = own.params[i];
    params = {};
    packed.any_logprobs = packed.any_logprobs || row.logprobs >= 0;
    if (row.target >= 0) {  // parameters that change the logits do not apply to a row with a target
      params.temperature = 0;
      params.logprobs = row.logprobs;
      params.active = 1;
      params.target = row.target;
      continue;
    }
    static_cast<RowSampling&>(params) = row;
    params.unit = ops::cpu::random_unit(row.seed, row.position);
    params.logprobs = row.logprobs;
    params.active = 1;
    params.mask = notes.mask_of(i);
    own.list(row, params);
    if (has_penalties(row)) params.slot = own.slot_of(row, i == 0 || rows[i - 1].sequence != row.sequence);
    packed.plain = packed.plain && params.slot < 0 && params.mask < 0 && params.list_begin == params.list_end;
  }
  packed.list_entries = static_cast<std::int64_t>(own.entries.size());
  packed.histories = static_cast<std::int64_t>(own.histories.size());

  const auto place = [&](std::size_t bytes) {
    const auto at = packed.bytes;
    packed.bytes = static_cast<std::size_t>(round_up(static_cast<std::int64_t>(at + bytes), kUploadAlignment));
    return at;
  };
  place(own.params.size() * sizeof(SampleParams));
  if (!packed.plain) {
    packed.entries_at = place(own.entries.size() * sizeof(SampleEntry));
    packed.histories_at = place(own.histories.size() * sizeof(SampleHistory));
    packed.counts_at = place(own.history_counts.size() * sizeof(SampleCount));
  }
  packed.begin = static_cast<std::size_t>(round_up(static_cast<std::int64_t>(to.size()), kUploadAlignment));
  to.resize(packed.begin + packed.bytes);
  auto* const at = to.data() + packed.begin;
  put(at, 0, own.params);
  if (!packed.plain) {
    put(at, packed.entries_at, own.entries);
    put(at, packed.histories_at, own.histories);
    put(at, packed.counts_at, own.history_counts);
  }
  return packed;
}

void Sampler::launch(Stream& stream, const ops::Tensor& logits, const SamplePacked& packed, void* uploaded,
                     SampleNotes& notes) {
  if (logits.dtype != DType::f32 || logits.cols != impl_->vocab || logits.rows < packed.rows) {
    throw Error(ErrorCode::internal, cat("logits [", logits.rows, ", ", logits.cols, "] of ", to_string(logits.dtype),
                                         " to sample ", packed.rows, " rows of ", impl_->vocab, " fp32 from"));
  }
  if (packed.masks > 0) {
    auto& own = *impl_;
    own.masks_copied.wait("upload of the token masks before");
    notes.wait(reinterpret_cast<std::uint32_t*>(own.host_masks.data()));
    const auto bytes = static_cast<std::size_t>(packed.masks * mask_words(own.vocab)) * sizeof(std::uint32_t);
    stream.upload(own.masks.data(), own.host_masks.data(), bytes, "upload of token masks");
    own.masks_copied.record(stream);
  }
  auto* const at = static_cast<std::byte*>(uploaded);
  sample(stream,
         {.logits = static_cast<float*>(logits.data),
          .stride = logits.stride,
          .rows = static_cast<int>(packed.rows),
          .vocab = impl_->vocab,
          .params = reinterpret_cast<const SampleParams*>(at),
          .plain = packed.plain,
          .any_logprobs = packed.any_logprobs,
          .entries = reinterpret_cast<SampleEntry*>(at + packed.entries_at),
          .num_entries = packed.list_entries,
          .histories = reinterpret_cast<const SampleHistory*>(at + packed.histories_at),
          .num_histories = packed.histories,
          .history_counts = reinterpret_cast<const SampleCount*>(at + packed.counts_at),
          .masks = impl_->masks.as<std::uint32_t>()},
         impl_->memory());
}

const std::int32_t* Sampler::sampled() const { return impl_->sampled.as<std::int32_t>(); }
const void* Sampler::results() const { return impl_->results.data(); }

std::size_t Sampler::result_bytes(const SamplePacked& packed) const {
  return static_cast<std::size_t>(packed.rows) * sizeof(SampleResult);
}

std::vector<ops::Sampled> Sampler::parse(const void* downloaded, std::int64_t rows, const SampleNotes& notes) const {
  const auto* const results = static_cast<const SampleResult*>(downloaded);
  std::vector<ops::Sampled> out(static_cast<std::size_t>(rows));
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto& result = results[i];
    auto& sampled = out[i];
    switch (result.status) {
      case SampleStatus::sampled:
        break;
      case SampleStatus::broken:
        sampled.error = ops::broken_logit(result.bad_id, result.bad_logit);
        continue;
      case SampleStatus::nothing_left:
        sampled.error = notes.why_no_token(i);
        continue;
    }
    sampled.token = result.token;
    sampled.logprob = result.logprob;
    for (int n = 0; n < result.num_top; ++n) sampled.top.emplace_back(result.top_ids[n], result.top_logprobs[n]);
  }
  return out;
}

}  // namespace charonia::cuda
