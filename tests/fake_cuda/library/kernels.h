// Operations that the host's kernels cannot stand for: memory, copies, products that are wider than
// their factors.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include "fallback.h"

namespace fake {

using at::Tensor;
using Option = std::optional<bool>;

class OnDevice {
 public:
  explicit OnDevice(std::optional<c10::Device> device)
      : before_(current().device) {
    if (device) set_device(device->index());
  }
  ~OnDevice() { current().device = before_; }

 private:
  c10::DeviceIndex before_;
};

inline at::ScalarType type_or_default(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(c10::get_default_dtype_as_scalartype());
}

inline Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, Option pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice guard(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      type_or_default(dtype), format);
}

inline Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<c10::Device> device, Option pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice guard(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::CUDA), type_or_default(dtype));
}

inline void copy_values(const Tensor& to, const Tensor& from) {
  auto host = to.is_cuda() ? host_view(to) : to;
  host.copy_(from.is_cuda() ? host_view(from) : from);
}

/// As of torch: on the source's stream, with both devices' streams in step before and after.
inline void copy_between_devices(const Tensor& to, const Tensor& from) {
  auto here = current_lane(from.get_device()), there = current_lane(to.get_device());
  order().wait(here, order().now(there));
  Kernel kernel(from.get_device(), "copy between devices");
  kernel.reads(from);
  kernel.writes(to);
  copy_values(to, from);
  order().wait(there, order().now(here));
}

inline void copy_to_device(const Tensor& to, const Tensor& from, bool non_blocking) {
  auto device = to.get_device();
  auto* address = static_cast<char*>(from.storage().mutable_data());
  auto range = range_of(from);
  const bool pinned = pinned_allocator().owns(address);
  Kernel kernel(device, "copy from the host");
  kernel.writes(to);
  if (pinned) {
    kernel.reads(from);
    copies().reveal(address + range.from, range.to - range.from, false);
  }
  copy_values(to, from);
  if (!non_blocking)
    host_waits_for(order().now(current_lane(device)), "copy from the host");
  else if (pinned)
    copies().leave(kernel.launch(), address + range.from, range.to - range.from);
}

inline void copy_to_host(const Tensor& to, const Tensor& from, bool non_blocking) {
  auto device = from.get_device();
  auto* address = static_cast<char*>(to.storage().mutable_data());
  auto range = range_of(to);
  const bool pinned = pinned_allocator().owns(address);
  Kernel kernel(device, "copy to the host");
  kernel.reads(from);
  if (pinned) {
    kernel.writes(to);
    copies().reveal(address + range.from, range.to - range.from, true);
  }
  copy_values(to, from);
  if (!non_blocking || !pinned) // memory that is not pinned is waited for by the driver
    host_waits_for(order().now(current_lane(device)), "copy to the host");
  else if (to.is_contiguous())
    copies().arrive(kernel.launch(), address + range.from, range.to - range.from);
}

inline Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  if (self.numel() == 0) return self;
  if (!self.is_cuda()) {
    copy_to_host(self, from, non_blocking);
  } else if (!from.is_cuda()) {
    copy_to_device(self, from, non_blocking);
  } else if (self.device() != from.device()) {
    copy_between_devices(self, from);
  } else {
    Kernel kernel(self.get_device(), "aten::copy_");
    kernel.reads(from);
    kernel.writes(self);
    copy_values(self, from);
  }
  return self;
}

inline Tensor& set_view(Tensor& self, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

inline Tensor& set_whole(Tensor& self, c10::Storage storage) {
  const int64_t length = storage.nbytes() / self.itemsize();
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({length});
  return self;
}

/// Give a storage other memory; what both have room for is copied.
inline void resize_memory(c10::StorageImpl* storage, c10::DeviceIndex device, size_t bytes) {
  auto fresh = device_allocator().allocate_on(bytes, device);
  if (auto common = std::min(bytes, storage->nbytes())) {
    auto launch = order().launch(current_lane(device), "resize a storage");
    order().use(launch, storage->data(), {0, common}, false);
    order().use(launch, fresh.get(), {0, common}, true);
    std::memcpy(fresh.get(), storage->data(), common);
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

inline const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  int64_t values = 1;
  for (auto length : C10_AS_INTARRAYREF_SLOW(size)) values *= length;
  const size_t bytes = (impl->storage_offset() + values) * self.itemsize();
  if (bytes > self.storage().nbytes())
    resize_memory(self.storage().unsafeGetStorageImpl(), self.get_device(), bytes);
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  return self;
}

inline void record_stream(Tensor& self, c10::Stream stream) {
  order().keep_for(self.storage().data(), lane_of(stream));
}

inline void check_wider(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  const auto factors = a.scalar_type();
  TORCH_CHECK(
      factors == b.scalar_type() &&
          (factors == dtype || (dtype == at::kFloat && (factors == at::kBFloat16 || factors == at::kHalf))),
      "out_dtype must be the factors' type, or float32 for bfloat16 and float16");
}

inline Tensor wider_mm(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  check_wider(a, b, dtype);
  return at::mm(a.to(dtype), b.to(dtype));
}

inline Tensor& wider_addmm(
    const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType dtype, const at::Scalar& beta,
    const at::Scalar& alpha, Tensor& out) {
  check_wider(a, b, dtype);
  return at::addmm_out(out, self, a.to(dtype), b.to(dtype), beta, alpha);
}

// called from Python --------------------------------------------------------------------------------

inline std::optional<at::Generator> generator(int64_t device) {
  return generator_of(static_cast<c10::DeviceIndex>(device));
}

inline void resize_storage(const Tensor& t, int64_t bytes) {
  resize_memory(t.storage().unsafeGetStorageImpl(), t.get_device(), bytes);
}

/// A kernel of somebody else's, such as a collective, on the current stream.
inline void use(at::TensorList reads, at::TensorList writes, std::string name) {
  const auto& any = reads.empty() ? writes[0] : reads[0];
  Kernel kernel(any.get_device(), std::move(name));
  for (const auto& t : reads) kernel.reads(t);
  for (const auto& t : writes) kernel.writes(t);
}

} // namespace fake
