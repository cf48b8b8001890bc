// What tests ask of the double of libcuda beyond the driver's own interface.
#ifndef LIBCUDA_DOUBLE_H
#define LIBCUDA_DOUBLE_H

#include <stdint.h>

enum { DOUBLE_STREAMS = 64, DOUBLE_LAUNCHES = 4096, DOUBLE_CLUSTER_LIMIT = 150000 };

// One launch that reached the double. `priority` is 1 where the launch carries none.
struct double_launch {
    const char *api;
    char name[96];
    unsigned shared_bytes, num_attributes, grid_x, block_x;
    int stream, priority, argument;
    uint64_t hold_ns;
};

void *double_make(const char *name, int static_bytes, int registers, int is_kernel);
void double_refuse(void *function, int shared_error, int shared_limit, int priority_error);
void double_refuse_modules(int error);
void double_set_capturing(int stream, int is_capturing);
int double_is_broken(int stream);
void double_set_context(int number);
void double_delay_sets(int microseconds);  // this thread's, between a kernel's attribute being asked for and set
void double_set_quiet(int quiet);
unsigned double_num_asked(void);  // calls that the filter makes when it decides anew
int double_attribute(void *function, int attribute);
unsigned double_take_launches(struct double_launch *to, unsigned most);

#endif
