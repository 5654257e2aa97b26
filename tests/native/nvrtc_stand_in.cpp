// A libnvrtc.so.13 that compiles nothing: for the libcuda of cuda_stand_in.cpp, which has all kernels
// already.
#include <cstddef>
#include <cstring>

extern "C" {

const char* nvrtcGetErrorString(int) { return "as the stand-in has it"; }
int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 99;  // newer than a real one
  return 0;
}
int nvrtcGetNumSupportedArchs(int* count) {
  *count = 1;
  return 0;
}
int nvrtcGetSupportedArchs(int* architectures) {
  *architectures = 90;
  return 0;
}
int nvrtcCreateProgram(void** program, const char*, const char*, int, const char* const*,
                       const char* const*) {
  *program = nullptr;
  return 0;
}
int nvrtcCompileProgram(void*, int, const char* const*) { return 0; }
int nvrtcGetCUBINSize(void*, std::size_t* numBytes) {
  *numBytes = 1;
  return 0;
}
int nvrtcGetCUBIN(void*, char* cubin) {
  *cubin = 0;
  return 0;
}
int nvrtcDestroyProgram(void**) { return 0; }

}  // extern "C"
