/* UCC's all-reduce in place for `coarse bench sync`: a few functions that Python can call by ctypes.
 *
 * Workers find each other by files in the job's private directory. Each tensor has one persistent collective, which
 * is UCC's fastest way. All functions return 0, or a negative ucc_status_t; one thread at a time.
 */

#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <ucc/api/ucc.h>
#include <unistd.h>

#define TRY(call)                      \
    do {                               \
        ucc_status_t status_ = (call); \
        if (status_ < 0) {             \
            return status_;            \
        }                              \
    } while (0)

struct exchange {
    char directory[PATH_MAX / 2];
    int rank, size;
    unsigned count; /* of all-gathers begun so far, the same on every worker */
};

struct gather {
    struct exchange *exchange;
    unsigned number;
    size_t bytes;
    char *results;
};

struct coarse_ucc {
    struct exchange exchange;
    ucc_lib_h lib;
    ucc_context_h context;
    ucc_team_h team;
    ucc_coll_req_h request;
};

static void name_of(const struct exchange *exchange, unsigned number, int rank, const char *suffix, char *path) {
    snprintf(path, PATH_MAX, "%s/ucc-%u-%d%s", exchange->directory, number, rank, suffix);
}

static ucc_status_t begin_gather(void *send, void *receive, size_t bytes, void *info, void **request) {
    struct exchange *exchange = info;
    struct gather *gather = malloc(sizeof *gather);
    char temporary[PATH_MAX], path[PATH_MAX];
    FILE *file;
    if (gather == NULL) {
        return UCC_ERR_NO_MEMORY;
    }
    *gather = (struct gather){exchange, exchange->count++, bytes, receive};
    name_of(exchange, gather->number, exchange->rank, ".new", temporary);
    name_of(exchange, gather->number, exchange->rank, "", path);
    file = fopen(temporary, "wb");
    if (file == NULL || fwrite(send, 1, bytes, file) != bytes || fclose(file) != 0 || rename(temporary, path) != 0) {
        free(gather);
        return UCC_ERR_NO_MESSAGE;
    }
    *request = gather;
    return UCC_OK;
}

static ucc_status_t test_gather(void *request) {
    struct gather *gather = request;
    char path[PATH_MAX];
    for (int rank = 0; rank < gather->exchange->size; ++rank) {
        FILE *file;
        size_t got;
        name_of(gather->exchange, gather->number, rank, "", path);
        file = fopen(path, "rb");
        if (file == NULL) {
            sched_yield();
            return UCC_INPROGRESS;
        }
        got = fread(gather->results + rank * gather->bytes, 1, gather->bytes, file);
        fclose(file);
        if (got != gather->bytes) {
            return UCC_ERR_NO_MESSAGE;
        }
    }
    return UCC_OK;
}

static ucc_status_t free_gather(void *request) {
    free(request);
    return UCC_OK;
}

static ucc_status_t open_lib(struct coarse_ucc *self) {
    ucc_lib_params_t params = {.mask = UCC_LIB_PARAM_FIELD_THREAD_MODE, .thread_mode = UCC_THREAD_SINGLE};
    ucc_lib_config_h config;
    TRY(ucc_lib_config_read(NULL, NULL, &config));
    TRY(ucc_init(&params, config, &self->lib));
    ucc_lib_config_release(config);
    return UCC_OK;
}

static ucc_oob_coll_t meeting(struct coarse_ucc *self) {
    return (ucc_oob_coll_t){
        .allgather = begin_gather,
        .req_test = test_gather,
        .req_free = free_gather,
        .coll_info = &self->exchange,
        .n_oob_eps = self->exchange.size,
        .oob_ep = self->exchange.rank,
    };
}

static ucc_status_t open_context(struct coarse_ucc *self) {
    ucc_context_params_t params = {.mask = UCC_CONTEXT_PARAM_FIELD_OOB};
    ucc_context_config_h config;
    params.oob = meeting(self);
    TRY(ucc_context_config_read(self->lib, NULL, &config));
    TRY(ucc_context_create(self->lib, &params, config, &self->context));
    ucc_context_config_release(config);
    return UCC_OK;
}

static ucc_status_t open_team(struct coarse_ucc *self) {
    ucc_team_params_t params = {
        .mask = UCC_TEAM_PARAM_FIELD_EP | UCC_TEAM_PARAM_FIELD_EP_RANGE | UCC_TEAM_PARAM_FIELD_OOB,
        .ep = self->exchange.rank,
        .ep_range = UCC_COLLECTIVE_EP_RANGE_CONTIG,
    };
    ucc_status_t status;
    params.oob = meeting(self);
    TRY(ucc_team_create_post(&self->context, 1, &params, &self->team));
    while ((status = ucc_team_create_test(self->team)) == UCC_INPROGRESS) {
        ucc_context_progress(self->context);
    }
    return status;
}

int coarse_ucc_open(const char *directory, int rank, int size, struct coarse_ucc **opened) {
    struct coarse_ucc *self = calloc(1, sizeof *self);
    if (self == NULL || strlen(directory) >= sizeof self->exchange.directory) {
        free(self);
        return UCC_ERR_INVALID_PARAM;
    }
    strcpy(self->exchange.directory, directory);
    self->exchange.rank = rank;
    self->exchange.size = size;
    *opened = self;
    TRY(open_lib(self));
    TRY(open_context(self));
    return open_team(self);
}

/* `type` is the place of the dtype in float32, float64, int32, int64. */
int coarse_ucc_prepare(struct coarse_ucc *self, void *buffer, uint64_t num_elements, int type) {
    static const ucc_datatype_t types[] = {UCC_DT_FLOAT32, UCC_DT_FLOAT64, UCC_DT_INT32, UCC_DT_INT64};
    ucc_coll_args_t args = {
        .mask = UCC_COLL_ARGS_FIELD_FLAGS,
        .flags = UCC_COLL_ARGS_FLAG_IN_PLACE | UCC_COLL_ARGS_FLAG_PERSISTENT,
        .coll_type = UCC_COLL_TYPE_ALLREDUCE,
        .op = UCC_OP_SUM,
    };
    args.dst.info.buffer = buffer;
    args.dst.info.count = num_elements;
    args.dst.info.datatype = types[type];
    args.dst.info.mem_type = UCC_MEMORY_TYPE_HOST;
    args.src.info = args.dst.info;
    return ucc_collective_init(&args, &self->request, self->team);
}

int coarse_ucc_all_reduce(struct coarse_ucc *self) {
    ucc_status_t status;
    TRY(ucc_collective_post(self->request));
    while ((status = ucc_collective_test(self->request)) == UCC_INPROGRESS) {
        ucc_context_progress(self->context);
    }
    return status;
}

int coarse_ucc_release(struct coarse_ucc *self) {
    ucc_coll_req_h request = self->request;
    self->request = NULL;
    return request == NULL ? UCC_OK : ucc_collective_finalize(request);
}

int coarse_ucc_close(struct coarse_ucc *self) {
    while (self->team != NULL && ucc_team_destroy(self->team) == UCC_INPROGRESS) {
        ucc_context_progress(self->context);
    }
    if (self->context != NULL) {
        ucc_context_destroy(self->context);
    }
    if (self->lib != NULL) {
        ucc_finalize(self->lib);
    }
    free(self);
    return UCC_OK;
}

const char *coarse_ucc_words(int status) { return ucc_status_string((ucc_status_t)status); }
