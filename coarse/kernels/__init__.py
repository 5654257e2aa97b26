"""The native core: data path, sync cores and kernels in C++ and CUDA, behind the module `_native`."""
