#pragma once

#include <stdint.h>

/// How libraries that are built elsewhere, for one version of a framework, reach an AsyncReducer of this
/// process. C, so that neither has to know the other's compiler.

#define COARSE_ASYNC_REDUCER_VERSION 1u

typedef void (*CoarseReduceDone)(void* context, const char* failure);

typedef struct CoarseAsyncReducer {
  uint32_t version; /* COARSE_ASYNC_REDUCER_VERSION */
  void* reducer;
  /* AsyncReducer::reduce(): `done` is called once, maybe before this returns, from any thread; `failure` is
     null after success, and else belongs to the caller of `done`. Never throws. */
  void (*reduce)(void* reducer, const char* key, const void* source, void* destination, uint64_t num_bytes,
                 CoarseReduceDone done, void* context);
} CoarseAsyncReducer;
