#include "standing.h"

#include "error.h"

namespace charonia::triton {

Standing ModelStanding::now() {
  bool ready = false;
  const ErrorPtr error(TRITONSERVER_ServerModelIsReady(server_, name_.c_str(), version_, &ready));
  if (!error && ready) {
    was_served_ = true;
    return Standing::served;
  }
  if (!was_served_) return Standing::unknown;
  if (!error) return Standing::unloading;
  return TRITONSERVER_ErrorCode(error.get()) == TRITONSERVER_ERROR_UNAVAILABLE ? Standing::exiting : Standing::unknown;
}

}  // namespace charonia::triton
