#include "error.h"

namespace charonia::triton {
namespace {

void log(TRITONSERVER_LogLevel level, const std::string& text) {
  detail::drop(TRITONSERVER_LogMessage(level, "charonia", 0, text.c_str()));
}

TRITONSERVER_Error_Code code_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const Error*>(&error);
  if (ours == nullptr) return TRITONSERVER_ERROR_INTERNAL;
  switch (ours->code()) {
    case ErrorCode::invalid_argument:
      return TRITONSERVER_ERROR_INVALID_ARG;
    case ErrorCode::resource_exhausted:
    case ErrorCode::unavailable:
    case ErrorCode::deadline_exceeded:
      return TRITONSERVER_ERROR_UNAVAILABLE;
    case ErrorCode::unsupported:
      return TRITONSERVER_ERROR_UNSUPPORTED;
    case ErrorCode::internal:
      break;
  }
  return TRITONSERVER_ERROR_INTERNAL;
}

const char* prefix_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const Error*>(&error);
  if (ours == nullptr) return "";
  switch (ours->code()) {
    case ErrorCode::invalid_argument:
    case ErrorCode::unsupported:
      return "[400] ";
    case ErrorCode::resource_exhausted:
      return "[429] ";
    case ErrorCode::unavailable:
      return "[503] ";
    case ErrorCode::deadline_exceeded:
      return "[504] ";
    case ErrorCode::internal:
      break;
  }
  return "";
}

}  // namespace

void check(TRITONSERVER_Error* error) {
  if (error == nullptr) return;
  const ErrorPtr owned(error);
  throw Error(ErrorCode::internal, TRITONSERVER_ErrorMessage(error));
}

void log_failure(TRITONSERVER_Error* error, const char* doing) {
  if (error == nullptr) return;
  const ErrorPtr owned(error);
  log_error(std::string(doing) + ": " + TRITONSERVER_ErrorMessage(error));
}

void log_info(const std::string& text) { log(TRITONSERVER_LOG_INFO, text); }
void log_warning(const std::string& text) { log(TRITONSERVER_LOG_WARN, text); }
void log_error(const std::string& text) { log(TRITONSERVER_LOG_ERROR, text); }

ErrorPtr to_triton(const std::exception& error) {
  return ErrorPtr(TRITONSERVER_ErrorNew(code_of(error), error.what()));
}

ErrorPtr to_client(const std::exception& error) {
  // Triton's HTTP front end makes 501 of UNSUPPORTED; what a client may not ask for is its 400.
  const auto code = code_of(error) == TRITONSERVER_ERROR_UNSUPPORTED ? TRITONSERVER_ERROR_INVALID_ARG : code_of(error);
  return ErrorPtr(TRITONSERVER_ErrorNew(code, (std::string(prefix_of(error)) + error.what()).c_str()));
}

}  // namespace charonia::triton
