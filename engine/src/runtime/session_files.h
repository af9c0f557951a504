// Session histories on disk, so that they survive a restart: one small file each, written on a thread of its own.
//
// A file's name is made of the session's id and of the model, so that engines of several models may share a folder.
// What it holds (little-endian): "CHSESS1\n"; u32 length and bytes of the id; i64 seconds since 1970 when the last turn
// ended; u32 count and i32 begins of the turns; u32 count and i32 tokens; u64 FNV-1a of all bytes before.
#pragma once

#include <condition_variable>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
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

  // Throws Error(invalid_argument) when the folder cannot be made.
  SessionFiles(std::filesystem::path folder, std::string_view model_name, int vocab_size);
  // Writes what is queued.
  ~SessionFiles();
  SessionFiles(const SessionFiles&) = delete;
  SessionFiles& operator=(const SessionFiles&) = delete;

  // The sessions of this model that were idle for at most ttl_s; files of older ones are removed. A file that is
  // damaged is passed over with a warning.
  std::vector<Stored> read(double ttl_s, std::vector<std::string>& warnings) const;

  // Neither blocks nor fails: what cannot be written is said once on the error stream. The youngest call counts.
  void write(const std::string& id, std::shared_ptr<const History> history);
  void erase(const std::string& id);
  // Returns when everything is on disk that was asked for before.
  void flush();

 private:
  struct Change {
    std::shared_ptr<const History> history;  // null: erase
    std::int64_t ended_s = 0;
  };
  std::filesystem::path file_of(std::string_view id) const;
  void change(const std::string& id, Change change);
  void apply(const std::string& id, const Change& change);
  void run();

  const std::filesystem::path folder_;
  const std::string suffix_;  // of this model's files
  const int vocab_size_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable written_;
  std::map<std::string, Change> changes_;
  bool writing_ = false;
  bool stop_ = false;
  bool warned_ = false;  // the thread's own
  std::thread thread_;
};

}  // namespace charonia::runtime
