/* A CUDA runtime without a GPU: libspind_cuda.so linked against it (make CUDA=1 cuda-tests) runs everything
 * that the backend does on the host - staging, lists, graphs, allocation, settling of steps - and computes nothing.
 * Kernels are checked (shapes of launches, shared memory) and not run; copies copy nothing; results are zeros, so every
 * answer is token 0. What the host must never do is an error here as it is there:
 *   - device memory is mapped without access: who follows a device address from the host gets SIGSEGV;
 *   - waiting for or freeing something while a stream is captured, an unknown address or event, a launch that no GPU takes.
 *
 * SPIND_DRY_FAULT=CALL:N[:CODE]   the N-th call of CALL (cudaMalloc, cudaEventSynchronize, launch, ...) fails with this
 *     cudaError_t; CODE 700 and up stay, as a broken device does; 600, and the device hangs from there on: whoever
 *     waits for it waits for ever. Preset 2, out of memory.
 * SPIND_DRY_ARMED=FILE     calls count for that only once FILE is there
 * SPIND_DRY_MEMORY=BYTES   of the GPU (140 GiB)
 * SPIND_DRY_COUNTS=1       tells at exit how much memory there was at most and how often each call came */
#define _GNU_SOURCE
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    MAX_PLACES = 1 << 16,
    MAX_KERNELS = 1 << 12,
    MAX_CALLS = 128,
    SHARED_PRESET = 48 << 10,
    SHARED_MOST = 227 << 10,
    STICKY_FROM = 700,
};

enum place_kind { PLACE_DEVICE, PLACE_HOST, PLACE_REGISTERED };

struct place {
    char *base;
    size_t bytes;
    enum place_kind kind;
};

static struct {
    pthread_mutex_t lock;
    struct place places[MAX_PLACES];
    int n_places;
    size_t total, used, peak;
    struct {
        const void *func;
        int shared; /* the most dynamic shared memory that was asked for */
    } kernels[MAX_KERNELS];
    int n_kernels;
    struct {
        const char *name;
        unsigned long n;
    } calls[MAX_CALLS];
    int n_calls;
    bool is_open, tells, hangs;
    char fault[64];
    unsigned long fault_at, n_towards; /* the fault: such calls since it was armed */
    const char *armed;                 /* a file, until it was seen; NULL: nothing to wait for */
    cudaError_t fault_code, sticky;
    cudaStream_t capturing;
    unsigned long captured; /* launches since */
    bool capture_broken;
} dry = {.lock = PTHREAD_MUTEX_INITIALIZER};

static __thread cudaError_t last_error;

/* ---- every call ---- */

static void tell_counts(void)
{
    fprintf(stderr, "dry: %.3f GiB of device memory at most\n", (double)dry.peak / 1073741824.0);
    for (int i = 0; i < dry.n_calls; i++)
        fprintf(stderr, "dry: %8lu %s\n", dry.calls[i].n, dry.calls[i].name);
}

static void dry_open(void)
{
    const char *fault = getenv("SPIND_DRY_FAULT"), *memory = getenv("SPIND_DRY_MEMORY");
    int code = cudaErrorMemoryAllocation;
    dry.is_open = true;
    dry.total = memory != NULL ? strtoull(memory, NULL, 0) : (size_t)140 << 30;
    if (fault != NULL && sscanf(fault, "%63[^:]:%lu:%d", dry.fault, &dry.fault_at, &code) < 2)
        fprintf(stderr, "dry: SPIND_DRY_FAULT=%s is not CALL:N[:CODE]\n", fault);
    dry.fault_code = (cudaError_t)code;
    dry.armed = getenv("SPIND_DRY_ARMED");
    dry.tells = getenv("SPIND_DRY_COUNTS") != NULL;
    if (dry.tells)
        atexit(tell_counts);
}

static void count(const char *name)
{
    int i = 0;
    while (i < dry.n_calls && strcmp(dry.calls[i].name, name) != 0)
        i++;
    if (i == dry.n_calls && i < MAX_CALLS)
        dry.calls[dry.n_calls++].name = name;
    if (i < MAX_CALLS)
        dry.calls[i].n++;
}

static bool fails_now(const char *name)
{
    if (dry.fault_at == 0 || strcmp(name, dry.fault) != 0)
        return false;
    if (dry.armed != NULL && access(dry.armed, F_OK) != 0)
        return false;
    dry.armed = NULL;
    if (++dry.n_towards != dry.fault_at)
        return false;
    fprintf(stderr, "dry: call %lu of %s fails with %d\n", dry.fault_at, name, (int)dry.fault_code);
    return true;
}

/* Every call begins so: the error that it is to fail with. Names are literals. */
static cudaError_t call(const char *name)
{
    pthread_mutex_lock(&dry.lock);
    if (!dry.is_open)
        dry_open();
    if (dry.tells)
        count(name);
    cudaError_t e = fails_now(name) ? dry.fault_code : dry.sticky;
    if ((int)e >= STICKY_FROM)
        dry.sticky = e;
    if (e == cudaErrorNotReady) {
        dry.hangs = true;
        e = cudaSuccess;
    }
    pthread_mutex_unlock(&dry.lock);
    if (e != cudaSuccess)
        last_error = e;
    return e;
}

static cudaError_t wrong(cudaError_t e, const char *what)
{
    fprintf(stderr, "dry: %s: %s\n", what, cudaGetErrorName(e));
    return last_error = e;
}

#define CALL(name)                   \
    do {                             \
        cudaError_t e_ = call(name); \
        if (e_ != cudaSuccess)       \
            return e_;               \
    } while (0)

/* What a stream that is captured does not bear: the capture is lost. */
#define WAITS(name)                             \
    do {                                        \
        CALL(name);                             \
        cudaError_t w_ = wait_for_device(name); \
        if (w_ != cudaSuccess)                  \
            return w_;                          \
    } while (0)

static cudaError_t wait_for_device(const char *name)
{
    if (dry.capturing != NULL) {
        dry.capture_broken = true;
        return wrong(cudaErrorStreamCaptureUnsupported, name);
    }
    while (dry.hangs)
        pause();
    return cudaSuccess;
}

/* ---- memory ---- */

static int find_place(const void *p)
{
    for (int i = dry.n_places; i-- > 0;)
        if ((const char *)p >= dry.places[i].base &&
            (const char *)p < dry.places[i].base + dry.places[i].bytes)
            return i;
    return -1;
}

static bool add_place(void *base, size_t bytes, enum place_kind kind)
{
    bool fits = dry.n_places < MAX_PLACES;
    if (fits)
        dry.places[dry.n_places++] = (struct place){base, bytes, kind};
    return fits;
}

static cudaError_t take(void **out, size_t bytes, enum place_kind kind)
{
    const size_t page = 4096, room = (bytes + page - 1) / page * page;
    const bool device = kind == PLACE_DEVICE;
    cudaError_t e = cudaSuccess;
    *out = NULL;
    if (bytes == 0)
        return cudaSuccess;
    pthread_mutex_lock(&dry.lock);
    void *p = MAP_FAILED;
    if (!device || room <= dry.total - dry.used)
        p = mmap(NULL, room, device ? PROT_NONE : PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED || !add_place(p, room, kind))
        e = cudaErrorMemoryAllocation;
    else
        *out = p;
    if (e == cudaSuccess && device)
        dry.peak = (dry.used += room) > dry.peak ? dry.used : dry.peak;
    pthread_mutex_unlock(&dry.lock);
    return e != cudaSuccess ? (last_error = e) : e;
}

static cudaError_t give(void *p, enum place_kind kind, const char *name)
{
    if (p == NULL)
        return cudaSuccess;
    pthread_mutex_lock(&dry.lock);
    int i = find_place(p);
    bool good = i >= 0 && dry.places[i].base == p && dry.places[i].kind == kind;
    if (good) {
        if (kind != PLACE_REGISTERED)
            munmap(p, dry.places[i].bytes);
        if (kind == PLACE_DEVICE)
            dry.used -= dry.places[i].bytes;
        dry.places[i] = dry.places[--dry.n_places];
    }
    pthread_mutex_unlock(&dry.lock);
    return good ? cudaSuccess : wrong(cudaErrorInvalidValue, name);
}

cudaError_t cudaMalloc(void **p, size_t bytes)
{
    CALL("cudaMalloc");
    return take(p, bytes, PLACE_DEVICE);
}

cudaError_t cudaMallocHost(void **p, size_t bytes)
{
    CALL("cudaMallocHost");
    return take(p, bytes, PLACE_HOST);
}

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned int flags)
{
    (void)flags;
    CALL("cudaHostAlloc");
    return take(p, bytes, PLACE_HOST);
}

cudaError_t cudaFree(void *p)
{
    WAITS("cudaFree");
    return give(p, PLACE_DEVICE, "cudaFree");
}

cudaError_t cudaFreeHost(void *p)
{
    WAITS("cudaFreeHost");
    return give(p, PLACE_HOST, "cudaFreeHost");
}

cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned int flags)
{
    (void)flags;
    CALL("cudaHostRegister");
    pthread_mutex_lock(&dry.lock);
    bool good = find_place(p) < 0 && add_place(p, bytes, PLACE_REGISTERED);
    pthread_mutex_unlock(&dry.lock);
    return good ? cudaSuccess : wrong(cudaErrorHostMemoryAlreadyRegistered, "cudaHostRegister");
}

cudaError_t cudaHostUnregister(void *p)
{
    CALL("cudaHostUnregister");
    return give(p, PLACE_REGISTERED, "cudaHostUnregister");
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned int flags)
{
    (void)flags;
    CALL("cudaHostGetDevicePointer");
    *device = host;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *at, const void *p)
{
    CALL("cudaPointerGetAttributes");
    pthread_mutex_lock(&dry.lock);
    int i = find_place(p);
    memset(at, 0, sizeof *at);
    at->type = i < 0                                ? cudaMemoryTypeUnregistered
               : dry.places[i].kind == PLACE_DEVICE ? cudaMemoryTypeDevice
                                                    : cudaMemoryTypeHost;
    pthread_mutex_unlock(&dry.lock);
    return cudaSuccess;
}

/* For a test that looks for it: from now on there is room for so much more. */
void dry_leave(size_t bytes)
{
    pthread_mutex_lock(&dry.lock);
    dry.total = dry.used + bytes;
    pthread_mutex_unlock(&dry.lock);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    CALL("cudaMemGetInfo");
    *total = dry.total;
    *free_bytes = dry.total - dry.used;
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t n, enum cudaMemcpyKind kind)
{
    (void)dst, (void)src, (void)n, (void)kind;
    WAITS("cudaMemcpy");
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n, enum cudaMemcpyKind kind,
                            cudaStream_t s)
{
    (void)dst, (void)src, (void)n, (void)kind, (void)s;
    CALL("cudaMemcpyAsync");
    return cudaSuccess;
}

cudaError_t cudaMemset(void *p, int value, size_t n)
{
    (void)p, (void)value, (void)n;
    CALL("cudaMemset");
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s)
{
    (void)p, (void)value, (void)n, (void)s;
    CALL("cudaMemsetAsync");
    return cudaSuccess;
}

/* ---- the device ---- */

cudaError_t cudaGetDeviceCount(int *n)
{
    CALL("cudaGetDeviceCount");
    *n = 1;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    CALL("cudaSetDevice");
    return device == 0 ? cudaSuccess : wrong(cudaErrorInvalidDevice, "cudaSetDevice");
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    (void)device;
    CALL("cudaGetDeviceProperties");
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "no GPU (dry)");
    p->major = 9;
    p->multiProcessorCount = 132;
    p->totalGlobalMem = dry.total;
    p->sharedMemPerBlockOptin = SHARED_MOST;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device)
{
    (void)device;
    CALL("cudaDeviceGetAttribute");
    *value = attr == cudaDevAttrMaxSharedMemoryPerBlockOptin ? SHARED_MOST
             : attr == cudaDevAttrMultiProcessorCount        ? 132
                                                             : 1;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    CALL("cudaDriverGetVersion");
    *version = CUDART_VERSION;
    return cudaSuccess;
}

/* ---- errors ---- */

cudaError_t cudaGetLastError(void)
{
    cudaError_t e = last_error;
    last_error = dry.sticky;
    return e;
}

const char *cudaGetErrorName(cudaError_t e)
{
    static __thread char text[32];
    if (e == cudaErrorMemoryAllocation)
        return "cudaErrorMemoryAllocation";
    if (e == cudaErrorIllegalAddress)
        return "cudaErrorIllegalAddress";
    snprintf(text, sizeof text, "cudaError %d", (int)e);
    return text;
}

const char *cudaGetErrorString(cudaError_t e)
{
    return cudaGetErrorName(e);
}

/* ---- streams and events ---- */

static cudaError_t make(void **out)
{
    *out = calloc(1, 8);
    return *out != NULL ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaStreamCreate(cudaStream_t *s)
{
    CALL("cudaStreamCreate");
    return make((void **)s);
}

cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    CALL("cudaStreamDestroy");
    free(s);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    (void)s;
    WAITS("cudaStreamSynchronize");
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *e)
{
    CALL("cudaEventCreate");
    return make((void **)e);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned int flags)
{
    (void)flags;
    CALL("cudaEventCreate");
    return make((void **)e);
}

cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    CALL("cudaEventDestroy");
    free(e);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    (void)s;
    CALL("cudaEventRecord");
    return e != NULL ? cudaSuccess : wrong(cudaErrorInvalidResourceHandle, "cudaEventRecord");
}

cudaError_t cudaEventQuery(cudaEvent_t e)
{
    CALL("cudaEventQuery");
    if (dry.hangs)
        return cudaErrorNotReady;
    return e != NULL ? cudaSuccess : wrong(cudaErrorInvalidResourceHandle, "cudaEventQuery");
}

cudaError_t cudaStreamQuery(cudaStream_t s)
{
    (void)s;
    CALL("cudaStreamQuery");
    return dry.hangs ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    WAITS("cudaEventSynchronize");
    return e != NULL ? cudaSuccess : wrong(cudaErrorInvalidResourceHandle, "cudaEventSynchronize");
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    (void)from, (void)to;
    CALL("cudaEventElapsedTime");
    *ms = 0.001f;
    return cudaSuccess;
}

/* ---- graphs ---- */

cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode)
{
    (void)mode;
    CALL("cudaStreamBeginCapture");
    if (dry.capturing != NULL)
        return wrong(cudaErrorStreamCaptureUnsupported, "cudaStreamBeginCapture");
    dry.capturing = s;
    dry.captured = 0;
    dry.capture_broken = false;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *out)
{
    CALL("cudaStreamIsCapturing");
    *out = s != dry.capturing   ? cudaStreamCaptureStatusNone
           : dry.capture_broken ? cudaStreamCaptureStatusInvalidated
                                : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out)
{
    (void)s;
    dry.capturing = NULL;
    CALL("cudaStreamEndCapture");
    if (dry.capture_broken)
        return wrong(cudaErrorStreamCaptureInvalidated, "cudaStreamEndCapture");
    return make((void **)out);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    (void)mode;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t g, unsigned long long flags)
{
    (void)g, (void)flags;
    CALL("cudaGraphInstantiate");
    return make((void **)out);
}

cudaError_t cudaGraphDestroy(cudaGraph_t g)
{
    CALL("cudaGraphDestroy");
    free(g);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g)
{
    CALL("cudaGraphExecDestroy");
    free(g);
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t g, cudaStream_t s)
{
    (void)s;
    CALL("cudaGraphLaunch");
    return g != NULL ? cudaSuccess : wrong(cudaErrorInvalidValue, "cudaGraphLaunch");
}

/* ---- kernels ---- */

static cudaError_t launch(const void *func, dim3 grid, dim3 block, size_t shared)
{
    CALL("launch");
    unsigned long threads = (unsigned long)block.x * block.y * block.z;
    int most = SHARED_PRESET;
    for (int i = 0; i < dry.n_kernels; i++)
        if (dry.kernels[i].func == func && dry.kernels[i].shared > most)
            most = dry.kernels[i].shared;
    dry.captured += dry.capturing != NULL;
    if (func == NULL || threads == 0 || threads > 1024 || block.z > 64 ||
        (unsigned long)grid.x * grid.y * grid.z == 0 || grid.y > 65535 || grid.z > 65535 ||
        shared > (size_t)most) {
        fprintf(stderr, "dry: grid %u %u %u, block %u %u %u, %zu bytes of shared memory of %d\n",
                grid.x, grid.y, grid.z, block.x, block.y, block.z, shared, most);
        return wrong(cudaErrorInvalidConfiguration, "a launch");
    }
    return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *func, void **args)
{
    (void)args;
    return launch(func, c->gridDim, c->blockDim, c->dynamicSmemBytes);
}

cudaError_t cudaLaunchKernel(const void *func, dim3 grid, dim3 block, void **args, size_t shared,
                             cudaStream_t s)
{
    (void)args, (void)s;
    return launch(func, grid, block, shared);
}

cudaError_t cudaFuncSetAttribute(const void *func, enum cudaFuncAttribute attr, int value)
{
    CALL("cudaFuncSetAttribute");
    if (attr != cudaFuncAttributeMaxDynamicSharedMemorySize)
        return cudaSuccess;
    if (value > SHARED_MOST || dry.n_kernels == MAX_KERNELS)
        return wrong(cudaErrorInvalidValue, "cudaFuncSetAttribute");
    pthread_mutex_lock(&dry.lock);
    dry.kernels[dry.n_kernels].func = func;
    dry.kernels[dry.n_kernels++].shared = value;
    pthread_mutex_unlock(&dry.lock);
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *func)
{
    (void)func;
    CALL("cudaFuncGetAttributes");
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 64;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveClusters(int *n, const void *func, const cudaLaunchConfig_t *c)
{
    (void)func, (void)c;
    CALL("cudaOccupancyMaxActiveClusters");
    *n = 16;
    return cudaSuccess;
}

/* What nvcc writes for <<<>>> and for the code that it embeds (crt/host_runtime.h). */
static __thread struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} configured;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t s);
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *s);
cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *func);
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 grid, dim3 block, void **args, size_t shared,
                               cudaStream_t s);
void **__cudaRegisterFatBinary(void *code);
void __cudaRegisterFatBinaryEnd(void **handle);
void __cudaUnregisterFatBinary(void **handle);
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name,
                            int limit, void *tid, void *bid, void *bdim, void *gdim, int *warps);
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int ext,
                       size_t size, int constant, int global);

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t s)
{
    configured.grid = grid;
    configured.block = block;
    configured.shared = shared;
    configured.stream = s;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *s)
{
    *grid = configured.grid;
    *block = configured.block;
    *shared = configured.shared;
    *(cudaStream_t *)s = configured.stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *func)
{
    *out = (cudaKernel_t)func;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 grid, dim3 block, void **args, size_t shared,
                               cudaStream_t s)
{
    (void)args, (void)s;
    return launch((const void *)k, grid, block, shared);
}

void **__cudaRegisterFatBinary(void *code)
{
    static void *handle;
    (void)code;
    return &handle;
}

void __cudaRegisterFatBinaryEnd(void **handle)
{
    (void)handle;
}

void __cudaUnregisterFatBinary(void **handle)
{
    (void)handle;
}

void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name,
                            int limit, void *tid, void *bid, void *bdim, void *gdim, int *warps)
{
    (void)handle, (void)host, (void)device, (void)name, (void)limit;
    (void)tid, (void)bid, (void)bdim, (void)gdim, (void)warps;
}

void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int ext,
                       size_t size, int constant, int global)
{
    (void)handle, (void)host, (void)device, (void)name, (void)ext, (void)size, (void)constant,
        (void)global;
}

/* ---- cuBLASLt: one algorithm, which wants nothing ---- */

static cublasStatus_t blas(const char *name)
{
    return call(name) == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *h)
{
    *h = (cublasLtHandle_t)&dry;
    return blas("cublasLtCreate");
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t h)
{
    (void)h;
    return CUBLAS_STATUS_SUCCESS;
}

const char *cublasLtGetStatusString(cublasStatus_t s)
{
    return s == CUBLAS_STATUS_SUCCESS ? "success" : "dry";
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t d, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t al, const void *b,
                              cublasLtMatrixLayout_t bl, const void *beta, const void *c,
                              cublasLtMatrixLayout_t cl, void *out, cublasLtMatrixLayout_t dl,
                              const cublasLtMatmulAlgo_t *algo, void *workspace, size_t bytes,
                              cudaStream_t s)
{
    (void)h, (void)d, (void)alpha, (void)a, (void)al, (void)b, (void)bl, (void)beta, (void)c;
    (void)cl, (void)out, (void)dl, (void)algo, (void)workspace, (void)bytes, (void)s;
    return blas("cublasLtMatmul");
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t d,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t out,
                                              cublasLtMatmulPreference_t p, int wanted,
                                              cublasLtMatmulHeuristicResult_t *results, int *n)
{
    (void)h, (void)d, (void)a, (void)b, (void)c, (void)out, (void)p, (void)wanted;
    memset(results, 0, sizeof *results);
    *n = 1;
    return blas("cublasLtMatmulAlgoGetHeuristic");
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t d, size_t size,
                                               cublasComputeType_t compute, cudaDataType_t scale)
{
    (void)compute, (void)scale;
    memset(d, 0, size);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t p, size_t size)
{
    memset(p, 0, size);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t m, size_t size,
                                                 cudaDataType type, uint64_t rows, uint64_t cols,
                                                 int64_t ld)
{
    (void)type, (void)rows, (void)cols, (void)ld;
    memset(m, 0, size);
    return CUBLAS_STATUS_SUCCESS;
}

#define TAKES_ATTRIBUTES(name, object, attribute)                           \
    cublasStatus_t name(object o, attribute a, const void *value, size_t n) \
    {                                                                       \
        (void)o, (void)a, (void)value, (void)n;                             \
        return CUBLAS_STATUS_SUCCESS;                                       \
    }
TAKES_ATTRIBUTES(cublasLtMatmulDescSetAttribute, cublasLtMatmulDesc_t,
                 cublasLtMatmulDescAttributes_t)
TAKES_ATTRIBUTES(cublasLtMatmulPreferenceSetAttribute, cublasLtMatmulPreference_t,
                 cublasLtMatmulPreferenceAttributes_t)
TAKES_ATTRIBUTES(cublasLtMatrixLayoutSetAttribute, cublasLtMatrixLayout_t,
                 cublasLtMatrixLayoutAttribute_t)
