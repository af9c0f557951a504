// Converts errors from and to Triton's C API. Owns Triton's handles. Writes to the server's log.
#pragma once

#include <exception>
#include <memory>
#include <string>

#include "charonia/error.h"
#include "triton_api.h"

namespace charonia::triton {

namespace detail {
inline void drop(TRITONSERVER_Error* error) {
  if (error != nullptr) TRITONSERVER_ErrorDelete(error);
}
}  // namespace detail

// Deletes a handle of Triton. Ignores an error of the deletion.
template <auto Delete>
struct Deleter {
  template <class Handle>
  void operator()(Handle* handle) const {
    detail::drop(Delete(handle));
  }
};

struct ErrorDeleter {
  void operator()(TRITONSERVER_Error* error) const { TRITONSERVER_ErrorDelete(error); }
};
struct ParameterDeleter {
  void operator()(TRITONSERVER_Parameter* parameter) const { TRITONSERVER_ParameterDelete(parameter); }
};

using ErrorPtr = std::unique_ptr<TRITONSERVER_Error, ErrorDeleter>;
using ParameterPtr = std::unique_ptr<TRITONSERVER_Parameter, ParameterDeleter>;
using MessagePtr = std::unique_ptr<TRITONSERVER_Message, Deleter<&TRITONSERVER_MessageDelete>>;
using MetricFamilyPtr = std::unique_ptr<TRITONSERVER_MetricFamily, Deleter<&TRITONSERVER_MetricFamilyDelete>>;
using MetricArgsPtr = std::unique_ptr<TRITONSERVER_MetricArgs, Deleter<&TRITONSERVER_MetricArgsDelete>>;
using MetricPtr = std::unique_ptr<TRITONSERVER_Metric, Deleter<&TRITONSERVER_MetricDelete>>;
using FactoryPtr = std::unique_ptr<TRITONBACKEND_ResponseFactory, Deleter<&TRITONBACKEND_ResponseFactoryDelete>>;
using ResponsePtr = std::unique_ptr<TRITONBACKEND_Response, Deleter<&TRITONBACKEND_ResponseDelete>>;

// Throws Error(internal) with Triton's text if `error` is not null.
void check(TRITONSERVER_Error* error);

// Logs `error` if it is not null, for calls whose failure has no other consequence.
void log_failure(TRITONSERVER_Error* error, const char* doing);

// Sends the engine's log to the server's log from now on.
void log_to_server();

void log_info(const std::string& text);
void log_warning(const std::string& text);
void log_error(const std::string& text);

// An error for the server, when it loads or unloads a model. The text is what().
ErrorPtr to_triton(const std::exception& error);

// An error for a client. Its text begins with `[400] ` if the request is wrong, `[429] ` if the server is overloaded,
// `[503] ` if the engine is shutting down, and `[504] ` if the request's own time ran out. Other errors have no prefix.
ErrorPtr to_client(const std::exception& error);
// The text of to_client().
std::string client_text(const std::exception& error);
// The name of the error's code, for logs.
const char* error_kind(const std::exception& error);

// Runs the body of an entry point. Returns its exception as an error.
template <class Body>
TRITONSERVER_Error* guarded(Body&& body) {
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    return to_triton(error).release();
  }
}

}  // namespace charonia::triton
