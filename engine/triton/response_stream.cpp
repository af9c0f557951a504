#include "response_stream.h"

#include <utility>

#include "charonia/error.h"
#include "error.h"

namespace charonia::triton {
namespace {

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

ResponseStream::ResponseStream(TRITONBACKEND_Request* request) : factory_(make_factory(request)) {}

ResponseStream::~ResponseStream() {
  fail(Error(ErrorCode::internal, "the engine dropped the request without a response"));
}

void ResponseStream::send(const Result& result, const Extras& extras, const OutputSet& wanted, bool last) {
  if (ended()) return;
  auto response = make_response(factory_.get());
  fill(response.get(), result, extras, wanted);
  // Sending takes the response and, with it, the final flag, whatever it returns.
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
