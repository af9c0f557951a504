// Session histories on disk, so that they survive a restart: one small file each, written on a thread of its own.
//
// A file's name is made of the session's id and of the model, so that engines of several models may share a folder. Of
// those of one model one alone writes: it holds a lock. Another one reads at its start, and writes as soon as that has
// ended, as where a server loads a model again.
// What it holds (little-endian): "CHSESS1\n"; u32 length and bytes of the id; i64 seconds since 1970 when the last turn
// ended; u32 count and i32 begins of the turns; u32 count and i32 tokens; u64 FNV-1a of all bytes before.
#pragma once

#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "runtime/session_history.h"

namespace charonia::runtime {

class SessionFiles {
 public:
  struct Stored {
    std::string id;
    std::shared_ptr<const History> history;
    double idle_s = 0;  // since its last turn ended
  };

  // Throws Error(invalid_argument) when the folder cannot be made. removal_delay: see read().
  SessionFiles(std::filesystem::path folder, std::string_view model_name, int vocab_size,
               std::chrono::milliseconds removal_delay = std::chrono::hours(1));
  // Writes what is queued, unless another one holds the lock.
  ~SessionFiles();
  SessionFiles(const SessionFiles&) = delete;
  SessionFiles& operator=(const SessionFiles&) = delete;

  // The sessions of this model that were idle for at most ttl_s. Files of older ones are passed over, and removed when
  // they still are too old after removal_delay: at the start of a machine its clock may be wrong. A file that is
  // damaged is passed over with a warning.
  std::vector<Stored> read(double ttl_s, std::vector<std::string>& warnings);

  // Neither waits for a file to be written nor fails: what cannot be written is said on the error stream, once until
  // something could be, and then no file of the session is left. What is erased is gone when erase() returns, unless
  // the file is being written. The youngest call counts.
  void write(const std::string& id, std::shared_ptr<const History> history);
  void erase(const std::string& id);
  // Returns when everything is on disk that was asked for before; at once where another one holds the lock.
  void flush();

 private:
  struct Change {
    std::shared_ptr<const History> history;  // null: erase
    std::int64_t ended_s = 0;
  };
  std::filesystem::path file_of(std::string_view id) const;
  template <class Take>  // take(path, what it holds, or nothing), for each file of this model
  void each_file(std::error_code& error, Take take) const;
  bool try_lock();  // under mutex_
  void remove_old() const;
  void apply(const std::string& id, const Change& change);
  void run();

  const std::filesystem::path folder_;
  const std::string suffix_;  // of this model's files
  const int vocab_size_;
  const std::chrono::milliseconds removal_delay_;
  int lock_ = -1;  // the file that is locked
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable written_;
  std::map<std::string, Change> changes_;
  bool owned_ = false;  // it has the lock
  double ttl_s_ = 0;    // read()'s
  std::optional<std::chrono::steady_clock::time_point> remove_old_at_;
  bool writing_ = false;
  bool stop_ = false;
  bool warned_ = false;  // the thread's own
  std::thread thread_;
};

}  // namespace charonia::runtime
