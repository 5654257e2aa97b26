// The TensorFlow ops CoarseReduce, CoarseReduceRows, both also weighted, and CoarseUpdate: a tensor, or rows
// of a table, reduced over all workers by the AsyncReducer and AsyncRows of an open session.
//
// Built for the TensorFlow that is installed (coarse/tensorflow/op_library.py). Asynchronous, and not run
// in the order of the program, so that any number of tensors are under way at once, in whatever order the
// graph comes to them; `key` says which tensor it is. Stateful: what all workers contribute is no constant,
// even where a worker's own is.

#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "coarse/client/async_reducer_interface.h"
#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

struct Endpoint {
  CoarseAsyncReducer tensors;
  CoarseAsyncRows rows;
  CoarseAsyncUpdates updates;
};

/// The sessions of this process that are open, by number.
class Endpoints {
 public:
  static Endpoints& instance() {
    static Endpoints* endpoints = new Endpoints;  // never destroyed: ops may run until the very end
    return *endpoints;
  }
  void open(std::int64_t number, const Endpoint& endpoint) {
    const std::lock_guard<std::mutex> lock(mutex_);
    endpoints_[number] = endpoint;
  }
  void close(std::int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    endpoints_.erase(number);
  }
  bool find(std::int64_t number, Endpoint& endpoint) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = endpoints_.find(number);
    if (found == endpoints_.end()) return false;
    endpoint = found->second;
    return true;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::int64_t, Endpoint> endpoints_;
};

struct UnderWay {
  OpKernelContext* context;
  AsyncOpKernel::DoneCallback done;
};

void finish(void* opaque, const char* failure) {
  auto* const underWay = static_cast<UnderWay*>(opaque);
  if (failure != nullptr) underWay->context->SetStatus(absl::AbortedError(failure));
  const AsyncOpKernel::DoneCallback done = std::move(underWay->done);
  delete underWay;
  done();
}

/// Multiplies each row in float64, and rounds to float32, then to T.
template <typename T>
void scale(Tensor& rows, const double* factors) {
  auto values = rows.flat_outer_dims<T>();
  for (std::int64_t row = 0; row < values.dimension(0); ++row) {
    for (std::int64_t i = 0; i < values.dimension(1); ++i)
      values(row, i) = static_cast<T>(static_cast<float>(static_cast<float>(values(row, i)) * factors[row]));
  }
}

void scaleRows(Tensor& rows, const double* factors) {
  if (factors == nullptr) return;
  switch (rows.dtype()) {
    case tensorflow::DT_FLOAT:
      return scale<float>(rows, factors);
    case tensorflow::DT_BFLOAT16:
      return scale<tensorflow::bfloat16>(rows, factors);
    default:
      return scale<Eigen::half>(rows, factors);
  }
}

/// Copies rows out of the memory that all workers share, and multiplies each by its factor.
absl::Status copyRows(OpKernelContext* context, std::uint64_t count, const std::uint64_t* numbers,
                      const void* values, const double* factors) {
  const auto numRows = static_cast<std::int64_t>(count);
  tensorflow::TensorShape shape = context->input(0).shape();
  shape.set_dim(0, numRows);
  Tensor *result = nullptr, *rows = nullptr;
  absl::Status status = context->allocate_output(0, shape, &result);
  if (status.ok()) status = context->allocate_output(1, {numRows}, &rows);
  if (!status.ok()) return status;
  std::memcpy(const_cast<char*>(result->tensor_data().data()), values, result->TotalBytes());
  scaleRows(*result, factors);
  std::memcpy(const_cast<char*>(rows->tensor_data().data()), numbers, rows->TotalBytes());
  return status;
}

void finishRows(void* opaque, const char* failure, std::uint64_t count, const std::uint64_t* numbers,
                const void* values, const double* factors) {
  if (failure == nullptr) {
    OpKernelContext* const context = static_cast<UnderWay*>(opaque)->context;
    context->SetStatus(copyRows(context, count, numbers, values, factors));
  }
  finish(opaque, failure);
}

/// Attributes of both ops: names of the reduced tensors and of the session.
class KeyedOp : public AsyncOpKernel {
 public:
  explicit KeyedOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("key", &key_));
    OP_REQUIRES_OK(context, context->GetAttr("endpoint", &number_));
  }

 protected:
  const char* key() const { return key_.c_str(); }
  absl::Status find(Endpoint& endpoint) const {
    if (Endpoints::instance().find(number_, endpoint)) return absl::OkStatus();
    return absl::FailedPreconditionError("the strategy's session is closed");
  }

 private:
  std::string key_;
  std::int64_t number_;
};

/// The last input of weighted ops, which lies in the host's memory; others have none.
struct Weights {
  Weights(OpKernelContext* context, int place) {
    if (context->num_inputs() <= place) return;
    values = context->input(place).flat<double>().data();
    count = static_cast<std::uint64_t>(context->input(place).NumElements());
  }
  const double* values = nullptr;
  std::uint64_t count = 0;
};

class ReduceOp : public KeyedOp {
 public:
  using KeyedOp::KeyedOp;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& input = context->input(0);
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->forward_input_or_allocate_output({0}, 0, input.shape(), &output),
                         done);
    Endpoint endpoint;
    OP_REQUIRES_OK_ASYNC(context, find(endpoint), done);
    const CoarseAsyncReducer& tensors = endpoint.tensors;
    const Weights weights(context, 1);
    tensors.reduce(tensors.reducer, key(), input.tensor_data().data(),
                   const_cast<char*>(output->tensor_data().data()), input.TotalBytes(), weights.values,
                   weights.count, &finish, new UnderWay{context, std::move(done)});
  }
};

/// A tensor in the memory of a GPU: its streams copy it to pinned memory of the host, and the result back. No
/// thread waits for them. Deletes itself at the end.
class GpuTransfer {
 public:
  GpuTransfer(OpKernelContext* context, AsyncOpKernel::DoneCallback done, const char* key, Tensor* output)
      : context_(context), done_(std::move(done)), key_(key), output_(output) {}

  /// Allocates memory of the host. @returns the failure, after which this object still exists.
  absl::Status prepare() {
    tensorflow::AllocatorAttributes pinned;
    pinned.set_on_host(true);
    pinned.set_gpu_compatible(true);
    return context_->allocate_temp(output_->dtype(), output_->shape(), &inHost_, pinned);
  }

  void begin(const CoarseAsyncReducer& tensors) {
    context_->op_device_context()->CopyDeviceTensorToCPU(
        &context_->input(0), key_, device(), &inHost_, [this, tensors](const absl::Status& status) {
          if (!status.ok()) return end(status);
          char* const bytes = const_cast<char*>(inHost_.tensor_data().data());
          const Weights weights(context_, 1);
          tensors.reduce(tensors.reducer, key_, bytes, bytes, inHost_.TotalBytes(), weights.values,
                         weights.count, &reduced, this);
        });
  }

 private:
  static void reduced(void* opaque, const char* failure) {
    auto* const transfer = static_cast<GpuTransfer*>(opaque);
    if (failure != nullptr) return transfer->end(absl::AbortedError(failure));
    transfer->context_->op_device_context()->CopyCPUTensorToDevice(
        &transfer->inHost_, transfer->device(), transfer->output_,
        [transfer](const absl::Status& status) { transfer->end(status); });
  }

  void end(const absl::Status& status) {
    context_->SetStatus(status);
    const AsyncOpKernel::DoneCallback done = std::move(done_);
    delete this;
    done();
  }

  tensorflow::Device* device() const { return static_cast<tensorflow::Device*>(context_->device()); }

  OpKernelContext* context_;
  AsyncOpKernel::DoneCallback done_;
  const char* key_;
  Tensor inHost_;
  Tensor* output_;
};

class ReduceOnGpuOp : public KeyedOp {
 public:
  using KeyedOp::KeyedOp;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(
        context, context->forward_input_or_allocate_output({0}, 0, context->input(0).shape(), &output), done);
    Endpoint endpoint;
    OP_REQUIRES_OK_ASYNC(context, find(endpoint), done);
    auto transfer = std::make_unique<GpuTransfer>(context, done, key(), output);
    OP_REQUIRES_OK_ASYNC(context, transfer->prepare(), done);
    transfer.release()->begin(endpoint.tensors);
  }
};

class ReduceRowsOp : public KeyedOp {
 public:
  using KeyedOp::KeyedOp;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& values = context->input(0);
    const Tensor& rows = context->input(1);
    OP_REQUIRES_ASYNC(context,
                      values.dims() >= 1 && rows.dims() == 1 && rows.dim_size(0) == values.dim_size(0),
                      absl::InvalidArgumentError("every row of values needs its number"), done);
    Endpoint endpoint;
    OP_REQUIRES_OK_ASYNC(context, find(endpoint), done);
    const Weights weights(context, 2);
    endpoint.rows.reduce(
        endpoint.rows.rows, key(), reinterpret_cast<const std::int64_t*>(rows.tensor_data().data()),
        values.tensor_data().data(), static_cast<std::uint64_t>(rows.dim_size(0)), values.TotalBytes(),
        weights.values, weights.count, &finishRows, new UnderWay{context, std::move(done)});
  }
};

/// The parameter after an update that memory devices do by the mean of all workers' gradients.
class UpdateOp : public KeyedOp {
 public:
  explicit UpdateOp(OpKernelConstruction* context) : KeyedOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("rule", &rule_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& gradient = context->input(0);
    const Tensor& value = context->input(1);
    const Tensor& coefficients = context->input(2);
    OP_REQUIRES_ASYNC(context, gradient.shape() == value.shape(),
                      absl::InvalidArgumentError("the gradient has not the shape of its variable"), done);
    OP_REQUIRES_ASYNC(context, coefficients.NumElements() == 9 && context->input(3).NumElements() == 1,
                      absl::InvalidArgumentError("an update has 9 coefficients and a number"), done);
    Tensor* updated = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, value.shape(), &updated), done);
    Endpoint endpoint;
    OP_REQUIRES_OK_ASYNC(context, find(endpoint), done);
    const auto c = coefficients.flat<float>();
    const auto step = static_cast<std::uint32_t>(context->input(3).flat<std::int64_t>()(0));
    const CoarseUpdateSettings settings{
        static_cast<std::uint32_t>(rule_), step, c(0), c(1), c(2), c(3), c(4), c(5), c(6), c(7), c(8)};
    endpoint.updates.update(endpoint.updates.updates, key(), gradient.tensor_data().data(),
                            value.tensor_data().data(), const_cast<char*>(updated->tensor_data().data()),
                            value.TotalBytes(), &settings, &finish, new UnderWay{context, std::move(done)});
  }

 private:
  std::int64_t rule_ = 0;
};

/// Does nothing, statefully: TensorFlow runs what has it, and not twice at once.
class SequenceOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext*) override {}
};

absl::Status shapesOfRows(tensorflow::shape_inference::InferenceContext* context) {
  tensorflow::shape_inference::ShapeHandle values;
  TF_RETURN_IF_ERROR(context->WithRankAtLeast(context->input(0), 1, &values));
  TF_RETURN_IF_ERROR(context->ReplaceDim(values, 0, context->UnknownDim(), &values));
  context->set_output(0, values);
  context->set_output(1, context->Vector(context->UnknownDim()));
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("CoarseReduce")
    .SetIsStateful()
    .Attr("T: {float, double, bfloat16, half, int32, int64, uint8}")
    .Attr("key: string")
    .Attr("endpoint: int")
    .Input("contribution: T")
    .Output("result: T")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      context->set_output(0, context->input(0));
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("CoarseReduce").Device(tensorflow::DEVICE_CPU), ReduceOp);
REGISTER_KERNEL_BUILDER(Name("CoarseReduce").Device(tensorflow::DEVICE_GPU), ReduceOnGpuOp);

REGISTER_OP("CoarseReduceWeighted")
    .SetIsStateful()
    .Attr("T: {float, double, bfloat16, half, int32, int64, uint8}")
    .Attr("key: string")
    .Attr("endpoint: int")
    .Input("contribution: T")
    .Input("weights: double")
    .Output("result: T")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      context->set_output(0, context->input(0));
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("CoarseReduceWeighted").Device(tensorflow::DEVICE_CPU), ReduceOp);
REGISTER_KERNEL_BUILDER(Name("CoarseReduceWeighted").Device(tensorflow::DEVICE_GPU).HostMemory("weights"),
                        ReduceOnGpuOp);

REGISTER_OP("CoarseReduceRows")
    .SetIsStateful()
    .Attr("T: {float, bfloat16, half}")
    .Attr("key: string")
    .Attr("endpoint: int")
    .Input("contribution: T")
    .Input("rows: int64")
    .Output("result: T")
    .Output("result_rows: int64")
    .SetShapeFn(shapesOfRows);
REGISTER_KERNEL_BUILDER(Name("CoarseReduceRows").Device(tensorflow::DEVICE_CPU), ReduceRowsOp);

REGISTER_OP("CoarseReduceRowsWeighted")
    .SetIsStateful()
    .Attr("T: {float, bfloat16, half}")
    .Attr("key: string")
    .Attr("endpoint: int")
    .Input("contribution: T")
    .Input("rows: int64")
    .Input("weights: double")
    .Output("result: T")
    .Output("result_rows: int64")
    .SetShapeFn(shapesOfRows);
REGISTER_KERNEL_BUILDER(Name("CoarseReduceRowsWeighted").Device(tensorflow::DEVICE_CPU), ReduceRowsOp);

REGISTER_OP("CoarseUpdate")
    .SetIsStateful()
    .Attr("T: {float}")
    .Attr("rule: int")
    .Attr("key: string")
    .Attr("endpoint: int")
    .Input("gradient: T")
    .Input("value: T")
    .Input("coefficients: float")
    .Input("step: int64")
    .Output("updated: T")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      context->set_output(0, context->input(1));
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("CoarseUpdate").Device(tensorflow::DEVICE_CPU), UpdateOp);

REGISTER_OP("CoarseSequence").SetIsStateful().SetShapeFn([](tensorflow::shape_inference::InferenceContext*) {
  return absl::OkStatus();
});
REGISTER_KERNEL_BUILDER(Name("CoarseSequence").Device(tensorflow::DEVICE_CPU), SequenceOp);
REGISTER_KERNEL_BUILDER(Name("CoarseSequence").Device(tensorflow::DEVICE_GPU), SequenceOp);

extern "C" {

/// Lets ops of this endpoint reach a session. @returns whether this library and the session fit each other.
__attribute__((visibility("default"))) int coarse_open_endpoint(std::int64_t number,
                                                                const CoarseAsyncReducer* tensors,
                                                                const CoarseAsyncRows* rows,
                                                                const CoarseAsyncUpdates* updates) {
  if (tensors->version != COARSE_ASYNC_REDUCER_VERSION || rows->version != COARSE_ASYNC_ROWS_VERSION ||
      updates->version != COARSE_ASYNC_UPDATES_VERSION)
    return 0;
  Endpoints::instance().open(number, {*tensors, *rows, *updates});
  return 1;
}

__attribute__((visibility("default"))) void coarse_close_endpoint(std::int64_t number) {
  Endpoints::instance().close(number);
}
}
