// Let autograd run on tensors that only say they are on CUDA, in a build of torch without CUDA. Loaded before torch
// starts: its engine asks for a device guard of each tensor's device, and for the streams of the accelerator if that is
// in use.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool isBuilt() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return false; // nothing has been started on a device, so there are no streams to wait for
  }
};

REGISTER_CUDA_HOOKS(CUDAHooks)
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>)

} // namespace at
