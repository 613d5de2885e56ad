/* The environment half: answers of the plan where the user has none. And the network half. */
#include "plugin.h"

#include <string.h>

enum { SYSTEM_ERROR = 2 };

static bool rereads; /* NCCL has asked for NCCL_NO_CACHE */

static int init_v1(uint8_t major, uint8_t minor, uint8_t patch, const char *suffix, logger_t none) {
  (void)none;
  return start_process((uint8_t[]){major, minor, patch}, suffix, NULL, 1);
}

static int init_v2(uint8_t major, uint8_t minor, uint8_t patch, const char *suffix, logger_t log) {
  return start_process((uint8_t[]){major, minor, patch}, suffix, log, 2);
}

/* The network half: NCCL tells it the hash of each communicator. It has a device, so NCCL keeps it
 * enabled, but no properties of the device, so NCCL goes on to the next network (plugin/net.cc of
 * 2.28.9 and 2.30.7): it is never assigned to a communicator. */
static int init_network(void **context, uint64_t hash, void *config, void *logger, void *profiler) {
  (void)config, (void)profiler;
  const struct plan *plan = active_plan();
  set_logger(logger);
  if (plan) watch(plan, context, hash);
  return SUCCESS;
}

static int devices(int *count) {
  *count = 1;
  return SUCCESS;
}

static int properties(int device, void *out) {
  (void)device, (void)out;
  return SYSTEM_ERROR;
}

/* struct ncclNet of versions 11 and 12, which order their functions alike. */
struct network {
  const char *name;
  int (*init)(void **, uint64_t, void *, void *, void *);
  int (*devices)(int *);
  int (*properties)(int, void *);
  void (*transfers[16])(void); /* listen to makeVDevice: for assigned networks only */
  int (*finalize)(void *);
  void (*set_attributes)(void);
};

EXPORT struct network ncclNetPlugin_v11 = {"tccl", init_network, devices, properties,
                                              {0}, nothing, 0};
EXPORT extern struct network ncclNetPlugin_v12 __attribute__((alias("ncclNetPlugin_v11")));

/* At exit, while NCCL's threads may still ask: everything stays as it is. */
static int finalize(void) {
  if (active_plan()) boards_sweep();
  return finish_next();
}

static const char *get(const char *name) {
  const struct plan *plan = active_plan();
  const char *value = user_value(name);
  if (!plan) return value;
  /* NCCL_NO_CACHE lets NCCL ask this one between the profiler's init and the proxy's thread. */
  if (strcmp(name, "NCCL_IGNORE_DISABLED_P2P") != 0) unplace();
  /* A communicator begins: one that failed before it was decided on counts no more. */
  if (strcmp(name, "NCCL_NET") == 0) {
    forget();
    /* With NCCL_NET, NCCL initialises only networks of that name. */
    __atomic_store_n(&ncclNetPlugin_v11.name, value ? value : "tccl", __ATOMIC_RELAXED);
    return value;
  }
  if (strcmp(name, "NCCL_NET_PLUGIN") == 0) return networks;
  if (strcmp(name, "NCCL_TUNER_PLUGIN") == 0) return tuner_plugin(value, own_path);
  if (strcmp(name, "NCCL_TOPO_DUMP_FILE") == 0) {
    conclude();
    return value;
  }
  if (strcmp(name, "NCCL_GRAPH_FILE") == 0) return value ? value : chosen_graph_file();
  if (strcmp(name, "NCCL_NO_CACHE") == 0) {
    __atomic_store_n(&rereads, true, __ATOMIC_RELAXED);
    return uncached[0] ? uncached : NULL;
  }
  bool last = strcmp(name, "NCCL_ALGO") == 0; /* of a communicator's questions (graph/tuning.cc) */
  /* An NCCL that does not ask what to read anew would keep other answers for all communicators. */
  const char *answer =
      last || __atomic_load_n(&rereads, __ATOMIC_RELAXED) ? chosen_variable(name) : NULL;
  if (last) forget();
  if (value) return value;
  /* Unasked, NCCL would take the profiler of this library, as of any network library. */
  if (strcmp(name, "NCCL_PROFILER_PLUGIN") == 0)
    return others_have("profiler", "ncclProfiler_v") ? NULL : plan->placed ? own_path : "none";
  return answer;
}

EXPORT const int tccl_plugin = 1;
EXPORT struct environment ncclEnvPlugin_v1 = {"tccl", init_v1, finalize, get};
EXPORT struct environment ncclEnvPlugin_v2 = {"tccl", init_v2, finalize, get};
