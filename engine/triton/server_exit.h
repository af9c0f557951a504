// What becomes of a model and its server when the engine's device has failed: clients and health checks are told, and
// the process ends, so that what supervises it starts a new one. CUDA leaves a process no other way to use the device
// again.
#pragma once

#include <mutex>
#include <string>

#include "raii.h"

namespace charonia::triton {

// EX_TEMPFAIL of sysexits.h: a new try may succeed. `charonia serve` knows it by os.EX_TEMPFAIL and ends with it, too.
inline constexpr int kDeviceFailedExitCode = 75;

// Ends this process at once, without destructors: what they would ask of the device fails, or hangs.
[[noreturn]] void exit_server();

// EX_SOFTWARE: `charonia serve` starts the server again.
inline constexpr int kStuckExitCode = 70;

// Ends this process at once when the server takes no responses any more.
[[noreturn]] void exit_stuck_server();

// Makes a model that can answer nothing not ready, for the server's health and the model's own, and keeps it loaded for
// its metrics. Any thread.
class Withdrawal {
 public:
  // Of a response stream that has ended: while it is kept the server cannot finish the model's unloading. The first is
  // kept.
  void keep(FactoryPtr factory);
  // Has the server unload the model, which `factory` holds up; a server that allows no unloading is left as it is, and
  // says so in the log. False, and nothing is done, when there is no factory yet.
  bool begin(TRITONSERVER_Server* server, const std::string& model);
  // Lets the unloading be finished.
  void end();

 private:
  std::mutex mutex_;
  FactoryPtr factory_;
  bool ended_ = false;
};

}  // namespace charonia::triton
