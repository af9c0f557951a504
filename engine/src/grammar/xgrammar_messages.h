// What xgrammar has to say. It warns of what it ignores, in the log; here that is an error of the grammar.
#pragma once

#include <string>

namespace charonia::grammar {

// While it lives, xgrammar's warnings on this thread are kept.
class Messages {
 public:
  Messages();
  ~Messages();
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  const std::string& warning() const { return warning_; }  // the first one, or empty
  void take(const std::string& warning);

 private:
  Messages* const before_;
  std::string warning_;
};

}  // namespace charonia::grammar
