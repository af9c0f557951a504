// The responses to one request: their tensors, and the stream that sends them.
#pragma once

#include <bitset>
#include <exception>
#include <mutex>
#include <string_view>

#include "charonia/types.h"
#include "error.h"
#include "generated/outputs.h"
#include "outbox.h"
#include "triton_api.h"

namespace charonia::triton {

using OutputSet = std::bitset<kOutputNames.size()>;

// Returns the outputs that a request names, or all outputs if it names none.
OutputSet requested_outputs(TRITONBACKEND_Request* request);

// Adds the tensors in `wanted` to a response, except `deliveries`. Throws Error if Triton rejects one.
void fill(TRITONBACKEND_Response* response, const Result& result, const Extras& extras, const OutputSet& wanted);

// Adds only `deliveries`. Throws Error if Triton rejects it.
void fill(TRITONBACKEND_Response* response, std::string_view delivery);

// The response stream of one request: any number of responses, and exactly one final flag. It destroys the request's
// response factory when the final flag is sent, because the model cannot be unloaded before. One thread sends; another
// thread may call abandoned() at the same time.
class ResponseStream {
 public:
  // Must be called before the request is released. Throws Error.
  explicit ResponseStream(TRITONBACKEND_Request* request);
  ~ResponseStream();  // ends an open stream with an error
  ResponseStream(const ResponseStream&) = delete;
  ResponseStream& operator=(const ResponseStream&) = delete;

  // Sends the tensors of a result; the last one ends the stream. Does nothing if the stream has ended. Throws Error if
  // Triton rejects a tensor; the stream then stays open.
  void send(const Result& result, const Extras& extras, const OutputSet& wanted, bool last);

  // The same for a delivery, if this is the stream of a subscription.
  void send(std::string_view delivery);

  // Ends the stream without a response. Returns the same as fail().
  FactoryPtr close();

  // Ends the stream with an error for the client. Returns the factory: the model stays loaded while the caller keeps
  // it. Does nothing and returns null if the stream has ended.
  FactoryPtr fail(const std::exception& error);

  // Whether the client has disconnected or the stream has ended.
  bool abandoned();

 private:
  bool ended() const { return factory_ == nullptr; }  // only on the sending thread
  FactoryPtr end();

  FactoryPtr factory_;
  std::mutex mutex_;  // protects factory_ while abandoned() uses it
};

}  // namespace charonia::triton
