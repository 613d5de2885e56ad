/* Mutations of an index, its graph files and a board, over the plugin's own sources.
 *
 * usage: fuzz index|board|tuner FOLDER COUNT SEED
 * FOLDER has plugin.index and its graph files, and is written to. Half of the mutated indices get
 * the right digest, so that the parser sees them. Prints how many were taken; exits 1 where a
 * mutated board without a new seal leads to a graph file, or a plan breaks its own rules.
 * `tuner` compares the tuner's answers to random cost tables with a plain search of the tables, and
 * prints the nanoseconds of a call.
 */
#include "plugin.h"

#include <fcntl.h>
#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static uint64_t state;

static unsigned pick(unsigned below) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return (unsigned)((state >> 11) % below);
}

static void fail(const char *what, long number) {
  printf("%s at mutation %ld\n", what, number);
  exit(1);
}

/* Change bytes: flips, digits, separators, copies, removals, a cut; return the new size. */
static size_t mutate(char *data, size_t size, size_t from, size_t room) {
  static const char words[] = "0123456789 \n,-:.=/xfF\0\377";
  for (unsigned i = 1 + pick(4); i > 0 && size > from + 1; i--) {
    size_t at = from + pick((unsigned)(size - from)), to = from + pick((unsigned)(size - from));
    size_t length = 1 + pick(40);
    switch (pick(6)) {
    case 0: data[at] ^= (char)(1 << pick(8)); break;
    case 1: data[at] = words[pick(sizeof words)]; break;
    case 2:
      if (at + length < size && to + length < size) memmove(data + to, data + at, length);
      break;
    case 3:
      if (at + length < size) memmove(data + at, data + at + length, size - at - length), size -= length;
      break;
    case 4:
      if (size + length < room && at + length < size)
        memmove(data + at + length, data + at, size - at), size += length;
      break;
    default:
      if (pick(20) == 0) size = at + 1;
    }
  }
  return size;
}

static size_t read_all(const char *path, char *out, size_t room) {
  FILE *file = fopen(path, "rb");
  size_t size = file ? fread(out, 1, room, file) : 0;
  if (!size) exit(fprintf(stderr, "cannot read %s\n", path));
  fclose(file);
  return size;
}

static void write_all(const char *path, const char *data, size_t size) {
  int fd = open(path, O_WRONLY | O_CREAT, 0600); /* O_TRUNC would wait for the disk */
  if (fd < 0 || write(fd, data, size) != (ssize_t)size || ftruncate(fd, (off_t)size) != 0)
    exit(fprintf(stderr, "write %s\n", path));
  close(fd);
}

static void write_digest(char *data, size_t size, size_t body) {
  uint8_t digest[DIGEST_BYTES];
  if (size < body) return;
  digest_of(data + body, size - body, digest);
  for (int i = 0; i < DIGEST_BYTES; i++) {
    char hex[3];
    snprintf(hex, sizeof hex, "%02x", digest[i]);
    memcpy(data + body - 1 - 2 * DIGEST_BYTES + 2 * i, hex, 2);
  }
}

static void check_plan(const struct plan *plan, long number) {
  if (plan->gpu_count < 1 || plan->gpu_count > MAX_GPUS) fail("GPUs out of range", number);
  uint64_t all = plan->gpu_count == 64 ? ~UINT64_C(0) : (UINT64_C(1) << plan->gpu_count) - 1;
  for (int i = 0; i < plan->set_count; i++) {
    const struct set *set = &plan->sets[i];
    if ((set->gpus & ~all) || plan_set(plan, set->gpus) != set) fail("a lost set", number);
    if (set->text && strlen(set->text) != set->size) fail("a graph file with a NUL", number);
    if (!set->text && plan->give.count == 0) fail("a set that gets nothing", number);
    for (int gpu = 0; gpu < MAX_GPUS; gpu++)
      if (set->nodes[gpu] < 0 || set->nodes[gpu] > MAX_NODE) fail("an unknown node", number);
  }
  for (int i = 0; i < plan->tune_count; i++) {
    const struct tune *tune = &plan->tunes[i], *next = tune + 1;
    if ((tune->gpus & ~all) || tune->from < 0 || tune->to < tune->from) fail("a range", number);
    if (tune->collective < 0 || tune->collective > 4 || tune->algorithm < 0 ||
        tune->algorithm > 1 || tune->protocol < 0 || tune->protocol > 2 || tune->channels < 0 ||
        tune->channels > MAX_CHANNELS)
      fail("a choice", number);
    bool same = tune->gpus == next->gpus && tune->collective == next->collective;
    if (same && tune->to >= next->from) fail("an overlap", number);
    if (i + 1 < plan->tune_count && tune->gpus > next->gpus) fail("tables out of order", number);
  }
}

static int fuzz_index(char *path, const char *folder, long count) {
  static char good[MAX_INDEX_BYTES], data[MAX_INDEX_BYTES + 4096], graph[MAX_GRAPH_BYTES];
  char name[4096], why[MAX_REASON];
  size_t size = read_all(path, good, sizeof good), body = 0;
  long taken = 0;
  for (int lines = 0; lines < 2; body++) lines += good[body] == '\n';
  snprintf(name, sizeof name, "%s/subsets/graph-0-1.xml", folder);
  size_t graph_size = read_all(name, graph, sizeof graph);
  for (long i = 0; i < count; i++) {
    memcpy(data, good, size);
    bool sealed = pick(2);
    size_t changed = mutate(data, size, sealed ? body : 0, sizeof data);
    if (sealed) write_digest(data, changed, body);
    write_all(path, data, changed);
    if (pick(64) == 0) {
      static char mutant[2 * MAX_GRAPH_BYTES];
      memcpy(mutant, graph, graph_size);
      write_all(name, mutant, mutate(mutant, graph_size, 0, MAX_GRAPH_BYTES));
    }
    struct plan *plan = plan_load(path, why);
    if (!plan && why[0] == '\0') fail("no reason", i);
    if (plan) check_plan(plan, i), taken++, plan_free(plan);
    write_all(name, graph, graph_size);
  }
  write_all(path, good, size);
  printf("%ld indices, %ld taken\n", count, taken);
  return 0;
}

static int fuzz_board(char *path, long count) {
  char why[MAX_REASON];
  struct plan *plan = plan_load(path, why);
  long taken = 0;
  if (!plan) return printf("%s\n", why), 2;
  struct post posts[MAX_GPUS + 2], good[MAX_GPUS + 2] = {{.hash = 0}};
  char *out = malloc(plan->largest_graph * 5 / 4 + 64);
  for (long i = 0; i < count; i++) {
    uint32_t ranks = 2 + pick((unsigned)plan->gpu_count - 1), all = plan->job ? (uint32_t)plan->job : ranks;
    for (uint32_t r = 0; r < ranks; r++) {
      good[r] = (struct post){.hash = 77, .rank = r, .ranks = all, .host = 5, .gpu = (int)r,
                              .nvml = (int)(r + pick(2) * 100), .nccl = 23007, .tuned = 1};
      memcpy(good[r].digest, plan->digest, DIGEST_BYTES);
      board_seal(&good[r]);
    }
    size_t size = ranks * sizeof *posts;
    memcpy(posts, good, sizeof good);
    size_t changed = mutate((char *)posts, size, 0, sizeof posts);
    bool sealed = pick(2);
    if (sealed)
      for (size_t r = 0; r < changed / sizeof *posts; r++) board_seal(&posts[r]);
    struct decision decision = decide(plan, &good[0], posts, changed);
    bool same = changed == size && memcmp(posts, good, size) == 0;
    if (decision.set || decision.table) {
      taken++;
      if (!sealed && !same) fail("a damaged board was taken", i);
      if (decision.set && decision.set->text && !graph_text(plan, &decision, out, plan->largest_graph * 5 / 4 + 64))
        fail("a graph file without room", i);
    } else if (decision.why[0] == '\0') {
      fail("no reason", i);
    }
  }
  free(out);
  plan_free(plan);
  printf("%ld boards, %ld taken\n", count, taken);
  return 0;
}

/* The head of ncclTuner_v5_t. */
extern struct tuner {
  const char *name;
  int (*init)(void **, uint64_t, size_t, size_t, void *, void *, void *);
  int (*choose)(void *, int, size_t, int, float **, int, int, int, int *);
} ncclTunerPlugin_v5;

enum { ALGORITHMS = 7, PROTOCOLS = 3, COSTS = ALGORITHMS * PROTOCOLS };

static bool allowed(float cost) { return cost >= 0 && cost < FLT_MAX / 4; }

static int cheapest(const float *costs) {
  int found = -1;
  for (int i = 0; i < COSTS; i++)
    if (allowed(costs[i]) && (found < 0 || costs[i] < costs[found])) found = i;
  return found;
}

static void check_choice(const struct plan *plan, const struct tune *table, long number) {
  float costs[COSTS], before[COSTS];
  int collective = (int)pick(6), pipelined = 1 + (pick(8) == 0), channels = 0, wanted = -1;
  size_t bytes = pick(2) ? (size_t)1 << pick(40) : pick(1 << 20);
  for (int i = 0; i < COSTS; i++)
    costs[i] = pick(3) ? 1.0f + (float)pick(1000) : pick(2) ? -1.0f : FLT_MAX / (float)(1 + pick(2));
  memcpy(before, costs, sizeof before);
  ncclTunerPlugin_v5.choose((void *)(uintptr_t)table, collective, bytes, pipelined, (float **)costs,
                            ALGORITHMS, PROTOCOLS, (int)pick(2), &channels);
  const struct tune *right = NULL;
  for (int i = 0; i < plan->tune_count; i++) {
    const struct tune *tune = &plan->tunes[i];
    if (table && tune->gpus == table->gpus && tune->collective == collective &&
        (uint64_t)tune->from <= bytes && bytes <= (uint64_t)tune->to)
      right = tune;
  }
  if (right && pipelined == 1) wanted = right->algorithm * PROTOCOLS + right->protocol;
  if (wanted >= 0 && !allowed(before[wanted])) wanted = -1; /* NCCL does not allow it */
  if (wanted >= 0 && __builtin_popcountll(table->gpus) > 8 &&
      cheapest(before) / PROTOCOLS != right->algorithm)
    wanted = -1; /* FP8 */
  if (cheapest(costs) != (wanted < 0 ? cheapest(before) : wanted)) fail("another choice", number);
  if (channels != (wanted < 0 ? 0 : right->channels)) fail("other channels", number);
  for (int i = 0; i < COSTS; i++)
    if (i != wanted && costs[i] != before[i]) fail("another cost", number);
}

static int fuzz_tuner(char *path, long count) {
  char why[MAX_REASON];
  struct plan *plan = plan_load(path, why);
  if (!plan) return printf("%s\n", why), 2;
  for (long i = 0; i < count; i++)
    check_choice(plan, pick(16) ? plan_table(plan, plan->tunes[pick((unsigned)plan->tune_count)].gpus)
                                : NULL, i);
  float costs[COSTS];
  struct timespec start, end;
  void *table = (void *)(uintptr_t)plan_table(plan, plan->tunes[0].gpus);
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &start);
  for (long i = 0; i < count; i++) {
    int channels = 0;
    for (int j = 0; j < COSTS; j++) costs[j] = (float)(j + 1);
    ncclTunerPlugin_v5.choose(table, 4, (size_t)1 << (i % 36), 1, (float **)costs, ALGORITHMS,
                              PROTOCOLS, 0, &channels);
  }
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
  plan_free(plan);
  double spent = 1e9 * (double)(end.tv_sec - start.tv_sec) + (double)(end.tv_nsec - start.tv_nsec);
  printf("%ld choices, %.1f ns each\n", count, spent / (double)count);
  return 0;
}

int main(int count, char **arguments) {
  static char path[4096];
  if (count != 5) return fprintf(stderr, "usage: fuzz index|board|tuner FOLDER COUNT SEED\n"), 2;
  snprintf(path, sizeof path, "%s/plugin.index", arguments[2]);
  state = strtoull(arguments[4], NULL, 10) * 2654435761u + 88172645463325252u;
  long rounds = atol(arguments[3]);
  if (strcmp(arguments[1], "tuner") == 0) return fuzz_tuner(path, rounds);
  if (strcmp(arguments[1], "index") == 0) return fuzz_index(path, arguments[2], rounds);
  return fuzz_board(path, rounds);
}
