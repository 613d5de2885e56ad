/* The tuner half: NCCL asks it before each collective of a communicator.
 *
 * All ranks must choose alike, or they hang. So a communicator has a table only where all posts say
 * that NCCL will ask this tuner (decide.c), and the answer depends on nothing but the table and
 * NCCL's costs, which NCCL's own choice takes for equal on all ranks as well.
 */
#include "plugin.h"

enum { ALL_GATHER = 2, PRECISE_RANKS = 8, FIRST_CLAMPLESS = 22900 };

static int init(void **context, uint64_t hash, size_t ranks, size_t nodes, void *logger,
                void *domains, void *constants) {
  (void)logger, (void)domains, (void)constants;
  unplace();
  /* NCCL hands the context back as it is: part of the plan, which is never written or freed. */
  *context = (void *)(uintptr_t)(nodes == 1 ? chosen_table(hash, ranks) : NULL);
  return SUCCESS;
}

static const struct tune *find(const struct tune *table, int collective, int64_t bytes) {
  uint64_t gpus = table->gpus;
  for (; table->gpus == gpus; table++)
    if (table->collective == collective && table->from <= bytes && bytes <= table->to) return table;
  return NULL;
}

/* What `tccl verify --tune` tells the tuner of its own process, between calls: algorithm (or TABLE,
 * NO_TABLE), protocol, channels (0: NCCL's own number), and the number of calls that followed. */
enum { TABLE = -1, NO_TABLE = -2 };
EXPORT int tccl_told[4] = {TABLE, 0, 0, 0};

/* Say whether NCCL allows a choice: not by a cost below 0 (up to 2.30), nor by a huge one. */
static bool allowed(float cost) { return cost >= 0 && cost < 1e30f; }

/* Make the table's choice the cheapest, if NCCL allows it. */
static int choose(void *table, int collective, size_t bytes, int pipelined, float **costs,
                  int algorithms, int protocols, int registered, int *channels) {
  (void)registered; /* a table holds for both: calls in CUDA graphs always say yes */
  struct tune told = {.algorithm = tccl_told[0], .protocol = tccl_told[1],
                      .channels = tccl_told[2]};
  const struct tune *tune = told.algorithm >= 0 ? &told : NULL;
  if (told.algorithm == TABLE && table) tune = find(table, collective, (int64_t)bytes);
  if (!tune || pipelined > 1 || tune->algorithm >= algorithms || tune->protocol >= protocols)
    return SUCCESS;
  /* Rings and trees get no more channels than the communicator has (scheduleCollTasksToPlan in
   * enqueue.cc), from 2.31 on no more than NCCL's own choice for the size; but broadcasts of a
   * group, which ask for an all-gather since 2.29, get all. */
  if (tune->channels && collective == ALL_GATHER && nccl_version() >= FIRST_CLAMPLESS)
    return SUCCESS;
  float *cost = (float *)costs; /* NCCL's type; an array of arrays, in fact */
  int wanted = tune->algorithm * protocols + tune->protocol, best = -1; /* NCCL's own choice */
  for (int i = 0; i < algorithms * protocols; i++)
    if (allowed(cost[i]) && (best < 0 || cost[i] < cost[best])) best = i;
  if (!allowed(cost[wanted]) || !(cost[best] > 0)) return SUCCESS;
  /* There NCCL keeps sums of FP8 precise by the algorithm (updateCollCostTable in enqueue.cc). */
  if (__builtin_popcountll(tune->gpus) > PRECISE_RANKS && best / protocols != tune->algorithm)
    return SUCCESS;
  cost[wanted] = cost[best] * 0.999f;
  if (tune->channels) *channels = tune->channels;
  if (tune == &told) tccl_told[3]++;
  return SUCCESS;
}

/* ncclTuner_v5_t, which NCCL 2.28.7 has; v6, the same and a function for sizes of chunks; and v7 of
 * 2.32.6, where the constants of init, which this tuner leaves alone, are of one generation more. */
EXPORT struct tuner {
  const char *name;
  int (*init)(void **, uint64_t, size_t, size_t, void *, void *, void *);
  int (*choose)(void *, int, size_t, int, float **, int, int, int, int *);
  int (*finalize)(void *);
  void *chunk_size;
} ncclTunerPlugin_v5 = {"tccl", init, choose, nothing, NULL};
EXPORT extern struct tuner ncclTunerPlugin_v6 __attribute__((alias("ncclTunerPlugin_v5")));
EXPORT extern struct tuner ncclTunerPlugin_v7 __attribute__((alias("ncclTunerPlugin_v5")));
