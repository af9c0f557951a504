#include "runtime/draft_logits.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"
#include "model/manifest.h"
#include "runtime/devices.h"
#include "runtime/executor.h"
#include "runtime/memory_plan.h"
#include "runtime/settings.h"

namespace charonia::runtime {
namespace {

// Computes the rows of one sequence from position `first` on, with these rows of hidden states. Returns their logits if
// it is a layer.
std::vector<ops::Sampled> compute(Executor& executor, int block_len, int first, std::span<const TokenId> ids,
                                  std::span<const std::int32_t> hidden, bool layer, bool reads_main) {
  std::vector<std::int32_t> positions(ids.size()), rows(ids.size());
  std::iota(positions.begin(), positions.end(), first);
  std::iota(rows.begin(), rows.end(), 0);
  std::vector<std::int32_t> blocks(static_cast<std::size_t>(positions.back() / block_len + 1));
  std::iota(blocks.begin(), blocks.end(), 0);
  const auto window = executor.window() > 0 ? blocks : std::vector<std::int32_t>{};
  const std::vector<std::int32_t> starts = {0, static_cast<std::int32_t>(ids.size())};
  std::vector<std::int32_t> state_in, state_out;  // a model with states computes all its rows in one step
  if (executor.num_blocks().state > 0) state_in = {-1}, state_out = {0};
  ops::SampleRow row;
  row.target = 0;
  row.logits = true;
  const std::vector<ops::SampleRow> samples(layer ? ids.size() : 0, row);
  executor.launch({.ids = ids,
                   .attention = {.query_start = starts,
                                 .positions = positions,
                                 .block_tables = {blocks, window, {}},
                                 .table_stride = std::ssize(blocks),
                                 .state_in = state_in,
                                 .state_out = state_out},
                   .logits_rows = std::span(rows).first(samples.size()),
                   .sample = samples,
                   .hidden_rows = hidden,
                   .reads_main = reads_main},
                  {});
  return executor.collect();
}

}  // namespace

std::vector<std::vector<float>> draft_logits(const std::filesystem::path& weights_dir,
                                             const std::vector<TokenId>& tokens, const std::vector<TokenId>& drafted,
                                             Settings settings) {
  if (tokens.size() < 2) {
    throw Error(ErrorCode::invalid_argument, cat("tokens has ", tokens.size(), " tokens, and needs at least 2"));
  }
  const auto size = cat(tokens.size());
  settings.insert({{"device", "cpu"}, {"token_budget", size}, {"max_batch_size", size}});
  auto [model, config, sampling, warnings] = read_settings(weights_dir, settings);
  const auto manifest = manifest_of(weights_dir, config, model);
  const auto choice = choose_devices(config);
  const auto free = free_memory(choice, 1);
  auto plan = plan_draft(config, model, manifest, free.front()).value();
  Executor main(weights_dir, model, config, plan.bytes);
  Executor layer(plan.weights_dir, plan.model, plan.config, 0, &main);
  std::vector<std::int32_t> hidden(tokens.size());
  std::iota(hidden.begin(), hidden.end(), 0);
  compute(main, config.cache_block_seq_len, 0, tokens, hidden, false, false);
  hidden.pop_back();
  std::vector<std::vector<float>> out;
  std::vector<TokenId> ids(tokens.begin() + 1, tokens.end());
  for (std::size_t step = 0;; ++step) {
    const auto first = static_cast<int>(out.size());
    for (auto& row : compute(layer, config.cache_block_seq_len, first, ids, hidden, true, step == 0)) {
      out.push_back(std::move(row.logits));
    }
    if (step == drafted.size()) return out;
    hidden = {static_cast<std::int32_t>(ids.size()) - 1};
    ids = {drafted[step]};
  }
}

}  // namespace charonia::runtime
