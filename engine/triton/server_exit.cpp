#include "server_exit.h"

#include <cstdlib>
#include <utility>

#include "error.h"

namespace charonia::triton {

void exit_server() {
  log_error("the server ends with exit code " + std::to_string(kDeviceFailedExitCode) + ", as the device has failed");
  std::_Exit(kDeviceFailedExitCode);
}

void exit_stuck_server() {
  log_error("Triton has not taken a response for 30 s, as can happen when a client cancels a stream "
            "(docs/contracts.md): the server ends with exit code " + std::to_string(kStuckExitCode) +
            ", to be started again");
  std::_Exit(kStuckExitCode);
}

void Withdrawal::keep(FactoryPtr factory) {
  const std::lock_guard lock(mutex_);
  if (!factory_ && !ended_) factory_ = std::move(factory);
}

bool Withdrawal::begin(TRITONSERVER_Server* server, const std::string& model) {
  {
    const std::lock_guard lock(mutex_);
    if (!factory_) return false;
  }
  log_failure(TRITONSERVER_ServerUnloadModel(server, model.c_str()),
              "the model cannot be shown as not ready, since the server is not started with "
              "--model-control-mode=explicit");
  return true;
}

void Withdrawal::end() {
  FactoryPtr last;  // its end may be the model's: not for under a lock
  const std::lock_guard lock(mutex_);
  ended_ = true;
  last = std::exchange(factory_, nullptr);
}

}  // namespace charonia::triton
