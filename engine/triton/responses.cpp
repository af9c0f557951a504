#include "responses.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "charonia/error.h"
#include "error.h"

namespace charonia::triton {
namespace {

class Filler {
 public:
  Filler(TRITONBACKEND_Response* response, const OutputSet& wanted) : response_(response), wanted_(wanted) {}

  bool wants(Output output) const { return wanted_.test(static_cast<std::size_t>(output)); }

  void add(Output output, std::span<const std::int32_t> values) {
    add_bytes(output, TRITONSERVER_TYPE_INT32, values.size(), std::as_bytes(values));
  }
  void add(Output output, std::span<const float> values) {
    add_bytes(output, TRITONSERVER_TYPE_FP32, values.size(), std::as_bytes(values));
  }
  void add(Output output, std::int32_t value) { add(output, std::span<const std::int32_t>(&value, 1)); }
  void add(Output output, float value) { add(output, std::span<const float>(&value, 1)); }
  void add(Output ids, Output logprobs, const std::vector<std::vector<TokenLogprob>>& rows) {
    const auto [flat_ids, flat_logprobs] = flattened(rows);
    add(ids, flat_ids);
    add(logprobs, flat_logprobs);
  }
  void add(Output output, std::string_view text) {
    if (!wants(output)) return;
    // BYTES: the length in 4 bytes, little-endian, then the text.
    const auto length = static_cast<std::uint32_t>(text.size());
    std::string packed(sizeof(length), '\0');
    std::memcpy(packed.data(), &length, sizeof(length));
    packed += text;
    add_bytes(output, TRITONSERVER_TYPE_BYTES, 1, std::as_bytes(std::span(packed)));
  }

 private:
  void add_bytes(Output output, TRITONSERVER_DataType type, std::size_t count, std::span<const std::byte> bytes) {
    if (!wants(output)) return;
    const char* name = kOutputNames[static_cast<std::size_t>(output)];
    const auto dim = static_cast<std::int64_t>(count);
    TRITONBACKEND_Output* handle = nullptr;
    check(TRITONBACKEND_ResponseOutput(response_, &handle, name, type, &dim, 1));
    void* buffer = nullptr;
    auto memory = TRITONSERVER_MEMORY_CPU;
    std::int64_t memory_id = 0;
    check(TRITONBACKEND_OutputBuffer(handle, &buffer, bytes.size(), &memory, &memory_id));
    if (memory == TRITONSERVER_MEMORY_GPU) {
      throw Error(ErrorCode::invalid_argument,
                  std::string(name) + ": an output in GPU memory was asked for; ask for system memory");
    }
    if (!bytes.empty()) std::memcpy(buffer, bytes.data(), bytes.size());
  }

  TRITONBACKEND_Response* response_;
  const OutputSet& wanted_;
};

// The input of postprocessing (definitions/tensors.toml).
std::vector<std::int32_t> text_tokens(const Result& result) {
  std::vector<std::int32_t> values = {result.text_begin, result.text_end};
  values.insert(values.end(), result.token_ids.begin(), result.token_ids.end());
  return values;
}

FactoryPtr make_factory(TRITONBACKEND_Request* request) {
  TRITONBACKEND_ResponseFactory* factory = nullptr;
  check(TRITONBACKEND_ResponseFactoryNew(&factory, request));
  return FactoryPtr(factory);
}

ResponsePtr make_response(TRITONBACKEND_ResponseFactory* factory) {
  TRITONBACKEND_Response* response = nullptr;
  check(TRITONBACKEND_ResponseNewFromFactory(&response, factory));
  return ResponsePtr(response);
}

}  // namespace

OutputSet requested_outputs(TRITONBACKEND_Request* request) {
  std::uint32_t count = 0;
  check(TRITONBACKEND_RequestOutputCount(request, &count));
  OutputSet wanted;
  for (std::uint32_t i = 0; i < count; ++i) {
    const char* name = nullptr;
    check(TRITONBACKEND_RequestOutputName(request, i, &name));
    const auto found = std::ranges::find(kOutputNames, std::string_view(name));
    if (found != kOutputNames.end()) wanted.set(static_cast<std::size_t>(found - kOutputNames.begin()));
  }
  return count == 0 ? OutputSet().set() : wanted;
}

void fill(TRITONBACKEND_Response* response, const Result& result, const Extras& extras, const OutputSet& wanted) {
  const std::array text_span = {static_cast<std::int32_t>(result.text_begin),
                                static_cast<std::int32_t>(result.text_end)};
  const std::array timings = {static_cast<float>(result.timings.queue_ms),
                              static_cast<float>(result.timings.first_token_ms),
                              static_cast<float>(result.timings.total_ms)};

  Filler filler(response, wanted);
  if (filler.wants(Output::text_tokens)) filler.add(Output::text_tokens, text_tokens(result));
  filler.add(Output::output_ids, result.token_ids);
  filler.add(Output::text_span, text_span);
  filler.add(Output::echo, extras.echo);
  filler.add(Output::lora_adapters, extras.lora_adapters);
  filler.add(Output::pooled, result.pooled);
  filler.add(Output::sequence_index, static_cast<std::int32_t>(result.index));
  filler.add(Output::output_log_probs, result.logprobs);
  filler.add(Output::top_log_prob_ids, Output::top_log_probs, result.top_logprobs);
  filler.add(Output::cum_log_probs, static_cast<float>(result.cumulative_logprob));
  filler.add(Output::prompt_ids, extras.prompt_ids);
  filler.add(Output::prompt_log_probs, result.prompt_logprobs);
  filler.add(Output::prompt_top_log_prob_ids, Output::prompt_top_log_probs, result.prompt_top_logprobs);
  filler.add(Output::finish_reason, to_string(result.finish_reason));
  filler.add(Output::num_input_tokens, result.num_input_tokens);
  filler.add(Output::num_output_tokens, result.num_output_tokens);
  filler.add(Output::num_cached_tokens, result.num_cached_tokens);
  filler.add(Output::num_computed_tokens, result.num_computed_tokens);
  filler.add(Output::num_proposed_tokens, result.num_proposed_tokens);
  filler.add(Output::num_accepted_tokens, result.num_accepted_tokens);
  filler.add(Output::num_session_tokens, result.num_session_tokens);
  filler.add(Output::timings, timings);
}

void fill(TRITONBACKEND_Response* response, std::string_view delivery) {
  static const auto kWanted = OutputSet().set(static_cast<std::size_t>(Output::deliveries));
  Filler(response, kWanted).add(Output::deliveries, delivery);
}

ResponseStream::ResponseStream(TRITONBACKEND_Request* request) : factory_(make_factory(request)) {}

ResponseStream::~ResponseStream() {
  fail(Error(ErrorCode::internal, "the engine dropped the request without a response"));
}

void ResponseStream::send(const Result& result, const Extras& extras, const OutputSet& wanted, bool last) {
  if (ended()) return;
  auto response = make_response(factory_.get());
  fill(response.get(), result, extras, wanted);
  // ResponseSend takes the response and the final flag even if it returns an error.
  log_failure(TRITONBACKEND_ResponseSend(response.release(), last ? TRITONSERVER_RESPONSE_COMPLETE_FINAL : 0, nullptr),
              "sending a response");
  if (last) end();
}

void ResponseStream::send(std::string_view delivery) {
  if (ended()) return;
  auto response = make_response(factory_.get());
  fill(response.get(), delivery);
  log_failure(TRITONBACKEND_ResponseSend(response.release(), 0, nullptr), "sending a delivery");
}

FactoryPtr ResponseStream::close() {
  if (ended()) return nullptr;
  log_failure(TRITONBACKEND_ResponseFactorySendFlags(factory_.get(), TRITONSERVER_RESPONSE_COMPLETE_FINAL),
              "ending a stream");
  return end();
}

FactoryPtr ResponseStream::fail(const std::exception& error) {
  if (ended()) return nullptr;
  TRITONBACKEND_Response* response = nullptr;
  auto* failed = TRITONBACKEND_ResponseNewFromFactory(&response, factory_.get());
  if (failed == nullptr) {
    const auto text = to_client(error);
    log_failure(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, text.get()),
                "sending an error response");
  } else {
    log_failure(failed, "making an error response");
    log_failure(TRITONBACKEND_ResponseFactorySendFlags(factory_.get(), TRITONSERVER_RESPONSE_COMPLETE_FINAL),
                "ending a stream");
  }
  return end();
}

FactoryPtr ResponseStream::end() {
  const std::lock_guard lock(mutex_);
  return std::exchange(factory_, nullptr);
}

bool ResponseStream::abandoned() {
  const std::lock_guard lock(mutex_);
  if (!factory_) return true;
  bool cancelled = false;
  log_failure(TRITONBACKEND_ResponseFactoryIsCancelled(factory_.get(), &cancelled), "asking for a cancellation");
  return cancelled;
}

}  // namespace charonia::triton
