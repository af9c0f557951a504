// Session histories on disk, so that they survive a restart: one small file each, written on a thread of its own.
//
// A file's name is made of the session's id and of the model, so that engines of several models may share a folder. Of
// those of one model one alone writes: it holds a lock. Another one reads at its start, and writes as soon as that has
// ended, as where a server loads a model again: what it was asked for before is not done to sessions that the other one
// went on with since.
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
  // something could be, and then no file of the session is left. The youngest call counts. at_once: the file is gone
  // when erase() returns, unless it is being written; that waits for the file system.
  void write(const std::string& id, std::shared_ptr<const History> history);
  void erase(const std::string& id, bool at_once);
  // Returns when everything is on disk that was asked for before; at once where another one holds the lock.
  void flush();

 private:
  struct Change {
    std::shared_ptr<const History> history;  // null: erase
    std::int64_t asked_s = 0;  // since 1970
    bool owned = false;        // when it was asked for
  };
  struct Decoded;
  static std::optional<Decoded> decode(std::string_view bytes, int vocab_size);
  std::filesystem::path file_of(std::string_view id) const;
  std::optional<Decoded> read_file(const std::filesystem::path& path) const;
  template <class Take>  // take(path), for each file whose name ends so
  void each_path(std::string_view ending, std::error_code& error, Take take) const;
  bool try_lock();  // under mutex_
  void remove_old() const;
  void remove_unfinished() const;  // with the lock
  void apply(const std::string& id, const Change& change);
  template <class Work>
  void guarded(Work work);
  void warn(const std::string& message);  // once until something could be written
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
  bool locked_ = false;  // it has the lock
  bool owned_ = false;   // it has the lock, or there is none to be had
  double ttl_s_ = 0;     // read()'s
  std::optional<std::chrono::steady_clock::time_point> remove_old_at_;
  bool writing_ = false;
  bool stop_ = false;
  bool warned_ = false;  // the thread's own
  std::thread thread_;
};

}  // namespace charonia::runtime
