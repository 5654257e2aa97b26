// A device of type GPU for TensorFlow, on a machine without one: its memory is the host's, with all bits
// inverted, so that nothing but copies between host and device can use it. Copies take place later, in
// threads of their own. tf.load_library() adds it, before anything asks for devices.
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tensorflow/core/common_runtime/device_factory.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/device_base.h"

namespace {

using tensorflow::Device;
using tensorflow::StatusCallback;
using tensorflow::Tensor;

std::atomic<std::int64_t> numCopies{0};

void copyBits(const Tensor& source, const Tensor& target, unsigned char inverted) {
  const absl::string_view from = source.tensor_data();
  char* const to = const_cast<char*>(target.tensor_data().data());
  for (std::size_t i = 0; i < from.size(); ++i) to[i] = static_cast<char>(from[i] ^ inverted);
}

class Streams : public tensorflow::DeviceContext {
 public:
  void CopyCPUTensorToDevice(const Tensor* source, Device*, Tensor* target, StatusCallback done,
                             bool) const override {
    copy(*source, *target, std::move(done), 0xff);
  }
  void CopyDeviceTensorToCPU(const Tensor* source, absl::string_view, Device*, Tensor* target,
                             StatusCallback done) override {
    copy(*source, *target, std::move(done), 0xff);
  }
  void CopyTensorInSameDevice(const Tensor* source, Device*, Tensor* target,
                              StatusCallback done) const override {
    copy(*source, *target, std::move(done), 0);
  }

 private:
  static void copy(const Tensor& source, const Tensor& target, StatusCallback done, unsigned char inverted) {
    ++numCopies;
    std::thread([source, target, inverted, done = std::move(done)] {
      copyBits(source, target, inverted);
      done(absl::OkStatus());
    }).detach();
  }
};

class GpuStandIn : public Device {
 public:
  explicit GpuStandIn(const std::string& name)
      : Device(tensorflow::Env::Default(), Device::BuildDeviceAttributes(name, tensorflow::DeviceType("GPU"),
                                                                         tensorflow::Bytes(1 << 30), {})) {
    info_.default_context = streams_;
    set_tensorflow_accelerator_device_info(&info_);
  }
  ~GpuStandIn() override { streams_->Unref(); }

  tensorflow::Allocator* GetAllocator(tensorflow::AllocatorAttributes) override {
    return tensorflow::cpu_allocator();
  }
  absl::Status TryGetDeviceContext(tensorflow::DeviceContext** context) override {
    streams_->Ref();
    *context = streams_;
    return absl::OkStatus();
  }
  absl::Status MakeTensorFromProto(const tensorflow::TensorProto& proto,
                                   const tensorflow::AllocatorAttributes attributes,
                                   Tensor* tensor) override {
    if (!tensor->FromProto(tensorflow::cpu_allocator(), proto))
      return absl::InvalidArgumentError("a constant cannot be read");
    if (!attributes.on_host()) copyBits(*tensor, *tensor, 0xff);
    return absl::OkStatus();
  }
  absl::Status Sync() override { return absl::OkStatus(); }

 private:
  Streams* const streams_ = new Streams;
  AcceleratorDeviceInfo info_;
};

class Factory : public tensorflow::DeviceFactory {
 public:
  absl::Status ListPhysicalDevices(std::vector<std::string>* devices) override {
    devices->push_back("/physical_device:GPU:0");
    return absl::OkStatus();
  }
  absl::Status CreateDevices(const tensorflow::SessionOptions&, const std::string& prefix,
                             std::vector<std::unique_ptr<Device>>* devices) override {
    devices->push_back(std::make_unique<GpuStandIn>(prefix + "/device:GPU:0"));
    return absl::OkStatus();
  }
};

REGISTER_LOCAL_DEVICE_FACTORY("GPU", Factory);

}  // namespace

extern "C" std::int64_t gpu_stand_in_copies() { return numCopies; }
