// The Python module charonia._engine: a thin binding of the public headers. charonia/api/engine.py is its Python side.
//
// Locks: a method that may wait releases the GIL first. The delivery thread takes the GIL for each result. So no thread
// waits for an engine's lock while it holds the GIL, and no thread waits for the GIL while it holds an engine's lock.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/text.h"
#include "charonia/config.h"
#include "charonia/engine.h"
#include "charonia/error.h"
#include "charonia/types.h"
#include "grammar/guide_compiler.h"
#include "kernel_bench.h"
#include "model/layers.h"
#include "ops/cpu/bandwidth.h"
#include "ops/cpu/free_memory.h"
#include "ops/cuda/make_cuda_ops.h"
#include "runtime/draft_logits.h"
#include "runtime/proposals.h"
#include "runtime/settings.h"
#include "text/token_split.h"
#include "text/token_table.h"

namespace py = pybind11;
using namespace charonia;

namespace {

// True while this thread runs or destroys a Python callback. This happens on a thread of an engine, and on the thread
// that submits a request that is rejected.
thread_local bool in_callback = false;

// Declare it before taking the GIL: releasing the GIL may destroy Python objects of this thread, for example an engine.
class InCallback {
 public:
  InCallback() = default;
  InCallback(const InCallback&) = delete;
  InCallback& operator=(const InCallback&) = delete;
  ~InCallback() { in_callback = before_; }

 private:
  const bool before_ = std::exchange(in_callback, true);
};

// A Python callable that may be copied, called and destroyed on any thread without the GIL.
class Callback {
 public:
  explicit Callback(py::function function)
      : function_(new py::function(std::move(function)), [](py::function* held) {
          const InCallback inside;  // it may own the last reference to the engine
          const py::gil_scoped_acquire gil;
          delete held;
        }) {}

  void operator()(Result&& result) const {
    const InCallback inside;
    const py::gil_scoped_acquire gil;
    try {
      (*function_)(std::move(result));
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("charonia: the callback of a request");
    }
  }

 private:
  std::shared_ptr<py::function> function_;
};

// The existing engines, and the threads that destroy or shut down engines for other threads. All of them must end
// before the interpreter: a delivery thread that takes the GIL while the interpreter exits would end the process.
class Registry {
 public:
  void add(std::weak_ptr<Engine> engine) {
    const std::lock_guard lock(mutex_);
    std::erase_if(engines_, [](const auto& one) { return one.expired(); });
    engines_.push_back(std::move(engine));
  }

  template <class Work>
  void on_another_thread(Work work) {
    const std::lock_guard lock(mutex_);
    threads_.emplace_back(std::move(work));
  }

  // Closes all engines: cancels their requests, and delivers the last results. Afterwards they reject requests.
  void close() {
    std::vector<std::weak_ptr<Engine>> engines;
    std::vector<std::thread> threads;
    {
      const std::lock_guard lock(mutex_);
      engines.swap(engines_);
      threads.swap(threads_);
    }
    for (const auto& one : engines) {
      if (const auto engine = one.lock()) engine->close();
    }
    for (auto& thread : threads) thread.join();
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Engine>> engines_;
  std::vector<std::thread> threads_;
};

// The registry is never destroyed. A forked child has a new, empty registry: the threads of the parent's engines do not
// exist there, and their locks may stay locked forever.
Registry& registry() {
  static Registry* one = [] {
    pthread_atfork(nullptr, nullptr, [] { one = new Registry; });
    return new Registry;
  }();
  return *one;
}

// Owns an engine. The last reference may be dropped on any thread, even in a callback, by the garbage collector. A
// callback runs on the engine's own thread, which the engine cannot join, so another thread destroys the engine. The
// same holds for shutdown. In a forked child, destruction, shutdown, cancel and stop do nothing, and every other call
// is rejected.
class EngineHolder {
 public:
  EngineHolder(const std::filesystem::path& weights_dir, const Settings& overrides) {
    const py::gil_scoped_release release;
    engine_ = std::make_shared<Engine>(weights_dir, overrides);
    registry().add(engine_);
  }
  EngineHolder(const EngineHolder&) = delete;
  EngineHolder& operator=(const EngineHolder&) = delete;
  ~EngineHolder() {
    const py::gil_scoped_release release;
    if (forked()) {
      new std::shared_ptr<Engine>(std::move(engine_));  // never destroyed
    } else if (in_callback) {
      registry().on_another_thread([engine = std::move(engine_)]() mutable { engine.reset(); });
    } else {
      engine_.reset();
    }
  }

  Engine& get() {
    if (forked()) {
      throw Error(ErrorCode::unavailable,
                  cat("this engine belongs to process ", process_, ", which forked this one: make another one here, ",
                      "or start processes with the start method spawn"));
    }
    return *engine_;
  }

  // which: a handle or an id. Python objects cancel their requests when they are destroyed, also in a forked child.
  template <class Which>
  bool cancel(Which which) {
    return !forked() && engine_->cancel(which);
  }
  template <class Which>
  bool stop(Which which) {
    return !forked() && engine_->stop(which);
  }

  void shutdown(int timeout_ms) {
    if (forked()) return;
    const auto work = [engine = engine_, timeout_ms] {
      engine->shutdown(timeout_ms);
      engine->close();
    };
    if (in_callback) {
      registry().on_another_thread(work);
    } else {
      work();
    }
  }

 private:
  bool forked() const { return ::getpid() != process_; }

  const pid_t process_ = ::getpid();
  std::shared_ptr<Engine> engine_;
};

// Returns the name of the class in errors.py for each code.
const char* error_class(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return "InvalidRequestError";
    case ErrorCode::not_found:
      return "NotFoundError";
    case ErrorCode::resource_exhausted:
      return "OverloadedError";
    case ErrorCode::unavailable:
      return "EngineClosedError";
    case ErrorCode::deadline_exceeded:
      return "DeadlineExceededError";
    case ErrorCode::unsupported:
      return "UnsupportedError";
    case ErrorCode::internal:
      break;
  }
  return "InternalError";
}

// The only place that converts the engine's errors to Python exceptions.
void raise_error(const Error& error) {
  py::set_error(py::module_::import("charonia.errors").attr(error_class(error.code())), error.what());
}

Engine::Handle submit(EngineHolder& holder, std::string id, std::vector<TokenId> input_ids, SamplingParams sampling,
                      int priority, bool stream, bool strip_leading_space, std::string session_id,
                      std::vector<TokenId> continuation_ids, bool end_session, std::optional<int> timeout_ms,
                      bool prompt_logits, const std::optional<std::pair<std::string, std::string>>& guide,
                      std::string cache_salt, std::string owner, std::vector<std::string> stop_until,
                      bool fit_max_tokens, bool prompt_progress, std::string lora_name, std::string pooling,
                      int dimensions, py::function function) {
  Request request;
  request.id = std::move(id);
  request.input_ids = std::move(input_ids);
  request.sampling = std::move(sampling);
  request.priority = priority;
  request.stream = stream;
  request.strip_leading_space = strip_leading_space;
  request.session_id = std::move(session_id);
  request.continuation_ids = std::move(continuation_ids);
  request.end_session = end_session;
  request.timeout_ms = timeout_ms;
  request.prompt_logits = prompt_logits;
  request.cache_salt = std::move(cache_salt);
  request.owner = std::move(owner);
  if (guide) request.guide = Guide{guide_type(guide->first), guide->second};
  request.stop_until = std::move(stop_until);
  request.fit_max_tokens = fit_max_tokens;
  request.prompt_progress = prompt_progress;
  request.lora_name = std::move(lora_name);
  request.pooling = std::move(pooling);
  request.dimensions = dimensions;
  Callback callback(std::move(function));
  const py::gil_scoped_release release;
  return holder.get().submit(std::move(request), std::move(callback));
}

using LogprobRows = std::vector<std::vector<std::pair<TokenId, float>>>;

LogprobRows pairs(const std::vector<std::vector<TokenLogprob>>& rows) {
  LogprobRows out;
  for (const auto& row : rows) {
    auto& entries = out.emplace_back();
    for (const auto& entry : row) entries.emplace_back(entry.id, entry.logprob);
  }
  return out;
}

// [rows, vocab]; [0, 0] without rows.
py::array_t<float> matrix(const std::vector<std::vector<float>>& rows) {
  const auto cols = rows.empty() ? 0 : rows.front().size();
  py::array_t<float> out({rows.size(), cols});
  for (std::size_t r = 0; r < rows.size(); ++r) std::ranges::copy(rows[r], out.mutable_data() + r * cols);
  return out;
}

void bind_config(py::module_& m) {
  py::class_<ConfigField>(m, "ConfigField", "One key of config.ini.")
      .def_readonly("key", &ConfigField::key)
      .def_readonly("kind", &ConfigField::kind, "int | float | bool | string")
      .def_readonly("default_value", &ConfigField::default_value)
      .def_readonly("range", &ConfigField::range)
      .def_readonly("help", &ConfigField::help)
      .def_readonly("model_attribute", &ConfigField::model_attribute)
      .def_readonly("ignored", &ConfigField::ignored);
  m.def(
      "config_fields",
      [] {
        const auto fields = config_fields();
        return std::vector<ConfigField>(fields.begin(), fields.end());
      },
      "Every key of config.ini, in its order.");
  m.def(
      "check_settings",
      [](const Settings& settings) {
        EngineConfig engine;
        return apply_settings(settings, engine);
      },
      py::arg("settings"), "Checks keys and values; returns warnings.");
  m.def(
      "setting_warnings",
      [](const std::filesystem::path& weights, const Settings& settings) {
        return runtime::read_settings(weights, settings).warnings;
      },
      py::arg("weights"), py::arg("settings"), "Warnings that config.ini and `settings` give an engine at its start.");
  m.def("draft_logits", &runtime::draft_logits, py::arg("weights"), py::arg("tokens"), py::arg("drafted"),
        py::arg("settings"),
        "The logits of an MTP layer or an EAGLE-3 head, for tests (engine/src/runtime/draft_logits.h).");
  m.def("choose_all_proposals_for_tests", &runtime::SpeculationPolicy::choose_all_for_tests, py::arg("all"),
        "Whether all engines choose all proposals, whatever a step takes.");
  m.def("settings_from_environment", &settings_from_environment, "CHARONIA_<KEY> of every inference parameter.");
  m.def("read_config_ini", &read_config_ini, py::arg("file"), "Section [llama] of a config.ini.");
}

void bind_measurements(py::module_& m) {
  m.def(
      "measure_read_bandwidth",
      [](int threads, int megabytes) {
        return 1e9 * ops::cpu::measure_read_bandwidth(static_cast<std::size_t>(megabytes) << 20, threads);
      },
      py::arg("threads") = 0, py::arg("megabytes") = 1024, py::call_guard<py::gil_scoped_release>(),
      "Bytes per second that `threads` threads (0: all processors) read from memory. Takes about two seconds.");
  m.def(
      "free_host_memory", [] { return ops::cpu::free_memory(); },
      "Bytes of host memory that may still be allocated, within the limits of control groups.");
  m.def(
      "num_gpus", &ops::num_cuda_devices,
      "Number of GPUs that device = auto can use.");
  m.def(
      "why_no_gpu",
      [] {
        std::string why;
        if (ops::num_cuda_devices() == 0) ops::cuda_devices(why);
        return why;
      },
      "The reason why no GPU can be used; empty if one can.");
}

void bind_plan(py::module_& m) {
  m.def(
      "plan_memory",
      [](const std::filesystem::path& weights, const Settings& settings, const std::string& memory) {
        const auto bytes = memory.empty() ? 0 : parse_bytes(memory).value_or(-1);
        if (bytes < 0) {
          throw Error(
              ErrorCode::invalid_argument,
              cat("memory = '", memory, "' is not valid: it takes bytes, with or without a unit (80GiB, 500MB)"));
        }
        const auto plan = plan_memory(weights, settings, bytes);
        py::dict out;
        out["model_name"] = plan.model.model_name;
        out["weight_type"] = plan.model.weight_type;
        out["data_type"] = to_string(model::data_type(plan.model));
        out["group_size"] = plan.model.group_size;
        out["quantization"] = plan.config.quantization;
        out["ranks"] = plan.config.tensor_para_size;
        out["device"] = plan.device;
        out["device_note"] = plan.device_note;
        out["weight_bytes"] = plan.weight_bytes;
        out["activation_bytes"] = plan.activation_bytes;
        out["speculative_bytes"] = plan.speculative_bytes;
        out["offload_bytes"] = plan.offload_bytes;
        out["kv_token_bytes"] = plan.kv_token_bytes;
        out["kv_block_bytes"] = plan.kv_block_bytes;
        out["kv_window_block_bytes"] = plan.kv_window_block_bytes;
        out["state_bytes"] = plan.state_bytes;
        out["window"] = plan.window;
        out["num_window_blocks"] = plan.num_window_blocks;
        out["host_bytes"] = plan.host_bytes;
        out["num_states"] = plan.num_states;
        out["adapter_bytes"] = plan.adapter_bytes;
        out["free_bytes"] = plan.free_bytes;
        out["num_blocks"] = plan.num_blocks;
        out["cache_block_seq_len"] = plan.config.cache_block_seq_len;
        out["session_len"] = plan.config.session_len;
        out["max_batch_size"] = plan.config.max_batch_size;
        out["token_budget"] = plan.config.token_budget;
        out["warnings"] = plan.warnings;
        return out;
      },
      py::arg("weights"), py::arg("settings"), py::arg("memory") = "",
      "What a model takes and what fits. memory: bytes of each GPU, or of the machine, in place of what is free here.");
}

void bind_types(py::module_& m) {
  py::class_<SamplingParams> sampling(m, "SamplingParams");
  sampling.def(py::init<>());
  visit_sampling([&](const char* name, const char*, auto member) { sampling.def_readwrite(name, member); });
  py::class_<Result>(m, "Result")
      .def_readonly("token_ids", &Result::token_ids)
      .def_readonly("text_begin", &Result::text_begin)
      .def_readonly("text_end", &Result::text_end)
      .def_readonly("text", &Result::text)
      .def_readonly("logprobs", &Result::logprobs)
      .def_property_readonly("top_logprobs", [](const Result& result) { return pairs(result.top_logprobs); })
      .def_property_readonly("finish_reason", [](const Result& result) { return to_string(result.finish_reason); })
      .def_readonly("error", &Result::error)
      .def_property_readonly(
          "error_class", [](const Result& result) { return error_class(result.error_code); },
          "The name of errors.py's class for the error.")
      .def_readonly("index", &Result::index)
      .def_readonly("cumulative_logprob", &Result::cumulative_logprob)
      .def_readonly("prompt_logprobs", &Result::prompt_logprobs)
      .def_property_readonly("prompt_top_logprobs",
                             [](const Result& result) { return pairs(result.prompt_top_logprobs); })
      .def_property_readonly("prompt_logits", [](const Result& result) { return matrix(result.prompt_logits); })
      .def_readonly("first_logits", &Result::first_logits)
      .def_readonly("pooled", &Result::pooled)
      .def_readonly("num_session_tokens", &Result::num_session_tokens)
      .def_readonly("num_input_tokens", &Result::num_input_tokens)
      .def_readonly("num_output_tokens", &Result::num_output_tokens)
      .def_readonly("num_cached_tokens", &Result::num_cached_tokens)
      .def_readonly("num_computed_tokens", &Result::num_computed_tokens)
      .def_readonly("num_proposed_tokens", &Result::num_proposed_tokens)
      .def_readonly("num_accepted_tokens", &Result::num_accepted_tokens)
      .def_property_readonly("timings", [](const Result& result) {
        return py::make_tuple(result.timings.queue_ms, result.timings.first_token_ms, result.timings.total_ms);
      });
}

void bind_info(py::module_& m) {
  py::class_<AdapterInfo>(m, "AdapterInfo", "A loaded LoRA adapter.")
      .def_readonly("name", &AdapterInfo::name)
      .def_readonly("folder", &AdapterInfo::folder)
      .def_readonly("fingerprint", &AdapterInfo::fingerprint)
      .def_readonly("max_rank", &AdapterInfo::max_rank)
      .def_readonly("bytes", &AdapterInfo::bytes)
      .def("__repr__", [](const AdapterInfo& info) {
        return cat("AdapterInfo(", info.name, ", ", info.folder, ", rank ", info.max_rank, ", ", bytes_text(info.bytes),
                   ")");
      });
  py::class_<SessionInfo>(m, "SessionInfo", "A session as the engine keeps it.")
      .def_readonly("id", &SessionInfo::id)
      .def_readonly("num_tokens", &SessionInfo::num_tokens)
      .def_readonly("num_turns", &SessionInfo::num_turns)
      .def_readonly("num_pinned_blocks", &SessionInfo::num_pinned_blocks)
      .def_readonly("idle_s", &SessionInfo::idle_s)
      .def_readonly("busy", &SessionInfo::busy);
  py::class_<EngineInfo>(m, "EngineInfo")
      .def_property_readonly("model_name", [](const EngineInfo& info) { return info.model.model_name; })
      .def_property_readonly("model_family", [](const EngineInfo& info) { return info.model.model_family; })
      .def_property_readonly("vocab_size", [](const EngineInfo& info) { return info.model.vocab_size; })
      .def_property_readonly("hidden_units", [](const EngineInfo& info) { return info.model.hidden_units; })
      .def_property_readonly("num_layer", [](const EngineInfo& info) { return info.model.num_layer; })
      .def_property_readonly("model_task", [](const EngineInfo& info) { return info.model.model_task; })
      .def_property_readonly("weight_type", [](const EngineInfo& info) { return info.model.weight_type; })
      .def_property_readonly("data_type",
                             [](const EngineInfo& info) { return to_string(model::data_type(info.model)); })
      .def_property_readonly("group_size", [](const EngineInfo& info) { return info.model.group_size; })
      .def_property_readonly("start_id", [](const EngineInfo& info) { return info.model.start_id; })
      .def_property_readonly("end_ids", [](const EngineInfo& info) { return info.model.end_ids; })
      .def_property_readonly("session_len", [](const EngineInfo& info) { return info.config.session_len; })
      .def_property_readonly("threads", [](const EngineInfo& info) { return info.config.threads; })
      .def_property_readonly("max_batch_size", [](const EngineInfo& info) { return info.config.max_batch_size; })
      .def_property_readonly("token_budget", [](const EngineInfo& info) { return info.config.token_budget; })
      .def_property_readonly("quant_policy", [](const EngineInfo& info) { return info.config.quant_policy; })
      .def_property_readonly("quantization", [](const EngineInfo& info) { return info.config.quantization; })
      .def_property_readonly("max_queue_size", [](const EngineInfo& info) { return info.config.max_queue_size; })
      .def_property_readonly("cache_block_seq_len",
                             [](const EngineInfo& info) { return info.config.cache_block_seq_len; })
      .def_property_readonly(
          "default_sampling", [](const EngineInfo& info) { return info.default_sampling; },
          "A copy of the parameters of requests that set none.")
      .def_readonly("device", &EngineInfo::device)
      .def_property_readonly("device_ids", [](const EngineInfo& info) { return info.config.device_ids; })
      .def_readonly("device_note", &EngineInfo::device_note)
      .def_readonly("instruction_set", &EngineInfo::instruction_set)
      .def_readonly("arithmetic", &EngineInfo::arithmetic)
      .def_property_readonly("deterministic", &EngineInfo::deterministic)
      .def_readonly("weight_bytes", &EngineInfo::weight_bytes)
      .def_readonly("weight_bytes_per_step", &EngineInfo::weight_bytes_per_step)
      .def_readonly("kv_cache_bytes", &EngineInfo::kv_cache_bytes)
      .def_readonly("num_blocks", &EngineInfo::num_blocks)
      .def_readonly("num_window_blocks", &EngineInfo::num_window_blocks)
      .def_readonly("num_states", &EngineInfo::num_states)
      .def_readwrite("warnings", &EngineInfo::warnings)
      .def_readonly("kernel_report", &EngineInfo::kernel_report)
      .def("__repr__", [](const EngineInfo& info) {
        return cat("EngineInfo(", info.model.model_name, ", ", info.model.weight_type, " on ", info.device,
                   ", session_len=", info.config.session_len, ", max_batch_size=", info.config.max_batch_size,
                   ", weights ", bytes_text(info.weight_bytes), ", KV cache ", bytes_text(info.kv_cache_bytes), " (",
                   runtime::kv_type(info.model, info.config), "))");
      });
}

void bind_stats(py::module_& m) {
  py::class_<EngineStats>(m, "EngineStats")
      .def_readonly("num_running", &EngineStats::num_running)
      .def_readonly("num_waiting", &EngineStats::num_waiting)
      .def_readonly("blocks_total", &EngineStats::blocks_total)
      .def_readonly("blocks_active", &EngineStats::blocks_active)
      .def_readonly("blocks_cached", &EngineStats::blocks_cached)
      .def_readonly("blocks_free", &EngineStats::blocks_free)
      .def_readonly("blocks_pinned", &EngineStats::blocks_pinned)
      .def_readonly("num_sessions", &EngineStats::num_sessions)
      .def_readonly("num_steps", &EngineStats::num_steps)
      .def_readonly("num_preemptions", &EngineStats::num_preemptions)
      .def_readonly("lora_slot_waits", &EngineStats::lora_slot_waits)
      .def_readonly("prompt_tokens", &EngineStats::prompt_tokens)
      .def_readonly("generation_tokens", &EngineStats::generation_tokens)
      .def_readonly("jump_forward_tokens", &EngineStats::jump_forward_tokens)
      .def_readonly("proposed_tokens", &EngineStats::proposed_tokens)
      .def_readonly("accepted_tokens", &EngineStats::accepted_tokens)
      .def_readonly("prefix_queries_tokens", &EngineStats::prefix_queries_tokens)
      .def_readonly("prefix_hit_tokens", &EngineStats::prefix_hit_tokens)
      .def_readonly("offload_queries_tokens", &EngineStats::offload_queries_tokens)
      .def_readonly("offload_hit_tokens", &EngineStats::offload_hit_tokens)
      .def_readonly("offload_bytes", &EngineStats::offload_bytes)
      .def_readonly("gemms_rejected", &EngineStats::gemms_rejected)
      .def("__repr__", [](const EngineStats& stats) {
        return cat("EngineStats(num_running=", stats.num_running, ", num_waiting=", stats.num_waiting,
                   ", blocks_free=", stats.blocks_free, " of ", stats.blocks_total,
                   ", prompt_tokens=", stats.prompt_tokens, ", generation_tokens=", stats.generation_tokens, ")");
      });
}

// A text::TokenSplit with the token table that it needs.
class TokenSplit {
 public:
  explicit TokenSplit(const std::filesystem::path& weights_dir)
      : table_(text::TokenTable::load(weights_dir / "token_table.safetensors")) {
    std::string why;
    split_ = text::TokenSplit::load(weights_dir / "token_split.safetensors", table_, why);
    if (!split_) throw Error(ErrorCode::unsupported, why);
  }
  std::vector<TokenId> forced(const std::vector<TokenId>& before, const std::string& text) const {
    return split_->forced(before, text);
  }

 private:
  const text::TokenTable table_;
  std::unique_ptr<const text::TokenSplit> split_;
};

void bind_split(py::module_& m) {
  py::class_<TokenSplit>(m, "TokenSplit", "How the tokenizer of a `weights` folder splits text that is to come.")
      .def(py::init<const std::filesystem::path&>(), py::arg("weights_dir"))
      .def("forced", &TokenSplit::forced, py::arg("before"), py::arg("text"),
           "The tokens that follow `before`, where `text` comes next, whatever comes after it.");
}

void bind_engine(py::module_& m) {
  py::class_<EngineHolder>(m, "Engine", "A loaded model; see engine/include/charonia/engine.h.")
      .def(py::init<const std::filesystem::path&, const Settings&>(), py::arg("weights_dir"),
           py::arg("overrides") = Settings{})
      .def("submit", &submit, py::kw_only(), py::arg("id"), py::arg("input_ids"), py::arg("sampling"),
           py::arg("priority"), py::arg("stream"), py::arg("strip_leading_space"), py::arg("session_id") = "",
           py::arg("continuation_ids") = std::vector<TokenId>{}, py::arg("end_session") = false,
           py::arg("timeout_ms") = std::nullopt, py::arg("prompt_logits") = false,
           py::arg("guide") = std::nullopt, py::arg("cache_salt") = "", py::arg("owner") = "",
           py::arg("stop_until") = std::vector<std::string>{}, py::arg("fit_max_tokens") = false,
           py::arg("prompt_progress") = false, py::arg("lora_name") = "", py::arg("pooling") = "",
           py::arg("dimensions") = 0, py::arg("callback"),
           "Queues a request; callback(Result) is called on the delivery thread. Returns its handle.")
      .def(
          "cancel", [](EngineHolder& holder, Engine::Handle handle) { return holder.cancel(handle); },
          py::arg("handle"), py::call_guard<py::gil_scoped_release>())
      .def(
          "cancel_id",
          [](EngineHolder& holder, const std::string& id) { return holder.cancel(std::string_view(id)); },
          py::arg("id"), py::call_guard<py::gil_scoped_release>())
      .def(
          "stop", [](EngineHolder& holder, Engine::Handle handle) { return holder.stop(handle); },
          py::arg("handle"), py::call_guard<py::gil_scoped_release>())
      .def(
          "stop_id",
          [](EngineHolder& holder, const std::string& id) { return holder.stop(std::string_view(id)); },
          py::arg("id"), py::call_guard<py::gil_scoped_release>())
      .def(
          "load_adapter",
          [](EngineHolder& holder, const std::string& name, const std::filesystem::path& folder) {
            holder.get().load_adapter(name, folder);
          },
          py::arg("name"), py::arg("folder"), py::call_guard<py::gil_scoped_release>())
      .def(
          "unload_adapter",
          [](EngineHolder& holder, const std::string& name) { return holder.get().unload_adapter(name); },
          py::arg("name"), py::call_guard<py::gil_scoped_release>())
      .def(
          "no_adapter",
          [](EngineHolder& holder, const std::string& name) { return std::string(holder.get().no_adapter(name).what()); },
          py::arg("name"), "The text of the error for a name that no adapter has.",
          py::call_guard<py::gil_scoped_release>())
      .def(
          "adapters", [](EngineHolder& holder) { return holder.get().adapters(); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "end_session", [](EngineHolder& holder, const std::string& id) { return holder.get().end_session(id); },
          py::arg("session_id"), py::call_guard<py::gil_scoped_release>())
      .def(
          "sessions", [](EngineHolder& holder) { return holder.get().sessions(); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "token_bytes", [](EngineHolder& holder, TokenId id) { return py::bytes(holder.get().token_bytes(id)); },
          py::arg("id"), "The bytes that a token stands for; empty for special ones.")
      .def(
          "shutdown", [](EngineHolder& holder, int timeout_ms) { holder.shutdown(timeout_ms); },
          py::arg("timeout_ms") = 0, py::call_guard<py::gil_scoped_release>())
      .def("info", [](EngineHolder& holder) { return holder.get().info(); })
      .def(
          "stats", [](EngineHolder& holder) { return holder.get().stats(); }, py::call_guard<py::gil_scoped_release>())
      .def(
          "kernel_report", [](EngineHolder& holder) { return holder.get().kernel_report(); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "check_integrity", [](EngineHolder& holder) { holder.get().check_integrity(); },
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace

PYBIND11_MODULE(_engine, m) {
  m.doc() = "Charonia's engine. Use charonia.Engine.";
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      raise_error(error);
    }
  });
  bind_config(m);
  bind_plan(m);
  bind_measurements(m);
  bind_kernel_bench(m);
  bind_types(m);
  bind_info(m);
  bind_stats(m);
  bind_split(m);
  py::module_::import("atexit").attr("register")(
      py::cpp_function([] { registry().close(); }, py::call_guard<py::gil_scoped_release>()));
  m.def("schema_for_llguidance", &grammar::schema_for_llguidance, py::arg("schema"),
        "The text of a JSON schema as llguidance gets it. Raises InvalidRequestError.");
  m.def("regex_for_llguidance", &grammar::regex_for_llguidance, py::arg("expression"),
        "The grammar in Lark that llguidance gets for a regular expression. Raises InvalidRequestError.");
  bind_engine(m);
}
