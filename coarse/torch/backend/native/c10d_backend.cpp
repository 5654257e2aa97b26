#include "c10d_backend.hpp"

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <stdexcept>
#include <torch/csrc/distributed/c10d/Utils.hpp>

namespace coarse_torch {
namespace {

using c10d::OpType;
using coarse::Collective;
using coarse::CollectiveKind;

// How long operations that were issued before a group is destroyed may still take.
constexpr milliseconds kDrainLimit{5000};

/// `options.asyncOp` where this torch has it: whether the caller goes on meanwhile.
template <typename Options>
auto isAsync(const Options& options, int) -> decltype(options.asyncOp) {
  return options.asyncOp;
}
template <typename Options>
bool isAsync(const Options&, long) {
  return true;
}

/// A call with the memory that it points to.
struct Call {
  Collective collective;
  Tensors inputs;
  std::vector<Writable> outputs;
  std::vector<const void*> inputPointers;
  std::vector<void*> outputPointers;
  std::vector<std::uint64_t> inputBytes;
  std::vector<std::uint64_t> outputBytes;

  void read(const at::Tensor& tensor) {
    inputs.push_back(readable(tensor));
    inputPointers.push_back(inputs.back().data_ptr());
  }
  void write(const at::Tensor& tensor) {
    outputs.emplace_back(tensor, false);
    outputPointers.push_back(outputs.back().data());
  }
  void update(const at::Tensor& tensor) {
    outputs.emplace_back(tensor, true);
    outputPointers.push_back(outputs.back().data());
    inputPointers.push_back(outputs.back().data());
  }

  void run(coarse::Collectives& collectives, milliseconds timeout) {
    collective.inputs = inputPointers.data();
    collective.outputs = outputPointers.data();
    collective.inputBytes = inputBytes.data();
    collective.outputBytes = outputBytes.data();
    collective.timeout = timeout;
    collectives.run(collective);
    for (Writable& output : outputs) output.store();
  }
};

/// The pieces of a flat tensor, one per rank.
Tensors piecesOf(const at::Tensor& tensor, int size) {
  TORCH_CHECK_VALUE(tensor.numel() % size == 0, "coarse: ", tensor.numel(), " elements are not divisible by ",
                    size, " ranks");
  const std::int64_t numElements = tensor.numel() / size;
  const at::Tensor flat = tensor.view({-1});
  Tensors pieces;
  for (int rank = 0; rank < size; ++rank) pieces.push_back(flat.narrow(0, rank * numElements, numElements));
  return pieces;
}

void checkAlike(const at::Tensor& tensor, const at::Tensor& piece, const char* what) {
  TORCH_CHECK_VALUE(
      tensor.scalar_type() == piece.scalar_type() && tensor.numel() == piece.numel(), "coarse: ", what,
      " must have the dtype and number of elements of the other side: ", dtypeName(tensor.scalar_type()), " ",
      tensor.sizes(), " against ", dtypeName(piece.scalar_type()), " ", piece.sizes());
}

}  // namespace

CoarseBackend::CoarseBackend(std::shared_ptr<coarse::Collectives> collectives, int rank, int size,
                             milliseconds timeout)
    : Backend(rank, size), collectives_(std::move(collectives)), timeout_(timeout), queue_(new WorkQueue) {}

CoarseBackend::~CoarseBackend() { abort(); }

c10::intrusive_ptr<c10d::Backend::Options> CoarseBackend::getBackendOptions() {
  return c10::make_intrusive<Options>("coarse", timeout_.load());
}

void CoarseBackend::shutdown() {
  if (!owner_.isThisProcess()) return;
  queue_->drain(kDrainLimit);
  abort();
}

void CoarseBackend::abort() {
  if (!owner_.isThisProcess()) return;
  const auto stop = [this] {
    collectives_->close();
    queue_->stop();
  };
  // The threads that are joined may need the interpreter: futures call back into Python.
  if (Py_IsInitialized() && PyGILState_Check()) {
    py::gil_scoped_release released;
    stop();
  } else {
    stop();
  }
}

void CoarseBackend::checkOwner() const {
  try {
    collectives_->checkOwner();
  } catch (const std::runtime_error& error) {
    std::rethrow_exception(asDistError(error));
  }
}

milliseconds CoarseBackend::timeoutOf(milliseconds timeout) const {
  return timeout == c10d::kUnsetTimeout ? timeout_.load() : timeout;
}

WorkPtr CoarseBackend::submit(Announcement announcement, std::vector<Step> steps) {
  checkOwner();
  std::vector<c10::Device> devices;
  for (const at::Tensor& tensor : announcement.inputs) {
    if (tensor.is_cuda()) devices.push_back(tensor.device());
    if (!devices.empty()) break;
  }
  auto work = c10::make_intrusive<CoarseWork>(announcement.opType, announcement.title, announcement.inputs,
                                              std::move(announcement.result), devices, ++issued_);
  queue_->run(
      work,
      [steps = std::move(steps)] {
        for (const Step& step : steps) step();
      },
      announcement.isAsync);
  return work;
}

void CoarseBackend::checkRoot(std::int64_t root) const {
  TORCH_CHECK_VALUE(root >= 0 && root < size_, "coarse: root ", root, " is none of the ", size_, " ranks");
}

void CoarseBackend::checkCount(const Tensors& tensors, const char* what) const {
  TORCH_CHECK_VALUE(tensors.size() == static_cast<std::size_t>(size_), "coarse: ", what, " must be ", size_,
                    " tensors, one per rank, not ", tensors.size());
}

WorkPtr CoarseBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  checkRoot(options.rootRank);
  std::vector<Step> steps;
  for (const at::Tensor& tensor : tensors) {
    auto call = std::make_shared<Call>();
    call->update(tensor);
    call->collective = collectiveOf(CollectiveKind::kBroadcast, tensor);
    call->collective.header.root = static_cast<std::int32_t>(options.rootRank);
    steps.emplace_back(
        [this, call, timeout = timeoutOf(options.timeout)] { call->run(*collectives_, timeout); });
  }
  return submit({OpType::BROADCAST, "coarse:broadcast", tensors, tensors, isAsync(options, 0)},
                std::move(steps));
}

CoarseBackend::Step CoarseBackend::allReduceStep(const at::Tensor& tensor, const c10d::ReduceOp& op,
                                                 milliseconds timeout) {
  const at::Tensor real = asReal(tensor, op);
  auto call = std::make_shared<Call>();
  call->update(real);
  call->collective = collectiveOf(CollectiveKind::kAllReduce, real);
  call->collective.header.combine = combineOf(op);
  checkReducible(real, call->collective.header.combine);
  return [this, call, timeout] { call->run(*collectives_, timeout); };
}

WorkPtr CoarseBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (!tensors.empty() && tensors[0].is_sparse()) return allreduce_sparse(tensors, options);
  std::vector<Step> steps;
  for (const at::Tensor& tensor : tensors) {
    steps.push_back(allReduceStep(tensor, options.reduceOp, timeoutOf(options.timeout)));
  }
  return submit({OpType::ALLREDUCE, "coarse:all_reduce", tensors, tensors, isAsync(options, 0)},
                std::move(steps));
}

WorkPtr CoarseBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Step> steps;
  for (const at::Tensor& tensor : tensors) {
    steps.push_back(allReduceStep(tensor, options.reduceOp, timeoutOf(options.timeout)));
  }
  return submit(
      {OpType::ALLREDUCE_COALESCED, "coarse:all_reduce_coalesced", tensors, tensors, isAsync(options, 0)},
      std::move(steps));
}

WorkPtr CoarseBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  checkRoot(options.rootRank);
  std::vector<Step> steps;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor real = asReal(tensor, options.reduceOp);
    auto call = std::make_shared<Call>();
    call->update(real);
    call->collective = collectiveOf(CollectiveKind::kReduce, real);
    call->collective.header.combine = combineOf(options.reduceOp);
    call->collective.header.root = static_cast<std::int32_t>(options.rootRank);
    checkReducible(real, call->collective.header.combine);
    steps.emplace_back(
        [this, call, timeout = timeoutOf(options.timeout)] { call->run(*collectives_, timeout); });
  }
  return submit({OpType::REDUCE, "coarse:reduce", tensors, tensors, isAsync(options, 0)}, std::move(steps));
}

CoarseBackend::Step CoarseBackend::gatherStep(CollectiveKind kind, const Tensors& outputs,
                                              const at::Tensor& input, std::int64_t root,
                                              milliseconds timeout) {
  auto call = std::make_shared<Call>();
  call->read(input);
  for (const at::Tensor& output : outputs) {
    checkAlike(output, input, "a tensor that is gathered into");
    call->write(output);
  }
  call->collective = collectiveOf(kind, input);
  call->collective.header.root = static_cast<std::int32_t>(root);
  return [this, call, timeout] { call->run(*collectives_, timeout); };
}

CoarseBackend::Step CoarseBackend::gatherFlatStep(const at::Tensor& output, const at::Tensor& input,
                                                  milliseconds timeout) {
  TORCH_CHECK_VALUE(output.numel() == input.numel() * size_ && output.scalar_type() == input.scalar_type(),
                    "coarse: all_gather_into_tensor needs an output of ", size_,
                    " times the input's elements and of its ", "dtype, has ", dtypeName(output.scalar_type()),
                    " ", output.sizes(), " for ", dtypeName(input.scalar_type()), " ", input.sizes());
  auto call = std::make_shared<Call>();
  call->read(input);
  call->outputs.emplace_back(output, false);
  for (int rank = 0; rank < size_; ++rank) {
    call->outputPointers.push_back(static_cast<std::byte*>(call->outputs[0].data()) + rank * input.nbytes());
  }
  call->collective = collectiveOf(CollectiveKind::kAllGather, input);
  return [this, call, timeout] { call->run(*collectives_, timeout); };
}

WorkPtr CoarseBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(inputs.size() == 1 && outputs.size() == 1, "coarse: all_gather takes one input tensor");
  checkCount(outputs[0], "the outputs of all_gather");
  return submit(
      {OpType::ALLGATHER, "coarse:all_gather", inputs, outputs[0], isAsync(options, 0)},
      {gatherStep(CollectiveKind::kAllGather, outputs[0], inputs[0], -1, timeoutOf(options.timeout))});
}

WorkPtr CoarseBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                       const c10d::AllgatherOptions& options) {
  return submit(
      {OpType::_ALLGATHER_BASE, "coarse:_all_gather_base", {input}, Tensors{output}, isAsync(options, 0)},
      {gatherFlatStep(output, input, timeoutOf(options.timeout))});
}

WorkPtr CoarseBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& options) {
  checkCount(Tensors(outputs.size()), "the output lists of all_gather_coalesced");
  std::vector<Step> steps;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Tensors pieces;
    for (const Tensors& ofRank : outputs) {
      TORCH_CHECK_VALUE(ofRank.size() == inputs.size(),
                        "coarse: all_gather_coalesced needs as many outputs of each ",
                        "rank as there are inputs");
      pieces.push_back(ofRank[i]);
    }
    steps.push_back(
        gatherStep(CollectiveKind::kAllGather, pieces, inputs[i], -1, timeoutOf(options.timeout)));
  }
  return submit(
      {OpType::ALLGATHER_COALESCED, "coarse:all_gather_coalesced", inputs, outputs, isAsync(options, 0)},
      std::move(steps));
}

WorkPtr CoarseBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                       const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "coarse: needs as many outputs as inputs");
  std::vector<Step> steps;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    steps.push_back(gatherFlatStep(outputs[i], inputs[i], timeoutOf(options.timeout)));
  }
  return submit(
      {OpType::COALESCED, "coarse:all_gather_into_tensor_coalesced", inputs, outputs, isAsync(options, 0)},
      std::move(steps));
}

WorkPtr CoarseBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::GatherOptions& options) {
  checkRoot(options.rootRank);
  TORCH_CHECK_VALUE(inputs.size() == 1, "coarse: gather takes one input tensor");
  const bool isRoot = rank_ == options.rootRank;
  TORCH_CHECK_VALUE(outputs.size() == (isRoot ? 1 : 0), "coarse: gather takes outputs at its root alone");
  if (isRoot) checkCount(outputs[0], "the outputs of gather");
  const Tensors pieces = isRoot ? outputs[0] : Tensors{};
  return submit(
      {OpType::GATHER, "coarse:gather", inputs, pieces, isAsync(options, 0)},
      {gatherStep(CollectiveKind::kGather, pieces, inputs[0], options.rootRank, timeoutOf(options.timeout))});
}

WorkPtr CoarseBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                               const c10d::ScatterOptions& options) {
  checkRoot(options.rootRank);
  TORCH_CHECK_VALUE(outputs.size() == 1, "coarse: scatter takes one output tensor");
  const bool isRoot = rank_ == options.rootRank;
  TORCH_CHECK_VALUE(inputs.size() == (isRoot ? 1 : 0), "coarse: scatter takes inputs at its root alone");
  auto call = std::make_shared<Call>();
  call->write(outputs[0]);
  if (isRoot) {
    checkCount(inputs[0], "the inputs of scatter");
    for (const at::Tensor& input : inputs[0]) {
      checkAlike(input, outputs[0], "a tensor that is scattered");
      call->read(input);
    }
  }
  call->collective = collectiveOf(CollectiveKind::kScatter, outputs[0]);
  call->collective.header.root = static_cast<std::int32_t>(options.rootRank);
  const Tensors announced = isRoot ? inputs[0] : outputs;
  return submit({OpType::SCATTER, "coarse:scatter", announced, outputs, isAsync(options, 0)},
                {[this, call, timeout = timeoutOf(options.timeout)] { call->run(*collectives_, timeout); }});
}

CoarseBackend::Step CoarseBackend::reduceScatterStep(const at::Tensor& output, const Tensors& inputs,
                                                     const c10d::ReduceOp& op, milliseconds timeout) {
  const at::Tensor real = asReal(output, op);
  auto call = std::make_shared<Call>();
  call->write(real);
  for (const at::Tensor& input : inputs) {
    checkAlike(input, output, "an input of reduce_scatter");
    call->read(asReal(input, op));
  }
  call->collective = collectiveOf(CollectiveKind::kReduceScatter, real);
  call->collective.header.combine = combineOf(op);
  checkReducible(real, call->collective.header.combine);
  return [this, call, timeout] { call->run(*collectives_, timeout); };
}

CoarseBackend::Step CoarseBackend::reduceScatterFlatStep(const at::Tensor& output, const at::Tensor& input,
                                                         const c10d::ReduceOp& op, milliseconds timeout) {
  TORCH_CHECK_VALUE(input.numel() == output.numel() * size_ && output.scalar_type() == input.scalar_type(),
                    "coarse: reduce_scatter_tensor needs an input of ", size_,
                    " times the output's elements and of its ", "dtype, has ", dtypeName(input.scalar_type()),
                    " ", input.sizes(), " for ", dtypeName(output.scalar_type()), " ", output.sizes());
  return reduceScatterStep(output, piecesOf(readable(input), size_), op, timeout);
}

WorkPtr CoarseBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                      const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == 1 && inputs.size() == 1,
                    "coarse: reduce_scatter takes one output tensor");
  checkCount(inputs[0], "the inputs of reduce_scatter");
  return submit({OpType::REDUCE_SCATTER, "coarse:reduce_scatter", inputs[0], outputs, isAsync(options, 0)},
                {reduceScatterStep(outputs[0], inputs[0], options.reduceOp, timeoutOf(options.timeout))});
}

WorkPtr CoarseBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                            const c10d::ReduceScatterOptions& options) {
  return submit({OpType::_REDUCE_SCATTER_BASE,
                 "coarse:_reduce_scatter_base",
                 {input},
                 Tensors{output},
                 isAsync(options, 0)},
                {reduceScatterFlatStep(output, input, options.reduceOp, timeoutOf(options.timeout))});
}

WorkPtr CoarseBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                       const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "coarse: needs as many outputs as inputs");
  std::vector<Step> steps;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    steps.push_back(
        reduceScatterFlatStep(outputs[i], inputs[i], options.reduceOp, timeoutOf(options.timeout)));
  }
  return submit(
      {OpType::COALESCED, "coarse:reduce_scatter_tensor_coalesced", inputs, outputs, isAsync(options, 0)},
      std::move(steps));
}

WorkPtr CoarseBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                     std::vector<std::int64_t>& outputSplits,
                                     std::vector<std::int64_t>& inputSplits,
                                     const c10d::AllToAllOptions& options) {
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(),
                    "coarse: all_to_all_single needs one dtype, has ", dtypeName(input.scalar_type()),
                    " for ", dtypeName(output.scalar_type()));
  c10d::checkSplitSizes(inputSplits, input, size_);
  c10d::checkSplitSizes(outputSplits, output, size_);
  const auto numRanks = static_cast<std::size_t>(size_);
  std::vector<std::size_t> inputLengths(numRanks), inputOffsets(numRanks), outputLengths(numRanks),
      outputOffsets(numRanks);
  c10d::computeLengthsAndOffsets(inputSplits, input, &inputLengths, &inputOffsets);
  c10d::computeLengthsAndOffsets(outputSplits, output, &outputLengths, &outputOffsets);
  auto call = std::make_shared<Call>();
  call->inputs.push_back(readable(input));
  call->outputs.emplace_back(output, false);
  const std::size_t itemBytes = input.element_size();
  for (std::size_t rank = 0; rank < numRanks; ++rank) {
    const auto* from = static_cast<const std::byte*>(call->inputs[0].data_ptr());
    auto* to = static_cast<std::byte*>(call->outputs[0].data());
    call->inputPointers.push_back(from + inputOffsets[rank] * itemBytes);
    call->outputPointers.push_back(to + outputOffsets[rank] * itemBytes);
    call->inputBytes.push_back(inputLengths[rank] * itemBytes);
    call->outputBytes.push_back(outputLengths[rank] * itemBytes);
  }
  call->collective = collectiveOf(CollectiveKind::kAllToAll, input);
  call->collective.header.pieceBytes = 0;
  call->collective.header.numDims = coarse::kDimsNotTold;
  return submit({OpType::ALLTOALL_BASE, "coarse:all_to_all", {input}, Tensors{output}, isAsync(options, 0)},
                {[this, call, timeout = timeoutOf(options.timeout)] { call->run(*collectives_, timeout); }});
}

WorkPtr CoarseBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  checkCount(outputs, "the outputs of all_to_all");
  checkCount(inputs, "the inputs of all_to_all");
  auto call = std::make_shared<Call>();
  for (const at::Tensor& input : inputs) {
    TORCH_CHECK_VALUE(input.scalar_type() == inputs[0].scalar_type(),
                      "coarse: all_to_all needs tensors of one dtype");
    call->read(input);
    call->inputBytes.push_back(input.nbytes());
  }
  for (const at::Tensor& output : outputs) {
    TORCH_CHECK_VALUE(output.scalar_type() == inputs[0].scalar_type(),
                      "coarse: all_to_all needs tensors of one dtype");
    call->write(output);
    call->outputBytes.push_back(output.nbytes());
  }
  call->collective = collectiveOf(CollectiveKind::kAllToAll, inputs[0]);
  call->collective.header.pieceBytes = 0;
  call->collective.header.numDims = coarse::kDimsNotTold;
  return submit({OpType::ALLTOALL, "coarse:all_to_all", inputs, outputs, isAsync(options, 0)},
                {[this, call, timeout = timeoutOf(options.timeout)] { call->run(*collectives_, timeout); }});
}

WorkPtr CoarseBackend::barrier(const c10d::BarrierOptions& options) {
  auto call = std::make_shared<Call>();
  call->collective.header.kind = CollectiveKind::kBarrier;
  return submit({OpType::BARRIER, "coarse:barrier", {}, Tensors{}, isAsync(options, 0)},
                {[this, call, timeout = timeoutOf(options.timeout)] { call->run(*collectives_, timeout); }});
}

}  // namespace coarse_torch
