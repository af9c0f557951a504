// Steps: their input, how to run them, their output.
//
//   prepare(limits, issue)  once, before the first step
//   begin_step(input)       passes all host arrays (a device with its own memory uploads them in one copy)
//   run_step(issue)         calls `issue` to issue the operations, or replays a captured CUDA graph of them
//   collect()               waits for the step's samples
// An asynchronous device accepts the next begin_step() and run_step() before collect() of the previous step. Results
// are collected in the order of the steps, and at most kMaxStepsInFlight may be uncollected.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/cache_kind.h"
#include "charonia/generated/sampling.h"

namespace charonia::ops {

class KvCache;

// The input of attention for a step. Sequence s has query rows [query_start[s], query_start[s+1]) of the step. Row r
// has position positions[r] and attends to positions 0 .. positions[r] of its own sequence. Position p of sequence s is
// in block block_tables[kind][s * table_stride + p / block_len], slot p % block_len, for layers of this kind of cache.
// In a table of kind `window`, entries of blocks that no window of the step reaches may be any block.
//
// Recurrent layers (kind `state`): sequence s has the rows above, from position p = positions[query_start[s]] on. Such
// a layer reads the state after the positions 0 .. p - 1 from slot state_in[s], and writes the state after the
// sequence's last row to slot state_out[s]. state_in[s] = -1 exactly if p = 0: the state is all zeros. Both may be one
// slot. Two sequences may read one slot, but no sequence reads or writes a slot that another one writes. A sequence
// without rows reads and writes nothing. The scheduler ends a sequence's rows at a snapshot
// (docs/cache_and_scheduler.md), so a step writes one state of each sequence. With proposals it writes the states after
// other rows too: that after row r to slot row_states[r], which no other row of the step reads or writes; -1: not that of
// row r. The last row of a sequence has state_out[s], or -1.
struct AttentionBatch {
  std::span<const std::int32_t> query_start;   // [sequences + 1]
  std::span<const std::int32_t> positions;     // [rows], ascending by one within a sequence
  PerKind<std::span<const std::int32_t>> block_tables;  // [sequences, table_stride]; empty for a kind without layers
  std::int64_t table_stride = 0;
  std::span<const std::int32_t> rotary_rows = {};  // [rows]: the row of cos_sin for each row; empty: its position
  std::span<const std::int32_t> state_in = {}, state_out = {};  // [sequences]; empty without layers of kind `state`
  std::span<const std::int32_t> row_states = {};  // [rows]; empty: no sequence has proposals
};

// The tokens that a row may sample.
class TokenMask {
 public:
  virtual ~TokenMask() = default;
  // Waits until the mask is ready, or computes it. Bit t % 32 of word t / 32 says whether token t may be sampled,
  // [ceil(vocab / 32)]. Valid until the step is collected. Throws Error if there is no mask: the text becomes the row's
  // error.
  virtual std::span<const std::uint32_t> wait() const = 0;
};

// One row to sample from.
struct SampleRow : RowSampling {  // greedy sampling breaks ties by the lowest id
  std::uint64_t seed = 0;
  std::int64_t position = 0;   // position of the token to sample; the random number is a function of (seed, position)
  // Id of the row's sequence: the same in all its steps, never used for another sequence. Rows of a sequence are
  // neighbours. If there are several, the tokens of all but the first may not follow: they come after proposals.
  std::uint64_t sequence = 0;
  std::span<const std::int32_t> prompt;  // token ids, for the penalties
  std::span<const std::int32_t> output;  // token ids sampled so far that the host knows
  std::int32_t pending = -1;  // >= 0: the token after `output` is the sample of row `pending` of the previous step
  // Added to the logits first; ascending by token, each token once. -infinity bans a token.
  std::span<const std::pair<std::int32_t, float>> bias;
  // Token ids that must not be sampled (min_tokens' end ids, bad words), ascending.
  std::span<const std::int32_t> banned;
  // -1: none; n: log probabilities of the sampled token and the n most likely, from the unmodified logits.
  int logprobs = -1;
  std::int32_t target = -1;  // >= 0: nothing is sampled; this token is returned, with the requested log probabilities
  bool logits = false;       // also return the whole row of logits; only with a target
  // The device waits for it as late as possible, after it has issued the logits. A step with a mask is launched only
  // after the previous step is collected.
  const TokenMask* mask = nullptr;
};

struct Sampled {
  std::int32_t token = 0;
  float logprob = 0;                                // log softmax of the unmodified logits
  std::vector<std::pair<std::int32_t, float>> top;  // most likely first, ties by lowest id
  std::vector<float> logits;                        // [vocab] if requested; otherwise empty
  std::string error;  // why this row could not be sampled (NaN, no token left); otherwise empty
};

// The arrays of one step. A device that copies them needs them only during begin_step(). On the CPU they must stay
// valid until collect().
struct StepInput {
  std::span<const std::int32_t> ids;          // [rows] token ids; -1 - i: the sample of row i of the previous step
  AttentionBatch attention;                   // without positions: the step issues no attention
  std::span<const std::int32_t> logits_rows;  // the rows whose logits are computed, ascending
  std::span<const SampleRow> sample;          // [logits_rows]: one each
  // [sequences]: prompt lengths, which the model needs for rotary scaling. Devices ignore them. Empty: rotation depends
  // only on positions.
  std::span<const std::int32_t> prompt_tokens = {};
  // [sequences]: the slots of their adapters (Device::fill_adapter_slot()); -1: none. Empty: no sequence has one, or
  // the device has no slots.
  std::span<const std::int32_t> adapters = {};
  // [rows]: for store_rows(), the row of another tensor that a row is written to; for load_rows(), the one that it is
  // read from. -1: none. Empty: none of any row.
  std::span<const std::int32_t> hidden_rows = {};
  bool reads_main = false;  // StepShape::reads_main
  // Blocks that are copied before the step computes. Decoder::launch() passes them to copy_blocks().
  std::span<const BlockCopy> block_copies = {};
};

// The numbers of rows of a step's operations. A device that replays captured graphs rounds them up to a graph's
// numbers. Rows beyond the input have undefined contents and no results.
struct StepShape {
  std::int64_t rows = 0, logits_rows = 0;
  bool adapters = false;  // rows may have adapters in slots
  // Of an MTP layer or a head (model/decoder.h): rows have hidden states of the main decoder, not of the layer itself.
  bool reads_main = false;
};

// The limits of an engine's steps, and the layout of its KV blocks.
struct StepLimits {
  int max_rows = 0;       // the token budget
  int max_sequences = 0;  // in a step
  int max_positions = 0;  // of a sequence: session_len
  int block_len = 0;      // of the KV cache; 0: any
  int kv_quant_bits = 0;  // KvLayout::quant_bits
  // In a step; 0: max_sequences. More than max_sequences: rows of prompts on the CPU, and rows of proposals.
  int max_logits_rows = 0;
  // Speculation with hidden states (model/decoder.h).
  int kept_hidden = 0;        // of a main decoder: the rows of the table of hidden states; 0: none
  bool reads_hidden = false;  // of an MTP layer or a head

  int logits_rows() const { return max_logits_rows > 0 ? max_logits_rows : max_sequences; }
};

inline constexpr int kMaxStepsInFlight = 2;
inline constexpr int kMaxTopLogprobs = 20;

class Steps {
 public:
  using Issue = std::function<void(const StepShape&)>;

  virtual ~Steps() = default;

  virtual bool asynchronous() const { return false; }  // run_step() returns before the step is computed

  // Call before the first step, and between steps to change the limits. Allocates the memory of steps (later steps
  // within the limits allocate nothing, except for long histories), selects the fastest kernel for each GEMM by
  // measurement, and captures the steps that will be replayed. `issue` is the function that every run_step() will get;
  // prepare() calls it with any StepShape within the limits. Throws Error(internal) if max_rows, max_sequences or
  // max_positions is less than 1.
  virtual void prepare(const StepLimits& limits, const Issue& issue) = 0;

  // Throws Error(internal) if prepare() was not called, if the step exceeds the limits, or if an id, a position, a
  // table or a row is out of its range.
  virtual void begin_step(const StepInput& input) = 0;
  // Copies whole blocks of the cache, in this order. Ignores kinds without layers. Call after begin_step() and before
  // run_step(); never part of a graph.
  virtual void copy_blocks(KvCache& cache, std::span<const BlockCopy> copies) = 0;
  virtual void run_step(const Issue& issue) = 0;
  // Waits for the samples of the oldest uncollected step, and returns them in the order of its sample rows. A row that
  // cannot be sampled has an error; the other rows are sampled. Throws Error(internal) if the device failed; the
  // message names the step and the operation, if they are known.
  virtual std::vector<Sampled> collect() = 0;
};

}  // namespace charonia::ops
