// Every operation without a kernel of its own: the host's kernel, on the same memory.
//
// Tensors of the device are handed to it as tensors of the host that share their memory, and what it
// returns comes back as the device's. Operations that touch values, not only shapes, are told to the
// tracker with the bytes that they read and write.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/TensorImpl.h>

#include <optional>

#include "hooks.h"

namespace fake {

inline Range range_of(const at::Tensor& t) {
  if (t.numel() == 0) return {0, 0};
  size_t first = t.storage_offset() * t.itemsize(), last = first;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d) * t.itemsize();
  return {first, last + t.itemsize()};
}

/// A kernel on the current stream of a device.
class Kernel {
 public:
  Kernel(c10::DeviceIndex device, std::string name)
      : launch_(order().launch(current_lane(device), std::move(name))) {}
  void reads(const at::Tensor& t) const { use(t, false); }
  void writes(const at::Tensor& t) const { use(t, true); }
  const Launch& launch() const { return launch_; }

 private:
  void use(const at::Tensor& t, bool writes) const {
    if (!t.defined() || !t.has_storage()) return;
    auto range = range_of(t);
    TORCH_CHECK(
        range.to <= t.storage().nbytes(), "CUDA error: an illegal memory access was encountered (", launch_.name, ")");
    order().use(launch_, t.storage().data(), range, writes);
  }
  Launch launch_;
};

inline at::Tensor over(const c10::Storage& storage, const at::Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

/// A tensor of the host over the memory of a tensor of the device, which it keeps.
inline at::Tensor host_view(const at::Tensor& t) {
  const auto& storage = t.storage();
  auto release = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
  c10::DataPtr data(storage.mutable_data(), new c10::Storage(storage), release, c10::Device(c10::kCPU));
  return over({c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true}, t, c10::DispatchKey::CPU);
}

inline bool share(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

/// The tensors of one operation, on the device and on the host.
class Pairs {
 public:
  std::optional<c10::Device> device;

  at::Tensor to_host(const at::Tensor& t) {
    if (!t.defined() || !t.is_cuda()) return t;
    TORCH_CHECK(
        !device || *device == t.device(),
        "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ", t.device(), "!");
    device = t.device();
    for (auto& [there, here] : all_)
      if (there.is_same(t)) return here;
    at::Tensor made;
    for (auto& [there, here] : all_)
      if (share(there, t)) {
        made = over(here.storage(), t, c10::DispatchKey::CPU);
        break;
      }
    if (!made.defined()) made = host_view(t);
    all_.emplace_back(t, made);
    return made;
  }

  /// What the kernel has resized is so on the device too.
  void take_over() {
    for (auto& [there, here] : all_) {
      if (there.storage().data() != here.storage().data()) {
        auto* impl = there.storage().unsafeGetStorageImpl();
        impl->set_data_ptr_noswap(as_device_memory(here.storage(), there.get_device()));
        impl->set_nbytes(here.storage().nbytes());
      }
      if (there.sizes() != here.sizes() || there.strides() != here.strides())
        there.unsafeGetTensorImpl()->set_sizes_and_strides(here.sizes(), here.strides(), here.storage_offset());
    }
  }

  /// A tensor that the kernel has returned, and whether its memory is new.
  std::pair<at::Tensor, bool> to_device(const at::Tensor& t) {
    if (!t.defined() || t.is_cuda()) return {t, false};
    for (auto& [there, here] : all_)
      if (here.is_same(t)) return {there, false};
    for (auto& [there, here] : all_)
      if (share(here, t)) return {over(there.storage(), t, c10::DispatchKey::CUDA), false};
    auto index = device.value_or(c10::Device(c10::kCUDA, current().device)).index();
    c10::Storage storage(
        c10::Storage::use_byte_size_t(), t.storage().nbytes(), as_device_memory(t.storage(), index), &device_allocator(), true);
    return {over(storage, t, c10::DispatchKey::CUDA), true};
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> all_;
};

template <class F>
c10::IValue map_tensors(const c10::IValue& value, F&& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& t : value.toTensorList()) mapped.push_back(f(t));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorList())
      mapped.push_back(t ? std::optional<at::Tensor>(f(*t)) : std::nullopt);
    return mapped;
  }
  return value;
}

/// Draws from the host's generator are draws from the device's meanwhile.
class DeviceRandom {
 public:
  DeviceRandom(bool draws, c10::DeviceIndex device) : draws_(draws), device_(device) {
    if (draws_) swap();
  }
  ~DeviceRandom() {
    if (draws_) swap();
  }

 private:
  void swap() {
    at::Generator host = at::detail::getDefaultCPUGenerator(), own = generator_of(device_);
    std::scoped_lock guard(host.mutex(), own.mutex());
    auto *a = at::check_generator<at::CPUGeneratorImpl>(host), *b = at::check_generator<at::CPUGeneratorImpl>(own);
    auto engine = a->engine();
    a->set_engine(b->engine());
    b->set_engine(engine);
    auto whole = a->next_float_normal_sample();
    a->set_next_float_normal_sample(b->next_float_normal_sample());
    b->set_next_float_normal_sample(whole);
    auto twice = a->next_double_normal_sample();
    a->set_next_double_normal_sample(b->next_double_normal_sample());
    b->set_next_double_normal_sample(twice);
  }
  bool draws_;
  c10::DeviceIndex device_;
};

/// Operations whose result the host has to know: a value, or how large it is.
inline bool waits(const std::string& name, bool masks) {
  static const std::set<std::string> always = {
      "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select",
      "aten::is_nonzero", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
      "aten::bincount", "aten::repeat_interleave", "aten::histc"};
  return always.count(name) || (masks && name == "aten::_index_put_impl_");
}

/// Whether an operation gives another view of its argument and no values.
inline bool is_view(const c10::FunctionSchema& schema) {
  if (schema.returns().empty()) return false;
  for (const auto& given : schema.returns())
    if (given.alias_info() == nullptr || given.alias_info()->isWrite()) return false;
  return true;
}

/// An operation and what it works on, as in "aten::mul [2, 3] float".
inline std::string with_shapes(std::string text, const std::vector<std::pair<at::Tensor, bool>>& used) {
  for (const auto& [t, written] : used) {
    text += " [";
    for (const auto size : t.sizes()) text += (text.back() == '[' ? "" : ", ") + std::to_string(size);
    text += std::string("] ") + c10::toString(t.scalar_type());
  }
  return text;
}

inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const auto first = stack->size() - schema.arguments().size();
  Pairs pairs;
  bool host = false, masks = false;
  std::vector<std::pair<at::Tensor, bool>> used; // and whether it is written
  for (size_t i = first; i < stack->size(); ++i) {
    const auto* alias = schema.arguments()[i - first].alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    auto& value = (*stack)[i];
    const bool list = value.isOptionalTensorList();
    value = map_tensors(value, [&](const at::Tensor& t) {
      if (!t.defined()) return t;
      if (t.is_cuda()) used.emplace_back(t, written);
      // numbers go along with a kernel's arguments, and indices are brought to the device
      host |= t.is_cpu() && (t.dim() > 0 || written) && !list;
      masks |= list && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte);
      return pairs.to_host(t);
    });
    if (value.isDevice() && value.toDevice().is_cuda()) {
      if (!pairs.device) pairs.device = c10::Device(c10::kCUDA, index_of(value.toDevice()));
      value = c10::Device(c10::kCPU);
    }
  }
  const auto device = pairs.device.value_or(c10::Device(c10::kCUDA, current().device));
  TORCH_CHECK(
      !host || used.empty(), "Expected all tensors to be on the same device, but found at least two devices, ",
      device, " and cpu! (", name, ")");
  std::optional<Kernel> kernel;
  if (!is_view(schema)) {
    kernel.emplace(device.index(), name);
    order().count(name);
    spinning().launches(with_shapes(name, used));
    for (const auto& [t, written] : used) written ? kernel->writes(t) : kernel->reads(t);
  }
  if (waits(name, masks)) host_waits_for(order().now(current_lane(device.index())), name.c_str());
  {
    DeviceRandom random(op.hasTag(at::Tag::nondeterministic_seeded), device.index());
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  pairs.take_over();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    (*stack)[i] = map_tensors((*stack)[i], [&](const at::Tensor& t) {
      auto [made, is_new] = pairs.to_device(t);
      if (is_new && kernel) kernel->writes(made);
      return made;
    });
}

} // namespace fake
