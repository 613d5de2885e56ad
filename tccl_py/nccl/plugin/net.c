/* The network half: NCCL tells it the hash of each communicator. It is never assigned to one.
 *
 * It has a device, so NCCL keeps it enabled, but no properties of the device, so NCCL goes on to
 * the next network (plugin/net.cc of NCCL 2.28.9 and 2.30.7).
 */
#include "plugin.h"

enum { SUCCESS = 0, SYSTEM_ERROR = 2 };

static int init(void **context, uint64_t hash, void *config, void *logger, void *profiler) {
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

static int finalize(void *context) {
  (void)context;
  return SUCCESS;
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

EXPORT struct network ncclNetPlugin_v11 = {"tccl", init, devices, properties, {0}, finalize, 0};
EXPORT extern struct network ncclNetPlugin_v12 __attribute__((alias("ncclNetPlugin_v11")));

/* With NCCL_NET, NCCL initialises only networks of that name. */
void name_network(const char *name) {
  __atomic_store_n(&ncclNetPlugin_v11.name, name, __ATOMIC_RELAXED);
}
