// What torch asks of any device: current device and stream, events, waiting.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

#include "copies.h"
#include "devices.h"
#include "spinning.h"

namespace fake {

inline void host_waits_for(const Clock& event, const char* why) {
  host_waits().add(why);
  order().host_waits(event);
  copies().settle();
}

inline void host_waits_for_device(c10::DeviceIndex device, const char* why) {
  host_waits().add(why);
  spinning().host_waits_for_device(why);
  order().host_waits_for_device(device);
  copies().settle();
}

/// A point of a stream, as an event has recorded it.
struct Mark {
  Clock clock;
  std::chrono::steady_clock::time_point at;
  bool timed;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }

  c10::Device getDevice() const override { return {c10::kCUDA, current().device}; }
  c10::Device exchangeDevice(c10::Device to) const override { return {c10::kCUDA, set_device(to.index())}; }
  void setDevice(c10::Device to) const override { set_device(to.index()); }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.index() >= 0) current().device = to.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const override {
    auto index = index_of(device);
    return stream_of(index, current().stream.at(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return stream_of(index_of(device), new_stream(priority < 0));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return stream_of(index_of(device), new_stream(high_priority));
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto& here = current().stream.at(to.device_index());
    return stream_of(to.device_index(), std::exchange(here, to.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    order().host_waits(order().now(lane_of(stream)));
    copies().settle();
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits_for(order().now(lane_of(stream)), "synchronize a stream");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    host_waits_for_device(device, "synchronize a device");
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag)
      const override {
    if (*event == nullptr) *event = new Mark();
    auto timed = flag == c10::EventFlag::BACKEND_DEFAULT;
    *static_cast<Mark*>(*event) = {order().now(lane_of(stream)), std::chrono::steady_clock::now(), timed};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) order().wait(lane_of(stream), static_cast<Mark*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    if (event != nullptr) order().host_waits(static_cast<Mark*>(event)->clock);
    copies().settle();
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) host_waits_for(static_cast<Mark*>(event)->clock, "synchronize an event");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Mark*>(event);
  }
  double elapsedTime(void* first, void* last, const c10::DeviceIndex) const override {
    auto *a = static_cast<Mark*>(first), *b = static_cast<Mark*>(last);
    TORCH_CHECK(a->timed && b->timed, "Both events must be created with argument 'enable_timing=True'.");
    return std::chrono::duration<double, std::milli>(b->at - a->at).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    order().keep_for(data.get(), lane_of(stream));
  }
};

} // namespace fake
