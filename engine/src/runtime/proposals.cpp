#include "runtime/proposals.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <span>

namespace charonia::runtime {
namespace {

constexpr double kMemory = 0.95;      // weight of earlier proposals when one is added
constexpr double kPriorWeight = 2;    // the assumed rates count as this number of proposals
constexpr std::array<double, kConfidences> kPriorRates = {0.3, 0.5, 0.6, 0.75, 0.85, 0.95, 0.75};
constexpr double kMaxRate = 0.98;
constexpr double kNewest = 0.2;       // weight of the newest time in a mean
constexpr double kMaxOutlier = 1.5;   // a time counts as at most this multiple of the mean
constexpr double kMinGain = 1.05;     // of tokens per second: smaller gains are noise
constexpr double kDraftGain = 1.1;    // of tokens per second by drafts, whose many short steps vary more
constexpr int kProbeInterval = 64;    // after this number of choices without a proposal, a few are tried again
constexpr double kMaxSearchSeconds = 0.005;  // before a step
constexpr double kSearchShare = 0.1;  // the same, of the time of a step
constexpr int kLeastProbe = 4;        // rows that a step may have beyond the measured ones, or a quarter of its decodes
constexpr int kPlainInterval = 64;    // after this number of steps that speculated, a plain step is measured again
constexpr int kFirstPlain = 4;        // the same, if there is no plain step with that number of decodes yet
constexpr int kMaxPlain = 32;         // steps for such a measurement, if those before had prefill
constexpr int kMaxUntimed = 2;        // choices with proposals whose steps were not measured, because they had prefill
constexpr int kForgetInterval = 1024;  // choices without drafts, after which their times and rates are too old
constexpr int kLeastDraftRows = 64;   // of a step of the draft model that computes missing tokens
constexpr int kTokensLeft = 128;      // more tokens are not expected to follow, even if they may

constexpr std::int64_t kMaxEntries = 512 << 10;  // of 8 bytes, for the sequences of a step with proposals

}  // namespace

int most_with_entries(std::int64_t of_sequence, std::int64_t of_row, int sequences) {
  const auto left = kMaxEntries / std::max(sequences, 1) - of_sequence;
  return static_cast<int>(left <= 0 ? 0 : left / std::max<std::int64_t>(of_row, 1));
}

double Acceptance::rate(int confidence) const {
  return rate(confidence, kPriorRates[static_cast<std::size_t>(confidence)]);
}

double Acceptance::rate(int confidence, double assumed) const {
  const auto& [tried, accepted] = counts_[static_cast<std::size_t>(confidence)];
  return std::min((accepted + kPriorWeight * assumed) / (tried + kPriorWeight), kMaxRate);
}

void Acceptance::add(int confidence, int proposed, int accepted) {
  auto& counts = counts_[static_cast<std::size_t>(confidence)];
  counts.tried = kMemory * counts.tried + std::min(accepted + 1, proposed);
  counts.accepted = kMemory * counts.accepted + accepted;
}

// Exact up to 16 rows, then eight slots for each doubling.
std::size_t RowTimes::slot_of(int rows) {
  const auto number = static_cast<unsigned>(std::max(rows, 1));
  if (number <= 16) return number - 1;
  const auto shift = static_cast<unsigned>(std::bit_width(number)) - 4;
  return std::min<std::size_t>(8 * shift + (number >> shift), kSlots - 1);
}

void RowTimes::add(int rows, double seconds) {
  if (seconds <= 0) return;
  const auto slot = slot_of(rows);
  auto& mean = means_[slot];
  if (mean.rows == 0) {
    mean = {static_cast<double>(rows), seconds};
  } else {
    mean.rows += kNewest * (rows - mean.rows);
    mean.seconds += kNewest * (std::min(seconds, kMaxOutlier * mean.seconds) - mean.seconds);
  }
  // Fewer rows take no longer. Otherwise a slow first step would make more rows look fast, and would not be corrected.
  for (auto& fewer : std::span(means_).first(slot)) fewer.seconds = std::min(fewer.seconds, mean.seconds);
}

RowTimes::Neighbours RowTimes::around(int rows) const {
  const auto measured = [](const Mean& mean) { return mean.rows > 0; };
  const auto slot = means_.begin() + static_cast<std::ptrdiff_t>(slot_of(rows));
  const auto below = std::find_if(std::make_reverse_iterator(slot + 1), means_.rend(), measured);
  const auto above = std::find_if(slot, means_.end(), measured);
  return {below == means_.rend() ? nullptr : &*below, above == means_.end() ? nullptr : &*above};
}

double RowTimes::at(int rows) const { return at(rows, around(rows)); }

double RowTimes::at(int rows, const Neighbours& near) {
  if (near.below != nullptr) return near.below->seconds;
  return near.above == nullptr ? 0 : near.above->seconds * std::min(rows / near.above->rows, 1.0);
}

double RowTimes::price(int rows) const {
  const auto near = around(rows);
  const auto [below, above] = near;
  if (below == nullptr || above == nullptr || below->seconds >= above->seconds) return at(rows, near);
  const auto share = std::clamp((rows - below->rows) / (above->rows - below->rows), 0.0, 1.0);
  return below->seconds + share * (above->seconds - below->seconds);
}

int RowTimes::within(double seconds, int least, int most) const {
  while (2 * least <= most && at(2 * least) <= seconds) least *= 2;
  return least;
}

int RowTimes::most() const {
  const auto last = std::find_if(means_.rbegin(), means_.rend(), [](const Mean& mean) { return mean.rows > 0; });
  return last == means_.rend() ? 0 : static_cast<int>(last->rows);
}

void SpeculationPolicy::measured(int decodes, double seconds) {
  times_.add(decodes, seconds);
  plain_ = speculated_ = 0;
}

void SpeculationPolicy::speculated(int rows, double seconds) {
  speculated_times_.add(rows, seconds);
  ++speculated_;
  untimed_ = 0;
}

double SpeculationPolicy::assumed_rate(int confidence) const {
  return (kPriorRates[static_cast<std::size_t>(confidence)] + acceptance_.rate(confidence)) / 2;
}

// The estimated time of a step with proposals: not less than without them.
double SpeculationPolicy::seconds(int decodes, int proposals) const {
  const int rows = decodes + proposals;
  const double alone = times_.at(decodes);
  double with = std::max(speculated_times_.at(rows), alone);
  if (speculated_times_.measured(rows)) return with;
  with = std::max(with, times_.at(rows));
  // An estimate that no measurement corrects must not be too low.
  return untimed_ < kMaxUntimed || times_.measured(rows) ? with : std::max(with, alone * rows / decodes);
}

double SpeculationPolicy::search_s(int decodes) const {
  const double alone = times_.at(decodes);
  return alone > 0 ? std::min(kSearchShare * alone, kMaxSearchSeconds) : kMaxSearchSeconds;
}

bool SpeculationPolicy::needs_plain(int decodes) {
  if (choose_all_ || speculated_ < (times_.measured(decodes) ? kPlainInterval : kFirstPlain)) return false;
  if (++plain_ <= kMaxPlain) return true;
  plain_ = speculated_ = 0;
  return false;
}

double SpeculationPolicy::begin_s(int missing, int tokens_left) const {
  if (missing <= kLeastDraftRows) return 0;
  return draft_times_.price(kLeastDraftRows) * missing / kLeastDraftRows / std::clamp(tokens_left, 1, kTokensLeft);
}

int SpeculationPolicy::draft_rows(int decodes) const {
  return draft_times_.within(times_.at(decodes), kLeastDraftRows, kMostDraftRows);
}

SpeculationPolicy::Choice SpeculationPolicy::best_of(int decodes, std::span<Candidate> candidates,
                                                     double wait_s) const {
  struct Token {
    double gain;  // probability that it is accepted
    Candidate* of;
    std::size_t index;  // among the tokens of its candidate
  };
  Choice out;
  if (const double alone = times_.at(decodes); alone > 0) out.rate = kMinGain * decodes / alone;
  std::vector<Token> tokens;
  for (auto& candidate : candidates) {
    candidate.chosen = 0;
    const auto first = tokens.size();
    double gain = 1, all = 0;
    for (int i = 0; i < candidate.size; ++i) {
      tokens.push_back({gain *= candidate.rate, &candidate, static_cast<std::size_t>(i)});
      all += gain;
    }
    // Plain steps give more tokens in that time. If it were kept, all tokens with a smaller gain would pay for it too.
    if (candidate.begin_s > 0 && all <= out.rate * candidate.begin_s) tokens.resize(first);
  }
  // The gains of one candidate descend, so its tokens stay in order.
  std::ranges::stable_sort(tokens, std::greater{}, &Token::gain);
  auto most = std::min(std::max(max_rows_ - decodes, 0) / 2, max_proposals_);
  if (!choose_all_) {  // an unmeasured number of rows may take much longer than the nearest measured one
    const int known = std::max({speculated_times_.most(), times_.most(), decodes});
    most = std::min(most, known - decodes + std::max(decodes / 4, kLeastProbe));
  }
  if (std::ssize(tokens) > most) tokens.erase(tokens.begin() + most, tokens.end());
  double expected = decodes, draft_s = 0;
  std::vector<int> draft_rows;  // of each step of the draft model
  for (const auto& token : tokens) {
    out.tokens.push_back(token.of);
    expected += token.gain;
    if (token.of->drafted) {
      if (token.index >= draft_rows.size()) draft_rows.push_back(0);
      auto& rows = draft_rows[token.index];
      if (rows > 0) draft_s -= draft_times_.at(rows);
      draft_s += draft_times_.at(++rows) + (token.index == 0 ? token.of->begin_s : 0);
    }
    const double step_s = seconds(decodes, static_cast<int>(out.tokens.size()));
    const double rate = step_s > 0 ? expected / (step_s + wait_s + draft_s) : expected;
    if (rate <= out.rate) continue;
    out.rate = rate;
    out.best = out.tokens.size();
  }
  if (choose_all_) out.best = out.tokens.size();
  return out;
}

bool SpeculationPolicy::probes() {
  if (++skipped_ < kProbeInterval) return false;
  skipped_ = 0;
  return true;
}

bool SpeculationPolicy::prefers_drafts(const Choice& of_known, const Choice& of_drafts) {
  return of_drafts.best > 0 && (choose_all_ || of_drafts.rate > kDraftGain * of_known.rate);
}

// Drafts of a long time ago say nothing about the next ones.
void SpeculationPolicy::count_undrafted(std::span<const Candidate> with_drafts) {
  if (std::ranges::none_of(with_drafts, &Candidate::drafted) || ++undrafted_ < kForgetInterval) return;
  undrafted_ = 0;
  draft_times_ = {};
  acceptance_.forget(kDrafted);
}

bool SpeculationPolicy::would_choose(int decodes, std::span<Candidate> known, std::span<Candidate> with_drafts) {
  if (needs_plain(decodes)) return false;
  // The step after the proposals waits for samples too.
  const double wait_s = std::max(speculated_times_.at(decodes) - times_.at(decodes), 0.0);
  const auto of_known = best_of(decodes, known, wait_s);
  if (of_known.best > 0) return true;
  const bool drafted = std::ranges::any_of(with_drafts, &Candidate::drafted);
  if (drafted && prefers_drafts(of_known, best_of(decodes, with_drafts, wait_s))) return true;
  const auto has_tokens = [](const Candidate& one) { return one.size > 0; };
  const bool any = std::ranges::any_of(known, has_tokens) || std::ranges::any_of(with_drafts, has_tokens);
  if (any && ++skipped_ + 1 >= kProbeInterval) return true;
  count_undrafted(with_drafts);
  return false;
}

void SpeculationPolicy::choose(int decodes, std::span<Candidate> candidates) { choose(decodes, candidates, {}); }

bool SpeculationPolicy::choose(int decodes, std::span<Candidate> known, std::span<Candidate> with_drafts) {
  auto of_known = best_of(decodes, known);
  const bool any_drafted = std::ranges::any_of(with_drafts, &Candidate::drafted);
  auto of_drafts = any_drafted ? best_of(decodes, with_drafts) : Choice{};
  const auto is_empty = [](const Candidate& one) { return one.size == 0; };
  if (std::ranges::all_of(known, is_empty) && std::ranges::all_of(with_drafts, is_empty)) return false;
  if (needs_plain(decodes)) {
    for (auto* const candidates : {&known, &with_drafts}) {
      for (auto& one : *candidates) one.chosen = 0;
    }
    return false;
  }
  bool drafts = prefers_drafts(of_known, of_drafts);
  const auto take = [](const Choice& choice) {
    for (auto* const candidate : std::span(choice.tokens).first(choice.best)) ++candidate->chosen;
  };
  if (drafts) {
    take(of_drafts);
    for (std::size_t i = 0; i < known.size(); ++i) {
      if (with_drafts[i].drafted && with_drafts[i].chosen == 0) with_drafts[i] = known[i];
    }
    of_drafts = best_of(decodes, with_drafts);
  }
  if (drafts || of_known.best > 0) {
    skipped_ = 0;
  } else if (probes()) {
    // In turn, if both are possible. A probe is too short to begin with a long prompt.
    std::erase_if(of_drafts.tokens, [](const Candidate* one) { return one->begin_s > 0; });
    probe_drafts_ = !probe_drafts_;
    drafts = !of_drafts.tokens.empty() && (probe_drafts_ || of_known.tokens.empty());
    auto& probe = drafts ? of_drafts : of_known;
    probe.best = std::min(probe.tokens.size(), static_cast<std::size_t>(std::max(decodes / 4, kLeastProbe)));
  }
  take(drafts ? of_drafts : of_known);
  if ((drafts ? of_drafts : of_known).best > 0) ++untimed_;
  if (drafts) {
    undrafted_ = 0;
  } else {
    count_undrafted(with_drafts);
  }
  return drafts;
}

}  // namespace charonia::runtime
