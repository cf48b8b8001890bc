// What the filter uses of HIP's interface, so that it builds without HIP's headers.
//
// The facts are from hip_runtime_api.h and hip_ext.h of ROCm 6 and 7. A function that a version lacks is not found. None of this has run
// on AMD hardware: it is tested against a double only.
#ifndef COUNTERPOINT_HIP_ABI_H
#define COUNTERPOINT_HIP_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int hipError_t;  // an enum
typedef struct opaque_hip_function *hipFunction_t;
typedef struct opaque_hip_stream *hipStream_t;
typedef struct opaque_hip_event *hipEvent_t;
typedef struct opaque_hip_module *hipModule_t;
typedef struct {
    uint32_t x, y, z;
} dim3;

enum { hipSuccess = 0, hipErrorNotFound = 500 };
enum { HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1, HIP_FUNC_ATTRIBUTE_NUM_REGS = 4 };
enum { hipStreamCaptureStatusNone = 0 };
enum { hipLaunchAttributeCooperative = 2 };
#define HIP_WORKGROUP_SHARED_BYTES 65536  // a workgroup may use so much without an attribute (stated, not measured)

typedef struct {
    int id;
    char pad[8 - sizeof(int)];
    union {
        char bytes[64];
        int cooperative;
    } value;
} hipLaunchAttribute;

typedef struct {
    dim3 grid, block;  // gridDim, blockDim
    size_t dynamic_shared_bytes;
    hipStream_t stream;
    hipLaunchAttribute *attributes;
    unsigned num_attributes;
} hipLaunchConfig_t;

typedef struct {
    dim3 grid, block;  // gridDimX, ... blockDimZ
    unsigned dynamic_shared_bytes;
    hipStream_t stream;
    hipLaunchAttribute *attributes;
    unsigned num_attributes;
} HIP_LAUNCH_CONFIG;

_Static_assert(sizeof(dim3) == 12 && sizeof(hipLaunchConfig_t) == 56 && sizeof(HIP_LAUNCH_CONFIG) == 56, "as in HIP's headers");

typedef hipError_t hipLaunchKernel_function(const void *, dim3, dim3, void **, size_t, hipStream_t);
typedef hipError_t hipExtLaunchKernel_function(const void *, dim3, dim3, void **, size_t, hipStream_t, hipEvent_t, hipEvent_t, int);
typedef hipError_t hipLaunchCooperativeKernel_function(const void *, dim3, dim3, void **, unsigned, hipStream_t);
typedef hipError_t hipLaunchKernelExC_function(const hipLaunchConfig_t *, const void *, void **);
typedef hipError_t hipModuleLaunchKernel_function(hipFunction_t, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                                  hipStream_t, void **, void **);
typedef hipError_t hipExtModuleLaunchKernel_function(hipFunction_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t,
                                                     size_t, hipStream_t, void **, void **, hipEvent_t, hipEvent_t, uint32_t);
typedef hipError_t hipModuleLaunchCooperativeKernel_function(hipFunction_t, unsigned, unsigned, unsigned, unsigned, unsigned,
                                                             unsigned, unsigned, hipStream_t, void **);
typedef hipError_t hipDrvLaunchKernelEx_function(const HIP_LAUNCH_CONFIG *, hipFunction_t, void **, void **);
typedef hipError_t hipGetProcAddress_function(const char *, void **, int version, uint64_t flags, int *status);

#endif
