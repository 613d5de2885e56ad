// The measuring kernels. One block is a lane: it takes slices from a FIFO, adds to them and puts them
// into the next, as one NCCL channel does with its Simple protocol, or does only one of the two.
// Free-standing CUDA C++ for NVRTC 12 and 13, sm 70 to 120: no headers.
//
// What is shaped after NCCL, because its rate depends on it: 16 bytes a thread and kUnroll of them in
// flight; all loads of a hunk arrive before its first store; a warp that only posts, so that the
// workers never wait for a fence; slices of a quarter of the FIFO; a block that receives and sends
// does both in one pass; the mix of passes is an all-reduce's. What is not: data and sizes are made
// up, and a lane stops by the clock.

// kBlocks lanes fit on a multiprocessor, for each of which a thread then has fewer registers. It is 1,
// with NCCL's kUnroll, or 2; cuda_device.py says why.
constexpr int kUnroll = (__CUDA_ARCH__ >= 1200 ? 6 : __CUDA_ARCH__ >= 800 ? 8 : 4) / (kBlocks * kBlocks);
constexpr int kWarp = 32;
constexpr int kWorkersReady = 1, kSliceMoved = 2;  // named barriers

// One end of a FIFO, or of a plain region, which nobody waits for. Counters count slices.
struct End {
  u64 data;      // address of the first slice; 0: this lane has no such end
  u64 wait;      // counter to look at before a slice; 0: always ready
  u64 post;      // counter to write after a slice; 0: nobody looks
  u64 slices;    // how many slices it holds
  u64 seed;      // of the pattern that checks write and compare; 0: nothing to compare
};

struct Lane {
  End in, out;
  u64 user;         // what is sent or added: in this GPU's memory
  u64 keep;         // where arrivals are kept: in this GPU's memory
  u64 user_slices;  // how many slices either holds
  u64 slice_bytes;  // a multiple of 16
  u64 coupled;      // 1: what comes in goes out, as in a ring; 0: each end at its own pace
  u64 cycle;        // chunks an all-reduce passes on before it begins anew, 2 (n - 1) for n GPUs
};

// What a lane reports; times are this GPU's nanoseconds.
struct Record {
  u64 resident;           // the epoch, once the block runs and waits
  u64 start, end;         // released; its last slice done
  u64 in_first, in_last;  // when the first and last slice of the window were done
  u64 in_count;           // slices between the two
  u64 out_first, out_last, out_count;
  u64 errors;             // 16-byte packs that differ from the pattern
  u64 bytes;              // all it moved, warm-up included
  u64 finished;           // the epoch, written last
};

struct Timing {
  u64 epoch;       // this repeat
  u64 warm_ns;     // moved but not counted
  u64 window_ns;   // counted
  u64 patience_ns; // how long to wait to be released
  u64 flag_shift;  // bytes from the first repeat's counters to this one's
  u64 gate;        // word in this GPU's memory by which its first lane tells the others; 0 before
};

__device__ __forceinline__ void barrier(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

__device__ __forceinline__ uint4 add(uint4 a, uint4 b) {
  return make_uint4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// What one pass does with a slice.
constexpr int kSend = 1, kKeep = 2, kAddSend = 3, kKeepSend = 4, kAddKeepSend = 5;

struct Slice {
  u64 in, out, user, keep;  // addresses
  u64 in_seed, out_seed, in_number, out_number;
};

// How many arrivals a thread waits for at once. NCCL's kernels have 96 registers a thread, too few for
// two sources of kUnroll packs: where it adds, a load goes out when the sum of an earlier one is made.
// Read off its machine code, 2.18 to 2.30, sm 70 to 120, f32: two where the sum is kept as well, and
// three to five where it is not.
template <int Pass>
constexpr int kAwaited = Pass == kAddKeepSend ? 2 : Pass == kAddSend ? 4 : kUnroll;

// `Count` packs of one thread, a warp's width apart. Stores begin with the last pack: it is the last
// to arrive, so no store goes out before all loads have come in.
template <int Pass, bool Check, int Count>
__device__ __forceinline__ u32 move_packs(const Slice& s, u64 pack) {
  constexpr bool receives = Pass != kSend, sends = Pass != kKeep;
  constexpr bool adds = Pass == kAddSend || Pass == kAddKeepSend;
  constexpr bool keeps = Pass == kKeep || Pass == kKeepSend || Pass == kAddKeepSend;
  const u32 nothing = gridDim.y - 1;  // 0, but the compiler does not know: makes loads wait
  uint4 in[Count], v[Count];
  u32 errors = 0;
#pragma unroll
  for (int i = 0; i < Count; i++)
    if (adds || Pass == kSend) v[i] = load(s.user + (pack + (u64)i * kWarp) * 16);
#pragma unroll
  for (int i = 0; i < Count + kAwaited<Pass>; i++) {
    const int come = i - kAwaited<Pass>;
    if (receives && come >= 0) {
      const u64 number = pack + (u64)come * kWarp;
      if (Check && s.in_seed && differ(in[come], pattern(s.in_seed, s.in_number, number))) errors++;
      v[come] = adds ? add(in[come], v[come]) : in[come];
    }
    if (receives && i < Count) {
      const u32 after = come >= 0 ? v[come < 0 ? 0 : come].x & nothing : 0;
      in[i] = load(s.in + (pack + (u64)i * kWarp) * 16 + after);
    }
  }
#pragma unroll
  for (int i = Count - 1; i >= 0; i--)
    if (keeps) store(s.keep + (pack + (u64)i * kWarp) * 16, v[i]);
#pragma unroll
  for (int i = Count - 1; i >= 0; i--) {
    const u64 number = pack + (u64)i * kWarp;
    if (sends) store(s.out + number * 16, Check ? pattern(s.out_seed, s.out_number, number) : v[i]);
  }
  return errors;
}

// A slice: warps take hunks of kUnroll packs a thread in turn; what is left goes pack by pack.
template <int Pass, bool Check>
__device__ __forceinline__ u32 move_slice(const Slice& s, u64 packs, int workers) {
  const u64 warps = workers / kWarp, lane = threadIdx.x % kWarp, hunk = kWarp * kUnroll;
  u32 errors = 0;
  for (u64 h = threadIdx.x / kWarp; h < packs / hunk; h += warps)
    errors += move_packs<Pass, Check, kUnroll>(s, h * hunk + lane);
  for (u64 p = packs / hunk * hunk + threadIdx.x; p < packs; p += workers)
    errors += move_packs<Pass, Check, 1>(s, p);
  return errors;
}

// Which ends a pass serves, and whether the lane goes on. Two of them, because the posting warp still
// reads the one of the last pass while thread 0 fills in the next.
struct Pass {
  u32 in, out, stop;
};

// How far a lane is, in slices.
struct Progress {
  u64 in_done, out_done;
};

// What thread 0 alone has to know: counters when last looked at, and when to stop. In shared memory,
// because all threads' registers are for packs.
struct Outlook {
  u64 in_seen, out_seen, stop_at;
};

__device__ __forceinline__ bool in_ready(const Lane& l, const Progress& p, const Outlook& o) {
  return l.in.data && (!l.in.wait || o.in_seen > p.in_done);
}

__device__ __forceinline__ bool out_ready(const Lane& l, const Progress& p, const Outlook& o) {
  return l.out.data && (!l.out.wait || o.out_seen + l.out.slices > p.out_done);
}

constexpr u64 kAbort = ~0ull;  // in place of an epoch: all lanes stop
constexpr u64 kChunk = 2;  // slices; NCCL passes a ring's data on by half FIFOs of two slices

// Waits until a pass is possible. A coupled lane sends its first chunk unasked, since in a closed ring
// all would wait for each other; the last chunk of a cycle it keeps, and then sends one of its own.
__device__ __forceinline__ Pass next_pass(const Lane& l, const Progress& p, Outlook& o, u64 flag) {
  bool in_wanted = l.in.data, out_wanted = l.out.data;
  if (in_wanted && out_wanted && l.coupled) {
    const bool last = l.cycle && p.in_done / kChunk % l.cycle == l.cycle - 1;
    if (last) out_wanted = false;
    else if (p.out_done - p.in_done < kChunk) in_wanted = false;
  }
  for (u64 spins = 1;; spins++) {
    if (in_wanted && !in_ready(l, p, o)) o.in_seen = look_at_counter(l.in.wait);
    if (out_wanted && !out_ready(l, p, o)) o.out_seen = look_at_counter(l.out.wait);
    const bool in = in_wanted && in_ready(l, p, o), out = out_wanted && out_ready(l, p, o);
    if (now_ns() >= o.stop_at) return Pass{0, 0, 1};
    if (spins % 4096 == 0 && look(flag) == kAbort) return Pass{0, 0, 1};
    if (l.coupled ? in == in_wanted && out == out_wanted : in || out) return Pass{in, out, 0};
  }
}

// Counts one end's slices; the window begins with the first slice that is done after the warm-up.
struct Count {
  u64 first, last, counted, done;
};

__device__ __forceinline__ void note(Count& c, u64 warm_at) {
  u64 t = now_ns();
  c.done++;
  if (c.first) c.counted++;
  else if (t >= warm_at) c.first = t;
  c.last = t;
}

// An all-reduce of n ranks adds n - 1 times, keeping the last sum, and passes sums on n - 2 times.
template <bool Check>
__device__ __forceinline__ u32 pass_on(const Lane& l, const Slice& s, u64 packs, int workers) {
  const u64 step = l.cycle ? s.in_number / kChunk % l.cycle : s.in_number / kChunk % 2 * 2;
  const u64 sum = l.cycle ? l.cycle / 2 - 1 : 1;
  if (step < sum) return move_slice<kAddSend, Check>(s, packs, workers);
  if (step == sum) return move_slice<kAddKeepSend, Check>(s, packs, workers);
  return move_slice<kKeepSend, Check>(s, packs, workers);
}

template <bool Check>
__device__ void work(const Lane& l, Pass* passes, Outlook* outlook, u64 flag, u32* errors) {
  const int workers = blockDim.x - kWarp;
  const u64 packs = l.slice_bytes / 16;
  Progress p = {0, 0};
  u32 wrong = 0;
  for (u64 turn = 0;; turn++) {
    Pass* shared = passes + turn % 2;
    if (threadIdx.x == 0) *shared = next_pass(l, p, *outlook, flag);
    barrier(kWorkersReady, workers);
    const Pass pass = *shared;
    if (!pass.stop) {
      const u64 user = (pass.out ? p.out_done : p.in_done) % l.user_slices * l.slice_bytes;
      const Slice s = {l.in.data + p.in_done % (l.in.slices + !l.in.slices) * l.slice_bytes,
                       l.out.data + p.out_done % (l.out.slices + !l.out.slices) * l.slice_bytes,
                       l.user + user, l.keep + user,
                       l.in.wait ? l.in.seed : 0, l.out.seed, p.in_done, p.out_done};
      if (pass.in && pass.out) wrong += pass_on<Check>(l, s, packs, workers);
      else if (pass.in) wrong += move_slice<kKeep, Check>(s, packs, workers);
      else wrong += move_slice<kSend, Check>(s, packs, workers);
      p.in_done += pass.in;
      p.out_done += pass.out;
    }
    barrier(kSliceMoved, blockDim.x);
    if (pass.stop) break;
  }
  if (Check && wrong) atomicAdd(errors, wrong);
}

// The posting warp: thread 0 gives slices back to the sender, thread 1 tells the receiver of new ones.
__device__ void post(const Lane& l, const Pass* passes, u64 warm_at, Count* in, Count* out) {
  const int thread = threadIdx.x % kWarp;
  Count c = {0, 0, 0, 0};
  for (u64 turn = 0;; turn++) {
    barrier(kSliceMoved, blockDim.x);
    const Pass pass = passes[turn % 2];
    if (pass.stop) break;
    if (thread == 0 && pass.in) {
      if (l.in.post) put(l.in.post, c.done + 1);
      note(c, warm_at);
    }
    if (thread == 1 && pass.out) {
      __threadfence_system();
      if (l.out.post) put(l.out.post, c.done + 1);
      note(c, warm_at);
    }
    __syncwarp();
  }
  if (thread == 0) *in = c;
  if (thread == 1) *out = c;
}

// When this lane starts, in this GPU's time; 0 if nobody releases it in time, so that a dead host or
// peer hangs nothing. One lane looks for the host's store and tells the others, and all start a moment
// later: had the first begun at once, its transfers would have delayed the last one's look.
constexpr u64 kAfterRelease = 20000;  // ns

__device__ u64 released(u64 flag, const Timing& t) {
  const u64 until = now_ns() + t.patience_ns;
  u64 seen = 0;
  if (blockIdx.x == 0) {
    while ((seen = look(flag)) < t.epoch && now_ns() <= until) {}
    const u64 start = seen >= t.epoch && seen != kAbort ? now_ns() + kAfterRelease : kAbort;
    put(t.gate, start);
    seen = start;
  } else {
    // The first lane's patience ends first: it was there before.
    while (!(seen = look(t.gate)) && now_ns() <= until + kAfterRelease) {}
  }
  if (!seen || seen == kAbort) return 0;
  while (now_ns() < seen) {}
  return now_ns();
}

template <bool Check>
__device__ __forceinline__ void pump_lane(const Lane* lanes, Record* records, u64 flag, Timing t) {
  __shared__ Pass passes[2];
  __shared__ Outlook outlook;
  __shared__ Count in, out;
  __shared__ u64 start;
  __shared__ u32 errors;
  __shared__ Lane lane;
  if (threadIdx.x < sizeof(Lane) / 8)
    ((u64*)&lane)[threadIdx.x] = ((const u64*)&lanes[blockIdx.x])[threadIdx.x];
  Record* record = records + blockIdx.x;
  __syncthreads();
  if (threadIdx.x == 0) {
    errors = 0;
    End* ends[2] = {&lane.in, &lane.out};
    for (int i = 0; i < 2; i++) {
      if (ends[i]->wait) ends[i]->wait += t.flag_shift;
      if (ends[i]->post) ends[i]->post += t.flag_shift;
    }
    put((u64)&record->resident, t.epoch);
    start = released(flag, t);
    outlook = Outlook{0, 0, start + t.warm_ns + t.window_ns};
  }
  __syncthreads();
  if (start) {
    if (threadIdx.x < blockDim.x - kWarp) work<Check>(lane, passes, &outlook, flag, &errors);
    else post(lane, passes, start + t.warm_ns, &in, &out);
  } else if (threadIdx.x == 0) {
    in = out = Count{0, 0, 0, 0};
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    record->start = start;
    record->end = in.last > out.last ? in.last : out.last;
    record->in_first = in.first, record->in_last = in.last, record->in_count = in.counted;
    record->out_first = out.first, record->out_last = out.last, record->out_count = out.counted;
    record->errors = errors;
    record->bytes = (in.done + out.done) * lane.slice_bytes;
    __threadfence_system();
    put((u64)&record->finished, t.epoch);
  }
}

extern "C" {

__global__ void __launch_bounds__(544, kBlocks)
pump(const Lane* lanes, Record* records, u64 flag, Timing t) {
  pump_lane<false>(lanes, records, flag, t);
}

__global__ void __launch_bounds__(544, kBlocks)
pump_check(const Lane* lanes, Record* records, u64 flag, Timing t) {
  pump_lane<true>(lanes, records, flag, t);
}

// Answers `count` of the host's questions with this GPU's time, for the clocks to be compared.
__global__ void echo(u64 question, u64 answer, u64 first, u64 count, u64 patience_ns) {
  for (u64 i = 0; i < count; i++) {
    const u64 until = now_ns() + patience_ns;
    while (look(question) < first + i)
      if (now_ns() > until) return;
    put(answer, now_ns());
  }
}

// The time, before and after work that is no kernel of ours; after `delay_ns`, so that copies start
// when lanes do.
__global__ void stamp(u64 address, u64 delay_ns) {
  const u64 until = now_ns() + delay_ns;
  while (now_ns() < until) {}
  put(address, now_ns());
}

}  // extern "C"
