// What the filter uses of CUDA's driver interface, so that it builds without CUDA's headers.
//
// NVIDIA keeps this interface stable for programs that are already built. Numbers and the order of fields are those of cuda.h from CUDA
// 11.8 (cuLaunchKernelEx) to 13.0. These launches were tested with driver 580 (CUDA 13.0) on H200s. The PFN_..._vXYYZZ types of
// cudaTypedefs.h say since when a function exists.
#ifndef COUNTERPOINT_DRIVER_ABI_H
#define COUNTERPOINT_DRIVER_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;          // an enum
typedef struct opaque_function *CUfunction;  // or a CUkernel, since CUDA 12.0
typedef struct opaque_kernel *CUkernel;
typedef struct opaque_stream *CUstream;
typedef struct opaque_context *CUcontext;
typedef struct opaque_module *CUmodule;
typedef struct opaque_library *CUlibrary;
typedef int CUdevice;

enum { CUDA_SUCCESS = 0, CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND = 302, CUDA_ERROR_NOT_FOUND = 500 };

// CUstream values for a default stream. NULL is one, too; the called function decides which default stream it means.
#define CU_STREAM_LEGACY 1
#define CU_STREAM_PER_THREAD 2

enum { CU_STREAM_CAPTURE_STATUS_NONE = 0 };
enum { CU_STREAM_CAPTURE_MODE_RELAXED = 2 };
enum { CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM = 2 };

enum {
    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1,
    CU_FUNC_ATTRIBUTE_NUM_REGS = 4,
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
    CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9,
};

enum { CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97 };

enum {
    CU_LAUNCH_ATTRIBUTE_COOPERATIVE = 2,
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4,
    CU_LAUNCH_ATTRIBUTE_PRIORITY = 8,
};

typedef struct {
    int id;  // an enum
    char pad[8 - sizeof(int)];
    union {
        char bytes[64];
        int cooperative;
        int priority;
        struct {
            unsigned x, y, z;
        } cluster;
    } value;
} CUlaunchAttribute;

typedef struct {
    unsigned grid[3];   // gridDimX, gridDimY, gridDimZ
    unsigned block[3];  // blockDimX, blockDimY, blockDimZ
    unsigned dynamic_shared_bytes;
    CUstream stream;
    CUlaunchAttribute *attributes;
    unsigned num_attributes;
} CUlaunchConfig;

_Static_assert(sizeof(CUlaunchAttribute) == 72 && sizeof(CUlaunchConfig) == 56, "as in cuda.h on 64-bit machines");

typedef CUresult cuLaunchKernel_function(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                                         void **parameters, void **extra);
typedef CUresult cuLaunchKernelEx_function(const CUlaunchConfig *, CUfunction, void **parameters, void **extra);
typedef CUresult cuLaunchCooperativeKernel_function(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                                    CUstream, void **parameters);
typedef CUresult cuFuncSetAttribute_function(CUfunction, int attribute, int value);
typedef CUresult cuKernelSetAttribute_function(int attribute, int value, CUkernel, CUdevice);
typedef CUresult cuGetProcAddress_function(const char *, void **, int version, uint64_t flags);
typedef CUresult cuGetProcAddress_v2_function(const char *, void **, int version, uint64_t flags, int *symbol_status);

#endif
