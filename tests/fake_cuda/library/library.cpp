// A device of type "cuda" for a torch that has none: the host's memory and the host's kernels, with
// streams, events and memory that are checked. To be loaded before torch.
#include "hooks.h"
#include "kernels.h"

#include <torch/library.h>

namespace at {
using CUDAHooks = fake::Hooks; // torch looks them up by this name
REGISTER_CUDA_HOOKS(CUDAHooks);
} // namespace at

namespace {

C10_REGISTER_GUARD_IMPL(CUDA, fake::Guard);

const bool has_allocator = [] {
  c10::SetAllocator(c10::kCUDA, &fake::device_allocator());
  return true;
}();

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

std::string counts(const std::map<std::string, long>& of) {
  std::string out;
  for (const auto& [what, count] : of) out += (out.empty() ? "" : ", ") + quoted(what) + ": " + std::to_string(count);
  return "{" + out + "}";
}

} // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fake::fallback>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", fake::empty);
  m.impl("empty_strided", fake::empty_strided);
  m.impl("copy_", fake::copy_);
  m.impl("set_.source_Storage", fake::set_whole);
  m.impl("set_.source_Storage_storage_offset", fake::set_view);
  m.impl("resize_", fake::resize_);
  m.impl("record_stream", fake::record_stream);
  m.impl("mm.dtype", fake::wider_mm);
  m.impl("addmm.dtype_out", fake::wider_addmm);
}

TORCH_LIBRARY(fake_cuda, m) {
  m.def("generator(int device) -> Generator?");
  m.def("host_view(Tensor t) -> Tensor");
  m.def("use(Tensor[] reads, Tensor[] writes, str name) -> ()");
  m.def("resize_storage(Tensor t, int bytes) -> ()");
}

TORCH_LIBRARY_IMPL(fake_cuda, CompositeExplicitAutograd, m) {
  m.impl("generator", fake::generator);
  m.impl("host_view", fake::host_view);
  m.impl("use", fake::use);
  m.impl("resize_storage", fake::resize_storage);
}

extern "C" {

/// What was found and counted since the last call, as JSON; valid until the next one.
const char* fake_cuda_report() {
  static std::string text;
  std::string faults;
  for (const auto& fault : fake::order().take_faults()) faults += (faults.empty() ? "" : ", ") + quoted(fault);
  text = "{\"faults\": [" + faults + "], \"host_waits\": " + counts(fake::host_waits().take()) +
      ", \"kernels\": " + counts(fake::order().take_kernels()) + "}";
  return text.c_str();
}

int fake_cuda_device_count() { return fake::device_count(); }

void fake_cuda_name_stream(int device, int64_t stream, const char* name) {
  fake::order().set_name(fake::order().lane_of(device, stream), name);
}

int64_t fake_cuda_memory(int device) { return fake::usage().now(static_cast<c10::DeviceIndex>(device)); }

int64_t fake_cuda_most_memory(int device) { return fake::usage().most(static_cast<c10::DeviceIndex>(device)); }

void fake_cuda_receives(int more) { fake::spinning().add(more); }

void fake_cuda_forget_kernels() { fake::spinning().forget_kernels(); }

void fake_cuda_forget_most_memory(int device) { fake::usage().forget_most(static_cast<c10::DeviceIndex>(device)); }
}
