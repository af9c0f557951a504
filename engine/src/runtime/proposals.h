// Speculation: sources of proposals, and the number of proposals that a step computes.
//
// The engine proposes tokens that may follow a sequence. The model computes them in one step, samples the token after
// each of them, and accepts a proposal if it equals the sampled token (schedule/proposals.cpp). So speculation changes
// no token. It saves time if a step with several rows takes little longer than a step with one row, and if enough
// proposals are accepted. Both are measured here.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "charonia/types.h"

namespace charonia::runtime {

struct Proposal {
  std::vector<TokenId> tokens;  // that may follow the last token of the sequence
  int confidence = 0;           // in [0, kConfidences); their acceptance is measured for each value
};
inline constexpr int kConfidences = 7;
inline constexpr int kCertain = 5;  // the confidence of tokens that a grammar requires
inline constexpr int kDrafted = 6;  // of a draft model (draft_model.h)
// The value of the label `source` in metrics: 0: n-grams; 1: a grammar; 2: a draft model, MTP layer or EAGLE-3 head.
constexpr int source_of(int confidence) { return confidence == kCertain ? 1 : confidence == kDrafted ? 2 : 0; }
inline constexpr int kMostDraftRows = 256;  // of a step of the draft model

// The most proposals of a sequence, if a GPU receives this number of entries for the sequence (counts of tokens for
// penalties), and for each of its rows (lists). All sequences of a step share a quarter of the memory that is reserved for
// them.
int most_with_entries(std::int64_t of_sequence, std::int64_t of_row, int sequences);

// A source of proposals for one sequence.
class ProposalSource {
 public:
  virtual ~ProposalSource() = default;
  // tokens: the prompt and the output so far, without placeholders. They begin with the tokens of the previous call.
  // Returns at most max_tokens tokens, or none. max_read: of the tokens that it has not read yet, so that a long prompt
  // delays no step.
  virtual Proposal propose(std::span<const TokenId> tokens, int max_tokens, int max_read) = 0;
};

// The share of a sequence's proposals that were accepted, of those whose predecessors were accepted too.
class Acceptance {
 public:
  double rate(int confidence) const;
  double rate(int confidence, double assumed) const;  // assumed: without proposals so far
  void add(int confidence, int proposed, int accepted);
  void forget(int confidence) { counts_[static_cast<std::size_t>(confidence)] = {}; }

 private:
  struct Counts {
    double tried = 0, accepted = 0;  // older proposals count less
  };
  std::array<Counts, kConfidences> counts_{};
};

// The mean time of steps that only decode, by the number of their rows.
class RowTimes {
 public:
  void add(int rows, double seconds);
  // The estimated time of a step. If this number of rows is not measured: the time of the next lower measured one, so that
  // the most that is possible is tried. Proportional to the rows below the lowest one; 0 if nothing is measured.
  double at(int rows) const;
  // The same, but linear between two measured numbers of rows: a price of rows that are not tried.
  double price(int rows) const;
  bool measured(int rows) const { return means_[slot_of(rows)].rows > 0; }
  int most() const;  // the largest measured number of rows; 0: none
  // The largest number of rows, of `least`, 2 * least ... up to `most`, whose step takes at most this time; or `least`.
  int within(double seconds, int least, int most) const;

 private:
  static constexpr std::size_t kSlots = 96;
  struct Mean {
    double rows = 0, seconds = 0;
  };
  // The nearest measured numbers of rows in the slots up to a slot, and from it on. Null: there is none.
  struct Neighbours {
    const Mean* below;
    const Mean* above;
  };
  static std::size_t slot_of(int rows);
  static double at(int rows, const Neighbours& near);
  Neighbours around(int rows) const;
  std::array<Mean, kSlots> means_{};
};

class SpeculationPolicy {
 public:
  // max_rows: of a step. Half of those that its decodes leave are for proposals (schedule/proposals.cpp), at most
  // max_proposals.
  explicit SpeculationPolicy(int max_rows = std::numeric_limits<int>::max(),
                             int max_proposals = std::numeric_limits<int>::max())
      : max_rows_(max_rows), max_proposals_(max_proposals) {}

  // Whether all policies choose all proposals, at any cost, so that tests do not depend on times.
  static void choose_all_for_tests(bool all) { choose_all_ = all; }

  struct Candidate {
    int size = 0;     // number of proposed tokens
    double rate = 0;  // probability that one of them is accepted, if its predecessors are
    int chosen = 0;   // out: how many of them the step should compute
    // The tokens are not known yet: the draft model computes them, the first ones of all sequences in one step, then
    // the second ones, and so on.
    bool drafted = false;
    double begin_s = 0;  // begin_s() of the sequence
  };

  // Chooses the numbers of proposals that give the most tokens per second. decodes: sequences of the step.
  void choose(int decodes, std::span<Candidate> candidates);
  // Also considers other candidates of the same sequences, in the same order, and some of them may be drafted. Returns
  // whether these are chosen instead of `known`. One whose drafts cost too much is then replaced by the known one.
  bool choose(int decodes, std::span<Candidate> known, std::span<Candidate> with_drafts);
  // Returns whether choose() is likely to choose some of these, before the last tokens are known. If not, this counts as
  // a choice without proposals.
  bool would_choose(int decodes, std::span<Candidate> known, std::span<Candidate> with_drafts);
  // A step without prefill has been computed. seconds: the time since the previous step, with the host's work.
  void measured(int decodes, double seconds);
  // The same, for a step with proposals, or one that waited for samples only because of speculation. rows: its decodes
  // and proposals.
  void speculated(int rows, double seconds);

  // The CPU time before a step in which its token masks may look for proposals, while nothing else runs.
  double search_s(int decodes) const;

  // A step of the draft model has been computed.
  void drafted(int rows, double seconds) { draft_times_.add(rows, seconds); }
  void accepted(int confidence, int proposed, int accepted) { acceptance_.add(confidence, proposed, accepted); }
  // The assumed rate of a sequence without proposals of this confidence so far: half of it is the rate of the last ones of
  // all sequences.
  double assumed_rate(int confidence) const;
  // The share in a step's time of the draft model's time for tokens that a sequence lacks. The time is divided among
  // the tokens that the sequence may still get.
  double begin_s(int missing, int tokens_left) const;
  // How many missing tokens the draft model may compute before a step: it may take as long as the step.
  int draft_rows(int decodes) const;

 private:
  struct Choice {
    std::vector<Candidate*> tokens;  // the candidate of each token, the most probable token first
    std::size_t best = 0;            // the number of tokens to compute
    double rate = 0;                 // expected tokens per second; without any measurement, tokens
  };
  // wait_s: more seconds that a step with proposals costs.
  Choice best_of(int decodes, std::span<Candidate> candidates, double wait_s = 0) const;
  double seconds(int decodes, int proposals) const;
  static bool prefers_drafts(const Choice& of_known, const Choice& of_drafts);
  bool probes();
  // Whether a step without proposals must be measured again.
  bool needs_plain(int decodes);
  void count_undrafted(std::span<const Candidate> with_drafts);

  static inline std::atomic<bool> choose_all_ = false;
  int max_rows_, max_proposals_;
  RowTimes times_, speculated_times_, draft_times_;
  Acceptance acceptance_;  // of all sequences
  int skipped_ = 0;        // choices in a row that took no proposal
  int speculated_ = 0;     // measured steps in a row that speculated
  int plain_ = 0;          // choices of a plain step that needs_plain() made since the last measured one
  int untimed_ = 0;        // choices with proposals since such a step was measured
  bool probe_drafts_ = false;
  int undrafted_ = 0;  // choices in a row that took no drafts
};

}  // namespace charonia::runtime
