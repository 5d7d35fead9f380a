/* What the headers of CUDA's runtime ask of NVIDIA's compiler, for a C compiler: nothing.
   torch's wheels bring those headers without this one. */
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __host__
#define __device__
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __location__(where)
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
