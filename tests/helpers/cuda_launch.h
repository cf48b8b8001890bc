// A launch and its attributes as cuLaunchKernelEx takes them (CUlaunchConfig, CUlaunchAttribute), for programs that launch in tests.
#ifndef CUDA_LAUNCH_H
#define CUDA_LAUNCH_H

typedef struct {
    int id, pad;
    union {
        char bytes[64];
        int number;
        unsigned cluster[3];
    } value;
} Attribute;
typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    Attribute *attributes;
    unsigned num_attributes;
} Config;

#endif
