// Errors of the engine. Inside the engine all errors are exceptions of this type. Each adapter (Triton's C API,
// pybind11) translates them in exactly one place.
#pragma once

#include <stdexcept>
#include <string>

namespace charonia {

enum class ErrorCode {
  invalid_argument,    // the caller's request or configuration is wrong; the text says which values are valid
  not_found,           // the request names something that does not exist
  resource_exhausted,  // the queue is full or there is not enough memory; retry later
  unavailable,         // the engine is shutting down or has failed
  deadline_exceeded,   // the request did not end within its own time limit
  unsupported,         // this build or installation does not have the model or feature
  internal,            // a broken invariant: a bug in the engine
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& what) : std::runtime_error(what), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace charonia
