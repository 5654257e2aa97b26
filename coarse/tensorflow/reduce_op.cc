// The TensorFlow op CoarseReduce: a tensor, reduced over all workers by the AsyncReducer of an open session.
//
// Built for the TensorFlow that is installed (coarse/tensorflow/kernel.py). Asynchronous and not stateful, so
// that any number of tensors are under way at once, in whatever order the graph comes to them; `key` says
// which tensor it is.

#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>

#include "coarse/async_reducer_interface.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

/// The sessions of this process that are open, by number.
class Endpoints {
 public:
  static Endpoints& instance() {
    static Endpoints* endpoints = new Endpoints;  // never destroyed: ops may run until the very end
    return *endpoints;
  }
  void open(std::int64_t number, const CoarseAsyncReducer& reducer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    reducers_[number] = reducer;
  }
  void close(std::int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    reducers_.erase(number);
  }
  bool find(std::int64_t number, CoarseAsyncReducer& reducer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = reducers_.find(number);
    if (found == reducers_.end()) return false;
    reducer = found->second;
    return true;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::int64_t, CoarseAsyncReducer> reducers_;
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

class ReduceOp : public AsyncOpKernel {
 public:
  explicit ReduceOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("key", &key_));
    OP_REQUIRES_OK(context, context->GetAttr("endpoint", &endpoint_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& input = context->input(0);
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->forward_input_or_allocate_output({0}, 0, input.shape(), &output),
                         done);
    CoarseAsyncReducer reducer;
    OP_REQUIRES_ASYNC(context, Endpoints::instance().find(endpoint_, reducer),
                      absl::FailedPreconditionError("the strategy's session is closed"), done);
    reducer.reduce(reducer.reducer, key_.c_str(), input.tensor_data().data(),
                   const_cast<char*>(output->tensor_data().data()), input.TotalBytes(), &finish,
                   new UnderWay{context, std::move(done)});
  }

 private:
  std::string key_;
  std::int64_t endpoint_;
};

/// Does nothing, statefully: TensorFlow runs what has it, and not twice at once.
class SequenceOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext*) override {}
};

}  // namespace

REGISTER_OP("CoarseReduce")
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

REGISTER_OP("CoarseSequence").SetIsStateful().SetShapeFn([](tensorflow::shape_inference::InferenceContext*) {
  return absl::OkStatus();
});
REGISTER_KERNEL_BUILDER(Name("CoarseSequence").Device(tensorflow::DEVICE_CPU), SequenceOp);

extern "C" {

/// Lets ops of this endpoint reach a reducer. @returns whether this library and the reducer fit each other.
__attribute__((visibility("default"))) int coarse_open_endpoint(std::int64_t number,
                                                                const CoarseAsyncReducer* reducer) {
  if (reducer->version != COARSE_ASYNC_REDUCER_VERSION) return 0;
  Endpoints::instance().open(number, *reducer);
  return 1;
}

__attribute__((visibility("default"))) void coarse_close_endpoint(std::int64_t number) {
  Endpoints::instance().close(number);
}
}
