#include "generations.h"

namespace charonia::triton {

Generation::~Generation() {
  const std::lock_guard lock(all_.mutex_);
  const auto found = all_.loaded_.find(key_);
  if (found == all_.loaded_.end()) return;
  found->second.erase(number_);
  if (found->second.empty()) all_.loaded_.erase(found);
}

void Generation::begin() {
  const std::lock_guard lock(all_.mutex_);
  number_ = ++all_.last_;
  all_.loaded_[key_].insert(number_);
}

bool Generation::replaced() const {
  const std::lock_guard lock(all_.mutex_);
  const auto found = all_.loaded_.find(key_);
  return number_ != 0 && found != all_.loaded_.end() && *found->second.rbegin() > number_;
}

}  // namespace charonia::triton
