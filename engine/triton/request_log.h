// A line in the log for each request, where CHARONIA_ACCESS_LOG asks for it. It has no text of prompts or completions.
#pragma once

#include <exception>
#include <string>

#include "totals.h"

namespace charonia::triton {

class RequestLog {
 public:
  RequestLog();  // reads the environment

  void ended(const std::string& request_id, const Totals& totals) const;
  // What the engine did not take, by the kind of its error: the text, which is for the client, may quote the request.
  void rejected(const std::string& request_id, const std::exception& error) const;

 private:
  bool on_;
};

}  // namespace charonia::triton
