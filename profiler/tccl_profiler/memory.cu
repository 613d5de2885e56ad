// Loads, stores, the clock and the pattern of all kernels; free-standing CUDA C++ for NVRTC.

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

__device__ __forceinline__ u64 look(u64 address) {
  u64 v;
  asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(v) : "l"(address) : "memory");
  return v;
}

// What was written before the counter was, is seen after it has been seen.
__device__ __forceinline__ u64 look_at_counter(u64 address) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(address) : "memory");
  return v;
}

__device__ __forceinline__ void put(u64 address, u64 v) {
  asm volatile("st.volatile.global.u64 [%0], %1;" ::"l"(address), "l"(v) : "memory");
}

// Volatile, because the first-level cache does not see what other devices write.
__device__ __forceinline__ uint4 load(u64 address) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address) : "memory");
  return v;
}

__device__ __forceinline__ void store(u64 address, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};"
               ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ uint4 pattern(u64 seed, u64 slice, u64 pack) {
  u32 a = (u32)(seed ^ (slice * 0x9E3779B97F4A7C15ull) ^ (pack * 0xC2B2AE3D27D4EB4Full));
  u32 b = (u32)((seed + slice * 0xD6E8FEB86659FD93ull + pack * 0xA0761D6478BD642Full) >> 17);
  return make_uint4(a, b, a ^ (b * 0x85EBCA6Bu), a + b);
}

__device__ __forceinline__ bool differ(uint4 a, uint4 b) {
  return a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w;
}
