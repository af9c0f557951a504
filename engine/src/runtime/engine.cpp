#include "charonia/engine.h"

#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "ops/cuda/make_cuda_ops.h"
#include "runtime/engine_impl.h"

namespace charonia {

using runtime::Sequence;

Engine::Impl::Impl(const std::filesystem::path& weights_dir, const Settings& overrides,
                   std::shared_ptr<MetricsSink> sink)
    : sink_(std::move(sink)) {
  load(weights_dir, overrides);
  make_scheduler();
  stats_.blocks_total = stats_.blocks_free = blocks_->num_blocks();
  if (sink_) {
    sink_->set(Metric::weight_bytes, static_cast<double>(info.weight_bytes));
    sink_->set(Metric::kv_cache_bytes, static_cast<double>(info.kv_cache_bytes));
    sink_->set(Metric::kv_blocks_total, blocks_->num_blocks());
  }
  report_gauges();
  thread_ = std::thread([this] { run(); });
}

Engine::Impl::~Impl() {
  close();
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void Engine::Impl::load(const std::filesystem::path& weights_dir, const Settings& overrides) {
  const auto ini = weights_dir / "config.ini";
  info.warnings = apply_settings(read_config_ini(ini), info.config, &info.model);
  for (const auto& [key, value] : overrides) {
    for (const auto& field : config_fields()) {
      if (field.key == key && field.model_attribute) {
        throw Error(ErrorCode::invalid_argument,
                    cat("setting ", key, " is the model's own and cannot be changed (", value, ")"));
      }
    }
  }
  for (auto& warning : apply_settings(overrides, info.config)) info.warnings.push_back(std::move(warning));
  auto& config = info.config;
  const int trained = info.model.max_position_embeddings;
  if (config.session_len == 0) config.session_len = trained;
  if (config.session_len > trained) {
    info.warnings.push_back(cat("session_len = ", config.session_len, " is more than the ", trained,
                                " positions that the model was trained for; answers may suffer beyond them"));
  }
  // Small and soon read: a workspace without it is refused before its weights are loaded.
  tokens_ = std::make_unique<sample::TokenTable>(sample::TokenTable::load(weights_dir / "token_table.safetensors"));
  const bool automatic = config.device == "auto";
  executor_ = std::make_unique<runtime::Executor>(weights_dir, info.model, config);
  info.device = executor_->device();
  if (automatic && info.device == "cpu") ops::cuda_devices(info.device_note);
  info.instruction_set = executor_->instruction_set();
  info.weight_bytes = executor_->weight_bytes();
  info.weight_bytes_per_step = executor_->weight_bytes_per_step();
  info.kv_cache_bytes = executor_->kv_cache_bytes();
  info.num_blocks = executor_->num_blocks();
}

void Engine::Impl::make_scheduler() {
  auto& config = info.config;
  blocks_ = std::make_unique<cache::BlockManager>(info.num_blocks, config.cache_block_seq_len,
                                                  config.enable_prefix_caching);
  scheduler_ = std::make_unique<schedule::Scheduler>(schedule::Limits{config.max_batch_size, config.token_budget},
                                                     *blocks_);
  if (scheduler_->capacity_tokens() < config.session_len) {
    info.warnings.push_back(cat("session_len is lowered from ", config.session_len, " to ",
                                scheduler_->capacity_tokens(), ", which is what the ", info.num_blocks,
                                " k/v blocks hold; raise cache_max_entry_count for more"));
    config.session_len = static_cast<int>(scheduler_->capacity_tokens());
  }
}

void Engine::Impl::check_fits(const Request& request) const {
  const auto prompt = static_cast<std::int64_t>(request.input_ids.size());
  const std::int64_t limit = info.config.session_len;
  if (prompt + 1 > limit) {
    throw Error(ErrorCode::invalid_argument,
                cat("the prompt does not fit: it has ", prompt, " tokens and the context (session_len) holds ", limit,
                    ", one of them to be generated. Shorten the prompt by at least ", prompt + 1 - limit, " tokens"));
  }
  const auto& max_tokens = request.sampling.max_tokens;
  if (max_tokens && prompt + *max_tokens > limit) {
    throw Error(ErrorCode::invalid_argument,
                cat("prompt and max_tokens do not fit: ", prompt, " prompt tokens and max_tokens = ", *max_tokens,
                    " make ", prompt + *max_tokens, ", and the context (session_len) holds ", limit,
                    ". Lower max_tokens to at most ", limit - prompt, " or shorten the prompt"));
  }
}

std::vector<TokenId> Engine::Impl::end_ids_of(const SamplingParams& sampling) const {
  return sampling.end_ids.empty() ? info.model.end_ids : sampling.end_ids;
}

int Engine::Impl::seconds_until_room() const {
  // One waiting request leaves the queue for each one that finishes.
  return static_cast<int>(std::clamp(std::ceil(seconds_per_finish_), 1.0, 60.0));
}

Engine::Handle Engine::Impl::submit(Request request, Callback callback) {
  const int vocab = info.model.vocab_size;
  if (request.input_ids.empty()) throw Error(ErrorCode::invalid_argument, "input_ids is empty: send at least one token");
  for (const auto id : request.input_ids) {
    if (id < 0 || id >= vocab) {
      throw Error(ErrorCode::invalid_argument,
                  cat("input_ids holds ", id, ", which is no token id: the vocabulary is [0, ", vocab, ")"));
    }
  }
  request.sampling.validate(vocab);
  auto end_ids = end_ids_of(request.sampling);
  if (request.sampling.bad_words.size() + end_ids.size() >= static_cast<std::size_t>(vocab)) {
    throw Error(ErrorCode::invalid_argument, cat("bad_words has ", request.sampling.bad_words.size(),
                                                 " entries, which may leave no token of the vocabulary's ", vocab));
  }
  check_fits(request);
  const int room = info.config.session_len - static_cast<int>(request.input_ids.size());
  const int max_tokens = request.sampling.max_tokens.value_or(room);

  std::unique_lock lock(mutex_);
  if (closing_) throw Error(ErrorCode::unavailable, "the engine is shutting down and takes no new request");
  const auto waiting = static_cast<int>(inbox_.submitted.size()) + stats_.num_waiting;
  if (waiting >= info.config.max_queue_size) {
    throw Error(ErrorCode::resource_exhausted,
                cat("the queue is full: ", waiting, " requests wait and max_queue_size is ",
                    info.config.max_queue_size, "; retry after ", seconds_until_room(), " s"));
  }
  const auto seed = request.sampling.seed.value_or(seeds_());
  const Handle handle = next_handle_++;
  live_.emplace(handle, request.id);
  inbox_.submitted.emplace_back(
      handle, std::make_unique<Sequence>(std::move(request), std::make_shared<Callback>(std::move(callback)),
                                         Clock::now(), *tokens_, std::move(end_ids), max_tokens, seed));
  lock.unlock();
  wake_.notify_one();
  return handle;
}

bool Engine::Impl::cancel(Handle handle) {
  {
    const std::lock_guard lock(mutex_);
    if (!live_.contains(handle)) return false;
    inbox_.cancels.push_back({handle, Clock::now()});
  }
  wake_.notify_one();
  return true;
}

bool Engine::Impl::cancel(std::string_view id) {
  bool known = false;
  {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    for (const auto& [handle, name] : live_) {
      if (name != id) continue;
      inbox_.cancels.push_back({handle, now});
      known = true;
    }
  }
  if (known) wake_.notify_one();
  return known;
}

void Engine::Impl::close() {
  shutdown(0);
  const std::lock_guard one(shutdown_mutex_);
  delivery_.close();
}

void Engine::Impl::shutdown(int timeout_ms) {
  if (delivery_.on_this_thread()) {
    throw Error(ErrorCode::internal, "shutdown() was called from a result callback, which it would wait for");
  }
  const std::lock_guard one(shutdown_mutex_);
  std::unique_lock lock(mutex_);
  closing_ = true;
  const auto idle = [this] { return live_.empty(); };
  if (!drained_.wait_for(lock, std::chrono::milliseconds(timeout_ms), idle)) {
    const auto now = Clock::now();
    for (const auto& [handle, id] : live_) inbox_.cancels.push_back({handle, now});
    wake_.notify_one();
    drained_.wait(lock, idle);
  }
}

EngineStats Engine::Impl::stats() const {
  const std::lock_guard lock(mutex_);
  auto stats = stats_;
  stats.num_waiting += static_cast<int>(inbox_.submitted.size());
  return stats;
}

void Engine::Impl::check_integrity() {
  std::promise<void> done;
  auto checked = done.get_future();
  {
    const std::lock_guard lock(mutex_);
    inbox_.tasks.emplace_back([this, &done] {
      try {
        scheduler_->check_integrity();
        done.set_value();
      } catch (...) {
        done.set_exception(std::current_exception());
      }
    });
  }
  wake_.notify_one();
  checked.get();
}

// ---- the public face ----

Engine::Engine(const std::filesystem::path& weights_dir, const Settings& overrides, std::shared_ptr<MetricsSink> sink)
    : impl_(std::make_unique<Impl>(weights_dir, overrides, std::move(sink))) {}
Engine::~Engine() = default;
Engine::Handle Engine::submit(Request request, Callback callback) {
  return impl_->submit(std::move(request), std::move(callback));
}
bool Engine::cancel(Handle handle) { return impl_->cancel(handle); }
bool Engine::cancel(std::string_view id) { return impl_->cancel(id); }
void Engine::shutdown(int timeout_ms) { impl_->shutdown(timeout_ms); }
void Engine::close() { impl_->close(); }
const EngineInfo& Engine::info() const { return impl_->info; }
EngineStats Engine::stats() const { return impl_->stats(); }
void Engine::check_integrity() { impl_->check_integrity(); }

}  // namespace charonia
