#pragma once

#include <unistd.h>

namespace coarse {

/// The process in which an object was made; a fork of it has a copy of the object, and none of its threads.
class Owner {
 public:
  bool isThisProcess() const noexcept { return ::getpid() == pid_; }

 private:
  pid_t pid_ = ::getpid();
};

/// Deletes an object that has threads, and in a fork leaves it where it is: even the destructor of a
/// condition variable waits there, for the thread that waited for it and does not exist.
class LeakInForks {
 public:
  template <typename T>
  void operator()(T* object) const {
    if (owner_.isThisProcess()) delete object;
  }

 private:
  Owner owner_;
};

}  // namespace coarse
