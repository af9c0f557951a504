// A request that the server traces, and the spans that the engine adds to its trace: queue, prefill and decode.
#pragma once

#include <chrono>
#include <memory>

#include "charonia/types.h"
#include "triton_api.h"

namespace charonia::triton {

// Owns the request, which the server's trace of it needs as long as spans are added: the last owner adds them and
// releases the request. A request that is not traced has none, and is released as soon as it is in the engine.
class TracedRequest {
 public:
  // Null where the server does not trace this request. Throws Error.
  static std::shared_ptr<TracedRequest> of(TRITONBACKEND_Request* request);

  TracedRequest(TRITONBACKEND_Request* request, TRITONSERVER_InferenceTrace* trace);
  ~TracedRequest();
  TracedRequest(const TracedRequest&) = delete;
  TracedRequest& operator=(const TracedRequest&) = delete;

  void submitted();                               // the engine is given it now
  void took(const Timings& timings) { timings_ = timings; }  // so far

 private:
  using Clock = std::chrono::steady_clock;  // the server's, too

  void report_spans() const;

  TRITONBACKEND_Request* request_;
  TRITONSERVER_InferenceTrace* trace_;
  Clock::time_point submitted_;
  Timings timings_;  // all 0: the engine has not taken it
};

}  // namespace charonia::triton
