#include "grammar/xgrammar_messages.h"

// Declares LogFatalImpl and LogMessageImpl, which XGRAMMAR_LOG_CUSTOMIZE asks for.
#include <support/logging.h>

#include "base/log.h"
#include "base/text.h"

namespace charonia::grammar {
namespace {

thread_local Messages* collecting = nullptr;

}  // namespace

Messages::Messages() : before_(collecting) { collecting = this; }
Messages::~Messages() { collecting = before_; }

void Messages::take(const std::string& warning) {
  if (!warning_.empty()) return;
  warning_ = warning;
  // It is not: what would be ignored is refused.
  for (const std::string_view ignored : {" It is ignored.", " and is ignored", "warning "}) {
    if (const auto at = warning_.find(ignored); at != std::string::npos) warning_.erase(at, ignored.size());
  }
  if (const auto at = warning_.find(" is ignored"); at != std::string::npos) warning_.replace(at, 11, " is not supported");
}

}  // namespace charonia::grammar

namespace xgrammar {

[[noreturn]] void LogFatalImpl(const std::string& file, int lineno, const std::string& message) {
  throw LogFatalError(file, lineno, message);
}

void LogMessageImpl(const std::string& file, int lineno, int level, const std::string& message) {
  if (level < XGRAMMAR_LOG_LEVEL_WARNING) return;
  if (charonia::grammar::collecting != nullptr) {
    charonia::grammar::collecting->take(message);
  } else {
    charonia::log({charonia::LogLevel::warning,
                   charonia::cat("xgrammar: ", message),
                   "",
                   {{"file", file}, {"line", std::int64_t{lineno}}}});
  }
}

}  // namespace xgrammar
