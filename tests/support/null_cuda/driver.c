/* A CUDA runtime, cuBLAS and driver that do nothing but hand out memory and count.

   Loaded before a CUDA build of torch, it lets torch's own allocator, autograd threads, streams,
   events and code generation run where there is no GPU. No kernel runs: what is in device memory
   has no meaning, but for copies of up to SMALL bytes, which are done. build.py compiles this with
   stubs for all other functions that torch's libraries import.

   What would block a host, or may not be called while a graph is captured, is what it knows of
   time: every kernel ends at once. */

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SMALL 65536
#define GIB (1ull << 30)
#define DEVICE_BYTES (80 * GIB)
#define ARENA_BYTES (1024 * GIB) /* of addresses, which are used once */
#define ALIGNMENT (2ull << 20)

/* ---- counters ---- */

#define COUNTERS(X)                                                                       \
  X(kernels) X(gemms) X(copies_on_device) X(copies_to_device) X(copies_to_host) X(fills)  \
  X(host_waits) X(stream_waits) X(events) X(allocations) X(frees) X(graph_launches)       \
  X(refused_in_capture)

enum {
#define X(name) name,
  COUNTERS(X)
#undef X
  NUM_COUNTERS
};
static _Atomic long counters[NUM_COUNTERS];
static const char *names[] = {
#define X(name) #name,
    COUNTERS(X)
#undef X
};

int null_cuda_num_counters(void) { return NUM_COUNTERS; }
const char *null_cuda_name(int counter) { return names[counter]; }
long null_cuda_count(int counter) { return counters[counter]; }

/* ---- streams, events, captures ---- */

typedef struct Stream { unsigned long long capture; int priority; struct Stream *next; } Stream;
typedef struct { unsigned long long capture; } Event;
typedef struct { size_t kernels; } Graph;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Stream legacy, *streams = &legacy;
static unsigned long long captures; /* so far */
static _Atomic int capturing;       /* now */
static size_t captured;             /* kernels, since the capture began */

static Stream *stream_of(cudaStream_t stream) {
  uintptr_t handle = (uintptr_t)stream;
  return handle <= 2 ? &legacy : (Stream *)stream; /* 0, 1 and 2 are the default streams */
}

static cudaError_t new_stream(cudaStream_t *stream, int priority) {
  Stream *made = calloc(1, sizeof *made);
  made->priority = priority;
  pthread_mutex_lock(&lock);
  made->next = streams;
  streams = made;
  pthread_mutex_unlock(&lock);
  *stream = (cudaStream_t)made;
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return new_stream(stream, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return new_stream(stream, 0);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  return new_stream(stream, priority);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}

static cudaError_t new_event(cudaEvent_t *event) {
  counters[events]++;
  *event = calloc(1, sizeof(Event));
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return new_event(event); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return new_event(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  free(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  ((Event *)event)->capture = stream_of(stream)->capture;
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  counters[stream_waits]++;
  unsigned long long capture = ((Event *)event)->capture;
  if (capture && capture == captures && capturing) stream_of(stream)->capture = capture;
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
  *milliseconds = 1;
  return cudaSuccess;
}

static cudaError_t host_waits_for_device(void) {
  counters[host_waits]++;
  if (!capturing) return cudaSuccess;
  counters[refused_in_capture]++;
  return cudaErrorStreamCaptureUnsupported;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return host_waits_for_device(); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return host_waits_for_device(); }
cudaError_t cudaDeviceSynchronize(void) { return host_waits_for_device(); }
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (!capturing) return cudaSuccess;
  counters[refused_in_capture]++;
  return cudaErrorStreamCaptureUnsupported;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = stream_of(stream)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *num) {
  cudaStreamIsCapturing(stream, status);
  if (id) *id = stream_of(stream)->capture;
  if (graph) *graph = 0;
  if (dependencies) *dependencies = 0;
  if (edges) *edges = 0;
  if (num) *num = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  stream_of(stream)->capture = ++captures;
  captured = 0;
  capturing = 1;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  Graph *made = calloc(1, sizeof *made);
  made->kernels = captured;
  capturing = 0;
  pthread_mutex_lock(&lock);
  for (Stream *each = streams; each; each = each->next) each->capture = 0;
  pthread_mutex_unlock(&lock);
  *graph = (cudaGraph_t)made;
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *num) {
  *num = ((Graph *)graph)->kernels;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph,
                                          unsigned long long flags) {
  *exec = (cudaGraphExec_t)graph;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  counters[graph_launches]++;
  return cudaSuccess;
}

/* ---- kernels ---- */

static cudaError_t launch(void) {
  counters[kernels]++;
  if (capturing) captured++;
  return cudaSuccess;
}
int null_cuda_launch(void) { return launch(); } /* for generated kernels, which are stubs */
cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments,
                             size_t shared, cudaStream_t stream) {
  return launch();
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel,
                                void **arguments) {
  return launch();
}
int __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                       cudaStream_t stream) {
  return launch();
}
int __cudaGetKernel(void **kernel, const void *function) {
  *kernel = (void *)function;
  return 0;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *num, const void *kernel,
                                                                   int block, size_t shared,
                                                                   unsigned flags) {
  *num = 2;
  return cudaSuccess;
}

/* ---- memory ---- */

typedef struct { char *start; size_t used; } Arena;
static Arena on_device, pinned;
static size_t device_bytes; /* allocated now */

static void *taken(Arena *arena, size_t num_bytes) {
  pthread_mutex_lock(&lock);
  if (!arena->start) {
    arena->start = mmap(0, ARENA_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (arena->start == MAP_FAILED) abort();
    arena->used = ALIGNMENT - (uintptr_t)arena->start % ALIGNMENT;
  }
  char *found = arena->start + arena->used;
  arena->used += (num_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  if (arena->used > ARENA_BYTES) abort();
  pthread_mutex_unlock(&lock);
  return found;
}
static int is_in(const Arena *arena, const void *address) {
  const char *at = address;
  return arena->start && at >= arena->start && at < arena->start + arena->used;
}

#define MANY 65536
static struct { void *address; size_t num_bytes; } blocks[MANY];

cudaError_t cudaMalloc(void **address, size_t num_bytes) {
  counters[allocations]++;
  if (device_bytes + num_bytes > DEVICE_BYTES) return cudaErrorMemoryAllocation;
  *address = taken(&on_device, num_bytes);
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MANY; i++)
    if (!blocks[i].address) {
      blocks[i].address = *address;
      blocks[i].num_bytes = num_bytes;
      break;
    }
  device_bytes += num_bytes;
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}
cudaError_t cudaFree(void *address) {
  counters[frees]++;
  pthread_mutex_lock(&lock);
  for (int i = 0; address && i < MANY; i++)
    if (blocks[i].address == address) {
      madvise(address, blocks[i].num_bytes, MADV_DONTNEED);
      device_bytes -= blocks[i].num_bytes;
      blocks[i].address = 0;
    }
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  *total = DEVICE_BYTES;
  *available = DEVICE_BYTES - device_bytes;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **address, size_t num_bytes, unsigned flags) {
  *address = taken(&pinned, num_bytes);
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void **address, size_t num_bytes) {
  return cudaHostAlloc(address, num_bytes, 0);
}
cudaError_t cudaFreeHost(void *address) { return cudaSuccess; }
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
  *device = host;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
  memset(attributes, 0, sizeof *attributes);
  attributes->type = is_in(&on_device, address) ? cudaMemoryTypeDevice
                     : is_in(&pinned, address)  ? cudaMemoryTypeHost
                                                : cudaMemoryTypeUnregistered;
  if (attributes->type == cudaMemoryTypeDevice) attributes->devicePointer = (void *)address;
  if (attributes->type == cudaMemoryTypeHost) attributes->hostPointer = (void *)address;
  return cudaSuccess;
}

static void copy(void *to, const void *from, size_t num_bytes) {
  int reads = is_in(&on_device, from), writes = is_in(&on_device, to);
  counters[reads && writes ? copies_on_device : writes ? copies_to_device : copies_to_host]++;
  if (capturing) captured++;
  if (num_bytes <= SMALL) memcpy(to, from, num_bytes);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t num_bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  copy(to, from, num_bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t num_bytes, enum cudaMemcpyKind kind) {
  copy(to, from, num_bytes);
  return host_waits_for_device();
}
static cudaError_t fill(void *to, int value, size_t num_bytes) {
  counters[fills]++;
  if (capturing) captured++;
  if (num_bytes <= SMALL) memset(to, value, num_bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t num_bytes) { return fill(to, value, num_bytes); }
cudaError_t cudaMemsetAsync(void *to, int value, size_t num_bytes, cudaStream_t stream) {
  return fill(to, value, num_bytes);
}

/* ---- the device: an H100, as far as it is asked ---- */

cudaError_t cudaGetDeviceCount(int *num) {
  *num = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

static int attribute(int which) {
  switch (which) {
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    default: return 1024;
  }
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
  *value = attribute(which);
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
  memset(found, 0, sizeof *found);
  strcpy(found->name, "NVIDIA H100 80GB HBM3 (null)");
  found->totalGlobalMem = DEVICE_BYTES;
  found->major = attribute(cudaDevAttrComputeCapabilityMajor);
  found->minor = attribute(cudaDevAttrComputeCapabilityMinor);
  found->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  found->warpSize = attribute(cudaDevAttrWarpSize);
  found->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  found->maxThreadsPerBlock = 1024;
  found->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  found->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  found->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  for (int i = 0; i < 3; i++) {
    found->maxThreadsDim[i] = 1024;
    found->maxGridSize[i] = i ? 65535 : 2147483647;
  }
  found->l2CacheSize = 50 << 20;
  found->memoryBusWidth = 5120;
  found->textureAlignment = 512;
  found->unifiedAddressing = found->canMapHostMemory = found->concurrentKernels = 1;
  found->asyncEngineCount = 3;
  return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorStreamCaptureUnsupported
             ? "operation not permitted when stream is capturing (null CUDA)"
         : error == cudaErrorMemoryAllocation ? "out of memory (null CUDA)"
                                              : "null CUDA";
}
const char *cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

static int nothing(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
  *function = (void *)nothing;
  if (result) *result = 0;
  return cudaSuccess;
}

/* ---- cuBLAS ---- */

static int handle;
int cublasCreate_v2(void **made) {
  *made = &handle;
  return 0;
}
int cublasLtCreate(void **made) { return cublasCreate_v2(made); }
int cublasGetMathMode(void *cublas, int *mode) {
  *mode = 0;
  return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void *cublas, void *operation, void *a, void *b, void *c,
                                   void *d, void *preference, int wanted, void *results, int *num) {
  *num = 1;
  return 0;
}
#define GEMM(name)           \
  int name(void) {           \
    counters[gemms]++;       \
    if (capturing) captured++; \
    return 0;                \
  }
GEMM(cublasLtMatmul)
GEMM(cublasGemmEx)
GEMM(cublasSgemm_v2)
GEMM(cublasSgemmStridedBatched)
GEMM(cublasGemmStridedBatchedEx)

/* ---- the driver ---- */

int cuDeviceGetCount(int *num) { return cudaGetDeviceCount(num); }
int cuDeviceGet(int *device, int number) { return cudaGetDevice(device); }
int cuDriverGetVersion(int *version) { return cudaDriverGetVersion(version); }
int cuDeviceGetAttribute(int *value, int which, int device) {
  *value = attribute(which); /* the driver has the runtime's numbers */
  return 0;
}
int cuCtxGetCurrent(void **context) {
  *context = &handle;
  return 0;
}
int cuCtxGetDevice(int *device) { return cudaGetDevice(device); }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
  *flags = 0;
  *is_active = 1;
  return 0;
}
int cuGetErrorString(int error, const char **text) {
  *text = "null CUDA";
  return 0;
}
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                        int *result) {
  *function = (void *)nothing;
  if (result) *result = 0;
  return 0;
}
