// The pipe through which `charonia serve` has models unloaded. The server's own API for that asks for a key that would
// stand in the server's command line, for everyone on the machine to read; a pipe has no key and no other writer.
#pragma once

#include <stop_token>
#include <thread>

#include "triton_api.h"

namespace charonia::triton {

// One thread, which reads names of models, a line each, from the file descriptor in the environment variable
// CHARONIA_CONTROL_FD, and has the server unload them. Without the variable there is no thread. The server's log says
// when a model is unloaded.
class ControlPipe {
 public:
  explicit ControlPipe(TRITONSERVER_Server* server);

 private:
  void run(const std::stop_token& stop);

  TRITONSERVER_Server* server_;
  int pipe_ = -1;
  std::jthread thread_;  // last: it uses the above
};

}  // namespace charonia::triton
