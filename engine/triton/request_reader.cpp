#include "request_reader.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "error.h"
#include "text/utf8.h"
#include "unpack.h"

namespace charonia::triton {
namespace {

template <class T>
struct Tensor {
  std::vector<T> values;  // row-major
  std::vector<std::int64_t> shape;
};

// The inputs and parameters of a request as typed values. A parameter counts as the input of its name if that input is
// absent: JSON fields of HTTP generate arrive as parameters. Must not be used after the request is released. Every
// reader returns nullopt for a missing input, and throws Error(invalid_argument) for an invalid one.
class Inputs {
 public:
  explicit Inputs(TRITONBACKEND_Request* request);

  // T: std::int32_t or float. Reads only inputs, because a parameter cannot hold a tensor.
  template <class T>
  std::optional<Tensor<T>> tensor(std::string_view name) const;

  // An input with one element, of any shape. T: bool, std::int32_t, std::uint64_t or float.
  template <class T>
  std::optional<T> scalar(std::string_view name) const;

  // [n] or one INT parameter.
  std::optional<std::vector<std::int32_t>> ids(std::string_view name) const;

  // BYTES of any shape with at most `most` elements, or one STRING parameter.
  std::optional<std::vector<std::string>> strings(std::string_view name, std::size_t most) const;
  // The same for at most one element. Empty if it is missing.
  std::string text(std::string_view name) const;

 private:
  using Parameter = std::variant<std::int64_t, double, bool, std::string>;

  struct Raw {
    TRITONSERVER_DataType type;
    std::vector<std::int64_t> shape;
    std::string bytes;  // all buffers joined
  };

  std::optional<Raw> read(std::string_view name) const;
  const Parameter* parameter(std::string_view name) const;

  std::map<std::string, TRITONBACKEND_Input*, std::less<>> inputs_;
  std::map<std::string, Parameter, std::less<>> parameters_;
};

const char* name_of(TRITONSERVER_DataType type) {
  static constexpr const char* kNames[] = {"INVALID", "BOOL",  "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16",
                                           "INT32",   "INT64", "FP16",  "FP32",   "FP64",   "BYTES",  "BF16"};
  const auto index = static_cast<std::size_t>(type);
  return index < std::size(kNames) ? kNames[index] : "an unknown type";
}

template <class T>
constexpr TRITONSERVER_DataType kTypeOf = TRITONSERVER_TYPE_INVALID;
template <>
constexpr TRITONSERVER_DataType kTypeOf<bool> = TRITONSERVER_TYPE_BOOL;
template <>
constexpr TRITONSERVER_DataType kTypeOf<std::int32_t> = TRITONSERVER_TYPE_INT32;
template <>
constexpr TRITONSERVER_DataType kTypeOf<std::uint64_t> = TRITONSERVER_TYPE_UINT64;
template <>
constexpr TRITONSERVER_DataType kTypeOf<float> = TRITONSERVER_TYPE_FP32;

void check_type(std::string_view name, TRITONSERVER_DataType is, TRITONSERVER_DataType wanted) {
  if (is != wanted) reject(name, ": is ", name_of(is), " and must be ", name_of(wanted));
}

template <class T>
std::vector<T> unpack(std::string_view name, const std::string& bytes) {
  if (bytes.size() % sizeof(T) != 0) {
    reject(name, ": ", bytes.size(), " bytes are not a whole number of ", name_of(kTypeOf<T>), " values");
  }
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// Converts a JSON number to any type whose range includes it. Converts true and false only to BOOL.
template <class T, class From>
T convert(std::string_view name, From value) {
  constexpr bool kToBool = std::is_same_v<T, bool>, kFromBool = std::is_same_v<From, bool>;
  if constexpr (kToBool && kFromBool) {
    return value;
  } else if constexpr (kToBool || kFromBool || std::is_same_v<From, std::string>) {
    reject(name, ": the parameter has another type than ", name_of(kTypeOf<T>));
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(value);
  } else if constexpr (std::is_floating_point_v<From>) {
    // Above 2^53 a double is not exact. The first condition also rejects NaN, which is not equal to its floor.
    constexpr double kExact = 9007199254740992.0;
    if (value != std::floor(value) || std::abs(value) > kExact) {
      reject(name, ": ", std::to_string(value), " is not a whole number");
    }
    return convert<T>(name, static_cast<std::int64_t>(value));
  } else {
    if (!std::in_range<T>(value)) {
      reject(name, ": ", value, " is out of the range of ", name_of(kTypeOf<T>), ", ", std::numeric_limits<T>::min(),
             " to ", std::numeric_limits<T>::max());
    }
    return static_cast<T>(value);
  }
}

std::string gather(std::string_view name, TRITONBACKEND_Input* input, std::uint32_t buffers, std::uint64_t total) {
  std::string bytes;
  bytes.reserve(total);
  for (std::uint32_t i = 0; i < buffers; ++i) {
    const void* buffer = nullptr;
    std::uint64_t size = 0;
    auto memory = TRITONSERVER_MEMORY_CPU;
    std::int64_t memory_id = 0;
    check(TRITONBACKEND_InputBuffer(input, i, &buffer, &size, &memory, &memory_id));
    if (memory == TRITONSERVER_MEMORY_GPU) reject(name, ": is in GPU memory; send it in system memory");
    bytes.append(static_cast<const char*>(buffer), size);
  }
  return bytes;
}

Inputs::Inputs(TRITONBACKEND_Request* request) {
  std::uint32_t count = 0;
  check(TRITONBACKEND_RequestInputCount(request, &count));
  for (std::uint32_t i = 0; i < count; ++i) {
    TRITONBACKEND_Input* input = nullptr;
    check(TRITONBACKEND_RequestInputByIndex(request, i, &input));
    const char* name = nullptr;
    check(TRITONBACKEND_InputProperties(input, &name, nullptr, nullptr, nullptr, nullptr, nullptr));
    inputs_.emplace(name, input);
  }
  check(TRITONBACKEND_RequestParameterCount(request, &count));
  for (std::uint32_t i = 0; i < count; ++i) {
    const char* name = nullptr;
    TRITONSERVER_ParameterType type{};
    const void* value = nullptr;
    check(TRITONBACKEND_RequestParameter(request, i, &name, &type, &value));
    switch (type) {
      case TRITONSERVER_PARAMETER_INT:
        parameters_.emplace(name, *static_cast<const std::int64_t*>(value));
        break;
      case TRITONSERVER_PARAMETER_DOUBLE:
        parameters_.emplace(name, *static_cast<const double*>(value));
        break;
      case TRITONSERVER_PARAMETER_BOOL:
        parameters_.emplace(name, *static_cast<const bool*>(value));
        break;
      case TRITONSERVER_PARAMETER_STRING:
        parameters_.emplace(name, std::string(static_cast<const char*>(value)));
        break;
      case TRITONSERVER_PARAMETER_BYTES:
        break;
    }
  }
}

std::optional<Inputs::Raw> Inputs::read(std::string_view name) const {
  const auto found = inputs_.find(name);
  if (found == inputs_.end()) return std::nullopt;
  Raw raw{};
  const std::int64_t* shape = nullptr;
  std::uint32_t dims = 0, buffers = 0;
  std::uint64_t total = 0;
  check(TRITONBACKEND_InputProperties(found->second, nullptr, &raw.type, &shape, &dims, &total, &buffers));
  raw.shape.assign(shape, shape + dims);
  raw.bytes = gather(name, found->second, buffers, total);
  return raw;
}

const Inputs::Parameter* Inputs::parameter(std::string_view name) const {
  const auto found = parameters_.find(name);
  return found == parameters_.end() ? nullptr : &found->second;
}

template <class T>
std::optional<Tensor<T>> Inputs::tensor(std::string_view name) const {
  auto raw = read(name);
  if (!raw) return std::nullopt;
  check_type(name, raw->type, kTypeOf<T>);
  return Tensor<T>{unpack<T>(name, raw->bytes), std::move(raw->shape)};
}

template <class T>
std::optional<T> Inputs::scalar(std::string_view name) const {
  if (const auto raw = read(name)) {
    check_type(name, raw->type, kTypeOf<T>);
    if (raw->bytes.size() != sizeof(T)) {
      reject(name, ": holds ", raw->bytes.size() / sizeof(T), " values and must hold one: shape [1]");
    }
    if constexpr (std::is_same_v<T, bool>) return raw->bytes.front() != 0;
    T value{};
    std::memcpy(&value, raw->bytes.data(), sizeof(T));
    return value;
  }
  const auto* found = parameter(name);
  if (found == nullptr) return std::nullopt;
  return std::visit([name](const auto& value) { return convert<T>(name, value); }, *found);
}

std::optional<std::vector<std::int32_t>> Inputs::ids(std::string_view name) const {
  if (auto sent = tensor<std::int32_t>(name)) return std::move(sent->values);
  if (const auto one = scalar<std::int32_t>(name)) return std::vector{*one};
  return std::nullopt;
}

std::optional<std::vector<std::string>> Inputs::strings(std::string_view name, std::size_t most) const {
  const auto raw = read(name);
  if (!raw) {
    const auto* found = parameter(name);
    if (found == nullptr) return std::nullopt;
    const auto* text = std::get_if<std::string>(found);
    if (text == nullptr) reject(name, ": the parameter has another type than STRING");
    return std::vector{*text};
  }
  check_type(name, raw->type, TRITONSERVER_TYPE_BYTES);
  return unpack_strings(name, raw->bytes, most);
}

std::string Inputs::text(std::string_view name) const {
  auto sent = strings(name, 1);
  return sent && !sent->empty() ? std::move(sent->front()) : std::string();
}

constexpr int kMostTopLogprobs = SamplingMaximum::logprobs;
constexpr std::size_t kLongestName = 256;  // bytes

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const auto dim : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(dim);
  return text + "]";
}

// Reads a field that is one value. Other fields have their own readers.
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

std::vector<std::vector<TokenId>> read_token_lists(const Inputs& inputs, const char* name, std::size_t most) {
  const auto sent = inputs.tensor<std::int32_t>(name);
  if (!sent) return {};
  if (sent->shape.size() != 2 || sent->shape[0] != 2) {
    reject(name, " has shape ", shape_text(sent->shape),
           " and must have [2, n]: row 0 the lists' ids joined, row 1 where each ends");
  }
  const std::span<const std::int32_t> values(sent->values);
  const auto columns = values.size() / 2;
  return unpack_token_lists(name, values.first(columns), values.subspan(columns), most);
}

std::vector<std::pair<TokenId, float>> read_logit_bias(const Inputs& inputs) {
  const auto ids = inputs.tensor<std::int32_t>("logit_bias_ids");
  const auto values = inputs.tensor<float>("logit_bias_values");
  const auto id_count = ids ? ids->values.size() : 0, value_count = values ? values->values.size() : 0;
  if (id_count != value_count) {
    reject("logit_bias_ids has ", id_count, " entries and logit_bias_values ", value_count,
           "; they belong together one by one");
  }
  std::vector<std::pair<TokenId, float>> bias;
  bias.reserve(id_count);
  for (std::size_t i = 0; i < id_count; ++i) bias.emplace_back(ids->values[i], values->values[i]);
  return bias;
}

// Empty: the request begins.
std::vector<std::optional<std::vector<TokenId>>> read_resumed(const Inputs& inputs) {
  const auto ids = inputs.ids("resumed_ids").value_or(std::vector<TokenId>{});
  const auto lengths = inputs.ids("resumed_lengths").value_or(std::vector<std::int32_t>{});
  if (lengths.size() > SamplingMaximum::n) {
    reject("resumed_lengths is for ", lengths.size(), " sequences, and n is at most ", SamplingMaximum::n);
  }
  std::vector<std::optional<std::vector<TokenId>>> resumed;
  auto rest = std::span(ids);
  for (const auto length : lengths) {
    if (length > std::ssize(rest))
      reject("resumed_lengths is for more tokens than the ", ids.size(), " of resumed_ids");
    auto& tokens = resumed.emplace_back();
    if (length < 0) continue;
    const auto own = rest.first(static_cast<std::size_t>(length));
    tokens.emplace(own.begin(), own.end());
    rest = rest.subspan(own.size());
  }
  if (!rest.empty()) {
    reject("resumed_ids has ", ids.size(), " tokens, and resumed_lengths leaves ", rest.size(),
           " of them to no sequence");
  }
  return resumed;
}

// -1: none.
int read_prompt_logprobs(const Inputs& inputs) {
  const int top = inputs.scalar<std::int32_t>("prompt_logprobs").value_or(-1);
  if (top < -1 || top > kMostTopLogprobs) {
    reject("prompt_logprobs is ", top, " and must be -1 (none) to ", kMostTopLogprobs);
  }
  return top;
}

// -1: none. top_logprobs implies return_log_probs.
int read_logprobs(const Inputs& inputs) {
  const int top = inputs.scalar<std::int32_t>("top_logprobs").value_or(0);
  if (top < 0 || top > kMostTopLogprobs) {
    reject("top_logprobs is ", top, " and must be 0 to ", kMostTopLogprobs);
  }
  return inputs.scalar<bool>("return_log_probs").value_or(false) || top > 0 ? top : -1;
}

SamplingParams read_sampling(const Inputs& inputs, SamplingParams sampling) {
  visit_sampling([&](std::string_view, std::string_view tensor, auto member) {
    if (!tensor.empty()) read_value(sampling.*member, inputs, tensor);
  });
  sampling.end_ids = inputs.ids("end_id").value_or(std::vector<TokenId>{});
  sampling.stop_words = inputs.strings("stop_words", kMaxStopWords).value_or(std::vector<std::string>{});
  sampling.thinking_begin_ids = inputs.ids("thinking_begin_ids").value_or(std::vector<TokenId>{});
  sampling.thinking_end_ids = inputs.ids("thinking_end_ids").value_or(std::vector<TokenId>{});
  sampling.thinking_begun = inputs.scalar<bool>("in_reasoning").value_or(false);
  sampling.thinking_call_ids = read_token_lists(inputs, "thinking_call_ids", kMaxThinkingCallMarks);
  sampling.bad_words = read_token_lists(inputs, "bad_words_ids", kMaxBadWords);
  sampling.logit_bias = read_logit_bias(inputs);
  sampling.logprobs = read_logprobs(inputs);
  sampling.prompt_logprobs = read_prompt_logprobs(inputs);
  return sampling;
}

// Reads the name of a session, a subscription or an owner.
std::string read_name(const Inputs& inputs, const std::string& tensor) {
  auto name = inputs.text(tensor);
  if (name.size() > kLongestName) reject(tensor, " has ", name.size(), " bytes and must have at most ", kLongestName);
  const auto control = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; };
  if (text::to_valid_utf8(name) != name || std::ranges::any_of(name, control)) {
    reject(tensor, " has bytes that are no UTF-8, or control characters: name it with letters, such as a UUID");
  }
  return name;
}

// In an ensemble, preprocessing sends both inputs with every request. They are empty texts if there is no guide.
std::optional<Guide> read_guide(const Inputs& inputs) {
  const auto type = inputs.text("guided_decoding_guide_type");
  auto guide = inputs.text("guided_decoding_guide");
  if (!type.empty()) return Guide{guide_type(type), std::move(guide)};
  if (!guide.empty()) reject("guided_decoding_guide needs guided_decoding_guide_type beside it");
  return std::nullopt;
}

// Returns the action of a request that names a subscription. With `generate`, the subscription receives the results.
Action read_subscription(const Inputs& inputs, EngineCall& call, bool has_input) {
  call.subscription = read_name(inputs, "subscription");
  const auto key = inputs.scalar<std::uint64_t>("subscription_key");
  const auto read = inputs.scalar<std::uint64_t>("subscription_read");
  const bool end = inputs.scalar<bool>("subscription_end").value_or(false);
  if (call.subscription.empty()) {
    const char* alone = key ? "subscription_key" : read ? "subscription_read" : end ? "subscription_end" : nullptr;
    if (alone != nullptr) reject(alone, " is sent without subscription: name the subscription");
    return Action::generate;
  }
  if (has_input && (read || end)) {
    reject("subscription_read and subscription_end are sent in requests of their own, without input_ids");
  }
  call.key = key.value_or(0);
  call.read = read.value_or(0);
  if (has_input) return Action::generate;
  return end ? Action::unsubscribe : read ? Action::acknowledge : Action::subscribe;
}

// Returns the action of a request about LoRA adapters, or generate.
Action read_adapter_action(const Inputs& inputs, EngineCall& call, bool has_input) {
  call.request.lora_name = inputs.text("lora_name");  // the engine checks it
  call.lora_path = inputs.text("lora_path");
  const bool unload = inputs.scalar<bool>("lora_unload").value_or(false);
  const bool list = inputs.scalar<bool>("lora_list").value_or(false);
  const int actions = (call.lora_path.empty() ? 0 : 1) + (unload ? 1 : 0) + (list ? 1 : 0);
  if (actions == 0) return Action::generate;
  if (actions > 1 || has_input) {
    reject("lora_path, lora_unload and lora_list are sent in requests of their own, without input_ids: send one");
  }
  return list ? Action::list_adapters : unload ? Action::unload_adapter : Action::load_adapter;
}

Action read_action(const Inputs& inputs, const Request& request, bool has_input) {
  const bool stop = inputs.scalar<bool>("stop").value_or(false);
  const bool cancel = inputs.scalar<bool>("cancel").value_or(false);
  if (stop && cancel) reject("stop and cancel are both true: stop keeps the session's turn, cancel drops it; send one");
  if (stop || cancel) {
    const std::string name = stop ? "stop" : "cancel";
    if (request.id.empty() && request.session_id.empty()) {
      reject(name, " is true and the request has no id: send the id of the request to ", name, ", or a session_id");
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
  if (call.action == Action::generate) call.action = read_adapter_action(inputs, call, ids.has_value());
  if (call.action == Action::cancel) {
    call.subscription = read_name(inputs, "subscription");
    call.key = inputs.scalar<std::uint64_t>("subscription_key").value_or(0);
  }
  if (call.action == Action::generate) call.action = read_subscription(inputs, call, ids.has_value());
  if (call.action != Action::generate) return call;
  if (!ids) {
    reject(
        "input_ids is missing: send the prompt's token ids, INT32 [n], or `stop` or `cancel` with a request's id or a "
        "session_id, or the name of a `subscription` to open");
  }
  call.request.input_ids = std::move(ids->values);
  call.request.sampling = read_sampling(inputs, defaults);
  call.request.guide = read_guide(inputs);
  if (auto more = inputs.tensor<std::int32_t>("continuation_ids")) {
    if (!more->values.empty() && call.request.session_id.empty()) {
      reject("continuation_ids has ", more->values.size(),
             " tokens and there is no session_id: send the session that they continue");
    }
    if (!more->values.empty() && call.request.sampling.prompt_logprobs >= 0) {
      reject("prompt_logprobs is set for the continuation of a session: ask for them with the whole conversation");
    }
    call.request.continuation_ids = std::move(more->values);
  }
  call.request.resumed = read_resumed(inputs);
  call.request.timeout_ms = inputs.scalar<std::int32_t>("timeout_ms");
  call.request.cache_salt = inputs.text("cache_salt");  // the engine checks its length
  call.request.owner = read_name(inputs, "owner");
  call.request.priority = inputs.scalar<std::int32_t>("priority").value_or(0);
  call.request.stream = inputs.scalar<bool>("stream").value_or(false);
  call.request.strip_leading_space = inputs.scalar<bool>("strip_leading_space").value_or(false);
  call.request.stop_until = inputs.strings("stop_until", kMaxStopWords).value_or(std::vector<std::string>{});
  call.request.prompt_progress = inputs.scalar<bool>("prompt_progress").value_or(false);
  call.request.fit_max_tokens = inputs.scalar<bool>("fit_max_tokens").value_or(false);
  call.request.pooling = inputs.text("pooling");
  call.request.dimensions = inputs.scalar<std::int32_t>("dimensions").value_or(0);
  call.echo = inputs.text("echo");
  check_echo(call.echo, call.request.sampling.n);
  call.in_reasoning = inputs.scalar<bool>("in_reasoning").value_or(false);
  return call;
}

}  // namespace charonia::triton
