// Where the tests find llguidance, unless the environment says it.
#include "grammar/library.h"

#include <cstdlib>

namespace charonia::grammar {
namespace {

const bool kPathsAreSet = ::setenv(kLibraryVariable, LLGUIDANCE_FILE, 0) == 0 &&
                          ::setenv(kPythonVariable, PYTHON_LIBRARY_FILE, 0) == 0;

}  // namespace
}  // namespace charonia::grammar
