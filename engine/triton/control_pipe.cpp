#include "control_pipe.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "error.h"

namespace charonia::triton {
namespace {

// Returns the file descriptor in the environment, or -1. Logs an invalid value.
int control_descriptor() {
  const char* const value = std::getenv("CHARONIA_CONTROL_FD");
  if (value == nullptr || *value == '\0') return -1;
  const std::string_view text(value);
  int descriptor = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), descriptor);
  const bool is_number = error == std::errc() && end == text.data() + text.size();
  const int flags = is_number ? ::fcntl(descriptor, F_GETFL) : -1;
  // The thread must be able to stop, so reads must not block.
  if (flags < 0 || ::fcntl(descriptor, F_SETFL, flags | O_NONBLOCK) != 0 ||
      ::fcntl(descriptor, F_SETFD, FD_CLOEXEC) != 0) {
    log_error("CHARONIA_CONTROL_FD=" + std::string(text) +
              " is not an open file descriptor: charonia serve cannot load or unload models");
    return -1;
  }
  return descriptor;
}

}  // namespace

ControlPipe::ControlPipe(TRITONSERVER_Server* server) : server_(server), pipe_(control_descriptor()) {
  if (pipe_ >= 0) thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
}

void ControlPipe::run(const std::stop_token& stop) {
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

void ControlPipe::run_command(const std::string& command) {
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

}  // namespace charonia::triton
