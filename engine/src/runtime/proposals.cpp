#include "runtime/proposals.h"

#include <algorithm>
#include <bit>
#include <span>

namespace charonia::runtime {
namespace {

constexpr double kMemory = 0.95;      // weight of earlier proposals when one is added
constexpr double kPriorWeight = 2;    // the assumed rates count as this number of proposals
constexpr std::array<double, kConfidences> kPriorRates = {0.3, 0.5, 0.6, 0.75, 0.85, 0.95, 0.75};
constexpr double kMaxRate = 0.98;
constexpr double kNewest = 0.2;       // weight of the newest time in a mean
constexpr double kMaxOutlier = 1.5;   // a time counts as at most this multiple of the mean
constexpr double kMinGain = 1.02;     // of tokens per second: smaller gains are noise
constexpr double kDraftGain = 1.1;    // of tokens per second by drafts, whose many short steps vary more
constexpr int kProbeInterval = 64;    // after this number of choices without a proposal, a few are tried again
constexpr int kForgetInterval = 1024;  // choices without drafts, after which their times and rates are too old
constexpr int kLeastDraftRows = 64;   // of a step of the draft model that computes missing tokens
constexpr int kTokensLeft = 128;      // more tokens are not expected to follow, even if they may

}  // namespace

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

double SpeculationPolicy::draft_rate() const { return (kPriorRates[kDrafted] + drafts_.rate(kDrafted)) / 2; }

double SpeculationPolicy::begin_s(int missing, int tokens_left) const {
  if (missing <= kLeastDraftRows) return 0;
  return draft_times_.price(kLeastDraftRows) * missing / kLeastDraftRows / std::clamp(tokens_left, 1, kTokensLeft);
}

int SpeculationPolicy::draft_rows(int decodes) const {
  return draft_times_.within(times_.at(decodes), kLeastDraftRows, kMostDraftRows);
}

SpeculationPolicy::Choice SpeculationPolicy::best_of(int decodes, std::span<Candidate> candidates) const {
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
  const auto most = static_cast<std::size_t>(std::min(std::max(max_rows_ - decodes, 0) / 2, max_proposals_));
  tokens.erase(tokens.begin() + static_cast<std::ptrdiff_t>(std::min(most, tokens.size())), tokens.end());
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
    const double seconds = times_.at(decodes + static_cast<int>(out.tokens.size()));
    const double rate = seconds > 0 ? expected / (seconds + draft_s) : expected;
    if (rate <= out.rate) continue;
    out.rate = rate;
    out.best = out.tokens.size();
  }
  return out;
}

bool SpeculationPolicy::probes() {
  if (++skipped_ < kProbeInterval) return false;
  skipped_ = 0;
  return true;
}

bool SpeculationPolicy::would_choose(int decodes, std::span<Candidate> known) {
  if (best_of(decodes, known).best > 0) return true;
  const bool any = std::ranges::any_of(known, [](const Candidate& one) { return one.size > 0; });
  return any && ++skipped_ + 1 >= kProbeInterval;
}

void SpeculationPolicy::choose(int decodes, std::span<Candidate> candidates) { choose(decodes, candidates, {}); }

bool SpeculationPolicy::choose(int decodes, std::span<Candidate> known, std::span<Candidate> with_drafts) {
  auto of_known = best_of(decodes, known), of_drafts = best_of(decodes, with_drafts);
  const auto is_empty = [](const Candidate& one) { return one.size == 0; };
  if (std::ranges::all_of(known, is_empty) && std::ranges::all_of(with_drafts, is_empty)) return false;
  bool drafts = of_drafts.best > 0 && of_drafts.rate > kDraftGain * of_known.rate;
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
    probe.best = std::min(probe.tokens.size(), static_cast<std::size_t>(std::max(decodes / 2, 4)));
  }
  take(drafts ? of_drafts : of_known);
  if (drafts) {
    undrafted_ = 0;
  } else if (std::ranges::any_of(with_drafts, &Candidate::drafted) && ++undrafted_ == kForgetInterval) {
    undrafted_ = 0;
    draft_times_ = {};
    drafts_ = {};
  }
  return drafts;
}

}  // namespace charonia::runtime
