#include "model.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <utility>

#include "base/bytes.h"
#include "base/json.h"
#include "base/text.h"
#include "error.h"
#include "runtime/settings.h"

namespace charonia::triton {
namespace {

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

ModelIdentity identify(TRITONBACKEND_Model* model) {
  ModelIdentity identity;
  const char* text = nullptr;
  check(TRITONBACKEND_ModelName(model, &text));
  identity.name = text;
  check(TRITONBACKEND_ModelVersion(model, &identity.version));
  TRITONBACKEND_ArtifactType type{};
  check(TRITONBACKEND_ModelRepository(model, &type, &text));
  if (type != TRITONBACKEND_ARTIFACT_FILESYSTEM) {
    throw Error(ErrorCode::unsupported, "the model repository must be a folder on this machine");
  }
  identity.repository = text;
  return identity;
}

// Returns the model's configuration in JSON, as completed by the server.
std::string config_json(TRITONBACKEND_Model* model) {
  TRITONSERVER_Message* raw = nullptr;
  check(TRITONBACKEND_ModelConfig(model, 1, &raw));
  const MessagePtr message(raw);
  const char* text = nullptr;
  std::size_t bytes = 0;
  check(TRITONSERVER_MessageSerializeToJson(message.get(), &text, &bytes));
  return {text, bytes};
}

// Checks the settings. The error for a wrong setting names the place where it is set.
void check_settings(const Settings& settings, const std::string& place) {
  try {
    EngineConfig unused;
    apply_settings(settings, unused);
  } catch (const Error& error) {
    throw Error(error.code(), place + ": " + error.what());
  }
}

// Returns the configuration of the workspace with these settings.
EngineConfig config_of(const ModelIdentity& identity, const Settings& settings) {
  EngineConfig config;
  ModelConfig model;
  apply_settings(read_config_ini(identity.weights_dir() / "config.ini"), config, &model);
  apply_settings(settings, config);
  return config;
}

Settings gather_settings(const ModelIdentity& identity, const ModelOptions& options) {
  auto settings = settings_from_environment();
  check_settings(settings, "environment (CHARONIA_<KEY>)");
  check_settings(options.settings, "`parameters` of " + (identity.repository / "config.pbtxt").string());
  settings.insert(options.settings.begin(), options.settings.end());  // keeps the settings of the environment
  if (!options.gpus.empty()) {
    const int ranks = config_of(identity, settings).tensor_para_size;
    settings.emplace("device_ids", device_ids_of(options.gpus, ranks));
  }
  return settings;
}

}  // namespace

TRITONSERVER_Server* server_of(TRITONBACKEND_Model* model) {
  TRITONSERVER_Server* server = nullptr;
  check(TRITONBACKEND_ModelServer(model, &server));
  return server;
}

Model::Model(TRITONBACKEND_Model* model, const MetricFamilies& families, Generations& generations)
    : Model(model, families, generations, identify(model), read_model_options(config_json(model))) {}

Model::Model(TRITONBACKEND_Model* model, const MetricFamilies& families, Generations& generations,
             const ModelIdentity& identity, const ModelOptions& options)
    : generation_(generations, identity.name, identity.version),
      sink_(make_metrics_sink(families, identity.name)),
      engine_(identity.weights_dir(), gather_settings(identity, options), sink_),
      watcher_(WatchedModel(server_of(model), identity.name, identity.version, options.warmup), generation_, engine_,
               calls_, subscriptions_, [this](const std::string& why) { end_all(why); }) {
  // Exits without destructors, because they would use the device. The clients see that the connection closes.
  engine_.on_failure([] { std::_Exit(EXIT_FAILURE); });
  engine_.on_delivered([this] { subscriptions_.flush(); });
  log_loaded(identity.name + " version " + std::to_string(identity.version));
  generation_.begin();
}

void Model::log_loaded(const std::string& name) const {
  const auto& info = engine_.info();
  const auto& model = info.model;
  const bool quantised = !model.data_type.empty() && model.data_type != model.weight_type;
  const auto type = quantised ? model.weight_type + " weights, " + model.data_type : model.weight_type;
  const auto where = info.device == "cuda"   ? "GPU " + info.config.device_ids
                     : info.device == "null" ? "null, which computes nothing"
                                             : info.device + ", " + std::to_string(info.config.threads) + " threads";
  const auto& method = info.config.speculative_method;
  const auto speculation =
      info.draft_model.empty() ? method : cat(method == "eagle3" ? "eagle3, head " : "draft model ", info.draft_model);
  log_info(cat(name, ": ", model.model_name, " (", model.model_family, ", ", type, ") on ", where, ", ",
               info.instruction_set, "; weights ", bytes_text(info.weight_bytes), "; KV cache ",
               bytes_text(info.kv_cache_bytes), " (", runtime::kv_type(model, info.config), ") in ", info.num_blocks,
               " blocks of ", info.config.cache_block_seq_len,
               " = ", std::int64_t{info.num_blocks} * info.config.cache_block_seq_len, " tokens",
               info.num_window_blocks > 0 ? cat(" and ", info.num_window_blocks, " window blocks") : "",
               info.num_states > 0 ? cat(" and ", info.num_states, " states") : "",
               method == "off" ? "" : cat("; speculation: ", speculation), "; context ",
               info.config.session_len, " tokens; steps of at most ", info.config.token_budget, " tokens and ",
               info.config.max_batch_size, " sequences"));
  if (!info.device_note.empty()) log_info(name + ": device = auto is the CPU: " + info.device_note);
  for (const auto& warning : info.warnings) log_warning(name + ": " + warning);
}

void Model::execute(TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request* request) noexcept {
  const auto begin = now_ns();
  bool taken = false;
  std::shared_ptr<TracedRequest> traced;
  try {
    traced = TracedRequest::of(request);
    taken = take(request, traced);
  } catch (const std::exception& error) {
    // Without a response factory, no response can be sent.
    log_error(std::string("a request could not be answered: ") + error.what());
  }
  // Triton's statistics need the request, but the request is released before its last response. So they count requests
  // and measure the time of execute() only. The engine's own metrics have the time of requests.
  const auto end = now_ns();
  log_failure(TRITONBACKEND_ModelInstanceReportStatistics(instance, request, taken, begin, begin, end, end),
              "reporting statistics");
  // The last owner of a traced request releases it: this function or the call.
  if (!traced) {
    log_failure(TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_ALL), "releasing a request");
  }
}

bool Model::take(TRITONBACKEND_Request* request, std::shared_ptr<TracedRequest> traced) {
  const auto call = std::make_shared<Call>(request);
  call->traced = std::move(traced);
  try {
    call->id = request_id(request);
    auto asked = read_call(request, engine_.info().default_sampling);
    call->outputs = asked.outputs;
    if (asked.action != Action::generate) {
      act(asked, call);
      return true;
    }
    call->session_id = asked.request.session_id;
    call->echo = std::move(asked.echo);
    call->in_reasoning = asked.in_reasoning;
    if (asked.request.sampling.prompt_logprobs >= 0) call->prompt_ids = asked.request.input_ids;
    // The engine rejects a number that is out of range.
    call->num_open = static_cast<std::size_t>(std::max(asked.request.sampling.n, 1));
    if (const auto& resumed = asked.request.resumed; !resumed.empty()) {
      for (const auto& tokens : resumed) call->begun.push_back(!tokens || !tokens->empty());
      call->num_open = static_cast<std::size_t>(
          std::ranges::count_if(resumed, &std::optional<std::vector<TokenId>>::has_value));
    }
    if (!asked.subscription.empty()) {
      call->subscription = subscriptions_.begin(asked.subscription, asked.key);
      call->key = asked.key;
      asked.request.joined_responses = true;
    }
    submit(std::move(asked.request), call);
    if (call->subscription) call->stream->close();
    return true;
  } catch (const std::exception& error) {
    request_log_.rejected(call->id, error);
    fail(*call, error);
    return false;
  }
}

void Model::act(const EngineCall& asked, const std::shared_ptr<Call>& call) {
  switch (asked.action) {
    case Action::generate:
      return;
    case Action::load_adapter:
      return load_adapter(asked, call);
    case Action::unload_adapter:
      if (const auto& name = asked.request.lora_name; !engine_.unload_adapter(name)) {
        throw engine_.no_adapter(name);
      }
      log_info(cat("unloaded the adapter ", asked.request.lora_name));
      return list_adapters(*call);
    case Action::list_adapters:
      return list_adapters(*call);
    case Action::subscribe:
      return open(asked.subscription, *call);
    case Action::acknowledge:
      subscriptions_.acknowledge(asked.subscription, asked.read);
      call->stream->close();
      return;
    case Action::unsubscribe:
      subscriptions_.close(asked.subscription);
      call->stream->close();
      return;
    case Action::end_session:
      engine_.end_session(asked.request.session_id);
      break;
    case Action::stop:
    case Action::cancel:
      end_requests(asked);
      break;
  }
  Result empty;
  empty.finish_reason = asked.action == Action::end_session ? FinishReason::stop : FinishReason::cancelled;
  call->stream->send(empty, {}, call->outputs, true);
}

void Model::load_adapter(const EngineCall& asked, const std::shared_ptr<Call>& call) {
  if (loads_adapter_.exchange(true)) {
    throw Error(ErrorCode::resource_exhausted, "another adapter is being loaded; retry after 1 s");
  }
  const auto load = [this, call, name = asked.request.lora_name, path = asked.lora_path] {
    try {
      try {
        engine_.load_adapter(name, path);
      } catch (const Error& error) {
        // The client can use another adapter.
        const bool unsupported = error.code() == ErrorCode::unsupported;
        throw Error(unsupported ? ErrorCode::invalid_argument : error.code(), error.what());
      }
      log_info(cat("loaded the adapter ", name, " from ", path));
      loads_adapter_ = false;
      list_adapters(*call);
    } catch (const std::exception& error) {
      loads_adapter_ = false;
      fail(*call, error);
    }
  };
  try {
    adapter_loader_ = std::jthread(load);
  } catch (...) {
    loads_adapter_ = false;
    throw;
  }
}

void Model::list_adapters(Call& call) {
  auto list = nlohmann::json::array();
  for (const auto& one : engine_.adapters()) {
    list.push_back({{"name", one.name},
                    {"path", one.folder},
                    {"fingerprint", one.fingerprint},
                    {"rank", one.max_rank},
                    {"bytes", one.bytes}});
  }
  const auto text = list.dump();
  Extras extras;
  extras.lora_adapters = text;
  Result empty;
  empty.finish_reason = FinishReason::stop;
  call.stream->send(empty, extras, call.outputs, true);
}

// An unknown id is not an error, because the request may have ended, or may still arrive.
void Model::end_requests(const EngineCall& asked) {
  const auto& request = asked.request;
  const auto end = [&](const auto& who) {
    return asked.action == Action::stop ? engine_.stop(who) : engine_.cancel(who);
  };
  if (!request.session_id.empty()) {
    for (const auto handle : calls_.of_session(request.session_id)) end(handle);
  } else if (!end(std::string_view(request.id)) && !asked.subscription.empty()) {
    subscriptions_.refuse(asked.subscription, asked.key);
  }
}

void Model::open(const std::string& subscription, Call& call) {
  if (const auto why = why_ended(); !why.empty()) throw Error(ErrorCode::unavailable, why);
  subscriptions_.open(subscription, call.stream, engine_.info());
}

void Model::count_subscriptions(int change) {
  if (change > 0) {
    calls_.opened();
  } else {
    calls_.closed();
  }
  if (sink_) sink_->add(Metric::subscriptions, change, 0);
}

void Model::submit(Request request, const std::shared_ptr<Call>& call) {
  try {
    // Add the call to the table first, because the last response may be sent before submit() returns.
    calls_.add(call);
    if (call->traced) call->traced->submitted();
    const auto handle = engine_.submit(std::move(request), [this, call](Result&& result) { deliver(*call, result); });
    calls_.submitted(*call, handle);
  } catch (...) {
    calls_.remove(*call);
    // The request's own stream receives the error, not the subscription.
    if (const auto subscription = std::exchange(call->subscription, nullptr)) {
      subscriptions_.ended(*subscription, call->key);
    }
    throw;
  }
}

void Model::deliver(Call& call, const Result& result) noexcept {
  const bool last = result.finish_reason != FinishReason::none && --call.num_open == 0;
  call.totals.see(result);
  if (call.traced) call.traced->took(call.totals.timings);
  try {
    send(call, result, last);
  } catch (const std::exception& error) {
    // fail() ends the stream. Then the watcher cancels the request.
    log_error(std::string("a response could not be made: ") + error.what());
    fail(call, error);
  }
  if (last) {
    request_log_.ended(call.id, call.totals);
    call.traced.reset();
    calls_.remove(call);
    if (call.subscription) subscriptions_.ended(*call.subscription, call.key);
  }
}

// An error of one sequence ends the request: the stream ends, and the watcher cancels the other sequences.
void Model::send(Call& call, const Result& result, bool last) {
  if (const auto error = error_of(result)) {
    fail(call, *error);
    return;
  }
  const auto index = static_cast<std::size_t>(result.index);
  if (call.begun.size() <= index) call.begun.resize(index + 1);
  const bool first = !call.begun[index];
  const bool progress = result.num_computed_tokens > 0;
  call.begun[index] = call.begun[index] || !progress;
  Extras extras;
  if (first && !progress) extras.echo = call.echo;
  if (first && !progress && index == 0) extras.prompt_ids = call.prompt_ids;
  if (!call.subscription) return call.stream->send(result, extras, call.outputs, last);
  if (call.failed) return;
  extras.in_reasoning = first && call.in_reasoning;
  for (const auto id : result.token_ids) extras.token_bytes.push_back(engine_.token_bytes(id));
  extras.name_of = [this](TokenId id) {
    return TokenName{.bytes = engine_.raw_token_bytes(id), .special = engine_.token_bytes(id).empty()};
  };
  subscriptions_.add(call.subscription, call.key, result, extras);
}

std::optional<Error> Model::error_of(const Result& result) {
  if (result.finish_reason == FinishReason::error) return Error(result.error_code, result.error);
  if (result.finish_reason != FinishReason::cancelled) return std::nullopt;
  const auto why = why_ended();
  if (why.empty()) return std::nullopt;
  return Error(ErrorCode::unavailable,
               why + "; the request was ended after " + std::to_string(result.num_output_tokens) + " tokens");
}

void Model::fail(Call& call, const std::exception& error) {
  if (call.subscription) {
    if (!call.failed.exchange(true)) subscriptions_.add_error(call.subscription, call.key, client_text(error));
    return;
  }
  call.stream->fail(error);
}

std::string Model::why_ended() {
  const std::lock_guard lock(why_mutex_);
  return why_ended_;
}

void Model::end_all(const std::string& why) {
  {
    const std::lock_guard lock(why_mutex_);
    why_ended_ = why;
  }
  engine_.shutdown(0);
}

}  // namespace charonia::triton
