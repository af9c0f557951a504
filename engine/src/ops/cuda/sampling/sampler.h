// Sampling on the device. The host packs the rows' parameters and lists into the step's upload; kernels leave token ids
// where the next step's embedding finds them, and a result per row for the step's download.
//
// Penalties count tokens: a table [slots, vocab] on the device holds of every sequence that has penalties how often
// each token was sampled and whether the prompt has it. A sequence keeps its slot from step to step; a history goes up
// only when it takes a slot, or when the table has not counted as many tokens as the row says were sampled. With more
// such sequences than slots the one that was sampled longest ago loses its slot.
//
// A mask goes up on its own, when the step's forward pass was issued and the mask is known: the kernels wait for it,
// the forward pass does not.
//
// Tokens are those that ops/cpu/sample.h draws from the same logits, as long as rounding does not decide: a token less
// likely than 2^-44 times the most likely is never drawn (there: e^-80).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ops/cuda/device/runtime.h"
#include "ops/cuda/sampling/sample_notes.h"
#include "ops/step.h"
#include "ops/tensor.h"

namespace charonia::cuda {

// Where the parts of a step's sampling lie in the upload. `bytes` is what pack() writes; for the same `rows`, no lists
// and no masks it is always the same layout, so that a captured step serves later ones.
struct SamplePacked {
  std::size_t begin = 0;  // in pack()'s `to`, a multiple of 16
  std::size_t bytes = 0;
  std::int64_t rows = 0;  // with padding
  bool plain = true;      // no row has lists, penalties or a mask: what captured steps take
  bool any_logprobs = false;
  std::int64_t list_entries = 0, histories = 0, masks = 0;
  std::size_t entries_at = 0, histories_at = 0, counts_at = 0;  // behind `begin`; of what is not plain
};

class Sampler {
 public:
  // max_rows: of a step, with padding; also the number of slots. Throws Error(unsupported) for a vocabulary beyond
  // 262144.
  Sampler(int vocab, int max_rows);
  ~Sampler();

  // Writes the parameters of `rows`, padded to `padded` rows that are ignored, behind `to` (grown as needed; begins at
  // the next multiple of 16), and notes what stays here. Takes and keeps slots: what is packed must be launched, in the
  // same order. Throws Error(internal) when a token id is not in the vocabulary, or two rows are of one sequence with
  // penalties.
  SamplePacked pack(std::span<const ops::SampleRow> rows, std::int64_t padded, std::vector<std::byte>& to,
                    SampleNotes& notes);

  // logits [packed.rows, vocab] f32, overwritten. `uploaded` is where pack()'s bytes lie on the device, overwritten
  // too; 16-byte aligned. Rows whose stride is a multiple of 4 are read faster. No allocation. Where there are masks,
  // waits for them.
  void launch(Stream& stream, const ops::Tensor& logits, const SamplePacked& packed, void* uploaded,
              SampleNotes& notes);

  // Token ids [rows] of the step launched last, on the device; -1: the row failed. The address never changes.
  const std::int32_t* sampled() const;
  // What is to be downloaded after launch(): results of packed.rows rows. The address never changes.
  const void* results() const;
  std::size_t result_bytes(const SamplePacked& packed) const;
  // Downloaded results of the first `rows` rows.
  std::vector<ops::Sampled> parse(const void* downloaded, std::int64_t rows, const SampleNotes& notes) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace charonia::cuda
