// Errors across the C API, in both directions, and the server's log. This is the one place that translates.
#pragma once

#include <exception>
#include <string>

#include "charonia/error.h"
#include "raii.h"
#include "triton_api.h"

namespace charonia::triton {

// Throws Error(internal) with Triton's text; null is success.
void check(TRITONSERVER_Error* error);

// For calls whose failure changes nothing for anybody but must not go unseen: writes it to the log.
void log_failure(TRITONSERVER_Error* error, const char* doing);

// From now on what the engine logs goes to the server's log.
void log_to_server();

void log_info(const std::string& text);
void log_warning(const std::string& text);
void log_error(const std::string& text);

// An error for the server, with the code that belongs to it; the text is what() alone (loading and unloading).
ErrorPtr to_triton(const std::exception& error);

// An error for a client. Its text begins with `[400] ` if the request is wrong, `[429] ` if the server is overloaded,
// `[503] ` if the engine is shutting down, and `[504] ` if the request's own time ran out. Other errors have no prefix.
ErrorPtr to_client(const std::exception& error);
// That text.
std::string client_text(const std::exception& error);

// Runs an entry point's body; what it throws becomes the returned error.
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
