// Receives that spin on a device until their message comes, and what would wait for them.
//
// A host that waits for all streams of its device waits for them too; so may a kernel that is
// launched for the first time, or on new shapes: it is loaded, a plan is made, memory is found.
#pragma once

#include <map>
#include <mutex>
#include <set>
#include <string>

#include "order.h"

namespace fake {

class Spinning {
 public:
  /// So many receives more are posted and not waited for.
  void add(int receives) {
    std::lock_guard<std::mutex> guard(lock_);
    receives_ += receives;
  }
  void host_waits_for_device(const std::string& why) {
    std::lock_guard<std::mutex> guard(lock_);
    if (receives_ > 0) order().note("the host waits for its device (" + why + ") while a receive spins");
  }
  /// `kernel` is its name and the shapes it works on.
  void launches(const std::string& kernel) {
    std::lock_guard<std::mutex> guard(lock_);
    if (known_.insert(kernel).second && receives_ > 0) order().note(kernel + " is launched for the first time while a receive spins");
  }
  void forget_kernels() {
    std::lock_guard<std::mutex> guard(lock_);
    known_.clear();
  }
  /// Pinned memory is handed out: what was given back, as torch's allocator keeps it, or new.
  void pins(size_t bytes) {
    std::lock_guard<std::mutex> guard(lock_);
    auto& free = pinned_[size_class(bytes)];
    if (free > 0) --free;
    else if (receives_ > 0) order().note(std::to_string(bytes) + " bytes are pinned while a receive spins");
  }
  void unpins(size_t bytes) {
    std::lock_guard<std::mutex> guard(lock_);
    ++pinned_[size_class(bytes)];
  }

 private:
  static size_t size_class(size_t bytes) {
    size_t size = 512;
    while (size < bytes) size *= 2;
    return size;
  }

  std::mutex lock_;
  int receives_ = 0;
  std::map<size_t, int> pinned_; // blocks that are free, by size
  std::set<std::string> known_;
};

inline Spinning& spinning() {
  static auto* only = new Spinning();
  return *only;
}

} // namespace fake
