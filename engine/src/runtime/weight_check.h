// Why logits are not finite: the weights are read once more when that happens, never before, since loading maps them
// without looking at their values.
#pragma once

#include <filesystem>
#include <future>
#include <stop_token>
#include <string>
#include <thread>

#include "base/dtype.h"

namespace charonia::runtime {

// Used by one thread, but for stop().
class WeightCheck {
 public:
  // The folder may be gone later, as the one that Python makes for a Hugging Face folder is. Its manifest is kept, which
  // names the files of linked weights; those that were converted into the folder were found finite then.
  // data: what weights that are not quantised are rounded to.
  WeightCheck(const std::filesystem::path& weights_dir, int ranks, DType data);
  ~WeightCheck() { join(); }

  // The error with what is known: the tensor that is not finite, or that none is. The first call begins to read the
  // weights, in a thread of its own, and waits some seconds for the answer; later calls do not wait. The answer is
  // logged as well.
  std::string explain(const std::string& error);

  // Has the reading end within some megabytes, and explain() with it; none begins later. Any thread may call.
  void stop() { stop_.request_stop(); }
  // The same, and waits for its thread. Not while explain() runs.
  void join();

 private:
  std::filesystem::path dir_;
  std::string manifest_;
  int ranks_;
  DType data_;
  std::shared_future<std::string> answer_;
  std::stop_source stop_;
  std::thread thread_;
};

}  // namespace charonia::runtime
