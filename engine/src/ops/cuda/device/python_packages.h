// Libraries that Python packages bring along.
#pragma once

#include <string>
#include <string_view>

namespace charonia::cuda {

// The file `name` in the folder `package` (as "nvidia/nccl/lib") of the Python packages among which this module is
// installed; empty when it is not there.
std::string in_python_packages(std::string_view package, std::string_view name);

}  // namespace charonia::cuda
