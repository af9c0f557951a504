// Errors of the engine. Inside the engine errors are exceptions of this one type; each adapter translates them in
// exactly one place (Triton's C API, pybind11).
#pragma once

#include <stdexcept>
#include <string>

namespace charonia {

enum class ErrorCode {
  invalid_argument,    // the caller's request or configuration is wrong; the text says what would be right
  resource_exhausted,  // the queue is full or memory does not suffice; worth another try later
  unavailable,         // the engine is shutting down or has failed
  pending,             // what the request needs is not there yet; worth another try later
  deadline_exceeded,   // the request did not end within its own time limit
  unsupported,         // a model or feature that this build or installation does not have
  internal,            // a broken invariant: a bug of ours
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& what) : std::runtime_error(what), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace charonia
