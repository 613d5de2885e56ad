/* The tccl plugin for NCCL: declarations shared by its sources.
 *
 * A communicator gets the graph file of exactly its GPUs, or default NCCL:
 *   1. NCCL initialises the network half on each rank (env.c), which posts the rank's GPU (board.c).
 *   2. NCCL's allgather of peer information is the barrier.
 *   3. NCCL asks the environment half for NCCL_TOPO_DUMP_FILE (env.c): all ranks read the same posts
 *      and decide alike (decide.c).
 *   4. NCCL asks for NCCL_GRAPH_FILE, on the same thread.
 *   5. NCCL initialises the profiler half there, which places host buffers (placement.c).
 *   6. NCCL initialises the tuner half, on the same thread (tuner.c).
 */
#ifndef TCCL_PLUGIN_H
#define TCCL_PLUGIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

enum {
  DIGEST_BYTES = 32,
  MAX_GPUS = 64,
  MAX_VARIABLES = 64,
  MAX_SETS = 4096,
  MAX_TUNES = 16384,
  MAX_CHANNELS = 64,
  MAX_JOB_RANKS = 1 << 20,
  MAX_INDEX_BYTES = 1 << 20,
  MAX_GRAPH_BYTES = 1 << 18,
  MAX_NVML_INDEX = 255,
  MAX_NODE = 1023,
  MAX_REASON = 256,
  SUCCESS = 0, /* of NCCL's functions */
};

/* files.c: files that nobody but root and the caller can write. */
int open_trusted(int at, const char *path, bool folder, char why[MAX_REASON]);
char *read_trusted(int folder, const char *path, size_t limit, size_t *size,
                   char why[MAX_REASON]);
int stat_of(int fd, struct stat *st);
bool read_line(const char *path, char *out, size_t size);
void digest_of(const void *data, size_t size, uint8_t out[DIGEST_BYTES]); /* BLAKE2b-256 */
bool digest_is(const char *hex, const void *data, size_t size, uint8_t out[DIGEST_BYTES]);
uint64_t hash_of(const void *data, size_t size);
bool explain(char why[MAX_REASON], const char *format, ...) __attribute__((format(printf, 2, 3)));

/* index.c: the plan. Immutable once loaded, never freed. */
struct gpu {
  int nvml;         /* the NVML index, by which graph files name the GPU */
  uint64_t bus;     /* domain, bus, device and function */
  const char *uuid; /* `-`: any; otherwise as nvidia-smi writes it */
};
struct variable {
  const char *name, *value; /* `value` NULL: any */
};
struct variables {
  int count;
  struct variable items[MAX_VARIABLES];
};
struct set { /* of GPUs: what communicators over exactly these get, besides `give` */
  uint64_t gpus; /* bit i: the index's GPU i */
  const char *name; /* of the graph file; `-`: variables alone */
  char *text; /* of the file, as it was when its digest was checked; NULL: none */
  size_t size;
  bool placed;
  int16_t nodes[MAX_GPUS]; /* where `placed`: the NUMA node of each GPU's outgoing hops */
};
struct tune { /* a choice for messages of `from` to `to` bytes; numbers as in NCCL's headers */
  uint64_t gpus; /* as in struct set */
  int64_t from, to;
  int collective, algorithm, protocol, channels;
};
struct plan {
  const char *path;
  int folder; /* of the index, open while it is read */
  char *data; /* the index's text, where all names and values point to */
  uint8_t digest[DIGEST_BYTES];
  bool simulated;
  int nccl_major, nccl_minor, driver, numa; /* -1: not known */
  int job; /* ranks of a job over several hosts, whose GPUs here are the only set; else 0 */
  int gpu_count;
  struct gpu gpus[MAX_GPUS];
  struct variables need, give, must, forbid;
  int set_count;
  struct set sets[MAX_SETS]; /* by ascending `gpus` */
  size_t largest_graph;
  int tune_count;
  struct tune tunes[MAX_TUNES + 1]; /* by ascending `gpus`, collective and size; the last has no GPUs */
  bool placed; /* some set is */
};
struct plan *plan_load(char *path, char why[MAX_REASON]);
void plan_free(struct plan *plan);
const struct set *plan_set(const struct plan *plan, uint64_t gpus);
const struct tune *plan_table(const struct plan *plan, uint64_t gpus);
const char *variable_of(const struct variables *variables, const char *name);
const char *next_gpu(const struct plan *plan, const char *text, const char **begin, int *gpu);
bool parse_bus(const char *text, uint64_t *bus);

/* host.c: the host and this thread's GPU. */
bool host_matches(const struct plan *plan, char why[MAX_REASON]);
uint64_t host_identity(const char *nccl_hostid);
int current_gpu(const struct plan *plan, int *nvml, char why[MAX_REASON]);

/* process.c: this process's plan, NCCL, log and other plugins. */
typedef void (*logger_t)(int level, unsigned long flags, const char *file, int line,
                         const char *format, ...);
struct environment {
  const char *name;
  int (*init)(uint8_t, uint8_t, uint8_t, const char *, logger_t); /* version 1: no logger */
  int (*finalize)(void);
  const char *(*get)(const char *);
};
extern char *own_path;         /* of this library */
extern char *networks;         /* the answer for NCCL_NET_PLUGIN */
extern char *uncached;         /* the answer for NCCL_NO_CACHE */
int start_process(const uint8_t nccl[3], const char *suffix, logger_t log, int api);
int finish_next(void);
const struct plan *active_plan(void);
const char *user_value(const char *name);
const char *contradiction(const struct plan *plan);
uint32_t nccl_version(void);
bool has_two_releases(void);
void set_logger(void *logger);
int nothing(void *unused); /* for halves that need a function */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
bool tuner_is_asked(void);
const char *tuner_plugin(const char *user, const char *own);
bool others_have(const char *kind, const char *stem);

/* board.c: posts of a communicator's ranks, in a file of /dev/shm. */
enum refusal { AGREES, USER_VARIABLE, OTHER_GPU, NO_MEMORY_FILE, TWO_RELEASES, REFUSALS };
struct post { /* 104 bytes without padding; written by one append */
  char magic[8];
  uint64_t hash;
  uint32_t rank, ranks;
  uint64_t host;
  uint32_t refusal;
  int32_t gpu, nvml;
  uint32_t nccl;
  uint8_t digest[DIGEST_BYTES];
  uint64_t tuned, spare, check; /* `tuned`: NCCL will ask our tuner; the hash of all before */
};
int board_post(const struct post *post, char why[MAX_REASON]);
void board_mark(int fd);
bool board_is_mark(const struct post *post);
void board_leave(int fd, uint64_t hash, bool decided);
void board_seal(struct post *post);
void boards_sweep(void);

/* decide.c: a thread's communicator. */
struct decision {
  const struct set *set; /* NULL: default NCCL */
  const struct tune *table;
  int nvml[MAX_GPUS]; /* today's NVML index of each of the set's GPUs */
  char why[MAX_REASON];
};
size_t posts_before_mark(const struct post *posts, size_t size);
struct decision decide(const struct plan *plan, const struct post *own, const struct post *posts,
                       size_t size);
size_t graph_text(const struct plan *plan, const struct decision *decision, char *out,
                  size_t room);
void watch(const struct plan *plan, void *context, uint64_t hash);
void conclude(void);
void forget(void);
const char *chosen_graph_file(void);
const struct tune *chosen_table(uint64_t hash, size_t ranks);
const char *chosen_variable(const char *name);
int chosen_node(uint64_t hash);

/* placement.c */
void unplace(void);

/* Since glibc 2.34 libdl and libpthread are in libc; the old versions of their symbols keep the
 * library loadable on older hosts. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define OLD_SYMBOL(name) struct old_##name /* sanitizers intercept the new ones */
#elif defined(__x86_64__)
#define OLD_SYMBOL(name) __asm__(".symver " #name "," #name "@GLIBC_2.2.5")
#elif defined(__aarch64__)
#define OLD_SYMBOL(name) __asm__(".symver " #name "," #name "@GLIBC_2.17")
#else
#define OLD_SYMBOL(name) struct old_##name
#endif

OLD_SYMBOL(dlopen);
OLD_SYMBOL(dlsym);
OLD_SYMBOL(dladdr);
OLD_SYMBOL(pthread_once);
OLD_SYMBOL(pthread_key_create);
OLD_SYMBOL(pthread_setspecific);
OLD_SYMBOL(dlclose);

#define EXPORT __attribute__((visibility("default")))

#endif
