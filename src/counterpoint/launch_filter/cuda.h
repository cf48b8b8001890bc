// What cuda.c and cuda_controls.c share: the driver's functions, and what each launch needs of them.
#ifndef COUNTERPOINT_CUDA_H
#define COUNTERPOINT_CUDA_H

#include "driver_abi.h"
#include "filter.h"

HIDDEN extern const struct driver_calls cuda_calls;

HIDDEN cuLaunchKernelEx_function *launch_ex_of_driver(bool is_per_thread);  // NULL if the driver has none
HIDDEN bool is_capturing(CUstream stream, bool is_per_thread);              // true also if the driver does not tell
HIDDEN bool has_room_for_cap(CUfunction kernel, uint32_t bytes);  // whether the kernel's limit allows so much dynamic shared memory now
HIDDEN void note_collective(CUstream stream, bool is_per_thread);
HIDDEN void hold_if_racing(const struct decision *, CUstream stream, bool is_per_thread);
HIDDEN void begin_programs_limit(void);  // call these around the program's own call that sets a kernel's limit
HIDDEN void end_programs_limit(void);
HIDDEN void forget_contexts(void);  // contexts may have been destroyed, with what was loaded in them

#endif
