// What torch asks of CUDA alone.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include "guard.h"
#include "memory.h"

namespace fake {

/// The generator of a device: the host's kind, with a state of its own.
inline at::Generator& generator_of(c10::DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int i = 0; i < most_devices; ++i)
      made->push_back(at::detail::createCPUGenerator(c10::detail::getNonDeterministicRandom()));
    return made;
  }();
  return all->at(device < 0 ? current().device : device);
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  int getNumGPUs() const override { return device_count(); }
  c10::DeviceIndex current_device() const override { return current().device; }
  c10::DeviceIndex getCurrentDevice() const override { return current().device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return set_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return set_device(device); }
  void deviceSynchronize(c10::DeviceIndex device) const override {
    host_waits_for_device(device, "synchronize a device");
  }
  bool isPinnedPtr(const void* address) const override { return pinned_allocator().owns(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator(); }
  c10::Device getDeviceFromPtr(void*) const override { return {c10::kCUDA, current().device}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return generator_of(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

} // namespace fake
