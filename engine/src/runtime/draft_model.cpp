#include "runtime/draft_model.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "cache/units.h"
#include "charonia/error.h"
#include "ops/broken_logits.h"
#include "text/utf8.h"

namespace charonia::runtime {
namespace {

constexpr int kPausedCalls = 16;  // Sequence::pause, after it got no blocks

}  // namespace

void check_vocabulary(const DraftPlan& plan, const text::TokenTable& table) try {
  const auto own = text::TokenTable::load(plan.weights_dir / "token_table.safetensors");
  for (std::int32_t id = 0; id < std::max(own.size(), table.size()); ++id) {
    const auto mine = own.raw_bytes(id), theirs = table.raw_bytes(id);
    if (mine == theirs && (mine.empty() || own.is_special(id) == table.is_special(id))) continue;
    const auto text = [](std::string_view bytes, bool special) {
      return cat(special ? "special token '" : "'", text::to_valid_utf8(bytes), "'");
    };
    throw Error(ErrorCode::invalid_argument,
                cat("its vocabulary differs from the model's: token ", id, " is ", text(mine, own.is_special(id)),
                    ", and ", text(theirs, table.is_special(id)),
                    " in the model. Choose a draft model of the same family"));
  }
} catch (const Error& error) {
  throw plan.name(error);
}

DraftModel::DraftModel(DraftPlan plan, int vocab_size, const Executor* main) : plan_(std::move(plan)) {
  if (!reads_hidden()) main = nullptr;
  try {
    executor_ = std::make_unique<Executor>(plan_.weights_dir, plan_.model, plan_.config, 0, main);
  } catch (const Error& error) {
    throw plan_.name(error);
  }
  vocab_size_ = std::min(vocab_size, plan_.model.vocab_size);
  lacks_tokens_ = vocab_size_ < vocab_size;
  for (int row = main == nullptr ? 0 : main->kept_hidden(); row > 0; --row) free_hidden_.push_back(row - 1);
  num_hidden_ = free_hidden_.size();
  const auto& counts = executor_->num_blocks();
  std::vector<cache::UnitKind> kinds;
  if (executor_->window() > 0) kinds.push_back({executor_->window(), counts.window});
  blocks_ = std::make_unique<cache::BlockManager>(counts.full, plan_.config.cache_block_seq_len,
                                                  plan_.config.enable_prefix_caching, counts.full, nullptr,
                                                  cache::BlockManager::default_hash, kinds);
  log({LogLevel::info,
       cat(name(), ": ", executor_->weight_bytes(), " bytes of weights, KV cache of ",
           counts.full * blocks_->block_len(), " tokens in ", executor_->kv_cache_bytes(), " bytes"),
       "",
       {}});
}

std::string DraftModel::name() const {
  return cat(plan_.is_mtp() ? "MTP layer of " : reads_hidden() ? "EAGLE-3 head " : "draft model ", plan_.model.model_name);
}

std::vector<std::string> DraftModel::kernel_report() const {
  auto lines = executor_->kernel_report();
  for (auto& line : lines) line = cat(name(), ": ", line);
  return lines;
}

// If there are too few rows, the sequence that was computed least recently loses its own, such as a preempted one.
void DraftModel::place(SeqId id, std::int32_t first, std::int32_t rows, std::vector<std::int32_t>& hidden_rows) {
  const auto found = sequences_.find(id);
  if (found != sequences_.end() && first == 0) found->second.lost = false;
  const bool lost = found != sequences_.end() && found->second.lost;
  while (!lost && std::ssize(free_hidden_) < rows) {
    Sequence* oldest = nullptr;
    for (auto& [other_id, other] : sequences_) {
      if (other.hidden.empty() || other_id == id || (oldest != nullptr && other.used >= oldest->used)) continue;
      oldest = &other;
    }
    if (oldest == nullptr) break;
    lose(*oldest);
  }
  if (lost || std::ssize(free_hidden_) < rows) {
    hidden_rows.insert(hidden_rows.end(), static_cast<std::size_t>(rows), -1);
    return;
  }
  hidden_rows.insert(hidden_rows.end(), free_hidden_.end() - rows, free_hidden_.end());
  free_hidden_.resize(free_hidden_.size() - static_cast<std::size_t>(rows));
}

void DraftModel::drop(std::span<const std::int32_t> hidden_rows) {
  std::ranges::copy_if(hidden_rows, std::back_inserter(free_hidden_), [](std::int32_t row) { return row >= 0; });
}

void DraftModel::computed(SeqId id, std::int32_t first, std::span<const std::int32_t> hidden_rows) {
  auto& sequence = sequences_[id];
  sequence.used = ++calls_;
  if (first == 0) sequence.lost = false;
  if (sequence.lost || hidden_rows.front() < 0) {
    drop(hidden_rows);
    return lose(sequence);
  }
  const auto kept = first - sequence.first_hidden;  // later rows were proposals, or are computed again
  const bool follows = kept >= 0 && kept <= std::ssize(sequence.hidden);
  keep_hidden(sequence, 0, follows ? kept : 0);
  if (!follows) sequence.first_hidden = first;
  sequence.hidden.insert(sequence.hidden.end(), hidden_rows.begin(), hidden_rows.end());
  drop_computed(sequence);
}

// Frees the rows of the table before the row `from` of the sequence's hidden states, and after the `count` following.
void DraftModel::keep_hidden(Sequence& sequence, std::int32_t from, std::int32_t count) {
  const std::span<const std::int32_t> all = sequence.hidden;
  const auto begin = static_cast<std::size_t>(from), size = static_cast<std::size_t>(count);
  drop(all.first(begin));
  drop(all.subspan(begin + size));
  const auto kept = all.subspan(begin, size);
  sequence.hidden = std::vector(kept.begin(), kept.end());
  sequence.first_hidden += from;
}

void DraftModel::drop_computed(Sequence& sequence) {
  const auto rows = std::clamp(sequence.computed - sequence.first_hidden, 0, hidden_rows(sequence));
  if (rows > 0) keep_hidden(sequence, rows, hidden_rows(sequence) - rows);
}

bool DraftModel::must_compute(SeqId id) const {
  const auto found = sequences_.find(id);
  return found != sequences_.end() && hidden_rows(found->second) >= kKeptHidden;
}

// Returns the salt for the prefix index. Such a layer has no row of token 0, but all rows depend on it.
std::uint64_t DraftModel::salt_of(std::span<const TokenId> tokens, std::uint64_t salt) const {
  constexpr std::uint64_t kMix = 0x9E3779B97F4A7C15;
  return reads_hidden() ? salt ^ ((static_cast<std::uint64_t>(tokens.front()) + 1) * kMix) : salt;
}

std::int32_t DraftModel::end_of(const Sequence& sequence) const {
  const auto rows = sequence.known - offset();
  return reads_hidden() ? std::min(sequence.first_hidden + hidden_rows(sequence), rows) : rows;
}

// A sequence that has computed nothing itself takes blocks of the prefix index. Other sequences may have computed more
// of its prompt meanwhile.
void DraftModel::find_prefix(Sequence& sequence, std::span<const TokenId> tokens, std::uint64_t salt) {
  release(sequence);
  sequence.tokens.assign(tokens.begin(), tokens.end());
  sequence.known = static_cast<std::int32_t>(tokens.size());
  sequence.salt = salt_of(tokens, salt);
  auto match = blocks_->match(tokens.subspan(static_cast<std::size_t>(offset())), sequence.known - offset() - 1,
                              sequence.salt);
  sequence.computed = match.num_tokens;
  sequence.blocks = std::move(match.blocks);
  sequence.nodes = std::move(match.nodes);
  sequence.units = std::move(match.units);
  sequence.num_inserted = sequence.blocks.size();
  sequence.searched = true;
}

bool DraftModel::fits(std::int32_t tokens) const {
  const auto rows = tokens - offset();
  return rows > 0 && tokens < plan_.config.session_len && blocks_of(rows + 1) <= blocks_->num_blocks();
}

bool DraftModel::pauses(Sequence& sequence) {
  if (sequence.pause == 0) return false;
  --sequence.pause;
  return true;
}

std::optional<int> DraftModel::missing(SeqId id, std::int32_t tokens) {
  const auto found = sequences_.find(id);
  if (!fits(tokens) || (reads_hidden() && found == sequences_.end())) return std::nullopt;
  if (found == sequences_.end()) return tokens;
  auto& sequence = found->second;
  if (sequence.lost || pauses(sequence)) return std::nullopt;
  if (reads_hidden() && sequence.searched && sequence.computed < sequence.first_hidden) return std::nullopt;
  return std::max(tokens - offset() - sequence.computed, 1);
}

std::optional<int> DraftModel::set_tokens(SeqId id, std::span<const TokenId> tokens, std::uint64_t salt) {
  const auto size = static_cast<std::int32_t>(tokens.size()), rows = size - offset();
  auto& sequence = sequences_[id];
  const auto unknown = [this](TokenId token) { return token >= vocab_size_; };
  const auto rest = tokens.subspan(static_cast<std::size_t>(sequence.known));
  if (sequence.lost) return std::nullopt;
  if (!fits(size)) {
    forget(id);
    return std::nullopt;
  }
  if (lacks_tokens_ && std::ranges::any_of(rest, unknown)) {
    lose(sequence);
    return std::nullopt;
  }
  if (pauses(sequence)) return std::nullopt;
  if (!sequence.began) find_prefix(sequence, tokens, salt);
  auto& own = sequence.tokens;
  const auto same = std::ranges::mismatch(own.begin() + sequence.known, own.end(), tokens.begin() + sequence.known,
                                          tokens.end());
  own.erase(same.in1, own.end());
  sequence.computed = std::min({sequence.computed, static_cast<std::int32_t>(own.size()) - offset(), rows - 1});
  own.insert(own.end(), same.in2, tokens.end());
  sequence.known = size;
  if (reads_hidden()) {  // without the rows of rejected proposals
    keep_hidden(sequence, 0, std::clamp(rows - sequence.first_hidden, 0, hidden_rows(sequence)));
  }
  insert_blocks(sequence);
  if (reads_hidden() && (sequence.computed < sequence.first_hidden || end_of(sequence) < rows)) return std::nullopt;
  return rows - sequence.computed;
}

void DraftModel::propose(std::span<Wanted> all, int max_rows, SpeculationPolicy& policy) {
  ++calls_;
  std::vector<Job> jobs;
  for (auto& wanted : all) {
    const auto found = sequences_.find(wanted.id);
    if (found == sequences_.end()) continue;
    auto& sequence = found->second;
    sequence.used = calls_;
    if (reads_hidden() && sequence.computed < sequence.first_hidden) {
      lose(sequence);
      continue;
    }
    const auto rows = end_of(sequence) - sequence.computed;
    if (rows <= 0) continue;
    jobs.emplace_back(&wanted, &sequence, ++sample_ids_, rows);
    wanted.count = std::min(wanted.count, plan_.config.session_len - sequence.known);
  }
  std::ranges::stable_sort(jobs, {}, &Job::size);  // so that no prompt delays the sequences that lack little
  int left = reads_hidden() ? plan_.config.token_budget : std::min(max_rows, plan_.config.token_budget);
  std::vector<Job*> running;
  for (auto& job : jobs) {
    // It gets all blocks now. Otherwise two sequences could each wait for blocks that the other one holds.
    if (left == 0) break;
    const auto end = job.sequence->computed + job.size;
    bool fits = allocate(*job.sequence, end + job.wanted->count);
    if (!fits && reads_hidden()) {  // without proposals, so that its hidden states are not lost
      job.wanted->count = 0;
      fits = allocate(*job.sequence, end);
    }
    if (!fits && reads_hidden()) lose(*job.sequence);
    if (!fits) {
      job.sequence->pause = kPausedCalls;
      continue;
    }
    job.size = std::min(job.size, left);
    left -= job.size;
    running.push_back(&job);
  }
  while (!running.empty()) {
    compute(running, policy);
    for (auto* const job : running) {
      job->sequence->began = true;
      job->sequence->computed += std::exchange(job->size, 1);
    }
    // The last proposal of a sequence is not computed.
    std::erase_if(running, [this](const Job* job) {
      return !samples(*job) || std::ssize(job->wanted->proposals) >= job->wanted->count;
    });
  }
  if (!reads_hidden()) return;
  for (const auto& job : jobs) {
    auto& sequence = *job.sequence;
    if (sequence.lost) continue;
    sequence.computed = std::min(sequence.computed, sequence.known - offset());  // proposals are computed again
    insert_blocks(sequence);  // now, because the sequence may have ended
    drop_computed(sequence);
  }
}

bool DraftModel::samples(const Job& job) const {
  const auto& sequence = *job.sequence;
  return job.wanted->count > 0 && sequence.computed + job.size + offset() == std::ssize(sequence.tokens);
}

// Adds the sampled tokens to the jobs whose last token is computed.
void DraftModel::compute(std::span<Job* const> jobs, SpeculationPolicy& policy) {
  std::vector<std::int32_t> ids, positions, query_start = {0}, logits_rows;
  std::vector<std::int32_t> hidden;  // Layer: of the token before the token of each row
  const bool reads_main = reads_hidden() && jobs.front()->last_row < 0;
  std::vector<ops::SampleRow> rows;
  std::size_t stride = 0;
  for (const auto* const job : jobs) stride = std::max(stride, job->sequence->blocks.size());
  PerKind<std::vector<std::int32_t>> tables;
  tables.full.resize(stride * jobs.size());
  const bool has_windows = !blocks_->kinds().empty();
  if (has_windows) tables.window.resize(tables.full.size());
  for (std::size_t s = 0; s < jobs.size(); ++s) {
    auto& job = *jobs[s];
    const auto& sequence = *job.sequence;
    for (auto i = sequence.computed; i < sequence.computed + job.size; ++i) {
      ids.push_back(sequence.tokens[static_cast<std::size_t>(i + offset())]);
      positions.push_back(i);
      if (reads_hidden()) {
        hidden.push_back(reads_main ? sequence.hidden[static_cast<std::size_t>(i - sequence.first_hidden)]
                                    : job.last_row);
      }
    }
    job.last_row = static_cast<std::int32_t>(ids.size()) - 1;
    query_start.push_back(static_cast<std::int32_t>(ids.size()));
    const auto at = static_cast<std::ptrdiff_t>(s * stride);
    std::ranges::copy(sequence.blocks, tables.full.begin() + at);
    if (has_windows) {
      const auto& units = sequence.units.front();
      std::ranges::copy(units.units, tables.window.begin() + at + units.first);
    }
    if (!samples(job)) continue;
    logits_rows.push_back(query_start.back() - 1);
    auto& row = rows.emplace_back(job.wanted->row(sequence.tokens));
    row.mask = nullptr;  // of a grammar, which checks the proposals later
    row.logprobs = -1;
    row.sequence = job.sample_id;
  }
  const auto begun = std::chrono::steady_clock::now();
  executor_->launch({.ids = ids,
                     .attention = {.query_start = query_start,
                                   .positions = positions,
                                   .block_tables = {tables.full, tables.window, {}},
                                   .table_stride = static_cast<std::int64_t>(stride)},
                     .logits_rows = logits_rows,
                     .sample = rows,
                     .hidden_rows = hidden,
                     .reads_main = reads_main},
                    {});
  const auto sampled = executor_->collect();
  if (!reads_hidden() || !rows.empty()) {  // such a layer computes KV even if there are no drafts
    policy.drafted(static_cast<int>(ids.size()),
                   std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count());
  }
  auto next = sampled.begin();
  for (auto* const job : jobs) {
    if (!samples(*job)) continue;
    const auto& sample = *next++;
    auto& wanted = *job->wanted;
    wanted.sampled = true;
    if (ops::has_broken_logit(sample.error) && !std::exchange(warned_, true)) {
      log({LogLevel::warning, cat(name(), " proposes nothing where its logits are not finite: ", sample.error), "", {}});
    }
    if (!sample.error.empty() || sample.token >= vocab_size_) {
      wanted.count = 0;  // such as a bias for a token that this model does not have
      continue;
    }
    wanted.proposals.push_back(sample.token);
    job->sequence->tokens.push_back(sample.token);
  }
}

bool DraftModel::fills_block(SeqId id) const {
  const auto found = sequences_.find(id);
  if (found == sequences_.end() || !plan_.config.enable_prefix_caching) return false;
  const auto& sequence = found->second;
  const auto length = blocks_->block_len();
  return sequence.computed >= sequence.first_hidden && end_of(sequence) / length > sequence.computed / length;
}

void DraftModel::forget(SeqId id) {
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) return;
  release(found->second);
  drop(found->second.hidden);
  sequences_.erase(found);
}

void DraftModel::release(Sequence& sequence) {
  for (std::size_t k = 0; k < sequence.units.size(); ++k) blocks_->release_units(k, sequence.units[k].units);
  blocks_->release(sequence.blocks);
  Sequence empty;
  empty.used = sequence.used;
  empty.first_hidden = sequence.first_hidden;
  empty.hidden = std::move(sequence.hidden);
  sequence = std::move(empty);
}

void DraftModel::lose(Sequence& sequence) {
  release(sequence);
  keep_hidden(sequence, 0, 0);
  sequence.lost = true;
}

void DraftModel::insert_blocks(Sequence& sequence) {
  const auto tokens = std::span<const TokenId>(sequence.tokens).subspan(static_cast<std::size_t>(offset()));
  const auto length = static_cast<std::size_t>(blocks_->block_len());
  for (; (sequence.num_inserted + 1) * length <= static_cast<std::size_t>(sequence.computed); ++sequence.num_inserted) {
    const auto index = sequence.num_inserted;
    auto& block = sequence.blocks[index];
    const auto parent = sequence.nodes.empty() ? cache::PrefixNode{} : sequence.nodes.back();
    std::vector<cache::BlockId> units;
    for (auto& range : sequence.units) units.push_back(range.at(static_cast<std::int32_t>(index)));
    const auto node = blocks_->insert(parent, block, tokens.subspan(index * length, length), sequence.salt, units);
    for (std::size_t k = 0; k < units.size(); ++k) sequence.units[k].at(static_cast<std::int32_t>(index)) = units[k];
    if (node.unique_id == parent.unique_id) continue;  // there is no index, or the parent has left it
    if (node.block != block) {
      blocks_->retain({&node.block, 1});
      blocks_->release({&block, 1});
      block = node.block;
    }
    sequence.nodes.push_back(node);
  }
}

// Allocates the blocks of the first `tokens` tokens. A sequence that this call of propose() is not for may lose its
// blocks. Returns false if that is not enough.
bool DraftModel::allocate(Sequence& sequence, std::int32_t tokens) {
  const int wanted = blocks_of(tokens);
  const int count = wanted - static_cast<int>(sequence.blocks.size());
  if (count <= 0) return true;
  if (wanted > blocks_->num_blocks()) return false;
  const std::vector<int> units(blocks_->kinds().size(), count);
  while (!blocks_->allocate(count, sequence.blocks, units, sequence.units)) {
    Sequence* oldest = nullptr;
    for (auto& [id, other] : sequences_) {
      if (other.used == calls_ || other.blocks.empty()) continue;
      if (oldest == nullptr || other.used < oldest->used) oldest = &other;
    }
    if (oldest == nullptr) return false;
    release(*oldest);
  }
  return true;
}

void DraftModel::check_integrity(std::size_t alive, bool in_flight) const {
  if (sequences_.size() > alive) {
    throw Error(ErrorCode::internal, cat("the draft model has ", sequences_.size(), " sequences, and ", alive,
                                         " are alive"));
  }
  std::vector<std::int32_t> hidden = free_hidden_;
  for (const auto& [id, sequence] : sequences_) std::ranges::copy(sequence.hidden, std::back_inserter(hidden));
  std::ranges::sort(hidden);
  if (std::ranges::adjacent_find(hidden) != hidden.end()) {
    throw Error(ErrorCode::internal, "two rows have one hidden state");
  }
  if (!in_flight && hidden.size() != num_hidden_) {
    throw Error(ErrorCode::internal, cat(num_hidden_ - hidden.size(), " rows of the hidden states are lost"));
  }
  std::vector<std::int32_t> use(static_cast<std::size_t>(blocks_->num_blocks()));
  std::vector<std::vector<std::int32_t>> unit_use;
  for (const auto& kind : blocks_->kinds()) unit_use.emplace_back(static_cast<std::size_t>(kind.num_units()));
  for (const auto& [id, sequence] : sequences_) {
    for (const auto block : sequence.blocks) ++use[static_cast<std::size_t>(block)];
    for (std::size_t k = 0; k < sequence.units.size(); ++k) {
      for (const auto unit : sequence.units[k].units) ++unit_use[k][static_cast<std::size_t>(unit)];
    }
  }
  blocks_->check_integrity(use, unit_use);
}

}  // namespace charonia::runtime
