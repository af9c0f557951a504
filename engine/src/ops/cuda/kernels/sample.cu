// sample(): launches the kernels for a batch of rows (sample_kernels.h), and prepares rows with bias, bans, penalties
// or a mask.
#include "ops/cuda/kernels/sample.h"

#include <algorithm>

#include "ops/cuda/kernels/sample_kernels.h"

namespace charonia::cuda {

using namespace sampling;

namespace {

CHARONIA_KERNEL(kFinishThreads, 1) void history_kernel(const SampleKernelParams p) {
  dependency_trigger();
  dependency_wait();
  const SampleHistory history = p.batch.histories[blockIdx.x];
  const auto stride = count_stride(p.batch.vocab);
  std::uint16_t* const counts = p.memory.table + history.slot * stride;
  const int tid = static_cast<int>(threadIdx.x);
  for (std::int64_t at = tid * 8; at < stride; at += kFinishThreads * 8) {
    *reinterpret_cast<uint4*>(counts + at) = uint4{0, 0, 0, 0};
  }
  __syncthreads();
  for (int i = history.begin + tid; i < history.end; i += kFinishThreads) {
    const SampleCount count = p.batch.history_counts[i];
    counts[count.id] = static_cast<std::uint16_t>(count.value);
  }
  __syncthreads();
  if (tid != 0) return;
  const auto count = [counts](int id) {
    if (id >= 0 && (counts[id] & kMaxCounted) < kMaxCounted) ++counts[id];
  };
  for (int i = history.more_begin; i < history.more_end; ++i) count(p.batch.history_counts[i].id);
  if (history.pending >= 0) count(p.memory.sampled[history.pending]);
}

CHARONIA_KERNEL(kScanThreads, 1) void scatter_kernel(const SampleKernelParams p) {
  dependency_trigger();
  dependency_wait();
  const auto row = static_cast<std::int64_t>(blockIdx.x);
  const SampleParams& params = p.batch.params[row];
  float* const logits = p.batch.logits + row * p.batch.stride;
  for (int i = params.list_begin + static_cast<int>(threadIdx.x); i < params.list_end; i += kScanThreads) {
    SampleEntry& entry = p.batch.entries[i];
    const float before = logits[entry.id];
    logits[entry.id] = before + entry.value;
    if (params.logprobs >= 0) entry.value = before;  // otherwise several rows may share the entries
  }
}

}  // namespace

void sample(Stream& stream, const SampleBatch& batch, const SampleMemory& memory) {
  constexpr int kBlocks = 256;  // of the histogram: enough to keep a large device busy
  SampleKernelParams p;
  p.batch = batch;
  p.memory = memory;
  p.groups = sample_groups(batch.vocab);
  p.aligned = reinterpret_cast<std::uintptr_t>(batch.logits) % sizeof(float4) == 0 && batch.stride % 4 == 0;
  const auto rows = static_cast<unsigned>(batch.rows);
  const auto chunks = divide_up(batch.vocab, kScanned);
  const auto parts = std::clamp<std::int64_t>(divide_up(kBlocks, std::max(batch.rows, 1)), 1, chunks);
  p.part = static_cast<int>(round_up(divide_up(batch.vocab, parts), kHistogramThreads * 4));
  const Launch scan{.grid_x = static_cast<unsigned>(chunks), .grid_y = rows, .threads = kScanThreads};
  const Launch histogram{
      .grid_x = static_cast<unsigned>(divide_up(batch.vocab, p.part)), .grid_y = rows, .threads = kHistogramThreads};
  if (batch.plain) {
    run_plain(stream, p, scan, histogram);
    return;
  }
  launch(stream, "sample: history", {.grid_x = static_cast<unsigned>(batch.num_histories), .threads = kFinishThreads},
         history_kernel, p);
  if (batch.any_logprobs) scan_originals(stream, p, scan);
  launch(stream, "sample: scatter", {.grid_x = batch.num_entries > 0 ? rows : 0, .threads = kScanThreads},
         scatter_kernel, p);
  run_changed(stream, p, scan, histogram);
}

}  // namespace charonia::cuda
