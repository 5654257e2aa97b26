#pragma once

#include <stdint.h>

/// The interface by which libraries that are built separately, for one version of a framework, reach an
/// AsyncReducer and its AsyncRows of this process. It is C, so the compilers need not match.

#define COARSE_ASYNC_REDUCER_VERSION 2u

typedef void (*CoarseReduceDone)(void* context, const char* failure);

typedef struct CoarseAsyncReducer {
  uint32_t version; /* COARSE_ASYNC_REDUCER_VERSION */
  void* reducer;
  /* AsyncReducer::reduce(): `done` is called once, maybe before this returns, from any thread; `failure` is
     null after success, and else belongs to the caller of `done`. `weights` are of the workers, or null; they
     must stay valid until `done`. Never throws. */
  void (*reduce)(void* reducer, const char* key, const void* source, void* destination, uint64_t num_bytes,
                 const double* weights, uint64_t num_weights, CoarseReduceDone done, void* context);
} CoarseAsyncReducer;

#define COARSE_ASYNC_ROWS_VERSION 2u

/* `numbers` and `values` of the `count` rows, and `factors`, are valid during the call. Each row is to be
   multiplied by its factor; null stands for 1. */
typedef void (*CoarseRowsDone)(void* context, const char* failure, uint64_t count, const uint64_t* numbers,
                               const void* values, const double* factors);

typedef struct CoarseAsyncRows {
  uint32_t version; /* COARSE_ASYNC_ROWS_VERSION */
  void* rows;
  /* AsyncRows::reduce(): `done` and `weights` as above. Never throws. */
  void (*reduce)(void* rows, const char* key, const int64_t* numbers, const void* values, uint64_t count,
                 uint64_t value_bytes, const double* weights, uint64_t num_weights, CoarseRowsDone done,
                 void* context);
} CoarseAsyncRows;

#define COARSE_ASYNC_UPDATES_VERSION 1u

/* The UpdateSettings of update.hpp that differ between rules; others are those that change nothing. */
typedef struct CoarseUpdateSettings {
  uint32_t rule;
  uint32_t update_number;
  float gradient_scale, parameter_scale, step_size, first_decay, first_weight, momentum, second_decay,
      second_weight, epsilon;
} CoarseUpdateSettings;

typedef struct CoarseAsyncUpdates {
  uint32_t version; /* COARSE_ASYNC_UPDATES_VERSION */
  void* updates;
  /* AsyncUpdates::update(): `done` as above. Never throws. */
  void (*update)(void* updates, const char* key, const void* gradient, const void* value, void* updated,
                 uint64_t num_bytes, const CoarseUpdateSettings* settings, CoarseReduceDone done,
                 void* context);
} CoarseAsyncUpdates;
