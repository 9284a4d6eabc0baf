// Which devices there are, which one and which stream is current in a thread, and how often the host
// has waited for a device.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

#include "order.h"

namespace fake {

constexpr int most_devices = 64;

/// As many as CUDA_VISIBLE_DEVICES names, else FAKE_CUDA_DEVICES.
inline int device_count() {
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) {
    std::string names = visible;
    return names.empty() ? 0 : 1 + static_cast<int>(std::count(names.begin(), names.end(), ','));
  }
  const char* all = std::getenv("FAKE_CUDA_DEVICES");
  return all ? std::min(std::atoi(all), most_devices) : 1;
}

struct Current {
  c10::DeviceIndex device = 0;
  std::array<c10::StreamId, most_devices> stream{};
};

inline Current& current() {
  thread_local Current here;
  return here;
}

inline c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : current().device;
}

inline c10::DeviceIndex set_device(c10::DeviceIndex index) {
  if (index < 0) return current().device;
  TORCH_CHECK(index < device_count(), "CUDA error: invalid device ordinal ", int(index));
  return std::exchange(current().device, index);
}

inline c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), id);
}

/// Streams of a priority on each device; after so many a "new" one is an old one, as in torch.
constexpr int pooled_streams = 32;

/// 0 is the default stream, then come those of each priority.
inline c10::StreamId new_stream(bool high_priority) {
  static std::atomic<unsigned> made[2] = {};
  return 1 + high_priority * pooled_streams + made[high_priority]++ % pooled_streams;
}

inline int lane_of(const c10::Stream& stream) {
  return order().lane_of(stream.device_index(), stream.id());
}

/// The stream on which kernels of this thread run.
inline int current_lane(c10::DeviceIndex device) {
  return order().lane_of(device, current().stream.at(device));
}

/// How often the host has waited for a device, by what made it wait.
class HostWaits {
 public:
  void add(const std::string& why) {
    std::lock_guard<std::mutex> guard(lock_);
    ++counts_[why];
  }
  std::map<std::string, long> take() {
    std::lock_guard<std::mutex> guard(lock_);
    return std::exchange(counts_, {});
  }

 private:
  std::mutex lock_;
  std::map<std::string, long> counts_;
};

inline HostWaits& host_waits() {
  static auto* only = new HostWaits();
  return *only;
}

} // namespace fake
