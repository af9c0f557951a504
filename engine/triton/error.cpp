#include "error.h"

#include "base/log.h"

namespace charonia::triton {
namespace {

TRITONSERVER_LogLevel level_of(LogLevel level) {
  switch (level) {
    case LogLevel::info:
      return TRITONSERVER_LOG_INFO;
    case LogLevel::warning:
      return TRITONSERVER_LOG_WARN;
    case LogLevel::error:
      break;
  }
  return TRITONSERVER_LOG_ERROR;
}

// How an error appears outside of the engine.
struct Appearance {
  TRITONSERVER_Error_Code code;
  const char* prefix;  // of the text for a client
  const char* kind;    // in the log
};

Appearance appearance_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const Error*>(&error);
  switch (ours == nullptr ? ErrorCode::internal : ours->code()) {
    case ErrorCode::invalid_argument:
      return {TRITONSERVER_ERROR_INVALID_ARG, "[400] ", "invalid_argument"};
    case ErrorCode::not_found:
      return {TRITONSERVER_ERROR_NOT_FOUND, "[404] ", "not_found"};
    case ErrorCode::resource_exhausted:
      return {TRITONSERVER_ERROR_UNAVAILABLE, "[429] ", "resource_exhausted"};
    case ErrorCode::unavailable:
      return {TRITONSERVER_ERROR_UNAVAILABLE, "[503] ", "unavailable"};
    case ErrorCode::deadline_exceeded:
      return {TRITONSERVER_ERROR_UNAVAILABLE, "[504] ", "deadline_exceeded"};
    case ErrorCode::unsupported:
      return {TRITONSERVER_ERROR_UNSUPPORTED, "", "unsupported"};
    case ErrorCode::internal:
      break;
  }
  return {TRITONSERVER_ERROR_INTERNAL, "", "internal"};
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

void log_to_server() {
  set_log_sink([](LogLevel level, const std::string& line) {
    detail::drop(TRITONSERVER_LogMessage(level_of(level), "charonia", 0, line.c_str()));
  });
}

void log_info(const std::string& text) { log({LogLevel::info, text, "", {}}); }
void log_warning(const std::string& text) { log({LogLevel::warning, text, "", {}}); }
void log_error(const std::string& text) { log({LogLevel::error, text, "", {}}); }

ErrorPtr to_triton(const std::exception& error) {
  return ErrorPtr(TRITONSERVER_ErrorNew(appearance_of(error).code, error.what()));
}

ErrorPtr to_client(const std::exception& error) {
  return ErrorPtr(TRITONSERVER_ErrorNew(appearance_of(error).code, client_text(error).c_str()));
}

std::string client_text(const std::exception& error) { return std::string(appearance_of(error).prefix) + error.what(); }

const char* error_kind(const std::exception& error) { return appearance_of(error).kind; }

}  // namespace charonia::triton
