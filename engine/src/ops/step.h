// Steps: what goes into one, how one is run, what comes out.
//
//   prepare(limits, issue)  once, before the first step
//   begin_step(input)       hands over all its host arrays (a device with its own memory uploads them as one piece)
//   run_step(issue)         has `issue` call the operations, or replays what they were the last time
//   collect()               waits for the step's samples
// An asynchronous device takes the next begin_step and run_step before collect() of the one before. Results are
// collected in the order of the steps, and at most kMaxStepsInFlight may be uncollected.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "charonia/generated/sampling.h"

namespace charonia::ops {

class KvCache;

// A step as attention sees it. Sequence s has query rows [query_start[s], query_start[s+1]) of the step; row r stands
// at position positions[r] and sees the positions 0 .. positions[r] of its own sequence. Position p of sequence s lives
// in block block_tables[s * table_stride + p / block_len], slot p % block_len.
struct AttentionBatch {
  std::span<const std::int32_t> query_start;   // [sequences + 1]
  std::span<const std::int32_t> positions;     // [rows], ascending by one within a sequence
  std::span<const std::int32_t> block_tables;  // [sequences, table_stride]
  std::int64_t table_stride = 0;
  std::span<const std::int32_t> rotary_rows =
      {};  // [rows]: the row of cos_sin that turns each row; empty: its position
};

// Which tokens a row may sample, worked out on a thread of its own while the step's forward pass runs.
class TokenMask {
 public:
  virtual ~TokenMask() = default;
  // Waits until the mask is known: bit t % 32 of word t / 32 says whether token t may be sampled, [ceil(vocab / 32)].
  // Valid until the step is collected. Throws Error when there is none: then the row has that text as its error.
  virtual std::span<const std::uint32_t> wait() const = 0;
};

// One row to sample from.
struct SampleRow : RowSampling {  // where it is greedy, the lowest id wins a tie
  std::uint64_t seed = 0;
  std::int64_t position = 0;   // of the token to sample; the random number is a function of (seed, position) alone
  std::uint64_t sequence = 0;  // whose row it is: the same in all steps of a sequence, never given to another
  std::span<const std::int32_t> prompt;  // token ids, for the penalties
  std::span<const std::int32_t> output;  // token ids sampled so far, as far as the host knows them
  std::int32_t pending = -1;  // >= 0: the one after `output` is what row `pending` of the step before sampled
  // Added to logits first, by token, ascending, each once. -infinity bans a token.
  std::span<const std::pair<std::int32_t, float>> bias;
  // Token ids that must not be sampled (min_tokens' end ids, bad words), ascending.
  std::span<const std::int32_t> banned;
  int logprobs = -1;                     // -1: none; n: sampled token's and the n most likely, of the unmodified logits
  std::int32_t target = -1;  // >= 0: nothing is sampled: this token is reported, with the log probabilities asked for
  bool logits = false;       // report the whole row of logits too; only with a target
  const TokenMask* mask = nullptr;  // asked as late as possible: a device waits for it when the logits are under way.
                                    // A step that has one is not launched before the step before it is collected
};

struct Sampled {
  std::int32_t token = 0;
  float logprob = 0;                                // log softmax of the unmodified logits
  std::vector<std::pair<std::int32_t, float>> top;  // most likely first, ties by lowest id
  std::vector<float> logits;                        // [vocab] where they were asked for; else empty
  std::string error;  // why this row could not be sampled (NaN, nothing left to sample); else empty
};

// The arrays of one step. They need not live longer than begin_step() on a device that copies them; on the CPU they
// must live until collect().
struct StepInput {
  std::span<const std::int32_t> ids;          // [rows] token ids; -1 - i: what sample row i of the step before sampled
  AttentionBatch attention;                   // without positions: the step issues no attention
  std::span<const std::int32_t> logits_rows;  // the rows whose logits are wanted, ascending
  std::span<const SampleRow> sample;          // [logits_rows]: one each
  // [sequences]: tokens of each one's prompt, by which the model scales long contexts. Devices do not look at it.
  // Empty: positions alone count.
  std::span<const std::int32_t> prompt_tokens = {};
  // Blocks (from, to) that are copied before anything is computed, in all layers. Decoder::launch() hands them to
  // copy_blocks().
  std::span<const std::pair<std::int32_t, std::int32_t>> block_copies = {};
};

// The numbers of rows that a step's operations work on. A device that replays captured steps rounds them up to those of
// a graph; rows beyond the input's hold anything and give nothing.
struct StepShape {
  std::int64_t rows = 0, logits_rows = 0;
};

// What the steps of an engine are bounded by, and how its KV blocks are cut.
struct StepLimits {
  int max_rows = 0;       // token budget
  int max_sequences = 0;  // in a step, and rows of logits
  int max_positions = 0;  // of a sequence: session_len
  int block_len = 0;      // of the KV cache; 0: any
  int kv_quant_bits = 0;  // KvLayout's
};

inline constexpr int kMaxStepsInFlight = 2;
inline constexpr int kMaxTopLogprobs = 20;

class Steps {
 public:
  using Issue = std::function<void(const StepShape&)>;

  virtual ~Steps() = default;

  virtual bool asynchronous() const { return false; }  // run_step returns before the step is computed

  // Before the first step, between steps to change the limits. Makes what steps need (a step within the limits
  // allocates nothing, but for long histories), measures which kernel candidate of a GEMM is fastest, captures the
  // steps that will be replayed. `issue` is what every run_step() will be called with; it is called with any StepShape
  // within the limits. Throws Error(internal) when max_rows, max_sequences or max_positions is less than 1.
  virtual void prepare(const StepLimits& limits, const Issue& issue) = 0;

  // Throws Error(internal) when nothing was prepared, when the step is beyond the limits, and when an id, a position, a
  // table or a row is out of its range.
  virtual void begin_step(const StepInput& input) = 0;
  // Copies whole blocks of the cache (all layers), in the order of the pairs (from, to). After begin_step() and before
  // run_step(); never part of a graph.
  virtual void copy_blocks(KvCache& cache, std::span<const std::pair<std::int32_t, std::int32_t>> pairs) = 0;
  virtual void run_step(const Issue& issue) = 0;
  // The samples of the oldest step not yet collected, in the order of its sample rows; waits for them. A row that
  // cannot be sampled says so in its error; the others are sampled. Throws Error(internal) when the device failed: the
  // message names the step and the operation, where that is known.
  virtual std::vector<Sampled> collect() = 0;
};

}  // namespace charonia::ops
