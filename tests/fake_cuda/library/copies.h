// Copies between a device and pinned memory, as the host sees them before it has waited: what arrives
// is not there yet, and what leaves must not change.
#pragma once

#include <cstring>
#include <functional>
#include <list>
#include <string_view>

#include "order.h"

namespace fake {

/// Bytes of ones: NaN in every floating-point type.
constexpr int unset = 0xFF;

class Copies {
 public:
  /// `at` holds what a copy has brought: hide it until the host, or another copy, comes to it.
  void arrive(const Launch& copy, char* at, size_t bytes) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    arriving_.push_back({copy, at, std::string(at, bytes)});
    std::memset(at, unset, bytes);
  }

  void leave(const Launch& copy, const char* from, size_t bytes) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    leaving_.push_back({copy, from, bytes, hash(from, bytes)});
  }

  /// The host has waited for something.
  void settle() {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    arriving_.remove_if([](const Arriving& each) {
      if (!order().host_knows(each.copy)) return false;
      std::memcpy(each.at, each.bytes.data(), each.bytes.size());
      return true;
    });
    leaving_.remove_if([](const Leaving& each) { return order().host_knows(each.copy) && looked_at(each); });
  }

  /// Another copy comes to this memory; whether it waits for those before is the tracker's to see.
  void reveal(const char* from, size_t bytes, bool to_write) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    auto meets = [&](const char* at, size_t length) { return at < from + bytes && from < at + length; };
    arriving_.remove_if([&](const Arriving& each) {
      if (!meets(each.at, each.bytes.size())) return false;
      std::memcpy(each.at, each.bytes.data(), each.bytes.size());
      return true;
    });
    if (to_write)
      leaving_.remove_if([&](const Leaving& each) { return meets(each.from, each.bytes) && looked_at(each); });
  }

  /// Pinned memory goes; its allocator keeps it for copies that run.
  void forget(const char* from, size_t bytes) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    auto inside = [&](const char* at) { return from <= at && at < from + bytes; };
    arriving_.remove_if([&](const Arriving& each) { return inside(each.at); });
    leaving_.remove_if([&](const Leaving& each) { return inside(each.from) && looked_at(each); });
  }

 private:
  struct Arriving {
    Launch copy;
    char* at;
    std::string bytes;
  };
  struct Leaving {
    Launch copy;
    const char* from;
    size_t bytes;
    size_t hash;
  };

  static size_t hash(const char* from, size_t bytes) {
    return std::hash<std::string_view>()(std::string_view(from, bytes));
  }

  static bool looked_at(const Leaving& each) {
    if (hash(each.from, each.bytes) != each.hash)
      order().note("pinned memory was changed while " + each.copy.name + " may still read it");
    return true;
  }

  std::recursive_mutex lock_;
  std::list<Arriving> arriving_;
  std::list<Leaving> leaving_;
};

inline Copies& copies() {
  static auto* only = new Copies();
  return *only;
}

} // namespace fake
