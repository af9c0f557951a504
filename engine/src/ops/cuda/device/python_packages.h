// Finds libraries that Python packages install.
#pragma once

#include <string>
#include <string_view>

namespace charonia::cuda {

// The file `name` in the folder `package` (such as "nvidia/nccl/lib") of the Python packages next to this module; empty
// if it does not exist.
std::string in_python_packages(std::string_view package, std::string_view name);

}  // namespace charonia::cuda
