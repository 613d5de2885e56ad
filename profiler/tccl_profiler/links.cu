// The kernel that proves links: writes and compares data with flags in the order that NCCL's protocols
// rely on. A block takes its steps one after the other; all waiting ends by the clock.
//
// Of NCCL's protocols: LL stores 16 bytes at once, each 8 of them 4 of data and 4 of flag. LL128 has 120
// bytes and a flag of 8 in each 128, stored by 8 lanes of a warp at once. Simple stores data, then a
// fence for the system, then a flag; where it reads, data stay and the flag alone crosses the link.

enum Act { kWrite = 0, kCompare = 1 };
enum Form { kLL = 0, kLL128 = 1, kSimple = 2 };

struct Step {
  u64 act, form;
  u64 data;    // address of the data
  u64 flag;    // address of Simple's flag; 0: nobody waits or tells, nor for the flags of LL and LL128
  u64 seed;    // of the pattern, and the value of flags
  u64 bytes;   // of data: a multiple of 480
};

struct Found {
  u64 state;  // 0: not reached, 1: done, 2: what was awaited did not come in time
  u64 wrong;  // packs of 16 bytes (LL: of 8) that differ from the pattern
  u64 begin, end;  // this GPU's nanoseconds
};

__device__ __forceinline__ void store_now(u64 address, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};"
               ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Eight lanes hold a line of 128 bytes; the last 8 bytes of the last lane are the flag.
__device__ __forceinline__ bool is_flag_lane() { return threadIdx.x % 8 == 7; }

__device__ void write(const Step& s) {
  const u64 packs = s.bytes / 16;
  if (s.form == kLL) {
    for (u64 i = threadIdx.x; i < packs * 2; i += blockDim.x) {
      const uint4 v = pattern(s.seed, 0, i);
      store_now(s.data + i * 16, make_uint4(v.x, (u32)s.seed, v.y, (u32)s.seed));
    }
  } else if (s.form == kLL128) {
    for (u64 i = threadIdx.x; i < s.bytes / 120 * 8; i += blockDim.x) {
      uint4 v = pattern(s.seed, 1, i);
      if (is_flag_lane()) v.z = (u32)s.seed, v.w = (u32)(s.seed >> 32);
      __syncwarp();
      store_now(s.data + i * 16, v);
    }
  } else {
    for (u64 i = threadIdx.x; i < packs; i += blockDim.x) store(s.data + i * 16, pattern(s.seed, 2, i));
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    if (s.form == kSimple && s.flag) put(s.flag, s.seed);
  }
}

// Whether packs came in time. `wait` is false where nobody writes any more.
__device__ bool compare(const Step& s, u64 until, u32* wrong, u32* late) {
  const u64 packs = s.bytes / 16;
  const bool waits = s.flag != 0;
  u32 bad = 0;
  if (s.form == kSimple) {
    if (waits && threadIdx.x == 0)
      while (look_at_counter(s.flag) != s.seed)
        if (now_ns() > until) { *late = 1; break; }
    __syncthreads();
    if (*late) return false;
    for (u64 i = threadIdx.x; i < packs; i += blockDim.x)
      bad += differ(load(s.data + i * 16), pattern(s.seed, 2, i));
  } else if (s.form == kLL) {
    for (u64 i = threadIdx.x; i < packs * 2 && !*(volatile u32*)late; i += blockDim.x) {
      uint4 v = load(s.data + i * 16);
      while (waits && (v.y != (u32)s.seed || v.w != (u32)s.seed)) {
        if (now_ns() > until) { *late = 1; break; }
        v = load(s.data + i * 16);
      }
      const uint4 p = pattern(s.seed, 0, i);
      bad += v.x != p.x || v.z != p.y || v.y != (u32)s.seed || v.w != (u32)s.seed;
    }
  } else {
    for (u64 i = threadIdx.x; i < s.bytes / 120 * 8 && !*(volatile u32*)late; i += blockDim.x) {
      uint4 v = load(s.data + i * 16);
      // NCCL loads the line until its last lane has the flag: here each lane looks at it, and then
      // takes what it loads in the same moment as the other lanes.
      while (waits) {
        const unsigned lanes = __activemask();
        const bool here = !is_flag_lane() || (v.z == (u32)s.seed && v.w == (u32)(s.seed >> 32));
        if (__all_sync(lanes, here)) break;
        if (now_ns() > until) *late = 1;
        if (__any_sync(lanes, *(volatile u32*)late)) break;
        v = load(s.data + i * 16);
      }
      uint4 p = pattern(s.seed, 1, i);
      if (is_flag_lane()) p.z = (u32)s.seed, p.w = (u32)(s.seed >> 32);
      bad += differ(v, p);
    }
  }
  if (bad) atomicAdd(wrong, bad);
  __syncthreads();
  return !*late;
}

// Block b takes steps first[b] to first[b + 1] in turn, up to one that waits in vain.
extern "C" __global__ void __launch_bounds__(256)
prove(const Step* steps, const u64* first, Found* found, u64 patience_ns) {
  __shared__ u32 wrong, late;
  for (u64 n = first[blockIdx.x]; n < first[blockIdx.x + 1]; n++) {
    const Step s = steps[n];
    __syncthreads();
    if (threadIdx.x == 0) wrong = 0, late = 0;
    __syncthreads();
    const u64 begin = now_ns();
    bool came = true;
    if (s.act == kWrite) write(s);
    else came = compare(s, begin + patience_ns, &wrong, &late);
    __syncthreads();
    if (threadIdx.x == 0) found[n] = Found{came ? 1ull : 2ull, wrong, begin, now_ns()};
    if (!came) return;
  }
}
