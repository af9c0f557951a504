#pragma once

#include <pybind11/pybind11.h>

// Adds the class KernelBench to the module.
void bind_kernel_bench(pybind11::module_& m);
