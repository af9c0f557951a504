// `charonia serve` loads and unloads models through this pipe. The server's own API for this needs a key on the
// server's command line, which every user of the machine can read. The pipe needs no key and has no other writer.
#pragma once

#include <future>
#include <list>
#include <stop_token>
#include <string>
#include <thread>

#include "triton_api.h"

namespace charonia::triton {

// A thread that reads commands, one per line, from the file descriptor in the environment variable CHARONIA_CONTROL_FD:
// NAME unloads that model, +NAME loads it. Without the variable there is no thread. The server logs that it has loaded
// or unloaded a model. The thread logs errors as "unloading 'NAME': why" or "loading 'NAME': why".
class ControlPipe {
 public:
  explicit ControlPipe(TRITONSERVER_Server* server);

 private:
  void run(const std::stop_token& stop);
  void run_command(const std::string& command);

  TRITONSERVER_Server* server_;
  int pipe_ = -1;
  std::list<std::future<void>> loads_;  // used by thread_; each loads a model, so that others can be unloaded meanwhile
  std::jthread thread_;                 // last: uses the members above
};

}  // namespace charonia::triton
