// Memory of the device, which is the host's, and pinned memory.
//
// New memory is NaN and memory that was given back is NaN again, so what is not set, or used too
// late, shows.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <cstring>
#include <unordered_map>

#include "copies.h"
#include "devices.h"
#include "spinning.h"

namespace fake {

/// Bytes in use on each device, and the most that were at once.
class Usage {
 public:
  void add(c10::DeviceIndex device, int64_t bytes) {
    std::lock_guard<std::mutex> guard(lock_);
    now_.at(device) += bytes;
    most_.at(device) = std::max(most_.at(device), now_.at(device));
  }
  int64_t now(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> guard(lock_);
    return now_.at(device);
  }
  int64_t most(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> guard(lock_);
    return most_.at(device);
  }
  void forget_most(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> guard(lock_);
    most_.at(device) = now_.at(device);
  }

 private:
  std::mutex lock_;
  std::array<int64_t, most_devices> now_{}, most_{};
};

inline Usage& usage() {
  static auto* only = new Usage();
  return *only;
}

/// What a device's storage owns: memory of the host, in a storage of the host.
struct Block {
  c10::Storage host;
  c10::DeviceIndex device;
  size_t bytes;

  static void give_back(void* given) {
    auto* block = static_cast<Block*>(given);
    auto* address = block->host.mutable_data();
    order().give_back(address, "");
    usage().add(block->device, -static_cast<int64_t>(block->bytes));
    // others, such as a pipe or an array of numpy's, never see memory of a device
    if (block->host.use_count() == 1 && address != nullptr) std::memset(address, unset, block->bytes);
    delete block;
  }
};

/// The host's memory as a device's, at home on the stream that is current there.
inline c10::DataPtr as_device_memory(c10::Storage host, c10::DeviceIndex device) {
  auto* address = host.mutable_data();
  auto bytes = host.nbytes();
  order().take(address, current_lane(device));
  usage().add(device, bytes);
  auto* block = new Block{std::move(host), device, bytes};
  return {address, block, &Block::give_back, c10::Device(c10::kCUDA, device)};
}

inline c10::Storage host_storage(size_t bytes) {
  auto* allocator = c10::GetAllocator(c10::kCPU);
  return {c10::Storage::use_byte_size_t(), bytes, allocator->allocate(bytes), allocator, true};
}

/// More than an H200 has.
constexpr size_t memory_of_a_device = size_t(141) << 30;

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(bytes, current().device); }
  c10::DataPtr allocate_on(size_t bytes, c10::DeviceIndex device) {
    if (bytes > memory_of_a_device)
      C10_THROW_ERROR(OutOfMemoryError, "CUDA out of memory. Tried to allocate " + std::to_string(bytes) + " bytes");
    auto host = host_storage(bytes);
    if (bytes) std::memset(host.mutable_data(), unset, bytes);
    return as_device_memory(std::move(host), device);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

inline DeviceAllocator& device_allocator() {
  static auto* only = new DeviceAllocator();
  return *only;
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* address = nullptr;
    TORCH_CHECK(!posix_memalign(&address, 64, std::max<size_t>(bytes, 1)), "out of memory");
    order().take(address, -1);
    spinning().pins(bytes);
    std::lock_guard<std::mutex> guard(lock_);
    ends_[static_cast<char*>(address)] = static_cast<char*>(address) + bytes;
    return {address, address, &PinnedAllocator::release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedAllocator::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  bool owns(const void* address) {
    auto* at = static_cast<char*>(const_cast<void*>(address));
    std::lock_guard<std::mutex> guard(lock_);
    auto after = ends_.upper_bound(at);
    return after != ends_.begin() && at < std::prev(after)->second;
  }

 private:
  static void release(void* address);

  std::mutex lock_;
  std::map<char*, char*> ends_;
};

inline PinnedAllocator& pinned_allocator() {
  static auto* only = new PinnedAllocator();
  return *only;
}

inline void PinnedAllocator::release(void* address) {
  auto& all = pinned_allocator();
  auto* from = static_cast<char*>(address);
  {
    std::lock_guard<std::mutex> guard(all.lock_);
    const size_t bytes = all.ends_[from] - from;
    copies().forget(from, bytes);
    spinning().unpins(bytes);
    all.ends_.erase(from);
  }
  order().give_back(address, "");
  std::free(address);
}

} // namespace fake
