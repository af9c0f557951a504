// Owners of the handles that Triton gives to keep: each deletes its handle exactly once.
#pragma once

#include <memory>

#include "triton_api.h"

namespace charonia::triton {

namespace detail {
inline void drop(TRITONSERVER_Error* error) {
  if (error != nullptr) TRITONSERVER_ErrorDelete(error);
}
}  // namespace detail

// Deletes with a function that reports errors; an error while deleting has nobody to act on it.
template <auto Delete>
struct Deleter {
  template <class Handle>
  void operator()(Handle* handle) const {
    detail::drop(Delete(handle));
  }
};

struct ErrorDeleter {
  void operator()(TRITONSERVER_Error* error) const { TRITONSERVER_ErrorDelete(error); }
};
struct ParameterDeleter {
  void operator()(TRITONSERVER_Parameter* parameter) const { TRITONSERVER_ParameterDelete(parameter); }
};

using ErrorPtr = std::unique_ptr<TRITONSERVER_Error, ErrorDeleter>;
using ParameterPtr = std::unique_ptr<TRITONSERVER_Parameter, ParameterDeleter>;
using MessagePtr = std::unique_ptr<TRITONSERVER_Message, Deleter<&TRITONSERVER_MessageDelete>>;
using MetricFamilyPtr = std::unique_ptr<TRITONSERVER_MetricFamily, Deleter<&TRITONSERVER_MetricFamilyDelete>>;
using MetricArgsPtr = std::unique_ptr<TRITONSERVER_MetricArgs, Deleter<&TRITONSERVER_MetricArgsDelete>>;
using MetricPtr = std::unique_ptr<TRITONSERVER_Metric, Deleter<&TRITONSERVER_MetricDelete>>;
using FactoryPtr = std::unique_ptr<TRITONBACKEND_ResponseFactory, Deleter<&TRITONBACKEND_ResponseFactoryDelete>>;
using ResponsePtr = std::unique_ptr<TRITONBACKEND_Response, Deleter<&TRITONBACKEND_ResponseDelete>>;

}  // namespace charonia::triton
