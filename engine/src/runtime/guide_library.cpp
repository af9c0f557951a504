#include "runtime/guide_library.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <fstream>
#include <string_view>
#include <system_error>

#include "base/text.h"
#include "charonia/error.h"
#include "grammar/interface_version.h"

namespace charonia::runtime {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kName = "libcharonia_grammar.so";
constexpr int kRetryAfter = 20;  // seconds: clients wait so long without giving up

fs::path marker_of(const fs::path& file) { return file.string() + ".build"; }

bool is_there(const fs::path& file) {
  std::error_code error;
  return fs::exists(file, error);
}

// Whether another process holds the lock.
bool is_locked(const fs::path& file) {
  const int descriptor = ::open(file.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return false;
  const bool locked = ::flock(descriptor, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  ::close(descriptor);
  return locked;
}

std::string first_line(const fs::path& file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  return line;
}

// Of the dynamic linker's messages, which have the whole path.
std::string without_folder(std::string text, const fs::path& file) {
  const auto whole = file.string();
  if (const auto at = text.find(whole); at != std::string::npos) text.replace(at, whole.size(), kName);
  return text;
}

[[noreturn]] void refuse(std::string_view why) {
  throw Error(ErrorCode::unsupported,
              cat("structured output cannot be used: ", why, ". Install charonia again (in a checkout: delete ", kName,
                  " and run make serve)"));
}

}  // namespace

fs::path guide_library_file() {
  Dl_info own{};
  std::error_code error;
  fs::path folder;
  if (::dladdr(reinterpret_cast<const void*>(&marker_of), &own) != 0 && own.dli_fname != nullptr) {
    folder = fs::canonical(own.dli_fname, error).parent_path();  // the server opens its backend by a link
  }
  for (const auto& place : std::array{folder, folder.parent_path(), folder.parent_path().parent_path()}) {
    if (is_there(place / kName) || is_there(marker_of(place / kName))) return place / kName;
  }
  return folder / kName;
}

GuideLibraryStatus guide_library_status(const fs::path& file) {
  using State = GuideLibraryStatus::State;
  if (is_there(file)) return {State::there, ""};
  if (is_locked(marker_of(file))) {
    return {State::compiling, cat("structured output is still being compiled, as it is after the first start, for a few "
                                  "minutes. Other requests are answered; retry after ", kRetryAfter, " s")};
  }
  const bool begun = is_there(marker_of(file));
  const auto log = first_line(marker_of(file));
  if (is_there(file)) return {State::there, ""};  // by now
  if (!begun) return {State::missing, cat("structured output is missing: there is no ", kName, ". Install charonia again")};
  return {State::missing, cat("structured output was not compiled to its end", log.empty() ? "" : ": see ", log,
                              log.empty() ? "" : " on the server", ". The next make serve begins anew")};
}

grammar::MakeGuideCompiler& open_guide_library(const fs::path& file) {
  const auto status = guide_library_status(file);
  if (status.state == GuideLibraryStatus::State::compiling) throw Error(ErrorCode::pending, status.problem);
  if (status.state == GuideLibraryStatus::State::missing) throw Error(ErrorCode::unsupported, status.problem);
  void* const library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) refuse(without_folder(::dlerror(), file));
  auto* const make = reinterpret_cast<grammar::MakeGuideCompiler*>(::dlsym(library, grammar::kMakeGuideCompiler));
  if (make == nullptr) {
    ::dlclose(library);  // else the one that replaces it would not be opened
    throw Error(ErrorCode::unsupported, cat("structured output cannot be used: ", kName,
                                            " is of another version than the engine: start the server again"));
  }
  return *make;
}

}  // namespace charonia::runtime
