// The response stream of one request: any number of responses, and exactly one final flag.
#pragma once

#include <exception>
#include <mutex>
#include <string_view>

#include "charonia/types.h"
#include "outputs.h"
#include "raii.h"
#include "triton_api.h"

namespace charonia::triton {

// Owns the request's response factory, which lives until the final flag is sent and not longer: a living one keeps the
// model from being unloaded. One thread sends; abandoned() may be asked on another one meanwhile.
class ResponseStream {
 public:
  // Before the request is released. Throws Error.
  explicit ResponseStream(TRITONBACKEND_Request* request);
  ~ResponseStream();  // a stream that was not ended ends with an error
  ResponseStream(const ResponseStream&) = delete;
  ResponseStream& operator=(const ResponseStream&) = delete;

  // Sends a result's tensors; the last one ends the stream. Does nothing on an ended one. What Triton refuses is thrown
  // as Error, and the stream is then still open.
  void send(const Result& result, const Extras& extras, const OutputSet& wanted, bool last);

  // Sends a delivery of a subscription, which its stream is. Otherwise as send().
  void send(std::string_view delivery);

  // Ends the stream without a response. Returns what fail() does.
  FactoryPtr close();

  // Ends the stream with an error for the client. Returns the factory, for a caller that wants the model to stay
  // loaded; null on a stream that had ended, where it does nothing.
  FactoryPtr fail(const std::exception& error);

  // Whether nobody listens: the client has left, or the stream has ended.
  bool abandoned();

 private:
  bool ended() const { return factory_ == nullptr; }  // for the sending thread
  FactoryPtr end();

  FactoryPtr factory_;
  std::mutex mutex_;  // between the end of factory_ and abandoned()
};

}  // namespace charonia::triton
