// A short busy wait for events that other threads cause within microseconds.
#pragma once

#include <chrono>
#include <thread>

namespace charonia {

// How long one of `threads` threads that meet often should spin before it sleeps. Zero if they cannot all run at the
// same time, because a spinning thread could then block a processor that another thread needs.
inline std::chrono::microseconds spin_limit(int threads) {
  constexpr std::chrono::microseconds kLimit{50};
  return threads <= static_cast<int>(std::thread::hardware_concurrency()) ? kLimit : std::chrono::microseconds{0};
}

// Hints to the processor that this is a wait loop.
inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until `done` returns true or the time limit passes. Returns the last value of `done`.
template <class Done>
bool spin(Done done, std::chrono::microseconds limit) {
  constexpr int kPausesPerLook = 32;
  if (limit.count() == 0) return done();
  const auto deadline = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (done()) return true;
      cpu_pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return done();
}

}  // namespace charonia
