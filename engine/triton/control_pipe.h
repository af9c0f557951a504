// The pipe through which `charonia serve` has models loaded and unloaded. The server's own API for that asks for a key
// that would stand in the server's command line, for everyone on the machine to read; a pipe has no key and no other
// writer.
#pragma once

#include <future>
#include <list>
#include <stop_token>
#include <string>
#include <thread>

#include "triton_api.h"

namespace charonia::triton {

// One thread, which reads orders, a line each, from the file descriptor in the environment variable
// CHARONIA_CONTROL_FD: NAME has the server unload that model, +NAME load it. Without the variable there is no thread.
// The server's log says when a model is unloaded or loaded; that one cannot be, this says, as "unloading 'NAME': why"
// or "loading 'NAME': why".
class ControlPipe {
 public:
  explicit ControlPipe(TRITONSERVER_Server* server);

 private:
  void run(const std::stop_token& stop);
  void obey(const std::string& order);

  TRITONSERVER_Server* server_;
  int pipe_ = -1;
  std::list<std::future<void>> loads_;  // the thread's: each loads a model, beside which others may be unloaded
  std::jthread thread_;                 // last: it uses the above
};

}  // namespace charonia::triton
