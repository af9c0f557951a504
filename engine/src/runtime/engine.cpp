#include "charonia/engine.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>

#include "base/bytes.h"
#include "base/log.h"
#include "base/text.h"
#include "model/manifest.h"
#include "model/rounding.h"
#include "ops/cpu/free_memory.h"
#include "ops/cuda/make_cuda_ops.h"
#include "runtime/devices.h"
#include "runtime/engine_impl.h"
#include "runtime/memory_plan.h"
#include "grammar/guide_compiler.h"
#include "runtime/settings.h"
#include "runtime/speculative_method.h"

namespace charonia {

Engine::Impl::Impl(const std::filesystem::path& weights_dir, const Settings& overrides,
                   std::shared_ptr<MetricsSink> sink)
    : sink_(std::move(sink)) {
  load(weights_dir, overrides);
  make_scheduler();
  report_kernels();
  info.arithmetic = runtime::arithmetic_of(info.config, info.instruction_set);
  make_offload(weights_dir);
  make_sessions();
  make_guides(weights_dir);
  for (const auto& [name, folder] : runtime::adapter_folders(info.config.lora_adapters)) load_adapter(name, folder);
  stats_.blocks_total = stats_.blocks_free = blocks_->num_blocks();
  if (sink_) {
    const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
    sink_->set(Metric::start_time_seconds, now.count());
    sink_->set(Metric::weight_bytes, static_cast<double>(info.weight_bytes));
    sink_->set(Metric::kv_cache_bytes, static_cast<double>(info.kv_cache_bytes));
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
  auto settings = runtime::read_settings(weights_dir, overrides);
  info.model = std::move(settings.model);
  info.config = std::move(settings.config);
  info.default_sampling = std::move(settings.default_sampling);
  info.warnings = std::move(settings.warnings);
  auto& config = info.config;
  runtime::check_is_model(info.model);
  // This file is small. It is read first, so that a workspace without it fails before its weights are loaded.
  tokens_ = std::make_unique<text::TokenTable>(text::TokenTable::load(weights_dir / "token_table.safetensors"));
  thinking_rules_ = std::make_unique<runtime::ThinkingRules>(*tokens_);
  const bool automatic = config.device == "auto";
  plan_draft(weights_dir);
  executor_ = std::make_unique<runtime::Executor>(weights_dir, info.model, config,
                                                  draft_plan_ ? draft_plan_->bytes : 0);
  max_positions_ = config.session_len;
  info.device = executor_->device();
  if (automatic && info.device == "cpu") ops::cuda_devices(info.device_note);
  for (auto& warning : executor_->warnings()) info.warnings.push_back(std::move(warning));
  info.instruction_set = executor_->instruction_set();
  info.weight_bytes = executor_->weight_bytes();
  info.weight_bytes_per_step = executor_->weight_bytes_per_step();
  info.kv_cache_bytes = executor_->kv_cache_bytes();
  info.num_blocks = executor_->num_blocks().full;
  info.num_window_blocks = executor_->num_blocks().window;
  info.num_states = executor_->num_blocks().state;
}

// Before the model is loaded, so that its KV cache leaves memory for the draft model, and errors come early.
void Engine::Impl::plan_draft(const std::filesystem::path& weights_dir) {
  const auto& method = runtime::method_of(info.config);
  if (!method.has_drafts()) return;
  const auto choice = runtime::choose_devices(info.config);
  const auto free = runtime::free_memory(choice, info.config.tensor_para_size);
  // Now, so that the draft model has the same sizes of steps.
  runtime::resolve_step_sizes(info.config, {choice.device, runtime::sms_of(choice.gpus), std::ranges::min(free)});
  auto config = info.config;
  config.device = choice.device;
  auto manifest = runtime::manifest_of(weights_dir, config, info.model);
  auto model = info.model;
  model::round_weights(model, manifest, config.quantization);
  runtime::resolve_adapter_slots(config, manifest.modules());
  draft_plan_ = runtime::plan_draft(config, model, manifest, runtime::free_for_draft(choice.device, free));
  if (draft_plan_ && !draft_plan_->warning.empty()) info.warnings.push_back(draft_plan_->warning);
  if (draft_plan_ && !method.reads_hidden) runtime::check_vocabulary(*draft_plan_, *tokens_);
}

void Engine::Impl::make_scheduler() {
  auto& config = info.config;
  const auto commit = [this](CacheKind kind) {
    return [this, kind](int blocks) { executor_->commit_blocks(kind, blocks); };
  };
  const auto chunk = executor_->chunk_blocks();
  std::vector<cache::UnitKind> kinds;
  if (const int window = executor_->window(); window > 0) {
    kinds.push_back({window, info.num_window_blocks, chunk.window, commit(CacheKind::window)});
  }
  if (info.num_states > 0) {
    kinds.push_back({0, info.num_states, chunk.state, commit(CacheKind::state), CacheKind::state});
  }
  blocks_ = std::make_unique<cache::BlockManager>(
      info.num_blocks, config.cache_block_seq_len, config.enable_prefix_caching, chunk.full, commit(CacheKind::full),
      cache::BlockManager::default_hash, kinds);
  step_time_ =
      std::make_unique<schedule::StepTime>(config.step_time_ms, config.stream_interval_ms, config.token_budget);
  // Prompts that need a row of logits per token, and proposals, share the rows that the decoder has memory for.
  const int logits_rows = runtime::step_limits(config, info.model).max_logits_rows;
  schedule::Limits limits{config.max_batch_size, config.token_budget, logits_rows};
  limits.adapter_slots = executor_->adapter_slots();
  limits.load_bytes = runtime::KvOffload::kBytesPerStep;
  scheduler_ = std::make_unique<schedule::Scheduler>(limits, *blocks_, step_time_.get());
  if (runtime::speculates(config, info.model)) {
    speculation_ = std::make_unique<runtime::SpeculationPolicy>(std::min(logits_rows, config.token_budget),
                                                                scheduler_->max_proposal_states());
    if (draft_plan_) {
      draft_ = std::make_unique<runtime::DraftModel>(*draft_plan_, info.model.vocab_size, executor_.get());
      for (const auto& warning : draft_->warnings()) {
        info.warnings.push_back(cat("speculative_method = ", config.speculative_method, ": ", warning));
      }
      if (!draft_->reads_hidden() && 2 * draft_->weight_bytes_per_step() > info.weight_bytes_per_step) {
        info.warnings.push_back(cat(draft_->name(), " reads ",
                                    100 * draft_->weight_bytes_per_step() / info.weight_bytes_per_step,
                                    " % of the bytes that the model reads in a step: choose a draft model that is about "
                                    "five times smaller"));
      }
      if (!draft_plan_->is_mtp()) info.draft_model = draft_plan_->model.model_name;
    }
  } else if (auto why = runtime::speculation_warning(config, info.model); !why.empty()) {
    info.warnings.push_back(std::move(why));
    config.speculative_method = "off";
  }
  if (scheduler_->capacity_tokens() < config.session_len) {
    info.warnings.push_back(cat("session_len is lowered from ", config.session_len, " to ",
                                scheduler_->capacity_tokens(), ", which is what the ", info.num_blocks,
                                " KV blocks hold; raise cache_max_entry_count for more"));
    config.session_len = static_cast<int>(scheduler_->capacity_tokens());
  }
  load_ = std::make_unique<runtime::LoadTracker>(config);
}

void Engine::Impl::make_offload(const std::filesystem::path& weights_dir) {
  if (info.config.kv_offload_path.empty() && info.config.kv_offload_memory.empty()) return;
  const auto reserved = executor_->untouched_bytes() + (draft_ ? draft_->untouched_bytes() : 0);
  runtime::check_offload(info.config, info.device, static_cast<std::int64_t>(ops::cpu::free_memory()) - reserved,
                         info.warnings);
  runtime::KvFiles::Options options;
  options.changed = [this] { hand_task([] {}); };
  offload_ = std::make_unique<runtime::KvOffload>(weights_dir, info, max_positions_, *executor_, *blocks_, *load_,
                                                  std::move(options), info.warnings);
  scheduler_->set_offload(offload_.get());
}

void Engine::Impl::make_sessions() {
  const auto& config = info.config;
  std::unique_ptr<runtime::SessionFiles> files;
  if (config.session_ttl_s > 0 && !config.session_dir.empty()) {
    files = std::make_unique<runtime::SessionFiles>(config.session_dir, info.model.model_name, info.model.vocab_size);
  }
  const runtime::SessionStore::Limits limits{
      .ttl_s = config.session_ttl_s,
      .pinned = config.session_quota,
      .max_sessions = config.max_sessions};
  sessions_ = std::make_unique<runtime::SessionStore>(limits, *blocks_, std::move(files));
  sessions_->restore(info.warnings);
  tidy_sessions();
}

void Engine::Impl::make_guides(const std::filesystem::path& weights_dir) {
  if (info.config.jump_forward || speculation_) {
    std::string why;
    token_split_ = text::TokenSplit::load(weights_dir / "token_split.safetensors", *tokens_, why);
    if (!token_split_ && info.config.jump_forward) info.warnings.push_back(cat("jump_forward is off: ", why));
  }
  auto make = [this] {
    return std::make_unique<grammar::GuideCompiler>(*tokens_, info.model.vocab_size, info.model.end_ids,
                                                    token_split_.get());
  };
  guides_ = std::make_unique<runtime::GuideThread>(std::move(make), sink_,
                                                    [this] { hand_task([this] { begin_compiled(); }); });
}

void Engine::Impl::hand_task(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    inbox_.tasks.push_back(std::move(task));
  }
  wake_.notify_one();
}

void Engine::Impl::close() {
  shutdown(0);
  const std::lock_guard one(shutdown_mutex_);
  on_engine_thread([] {});  // waits until the engine thread has destroyed the last requests and their callbacks
  guides_->close();
  if (offload_) offload_->close();
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
    for (const auto& [handle, id] : live_) inbox_.ends.push_back({handle, now});
    wake_.notify_one();
    drained_.wait(lock, idle);
  }
  lock.unlock();
  sessions_->flush();
  // The last steps may still be in flight. A second shutdown has nothing to store.
  for (bool done = !offload_ || std::exchange(stored_, true); !done;) {
    on_engine_thread([&] {
      done = in_flight_ == nullptr;
      if (done) offload_->flush();
    });
  }
}

EngineStats Engine::Impl::stats() const {
  const int num_sessions = sessions_->count();
  const std::lock_guard lock(mutex_);
  auto stats = stats_;
  stats.num_waiting += static_cast<int>(inbox_.submitted.size());
  stats.num_sessions = num_sessions;
  return stats;
}

bool Engine::Impl::end_session(std::string_view session_id) {
  const bool known = sessions_->forget(session_id);
  if (known) {
    {
      const std::lock_guard lock(mutex_);
      inbox_.tasks.emplace_back([this] {
        tidy_sessions();
        report_gauges();
      });
    }
    wake_.notify_one();
  }
  return known;
}

void Engine::Impl::on_engine_thread(const std::function<void()>& task) {
  std::promise<void> promise;
  auto done = promise.get_future();
  {
    const std::lock_guard lock(mutex_);
    inbox_.tasks.emplace_back([&] {
      try {
        task();
        promise.set_value();
      } catch (...) {
        promise.set_exception(std::current_exception());
      }
    });
  }
  wake_.notify_one();
  done.get();
}

void Engine::Impl::check_integrity() {
  on_engine_thread([this] {
    scheduler_->check_integrity();
    if (draft_) draft_->check_integrity(completions_.size(), in_flight_ != nullptr);
  });
}

std::vector<std::string> Engine::Impl::kernel_report() {
  std::vector<std::string> lines;
  on_engine_thread([&] { lines = kernels(); });
  return lines;
}

// Call it between steps. The lines of the draft model come last.
std::vector<std::string> Engine::Impl::kernels() const {
  auto lines = executor_->kernel_report();
  if (draft_) std::ranges::move(draft_->kernel_report(), std::back_inserter(lines));
  return lines;
}

void Engine::Impl::report_kernels() {
  info.kernel_report = kernels();
  if (info.kernel_report.empty()) return;
  log({LogLevel::info,
       cat("which kernels were chosen: ", info.kernel_report.size(),
           " lines in EngineInfo::kernel_report (Python: Engine.info.kernel_report), which `charonia benchmark static "
           "--verbose` prints"),
       "",
       {}});
}

// ---- the public class ----

Engine::Engine(const std::filesystem::path& weights_dir, const Settings& overrides, std::shared_ptr<MetricsSink> sink)
    : impl_(std::make_unique<Impl>(weights_dir, overrides, std::move(sink))) {}
Engine::~Engine() = default;
Engine::Handle Engine::submit(Request request, Callback callback) {
  return impl_->submit(std::move(request), std::move(callback));
}
bool Engine::cancel(Handle handle) { return impl_->end(handle, false); }
bool Engine::cancel(std::string_view id) { return impl_->end(id, false); }
bool Engine::stop(Handle handle) { return impl_->end(handle, true); }
bool Engine::stop(std::string_view id) { return impl_->end(id, true); }
bool Engine::end_session(std::string_view session_id) { return impl_->end_session(session_id); }
std::vector<SessionInfo> Engine::sessions() const { return impl_->sessions(); }
void Engine::load_adapter(const std::string& name, const std::filesystem::path& folder) {
  impl_->load_adapter(name, folder);
}
bool Engine::unload_adapter(std::string_view name) { return impl_->unload_adapter(name); }
std::vector<AdapterInfo> Engine::adapters() const { return impl_->adapters(); }
Error Engine::no_adapter(std::string_view name) const { return impl_->no_adapter(name); }
std::string_view Engine::token_bytes(TokenId id) const { return impl_->token_bytes(id); }
std::string_view Engine::raw_token_bytes(TokenId id) const { return impl_->raw_token_bytes(id); }
void Engine::shutdown(int timeout_ms) { impl_->shutdown(timeout_ms); }
void Engine::close() { impl_->close(); }
void Engine::on_failure(std::function<void()> function) { impl_->on_failure(std::move(function)); }
void Engine::on_delivered(std::function<void()> function) { impl_->on_delivered(std::move(function)); }
const EngineInfo& Engine::info() const { return impl_->info; }
EngineStats Engine::stats() const { return impl_->stats(); }
std::vector<std::string> Engine::kernel_report() { return impl_->kernel_report(); }
void Engine::check_integrity() { impl_->check_integrity(); }

}  // namespace charonia
