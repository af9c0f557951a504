#include "runtime/executor.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"
#include "runtime/cache_size.h"
#include "runtime/devices.h"
#include "runtime/step_sizes.h"

namespace charonia::runtime {
ops::StepLimits step_limits(const EngineConfig& config) {
  require_step_sizes(config);
  return {.max_rows = config.token_budget,
          .max_sequences = config.max_batch_size,
          .max_positions = config.session_len,
          .block_len = config.cache_block_seq_len,
          .kv_quant_bits = config.quant_policy};
}

Executor::Executor(const std::filesystem::path& weights_dir, const ModelConfig& model, EngineConfig& config) {
  for (auto& device : make_devices(weights_dir, model, config)) {
    ranks_.push_back(std::make_unique<Rank>(std::move(device)));
  }
  asynchronous_ = std::ranges::all_of(ranks_, [](const auto& rank) { return rank->ops().asynchronous(); });
  threads_ = std::make_unique<RankThreads>(static_cast<int>(ranks_.size()));
  const auto limits = step_limits(config);
  const model::WeightFiles files(weights_dir, config.tensor_para_size);
  on_ranks([&](int rank) { of(rank).check_memory(model, files.manifest(), config, limits); });
  on_ranks([&](int rank) { of(rank).load(model, files, limits); });
  num_blocks_ = blocks_of_all(config);
  chunk_blocks_ = blocks_per_chunk(config.cache_chunk_size, num_blocks_);
  on_ranks([&](int rank) { of(rank).make_cache(num_blocks_, chunk_blocks_); });
}

int Executor::blocks_of_all(const EngineConfig& config) const {
  int out = std::numeric_limits<int>::max();
  for (const auto& rank : ranks_) {
    const CacheMemory memory{rank->block_bytes(), rank->free_for_cache(), static_cast<int>(ranks_.size())};
    try {
      out = std::min(out, blocks_that_fit(config, memory));
    } catch (const Error&) {
      throw of_rank(std::current_exception(), rank->ops().rank(), memory.ranks);
    }
  }
  return out;
}

// No exchange is part of it: a rank without memory must not end those of the others.
void Executor::commit_blocks(int num_blocks) {
  threads_->run([&](int rank) { of(rank).commit_blocks(num_blocks); });
}

void Executor::on_ranks(const RankThreads::Task& task) {
  threads_->run(task, [this](int rank, std::string_view why) { of(rank).ops().abort_collectives(why); });
}

void Executor::launch(const ops::StepInput& input) {
  on_ranks([&](int rank) { of(rank).launch(input); });
}

std::vector<ops::Sampled> Executor::collect() {
  std::vector<std::vector<ops::Sampled>> samples(ranks_.size());
  // On all ranks at the same time, so that an error of one rank releases the ranks whose step waits for it.
  on_ranks([&](int rank) { samples[static_cast<std::size_t>(rank)] = of(rank).collect(); });
  for (std::size_t rank = 1; rank < samples.size(); ++rank) {
    if (!std::ranges::equal(samples[rank], samples[0], {}, &ops::Sampled::token, &ops::Sampled::token)) {
      throw Error(ErrorCode::internal, cat("rank ", rank, ": it has sampled other tokens than rank 0"));
    }
  }
  return std::move(samples[0]);
}

std::string Executor::device() const { return std::string(ranks_.front()->ops().device()); }

std::string Executor::instruction_set() const { return std::string(ranks_.front()->ops().instruction_set()); }

std::string Executor::warning() const { return ranks_.front()->ops().warning(); }

std::vector<std::string> Executor::kernel_report() const {
  std::vector<std::string> lines;
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    for (auto& line : ranks_[rank]->ops().report()) {
      lines.push_back(ranks_.size() > 1 ? cat("rank ", rank, ": ", line) : std::move(line));
    }
  }
  return lines;
}

std::int64_t Executor::gemms_rejected() const {
  std::int64_t sum = 0;
  for (const auto& rank : ranks_) sum += rank->ops().gemms_rejected();
  return sum;
}

std::int64_t Executor::weight_bytes() const {
  std::int64_t sum = 0;
  for (const auto& rank : ranks_) sum += rank->decoder().weight_bytes();
  return sum;
}

std::int64_t Executor::weight_bytes_per_step() const {
  std::int64_t sum = 0;
  for (const auto& rank : ranks_) sum += rank->decoder().weight_bytes_per_step();
  return sum;
}

std::int64_t Executor::kv_cache_bytes() const {
  std::int64_t sum = 0;
  for (const auto& rank : ranks_) sum += static_cast<std::int64_t>(rank->block_bytes()) * num_blocks_;
  return sum;
}

}  // namespace charonia::runtime
