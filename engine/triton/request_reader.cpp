#include "request_reader.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

#include "error.h"
#include "inputs.h"
#include "text/utf8.h"
#include "unpack.h"

namespace charonia::triton {
namespace {

constexpr int kMostTopLogprobs = SamplingMaximum::logprobs;
constexpr std::size_t kLongestName = 256;  // bytes

[[noreturn]] void reject(const std::string& text) { throw Error(ErrorCode::invalid_argument, text); }

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const auto dim : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(dim);
  return text + "]";
}

// One value into a field that is one; other fields have readers of their own.
template <class T>
void read_value(T& field, const Inputs& inputs, std::string_view tensor) {
  if constexpr (std::is_arithmetic_v<T>) {
    if (const auto value = inputs.scalar<T>(tensor)) field = *value;
  }
}
template <class T>
void read_value(std::optional<T>& field, const Inputs& inputs, std::string_view tensor) {
  field = inputs.scalar<T>(tensor);
}

std::vector<std::vector<TokenId>> read_bad_words(const Inputs& inputs) {
  const auto sent = inputs.tensor<std::int32_t>("bad_words_ids");
  if (!sent) return {};
  if (sent->shape.size() != 2 || sent->shape[0] != 2) {
    reject("bad_words_ids has shape " + shape_text(sent->shape) +
           " and must have [2, n]: row 0 the words' ids joined, row 1 where each ends");
  }
  const std::span<const std::int32_t> values(sent->values);
  const auto columns = values.size() / 2;
  return unpack_bad_words(values.first(columns), values.subspan(columns));
}

std::vector<std::pair<TokenId, float>> read_logit_bias(const Inputs& inputs) {
  const auto ids = inputs.tensor<std::int32_t>("logit_bias_ids");
  const auto values = inputs.tensor<float>("logit_bias_values");
  const auto id_count = ids ? ids->values.size() : 0, value_count = values ? values->values.size() : 0;
  if (id_count != value_count) {
    reject("logit_bias_ids has " + std::to_string(id_count) + " entries and logit_bias_values " +
           std::to_string(value_count) + "; they belong together one by one");
  }
  std::vector<std::pair<TokenId, float>> bias;
  bias.reserve(id_count);
  for (std::size_t i = 0; i < id_count; ++i) bias.emplace_back(ids->values[i], values->values[i]);
  return bias;
}

// -1: none.
int read_prompt_logprobs(const Inputs& inputs) {
  const int top = inputs.scalar<std::int32_t>("prompt_logprobs").value_or(-1);
  if (top < -1 || top > kMostTopLogprobs) {
    reject("prompt_logprobs is " + std::to_string(top) + " and must be -1 (none) to " +
           std::to_string(kMostTopLogprobs));
  }
  return top;
}

// -1: none. Asking for the most likely tokens asks for log probabilities.
int read_logprobs(const Inputs& inputs) {
  const int top = inputs.scalar<std::int32_t>("top_logprobs").value_or(0);
  if (top < 0 || top > kMostTopLogprobs) {
    reject("top_logprobs is " + std::to_string(top) + " and must be 0 to " + std::to_string(kMostTopLogprobs));
  }
  return inputs.scalar<bool>("return_log_probs").value_or(false) || top > 0 ? top : -1;
}

SamplingParams read_sampling(const Inputs& inputs, SamplingParams sampling) {
  visit_sampling([&](std::string_view, std::string_view tensor, auto member) {
    if (!tensor.empty()) read_value(sampling.*member, inputs, tensor);
  });
  sampling.end_ids = inputs.ids("end_id").value_or(std::vector<TokenId>{});
  sampling.stop_words = inputs.strings("stop_words", kMaxStopWords).value_or(std::vector<std::string>{});
  sampling.bad_words = read_bad_words(inputs);
  sampling.logit_bias = read_logit_bias(inputs);
  sampling.logprobs = read_logprobs(inputs);
  sampling.prompt_logprobs = read_prompt_logprobs(inputs);
  return sampling;
}

// A session's or a subscription's.
std::string read_name(const Inputs& inputs, const std::string& tensor) {
  auto sent = inputs.strings(tensor, 1);
  if (!sent || sent->empty()) return {};
  auto& name = sent->front();
  if (name.size() > kLongestName) {
    reject(tensor + " has " + std::to_string(name.size()) + " bytes and must have at most " +
           std::to_string(kLongestName));
  }
  const auto control = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; };
  if (text::to_valid_utf8(name) != name || std::ranges::any_of(name, control)) {
    reject(tensor + " has bytes that are no UTF-8, or control characters: name it with letters, such as a UUID");
  }
  return std::move(name);
}

// The engine checks its length.
std::string read_cache_salt(const Inputs& inputs) {
  auto sent = inputs.strings("cache_salt", 1);
  return sent && !sent->empty() ? std::move(sent->front()) : std::string();
}

// In an ensemble preprocessing gives both with every request: empty texts where there is no guide.
std::optional<Guide> read_guide(const Inputs& inputs) {
  auto type = inputs.strings("guided_decoding_guide_type", 1);
  auto guide = inputs.strings("guided_decoding_guide", 1);
  if (!type || type->empty() || type->front().empty()) {
    if (guide && !guide->empty() && !guide->front().empty()) {
      reject("guided_decoding_guide needs guided_decoding_guide_type beside it");
    }
    return std::nullopt;
  }
  return Guide{guide_type(type->front()), guide && !guide->empty() ? std::move(guide->front()) : std::string()};
}

// What a request that names a subscription asks of it; generate: to take its results.
Action read_subscription(const Inputs& inputs, EngineCall& call, bool has_input) {
  call.subscription = read_name(inputs, "subscription");
  const auto key = inputs.scalar<std::uint64_t>("subscription_key");
  const auto read = inputs.scalar<std::uint64_t>("subscription_read");
  const bool end = inputs.scalar<bool>("subscription_end").value_or(false);
  call.parsed = inputs.scalar<bool>("subscription_parsing").value_or(false);
  if (call.subscription.empty()) {
    const char* alone = key           ? "subscription_key"
                        : read        ? "subscription_read"
                        : end         ? "subscription_end"
                        : call.parsed ? "subscription_parsing"
                                      : nullptr;
    if (alone != nullptr) reject(std::string(alone) + " is sent without subscription: name the subscription");
    return Action::generate;
  }
  if (has_input && (read || end)) {
    reject("subscription_read and subscription_end are sent in requests of their own, without input_ids");
  }
  call.key = key.value_or(0);
  call.read = read.value_or(0);
  if (has_input) return Action::generate;
  return end ? Action::unsubscribe : read ? Action::read : Action::subscribe;
}

// Log probabilities of the prompt are none of what a subscription carries.
void check_carried(const EngineCall& call) {
  if (call.subscription.empty() || call.request.sampling.prompt_logprobs < 0) return;
  reject("prompt_logprobs is set and subscription is '" + call.subscription +
         "': log probabilities of the prompt do not go through one, so send the request without subscription");
}

Action read_action(const Inputs& inputs, const Request& request, bool has_input) {
  const bool stop = inputs.scalar<bool>("stop").value_or(false);
  const bool cancel = inputs.scalar<bool>("cancel").value_or(false);
  if (stop && cancel) reject("stop and cancel are both true: stop keeps the session's turn, cancel drops it; send one");
  if (stop || cancel) {
    const std::string name = stop ? "stop" : "cancel";
    if (request.id.empty() && request.session_id.empty()) {
      reject(name + " is true and the request has no id: send the id of the request to " + name + ", or a session_id");
    }
    return stop ? Action::stop : Action::cancel;
  }
  if (!request.end_session) return Action::generate;
  if (request.session_id.empty()) reject("end_session is true and there is no session_id: send the session's");
  return has_input ? Action::generate : Action::end_session;
}

}  // namespace

std::string request_id(TRITONBACKEND_Request* request) {
  const char* id = nullptr;
  check(TRITONBACKEND_RequestId(request, &id));
  return id == nullptr ? std::string() : std::string(id);
}

EngineCall read_call(TRITONBACKEND_Request* request, const SamplingParams& defaults) {
  const Inputs inputs(request);
  EngineCall call;
  call.outputs = requested_outputs(request);
  call.request.id = request_id(request);
  call.request.session_id = read_name(inputs, "session_id");
  call.request.end_session = inputs.scalar<bool>("end_session").value_or(false);
  auto ids = inputs.tensor<std::int32_t>("input_ids");
  call.action = read_action(inputs, call.request, ids.has_value());
  if (call.action == Action::generate) call.action = read_subscription(inputs, call, ids.has_value());
  if (call.action != Action::generate) return call;
  if (!ids) {
    reject(
        "input_ids is missing: send the prompt's token ids, INT32 [n], or `stop` or `cancel` with a request's id or a "
        "session_id, or the name of a `subscription` to open");
  }
  call.request.input_ids = std::move(ids->values);
  call.request.sampling = read_sampling(inputs, defaults);
  check_carried(call);
  call.request.guide = read_guide(inputs);
  if (auto more = inputs.tensor<std::int32_t>("continuation_ids")) {
    if (!more->values.empty() && call.request.session_id.empty()) {
      reject("continuation_ids has " + std::to_string(more->values.size()) +
             " tokens and there is no session_id: send the session that they continue");
    }
    if (!more->values.empty() && call.request.sampling.prompt_logprobs >= 0) {
      reject("prompt_logprobs is set for the continuation of a session: ask for them with the whole conversation");
    }
    call.request.continuation_ids = std::move(more->values);
  }
  call.request.timeout_ms = inputs.scalar<std::int32_t>("timeout_ms");
  call.request.cache_salt = read_cache_salt(inputs);
  call.request.priority = inputs.scalar<std::int32_t>("priority").value_or(0);
  call.request.stream = inputs.scalar<bool>("stream").value_or(false);
  call.request.strip_leading_space = inputs.scalar<bool>("strip_leading_space").value_or(false);
  call.request.stop_until = inputs.strings("stop_until", kMaxStopWords).value_or(std::vector<std::string>{});
  call.request.fit_max_tokens = inputs.scalar<bool>("fit_max_tokens").value_or(false);
  if (auto echo = inputs.strings("echo", 1); echo && !echo->empty()) call.echo = std::move(echo->front());
  check_echo(call.echo, call.request.sampling.n);
  if (auto options = inputs.strings("parsing_options", 1); options && !options->empty()) {
    call.parsing_options = std::move(options->front());
    check_parsing_options(call.parsing_options);
  }
  return call;
}

}  // namespace charonia::triton
