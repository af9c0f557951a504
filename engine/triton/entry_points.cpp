// The functions that Triton calls. They create and destroy the backend, its models and their instances, and execute
// requests.
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <thread>

#include "base/text.h"
#include "error.h"
#include "model.h"
#include "triton_api.h"

namespace charonia::triton {
namespace {

void check_api_version() {
  std::uint32_t major = 0, minor = 0;
  check(TRITONBACKEND_ApiVersion(&major, &minor));
  if (major != kBackendApiMajor || minor < kBackendApiMinor) {
    throw Error(ErrorCode::unsupported,
                cat("the server's backend API is ", major, ".", minor, "; this backend needs ", kBackendApiMajor, ".",
                    kBackendApiMinor, " or newer: Triton 24.10 or newer"));
  }
}

// `charonia serve` loads and unloads models through this pipe. The server's own API for this needs a key on the
// server's command line, which every user of the machine can read. The pipe needs no key and has no other writer.
//
// A thread that reads commands, one per line, from the file descriptor in the environment variable CHARONIA_CONTROL_FD:
// NAME unloads that model, +NAME loads it. Without the variable there is no thread. The server logs that it has loaded
// or unloaded a model. The thread logs errors as "unloading 'NAME': why" or "loading 'NAME': why".
class ControlPipe {
 public:
  explicit ControlPipe(TRITONSERVER_Server* server) : server_(server), pipe_(control_descriptor()) {
    if (pipe_ >= 0) thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
  }

 private:
  // Returns the file descriptor in the environment, or -1. Logs an invalid value.
  static int control_descriptor() {
    const char* const value = std::getenv("CHARONIA_CONTROL_FD");
    if (value == nullptr || *value == '\0') return -1;
    const int descriptor = parse_number<int>(value).value_or(-1);
    const int flags = ::fcntl(descriptor, F_GETFL);
    // The thread must be able to stop, so reads must not block.
    if (flags < 0 || ::fcntl(descriptor, F_SETFL, flags | O_NONBLOCK) != 0 ||
        ::fcntl(descriptor, F_SETFD, FD_CLOEXEC) != 0) {
      log_error(cat("CHARONIA_CONTROL_FD=", value,
                    " is not an open file descriptor: charonia serve cannot load or unload models"));
      return -1;
    }
    return descriptor;
  }

  void run(const std::stop_token& stop) {
    const int stopped = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (stopped < 0) {
      return log_error("no event descriptor for the control pipe: charonia serve cannot load or unload models");
    }
    {
      const std::stop_callback wake(stop, [stopped] {
        const std::uint64_t one = 1;
        [[maybe_unused]] const auto written = ::write(stopped, &one, sizeof one);
      });
      std::string pending;
      std::array<char, 256> buffer{};
      while (!stop.stop_requested()) {
        std::array<pollfd, 2> watched{{{pipe_, POLLIN, 0}, {stopped, POLLIN, 0}}};
        if (::poll(watched.data(), watched.size(), -1) < 0 && errno != EINTR) break;
        if (watched[0].revents == 0) continue;
        const auto got = ::read(pipe_, buffer.data(), buffer.size());
        if (got == 0 || (got < 0 && errno != EINTR && errno != EAGAIN)) break;  // the launcher has ended
        if (got > 0) pending.append(buffer.data(), static_cast<std::size_t>(got));
        for (auto end = pending.find('\n'); end != std::string::npos; end = pending.find('\n')) {
          run_command(pending.substr(0, end));
          pending.erase(0, end + 1);
        }
      }
    }
    ::close(stopped);
  }

  void run_command(const std::string& command) {
    if (!command.starts_with('+')) {
      log_failure(TRITONSERVER_ServerUnloadModel(server_, command.c_str()), ("unloading '" + command + "'").c_str());
      return;
    }
    loads_.remove_if(
        [](const auto& load) { return load.wait_for(std::chrono::seconds(0)) == std::future_status::ready; });
    // On its own thread, because loading takes as long as reading the model's weights.
    loads_.push_back(std::async(std::launch::async, [server = server_, model = command.substr(1)] {
      log_failure(TRITONSERVER_ServerLoadModel(server, model.c_str()), ("loading '" + model + "'").c_str());
    }));
  }

  TRITONSERVER_Server* server_;
  int pipe_ = -1;
  std::list<std::future<void>> loads_;  // used by thread_; each loads a model, so that others can be unloaded meanwhile
  std::jthread thread_;                 // last: uses the members above
};

// State that the models of the backend share. The server keeps the backend until the server ends, even without models.
struct Shared {
  MetricFamilies families;
  Generations generations;
  std::once_flag has_control;
  std::optional<ControlPipe> control;  // set with the first model, because only models know the server
};

Shared& shared_of(TRITONBACKEND_Backend* backend) {
  void* state = nullptr;
  check(TRITONBACKEND_BackendState(backend, &state));
  return *static_cast<Shared*>(state);
}

TRITONBACKEND_Backend* backend_of(TRITONBACKEND_Model* model) {
  TRITONBACKEND_Backend* backend = nullptr;
  check(TRITONBACKEND_ModelBackend(model, &backend));
  return backend;
}

Model* state_of(TRITONBACKEND_Model* model) {
  void* state = nullptr;
  check(TRITONBACKEND_ModelState(model, &state));
  return static_cast<Model*>(state);
}

Model* state_of(TRITONBACKEND_ModelInstance* instance) {
  TRITONBACKEND_Model* model = nullptr;
  check(TRITONBACKEND_ModelInstanceModel(instance, &model));
  return state_of(model);
}

}  // namespace
}  // namespace charonia::triton

using namespace charonia::triton;

extern "C" {

TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend* backend) {
  return guarded([backend] {
    check_api_version();
    log_to_server();
    auto shared = std::make_unique<Shared>();
    check(TRITONBACKEND_BackendSetState(backend, shared.get()));
    shared.release();  // Finalize deletes it
  });
}

TRITONSERVER_Error* TRITONBACKEND_Finalize(TRITONBACKEND_Backend* backend) {
  return guarded([backend] { delete &shared_of(backend); });
}

TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) {
  return guarded([model] {
    auto& shared = shared_of(backend_of(model));
    std::call_once(shared.has_control, [&] { shared.control.emplace(server_of(model)); });
    auto state = std::make_unique<Model>(model, shared.families, shared.generations);
    check(TRITONBACKEND_ModelSetState(model, state.get()));
    state.release();  // ModelFinalize deletes it
  });
}

TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model) {
  return guarded([model] { delete state_of(model); });
}

// A model has one instance. The model has all the state.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance*) { return nullptr; }
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceFinalize(TRITONBACKEND_ModelInstance*) { return nullptr; }

// Always returns null. An error would return all requests to the server, so each request receives its own response.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance* instance,
                                                       TRITONBACKEND_Request** requests, std::uint32_t count) {
  Model* model = nullptr;
  if (auto* error = guarded([&] { model = state_of(instance); })) return error;
  for (auto* request : std::span(requests, count)) model->execute(instance, request);
  return nullptr;
}

}  // extern "C"
