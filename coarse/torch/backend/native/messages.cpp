#include <cstring>
#include <stdexcept>

#include "c10d_backend.hpp"

namespace coarse_torch {

using c10d::OpType;

WorkPtr CoarseBackend::post(OpType opType, const char* title, Tensors& tensors, int peer, int tag) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "coarse: messages are of one tensor");
  TORCH_CHECK_VALUE(opType == OpType::RECVANYSOURCE || (peer >= 0 && peer < size_), "coarse: ", peer,
                    " is none of the ", size_, " ranks");
  checkOwner();
  const bool isSend = opType == OpType::SEND;
  const at::Tensor& tensor = tensors[0];
  std::shared_ptr<Writable> target;
  at::Tensor memory;
  if (isSend) {
    memory = readable(tensor);
  } else {
    target = std::make_shared<Writable>(tensor, false);
    memory = target->memory();
  }
  coarse::Message message;
  message.isSend = isSend;
  message.peer = peer;
  message.tag = tag;
  message.data = memory.data_ptr();
  message.numBytes = memory.nbytes();
  std::strncpy(message.dtype, dtypeName(memory.scalar_type()).c_str(), coarse::kDTypeNameBytes - 1);
  message.timeout = timeout_.load();
  std::vector<c10::Device> devices;
  if (tensor.is_cuda()) devices.push_back(tensor.device());
  auto work = c10::make_intrusive<CoarseWork>(opType, title, tensors, tensors, devices, ++issued_);
  message.done = [work, target, memory](const std::string& error, int from) {
    work->setSourceRank(from);
    if (!error.empty()) {
      work->complete(asDistError(std::runtime_error(error)));
      return;
    }
    at::NoGradGuard noGrad;
    if (target) target->store();
    work->complete(nullptr);
  };
  collectives_->post(message);
  return work;
}

WorkPtr CoarseBackend::send(Tensors& tensors, int destination, int tag) {
  return post(OpType::SEND, "coarse:send", tensors, destination, tag);
}

WorkPtr CoarseBackend::recv(Tensors& tensors, int source, int tag) {
  return post(OpType::RECV, "coarse:recv", tensors, source, tag);
}

WorkPtr CoarseBackend::recvAnysource(Tensors& tensors, int tag) {
  return post(OpType::RECVANYSOURCE, "coarse:recvAnySource", tensors, -1, tag);
}

}  // namespace coarse_torch
