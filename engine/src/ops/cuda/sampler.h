// Sampling on the device. The host packs the rows' parameters and lists into the step's upload; kernels leave token ids
// where the next step's embedding finds them, and a result per row for the step's download.
//
// Penalties count tokens: a table [slots, vocab] on the device holds of every sequence that has penalties how often each
// token was sampled and whether the prompt has it. A sequence keeps its slot from step to step; a history goes up only
// when it takes a slot.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ops/cuda/runtime.h"
#include "ops/ops.h"

namespace charonia::cuda {

// Where the parts of a step's sampling lie in the upload. `bytes` is what pack() writes; for the same `rows` and lists
// that are empty it is always the same layout, so that a recorded step serves later ones.
struct SamplePacked {
  std::int64_t rows = 0;      // with padding
  bool plain = true;          // no row has lists or penalties: what recorded steps take
  std::size_t bytes = 0;
  std::int64_t list_entries = 0;
};

class Sampler {
 public:
  Sampler(int vocab, int max_rows, Stream& stream);
  ~Sampler();

  // Writes the parameters of `rows`, padded to `padded` rows with rows that are ignored, behind `to` (grown as needed;
  // 16-byte aligned begin). Takes and keeps slots.
  SamplePacked pack(std::span<const ops::SampleRow> rows, std::int64_t padded, std::vector<std::byte>& to);

  // logits [packed.rows, vocab] f32, overwritten. `uploaded` is where pack()'s bytes lie on the device. No allocation.
  void launch(Stream& stream, const ops::Tensor& logits, const SamplePacked& packed, const void* uploaded);

  // Token ids [rows] of the step launched last, on the device; -1: the row failed. The address never changes.
  const std::int32_t* sampled() const;
  // What is to be downloaded after launch(): results of packed.rows rows.
  const void* results() const;
  std::size_t result_bytes(const SamplePacked& packed) const;
  // Downloaded results of the first `rows` rows.
  std::vector<ops::Sampled> parse(const void* downloaded, std::int64_t rows) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace charonia::cuda
