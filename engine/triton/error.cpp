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
      return "[400] ";
    case ErrorCode::resource_exhausted:
      return "[429] ";
    case ErrorCode::unavailable:
      return "[503] ";
    case ErrorCode::deadline_exceeded:
      return "[504] ";
    case ErrorCode::unsupported:
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

void log_to_server() {
  set_log_sink([](LogLevel level, const std::string& line) {
    detail::drop(TRITONSERVER_LogMessage(level_of(level), "charonia", 0, line.c_str()));
  });
}

void log_info(const std::string& text) { log({LogLevel::info, text, "", {}}); }
void log_warning(const std::string& text) { log({LogLevel::warning, text, "", {}}); }
void log_error(const std::string& text) { log({LogLevel::error, text, "", {}}); }

ErrorPtr to_triton(const std::exception& error) {
  return ErrorPtr(TRITONSERVER_ErrorNew(code_of(error), error.what()));
}

ErrorPtr to_client(const std::exception& error) {
  return ErrorPtr(TRITONSERVER_ErrorNew(code_of(error), client_text(error).c_str()));
}

std::string client_text(const std::exception& error) { return std::string(prefix_of(error)) + error.what(); }

}  // namespace charonia::triton
