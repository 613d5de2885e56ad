/* A stand-in for NCCL: a thread for each rank plays what NCCL was recorded to ask of its plugins.
 *
 * usage: stand_in PLUGIN RECORD LIBCUDA LIBNVML RELEASE < SCRIPT
 * SCRIPT: one line for each communicator, played by its ranks alone, in the order of lines:
 *     comm HASH R,R,...     the ranks make a communicator
 *     lacks HASH R,R,...    the same, but the last rank's NCCL has no plugin
 *     blind HASH R,R,...    the same, but the last rank's NCCL keeps the number of ranks elsewhere
 *     failed HASH R,R,...   the ranks begin, and fail before NCCL's first barrier
 *     shared HASH R,R,...   a child that shares its parent's network
 *     late HASH R,R,...     the ranks fail when the profiler is initialised
 *     racy HASH R,R,...     the ranks do not wait for each other
 *     early HASH R,R,...    NCCL 2.28.9 starts too, when all ranks but the last have their network
 *     amid HASH R,R,...     NCCL 2.28.9 starts too, before the ranks ask for graph file and variables
 * Prints `HASH RANK SIZE FNV BUFFSIZE ALGO NODE` for each rank of a communicator: the graph file that
 * the plugin answered, or 0 0, and the NUMA node that the thread prefers when NCCL would create the
 * proxy's thread, or -1; and at last the seconds of loading the plan, and the mean and the worst
 * seconds in the plugin for a rank of a communicator. Exits 1 where a thread keeps its preference.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 8, LINES = 4096, CALLS = 256, HASH_AT = (1 << 20) + 3192, SCANNED_BYTES = 5 << 20 };

struct line {
  char kind[8];
  uint64_t hash;
  int ranks[RANKS], count;
  pthread_barrier_t barrier;
};
struct section {
  char names[CALLS][48];
  int count;
};
struct environment {
  const char *name;
  int (*init)(uint8_t, uint8_t, uint8_t, const char *, void *);
  int (*finalize)(void);
  const char *(*get)(const char *);
};
struct network {
  const char *name;
  int (*init)(void **, uint64_t, void *, void *, void *);
};

struct profiler {
  const char *name;
  int (*init)(void **, uint64_t, int *, const char *, int, int, int, void *);
  void *events[3];
  int (*finalize)(void *);
};

static struct line lines[LINES];
static int line_count;
static struct section sections[3]; /* first, later, shared */
static struct environment *environment;
static struct network *network;
static const struct profiler *profiler;
static void (*use_gpu)(int);
static double worst, total;
static long communicators;
static pthread_mutex_t output = PTHREAD_MUTEX_INITIALIZER;

/* The thread's own time: a busy machine takes cores away for longer than the plugin needs. */
static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void read_file(const char *path, size_t *size, uint64_t *fnv) {
  FILE *file = fopen(path, "rb");
  if (!file) {
    printf("cannot open %s\n", path);
    exit(1);
  }
  *size = 0;
  *fnv = 0xcbf29ce484222325;
  for (int c; (c = fgetc(file)) != EOF; ++*size) *fnv = (*fnv ^ (uint64_t)c) * 0x100000001b3;
  fclose(file);
}

/* Return the NUMA node that this thread prefers, or -1. */
static int preferred(void) {
  unsigned long nodes[16] = {0};
  int mode = 0;
  if (syscall(SYS_get_mempolicy, &mode, nodes, 1025, NULL, 0) != 0 || mode != 1) return -1;
  return __builtin_ctzl(nodes[0]);
}

/* Initialise the profiler, as NCCL does after its last question before. */
static int profile(uint64_t hash, int rank, int ranks, void **context) {
  int mask = 1;
  profiler->init(context, hash, &mask, "", 1, ranks, rank, NULL);
  if (mask) exit(printf("the profiler is on\n"));
  return preferred();
}

/* Play one communicator on one rank. */
static void play(struct line *line, int place, bool first) {
  bool shared = strcmp(line->kind, "shared") == 0, behind = false;
  bool racy = strcmp(line->kind, "racy") == 0, last = place == line->count - 1;
  bool early = strcmp(line->kind, "early") == 0, amid = strcmp(line->kind, "amid") == 0;
  const struct section *asked = &sections[shared ? 2 : first ? 0 : 1];
  bool blind = strcmp(line->kind, "blind") == 0 && last;
  bool mute = strcmp(line->kind, "lacks") == 0 && last;
  /* Behind it are no communicators of other threads, whose ranks the plugin would take for its. */
  char *comm = calloc(1, HASH_AT + 64 + (blind ? SCANNED_BYTES : 0));
  uint32_t ranks[2] = {(uint32_t)place, (uint32_t)line->count};
  char buffers[32] = "-", algo[32] = "-";
  int node = -1;
  void *context = NULL;
  size_t size = 0;
  uint64_t fnv = 0;
  double spent = 0;
  if (!blind) memcpy(comm + HASH_AT, &line->hash, 8);
  memcpy(comm + HASH_AT + 8, ranks, 8);
  for (int i = 0; i < asked->count; i++) {
    const char *name = asked->names[i], *answer = NULL;
    bool starts = (early && strcmp(name, "net") == 0) || (amid && strcmp(name, "NCCL_TOPO_FILE") == 0);
    if (starts && early && last) pthread_barrier_wait(&line->barrier);
    if (starts && last) environment->init(2, 28, 9, "", NULL);
    if (strcmp(name, "net") == 0 && !mute) {
      double start = now();
      network->init((void **)comm, line->hash, NULL, NULL, NULL);
      spent += now() - start;
    }
    if (starts && !(early && last)) pthread_barrier_wait(&line->barrier);
    bool next = strcmp(name, "NCCL_P2P_DISABLE") == 0 || strcmp(name, "NCCL_TOPO_DUMP_FILE") == 0;
    if (next && strcmp(line->kind, "failed") == 0) break;
    if (strcmp(name, "net") == 0 && racy) usleep((unsigned)rand() % 500);
    if (next && !behind) {
      if (!racy) pthread_barrier_wait(&line->barrier); /* NCCL's allgather of peer information */
      behind = true;
    }
    if (strcmp(name, "net") == 0 || mute) continue;
    bool init = strcmp(name, first ? "NCCL_PROFILER_PLUGIN" : "NCCL_PROTO") == 0;
    if (init && !first) node = profile(line->hash, place, line->count, &context);
    if (init && strcmp(line->kind, "late") == 0) break;
    double start = now();
    answer = environment->get(name);
    spent += now() - start;
    if (preferred() >= 0) exit(printf("a preference stays\n"));
    if (init && first) node = profile(line->hash, place, line->count, &context);
    if (!answer) continue;
    if (strcmp(name, "NCCL_GRAPH_FILE") == 0) read_file(answer, &size, &fnv);
    if (strcmp(name, "NCCL_BUFFSIZE") == 0) snprintf(buffers, sizeof buffers, "%s", answer);
    if (strcmp(name, "NCCL_ALGO") == 0) snprintf(algo, sizeof algo, "%s", answer);
  }
  free(comm);
  if (context && place % 2) profiler->finalize(context);
  pthread_mutex_lock(&output);
  if (strcmp(line->kind, "failed") != 0)
    printf("%llx %d %zu %llx %s %s %d\n", (unsigned long long)line->hash, line->ranks[place], size,
           (unsigned long long)fnv, buffers, algo, node);
  if (spent > worst) worst = spent;
  total += spent;
  communicators++;
  pthread_mutex_unlock(&output);
}

static void *be_rank(void *argument) {
  int rank = (int)(intptr_t)argument;
  bool first = true;
  use_gpu(rank);
  for (int i = 0; i < line_count; i++)
    for (int place = 0; place < lines[i].count; place++)
      if (lines[i].ranks[place] == rank) {
        play(&lines[i], place, first);
        first = false;
      }
  return NULL;
}

static void read_record(const char *path) {
  static const char *const kinds[] = {"first", "later", "shared"};
  char text[128], name[48];
  FILE *file = fopen(path, "r");
  struct section *section = NULL;
  while (file && fgets(text, sizeof text, file)) {
    text[strcspn(text, "\n")] = '\0';
    for (int i = 0; i < 3; i++)
      if (strcmp(text, kinds[i]) == 0) section = &sections[i];
    if (!section || section->count == CALLS) continue;
    if (sscanf(text, "env %47s", name) == 1) strcpy(section->names[section->count++], name);
    if (strcmp(text, "net") == 0) strcpy(section->names[section->count++], "net");
  }
  if (!file || !sections[2].count) exit(fprintf(stderr, "%s: no record\n", path));
  fclose(file);
}

static void read_script(void) {
  char text[256], ranks[128];
  while (line_count < LINES && fgets(text, sizeof text, stdin)) {
    struct line *line = &lines[line_count];
    unsigned long long hash;
    if (sscanf(text, "%7s %llx %127s", line->kind, &hash, ranks) != 3) continue;
    line->hash = hash;
    for (char *save, *part = strtok_r(ranks, ",", &save); part && line->count < RANKS;
         part = strtok_r(NULL, ",", &save))
      line->ranks[line->count++] = atoi(part);
    pthread_barrier_init(&line->barrier, NULL, (unsigned)line->count);
    line_count++;
  }
}

int main(int count, char **arguments) {
  pthread_t threads[RANKS];
  unsigned char nccl[3];
  if (count != 6 || sscanf(arguments[5], "%hhu.%hhu.%hhu", nccl, nccl + 1, nccl + 2) != 3)
    return fprintf(stderr, "usage: stand_in PLUGIN RECORD LIBCUDA LIBNVML RELEASE\n"), 2;
  void *cuda = dlopen(arguments[3], RTLD_NOW), *nvml = dlopen(arguments[4], RTLD_NOW);
  void *plugin = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (!cuda || !nvml || !plugin) return fprintf(stderr, "%s\n", dlerror()), 2;
  *(void **)&use_gpu = dlsym(cuda, "fake_use");
  environment = dlsym(plugin, "ncclEnvPlugin_v2");
  network = dlsym(plugin, "ncclNetPlugin_v12");
  profiler = dlsym(plugin, "ncclProfiler_v5");
  read_record(arguments[2]);
  read_script();
  double start = now();
  environment->init(nccl[0], nccl[1], nccl[2], "", NULL);
  start = now() - start;
  if (nccl[1] >= 30) environment->get("NCCL_NO_CACHE"); /* before all other variables */
  environment->get("NCCL_NET_PLUGIN");
  for (intptr_t i = 0; i < RANKS; i++) pthread_create(&threads[i], NULL, be_rank, (void *)i);
  for (int i = 0; i < RANKS; i++) pthread_join(threads[i], NULL);
  environment->finalize();
  dlclose(plugin);
  printf("seconds %.9f %.9f %.9f\n", start, total / (double)(communicators ? communicators : 1), worst);
  return 0;
}
