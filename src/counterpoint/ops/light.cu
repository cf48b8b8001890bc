// Light collectives: CTAs of 128 threads with at most 32 registers each and no shared memory, which fit beside most kernels.
//
// Ranks reach each other's memory by address. CTA b waits only for CTA b of each peer, and CTAs are placed in order, so not all
// of them need be resident at once. Flags rise by two in every launch, and each CTA counts its launches itself: captured
// launches can be replayed. NVRTC compiles this file for the GPU at hand, so it includes nothing.

typedef unsigned long long u64;
#define MAX_PEERS 7
#define THREADS 128
#define UNROLL 4

struct LightArgument {
    u64 source[MAX_PEERS + 1];  // push: what goes to each target; reduce: one block of each rank, in the order of ranks
    u64 target[MAX_PEERS + 1];  // where it goes
    u64 num_bytes[MAX_PEERS + 1];
    u64 raised[MAX_PEERS];   // the flags of this rank on each peer, one a CTA
    u64 awaited[MAX_PEERS];  // the flags of each peer on this rank
    u64 counts;              // one a CTA, of this launch's own rank
    int num_sources, num_targets, num_peers;
    float scale;  // of a sum
};

__device__ __forceinline__ void raise_flag(u64 flag, unsigned value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ __forceinline__ unsigned read_flag(u64 flag) {
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}

// Until CTA blockIdx.x of every peer has come as far. One thread a peer.
__device__ __forceinline__ void meet(const LightArgument& argument, unsigned value) {
    if (threadIdx.x < argument.num_peers) {
        raise_flag(argument.raised[threadIdx.x] + 4 * blockIdx.x, value);
        while ((int)(read_flag(argument.awaited[threadIdx.x] + 4 * blockIdx.x) - value) < 0) __nanosleep(32);
    }
    __syncthreads();
}

__device__ __forceinline__ unsigned count_of(const LightArgument& argument) {
    return ((volatile unsigned*)argument.counts)[blockIdx.x];
}

__device__ __forceinline__ void leave(const LightArgument& argument, unsigned count) {
    __syncthreads();  // all of this CTA has written
    meet(argument, count + 2);
    if (threadIdx.x == 0) ((volatile unsigned*)argument.counts)[blockIdx.x] = count + 2;
}

__device__ __forceinline__ void copy(const uint4* source, uint4* target, unsigned num_vectors) {
    const unsigned stride = gridDim.x * THREADS;
    unsigned i = blockIdx.x * THREADS + threadIdx.x;
    for (; i + (UNROLL - 1) * stride < num_vectors; i += UNROLL * stride) {
        uint4 held[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) held[k] = __ldcs(source + i + k * stride);
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) target[i + k * stride] = held[k];
    }
    for (; i < num_vectors; i += stride) target[i] = source[i];
}

// All-gather and all-to-all: this rank writes its blocks to all ranks.
extern "C" __global__ void __launch_bounds__(THREADS, 16) counterpoint_light_push(const __grid_constant__ LightArgument argument) {
    const unsigned count = count_of(argument);
    meet(argument, count + 1);
    for (int k = 0; k < argument.num_targets; ++k)
        copy((const uint4*)argument.source[k], (uint4*)argument.target[k], (unsigned)(argument.num_bytes[k] / 16));
    leave(argument, count);
}

struct Float32 {
    static const int PER_WORD = 1;
    static __device__ __forceinline__ void add(float* sum, unsigned word) { sum[0] += __uint_as_float(word); }
    static __device__ __forceinline__ unsigned rounded(const float* sum) { return __float_as_uint(sum[0]); }
};

struct Bfloat16 {
    static const int PER_WORD = 2;
    static __device__ __forceinline__ void add(float* sum, unsigned word) {
        sum[0] += __uint_as_float(word << 16);
        sum[1] += __uint_as_float(word & 0xffff0000u);
    }
    static __device__ __forceinline__ unsigned rounded(const float* sum) {
        unsigned word;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(sum[1]), "f"(sum[0]));
        return word;
    }
};

struct Float16 {
    static const int PER_WORD = 2;
    static __device__ __forceinline__ void add(float* sum, unsigned word) {
        float low, high;
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(word));
        sum[0] += low;
        sum[1] += high;
    }
    static __device__ __forceinline__ unsigned rounded(const float* sum) {
        unsigned word;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(sum[1]), "f"(sum[0]));
        return word;
    }
};

template <typename Kind>
__device__ __forceinline__ unsigned sum_of_two(unsigned first, unsigned second, float scale) {
    float sum[2] = {-0.0f, -0.0f};
    Kind::add(sum, first);
    Kind::add(sum, second);
#pragma unroll
    for (int k = 0; k < Kind::PER_WORD; ++k) sum[k] *= scale;
    return Kind::rounded(sum);
}

// Two ranks: the loads of several vectors are under way at once.
template <typename Kind>
__device__ __forceinline__ void reduce_two(const LightArgument& argument, unsigned num_vectors) {
    const uint4* first = (const uint4*)argument.source[0];
    const uint4* second = (const uint4*)argument.source[1];
    const unsigned stride = gridDim.x * THREADS;
    for (unsigned i = blockIdx.x * THREADS + threadIdx.x; i < num_vectors; i += 2 * stride) {
        const bool is_pair = i + stride < num_vectors;
        uint4 a[2], b[2];
        a[0] = first[i];
        b[0] = second[i];
        if (is_pair) {
            a[1] = first[i + stride];
            b[1] = second[i + stride];
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            if (k == 1 && !is_pair) break;
            a[k].x = sum_of_two<Kind>(a[k].x, b[k].x, argument.scale);
            a[k].y = sum_of_two<Kind>(a[k].y, b[k].y, argument.scale);
            a[k].z = sum_of_two<Kind>(a[k].z, b[k].z, argument.scale);
            a[k].w = sum_of_two<Kind>(a[k].w, b[k].w, argument.scale);
            for (int t = 0; t < argument.num_targets; ++t) ((uint4*)argument.target[t])[i + k * stride] = a[k];
        }
    }
}

// Any number of ranks: added up in single precision in the order of ranks, rounded once. Two words of four at a time.
template <typename Kind>
__device__ __forceinline__ void reduce_all(const LightArgument& argument, unsigned num_vectors) {
    const unsigned stride = gridDim.x * THREADS;
    for (unsigned i = blockIdx.x * THREADS + threadIdx.x; i < num_vectors; i += stride) {
        float sum[4 * Kind::PER_WORD];
#pragma unroll
        for (int k = 0; k < 4 * Kind::PER_WORD; ++k) sum[k] = -0.0f;
        for (int rank = 0; rank < argument.num_sources; ++rank) {
            const uint4 word = ((const uint4*)argument.source[rank])[i];
            Kind::add(sum, word.x);
            Kind::add(sum + Kind::PER_WORD, word.y);
            Kind::add(sum + 2 * Kind::PER_WORD, word.z);
            Kind::add(sum + 3 * Kind::PER_WORD, word.w);
        }
#pragma unroll
        for (int k = 0; k < 4 * Kind::PER_WORD; ++k) sum[k] *= argument.scale;
        const uint4 rounded = {Kind::rounded(sum), Kind::rounded(sum + Kind::PER_WORD), Kind::rounded(sum + 2 * Kind::PER_WORD),
                               Kind::rounded(sum + 3 * Kind::PER_WORD)};
        for (int t = 0; t < argument.num_targets; ++t) ((uint4*)argument.target[t])[i] = rounded;
    }
}

template <typename Kind>
__device__ __forceinline__ void reduce(const LightArgument& argument) {
    const unsigned count = count_of(argument), num_vectors = (unsigned)(argument.num_bytes[0] / 16);
    meet(argument, count + 1);
    if (argument.num_sources == 2) reduce_two<Kind>(argument, num_vectors);
    else reduce_all<Kind>(argument, num_vectors);
    leave(argument, count);
}

#define LIGHT(NAME) extern "C" __global__ void __launch_bounds__(THREADS, 16) NAME(const __grid_constant__ LightArgument argument)
// Reduce-scatter and all-reduce: this rank sums its block of all ranks, and writes it to all targets.
LIGHT(counterpoint_light_reduce_float32) { reduce<Float32>(argument); }
LIGHT(counterpoint_light_reduce_bfloat16) { reduce<Bfloat16>(argument); }
LIGHT(counterpoint_light_reduce_float16) { reduce<Float16>(argument); }
