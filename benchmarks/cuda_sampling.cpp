// From logits to tokens, for every kind of sampling.
#include "cuda_bench.h"
#include "ops/cuda/emulated/host_device.h"
#include "ops/cuda/sampling/sampler.h"

namespace charonia::bench {
namespace {

struct Kind {
  const char* name;
  ops::SampleRow row;
  bool penalties;  // they are of a sequence
};

void measure_one(Bench& bench, const ModelShape& model, std::int64_t rows, const Kind& kind) {
  const auto vocab = static_cast<int>(model.vocab);
  cuda::Sampler sampler(vocab, static_cast<int>(rows));
  cuda::SampleNotes notes;
  std::vector<ops::SampleRow> all(static_cast<std::size_t>(rows), kind.row);
  std::vector<std::int32_t> prompt;
  for (int i = 0; i < 64; ++i)
    prompt.push_back(static_cast<std::int32_t>(bench.random() % static_cast<unsigned>(vocab)));
  for (std::size_t r = 0; r < all.size(); ++r) {
    all[r].seed = r;
    all[r].position = 100;
    if (kind.penalties) all[r].sequence = r + 1, all[r].prompt = prompt;
  }
  // With penalties the first step brings the histories; measured is one after it.
  std::vector<std::byte> bytes;
  auto packed = sampler.pack(all, rows, bytes, notes);
  const auto width = cuda::round_up(model.vocab, 4);
  const double logits_bytes = 4.0 * static_cast<double>(rows * model.vocab);
  const int n = bench.copies(static_cast<std::size_t>(logits_bytes));
  const auto logits = bench.random_values(DType::f32, n * rows * width, 2);
  const auto launch = [&](int index, void* uploaded) {
    sampler.launch(bench.stream, {logits.as<float>() + index % n * rows * width, DType::f32, rows, model.vocab, width},
                   packed, uploaded, notes);
  };
  if (packed.histories > 0) {
    const auto first = bench.uploaded(bytes);
    launch(0, first.as<std::byte>() + packed.begin);
    bench.stream.wait("histories of a benchmark");
    static const std::vector<std::int32_t> sampled{5};
    for (auto& row : all) row.output = sampled;
    bytes.clear();
    packed = sampler.pack(all, rows, bytes, notes);
  }
  const auto uploaded = bench.uploaded(bytes);
  const Case what{.kernel = packed.plain ? "sample" : "sample_changed",
                  .shape = {{"model", model.name}, {"rows", rows}, {"vocab", model.vocab}},
                  .variant = kind.name,
                  // Logits once; with penalties the table of counts as well.
                  .bytes = logits_bytes * (kind.penalties ? 1.5 : 1)};
  bench.measure(what, [&](int index) { launch(index, uploaded.as<std::byte>() + packed.begin); });
}

}  // namespace

void measure_sampling(Bench& bench) {
  std::vector<std::int64_t> rows{1, 8, 64, 256};
  if (bench.size == Size::quick) rows = {1, 64};
  if (bench.size == Size::tiny) rows = {1, 3};
  static const std::vector<std::int32_t> banned{2};
  ops::SampleRow greedy, plain;
  greedy.temperature = 0;
  plain.temperature = 0.8F;
  auto filtered = plain, logprobs = greedy, bans = plain, penalties = plain;
  filtered.top_k = 50, filtered.top_p = 0.9F;
  logprobs.logprobs = 20;
  bans.banned = banned;
  penalties.repetition_penalty = 1.1F;
  const Kind kinds[] = {{"greedy", greedy, false},
                        {"temperature 0.8", plain, false},
                        {"top-k 50, top-p 0.9", filtered, false},
                        {"greedy, 20 log probabilities", logprobs, false},
                        {"temperature 0.8, a banned token", bans, false},
                        {"temperature 0.8, penalties", penalties, true}};
  for (const auto& model : model_shapes(bench.size)) {
    for (const auto count : rows) {
      for (const auto& kind : kinds) measure_one(bench, model, count, kind);
    }
  }
}

}  // namespace charonia::bench
