// Sampling on the device. The host packs the rows' parameters and lists into the step's upload. Kernels write token ids
// for the next step's embedding, and a result per row for the step's download.
//
// Penalties need counts of tokens: a table [slots, vocab] on the device holds, for every sequence with penalties, how
// often each token was sampled and whether the prompt contains it. A sequence keeps its slot between steps. Its history
// is uploaded only when it gets a slot, or when the table's count differs from the row's number of sampled tokens. If
// there are more such sequences than slots, the one that was sampled longest ago loses its slot. Further rows of a
// sequence in a step, after proposals, have slots for this step only, and share one uploaded history.
//
// A mask is uploaded separately, after the step's forward pass was issued and the mask is ready: the kernels wait for
// it, the forward pass does not.
//
// Tokens are the same as those of ops/cpu/sample.h for the same logits, unless rounding decides. A token with less than
// 2^-44 times the probability of the most likely is never drawn (on the CPU: e^-80).
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

// The layout of a step's sampling in the upload. `bytes` is the size that pack() writes. For the same `rows`, without
// lists and masks, the layout is always the same, so that a captured step serves later steps.
struct SamplePacked {
  std::size_t begin = 0;  // offset in pack()'s `to`, a multiple of 16
  std::size_t bytes = 0;
  std::int64_t rows = 0;  // with padding
  bool plain = true;      // no row has lists, penalties or a mask; required by captured steps
  bool any_logprobs = false;
  std::int64_t list_entries = 0, histories = 0, masks = 0;
  std::size_t entries_at = 0, histories_at = 0, counts_at = 0;  // relative to `begin`; only if not plain
};

class Sampler {
 public:
  // max_rows: of a step, with padding; also the number of slots. Throws Error(unsupported) for a vocabulary beyond
  // 262144.
  Sampler(int vocab, int max_rows);
  ~Sampler();

  // Appends the parameters of `rows`, padded to `padded` rows that are ignored, to `to` (at the next multiple of 16),
  // and records the host's part in `notes`. The output of a sequence's first row is the beginning of the output of its
  // later rows. Assigns slots, so packed steps must be launched, in the same order. Throws Error(internal) if a token id
  // is not in the vocabulary.
  SamplePacked pack(std::span<const ops::SampleRow> rows, std::int64_t padded, std::vector<std::byte>& to,
                    SampleNotes& notes);

  // logits [packed.rows, vocab] f32, overwritten. `uploaded`: pack()'s bytes on the device, overwritten too; 16-byte
  // aligned. Rows whose stride is a multiple of 4 are read faster. Does not allocate. Waits for the masks, if there are
  // any.
  void launch(Stream& stream, const ops::Tensor& logits, const SamplePacked& packed, void* uploaded,
              SampleNotes& notes);

  // Token ids [rows] of the last launched step, on the device; -1: the row failed. The address never changes.
  const std::int32_t* sampled() const;
  // The results of packed.rows rows, to be downloaded after launch(). The address never changes.
  const void* results() const;
  std::size_t result_bytes(const SamplePacked& packed) const;
  // Converts the downloaded results of the first `rows` rows.
  std::vector<ops::Sampled> parse(const void* downloaded, std::int64_t rows, const SampleNotes& notes) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace charonia::cuda
