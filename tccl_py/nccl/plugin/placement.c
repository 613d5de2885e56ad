/* The profiler half: NCCL's host buffers of a rank on the NUMA node that the plan names.
 *
 * NCCL initialises a communicator's profiler just before it creates the proxy's service thread
 * (init.cc of 2.28.7 to 2.30.7). That thread allocates the FIFOs of hops through host memory, also
 * those of the first collective, and inherits the memory policy of its creator. So the creator's
 * policy is the planned node from the profiler's init to NCCL's next question on the same thread.
 * Nothing is profiled.
 */
#include "plugin.h"

#include <errno.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
  POLICY_DEFAULT = 0,
  POLICY_PREFERRED = 1,
  POLICY_LOCAL = 4,
  WORDS = (MAX_NODE + 1) / 64,
  BITS = MAX_NODE + 2, /* the kernel reads one bit less */
};

/* The policy that this thread had before. */
static _Thread_local struct {
  bool replaced;
  int mode;
  uint64_t nodes[WORDS];
} before;

/* Give this thread its own memory policy back. */
void unplace(void) {
  if (!before.replaced) return;
  before.replaced = false;
  if (syscall(SYS_set_mempolicy, before.mode, before.nodes, BITS) != 0)
    say("cannot restore a thread's memory policy: %s", strerror(errno));
}

static bool place(int node, char why[MAX_REASON]) {
  uint64_t nodes[WORDS] = {0};
  if (syscall(SYS_get_mempolicy, &before.mode, before.nodes, BITS, NULL, 0) != 0)
    return explain(why, "get_mempolicy: %s", strerror(errno));
  if (before.mode != POLICY_DEFAULT && before.mode != POLICY_LOCAL)
    return explain(why, "the thread has a memory policy of its own");
  nodes[node / 64] = UINT64_C(1) << node % 64;
  if (syscall(SYS_set_mempolicy, POLICY_PREFERRED, nodes, BITS) != 0)
    return explain(why, "set_mempolicy: %s", strerror(errno));
  return before.replaced = true;
}

static int init(void **context, uint64_t hash, int *mask, const char *name, int hosts, int ranks,
                int rank, void *logger) {
  char why[MAX_REASON];
  int node = chosen_node(hash);
  (void)name, (void)hosts, (void)logger;
  unplace();
  *mask = 0;
  *context = &before; /* NCCL finalizes no profiler without a context */
  if (node < 0) return SUCCESS;
  if (place(node, why)) say("rank %d of %d: host buffers on NUMA node %d", rank, ranks, node);
  else say("rank %d of %d: host buffers where NCCL puts them: %s", rank, ranks, why);
  return SUCCESS;
}

/* Also after a communicator that failed between the two calls above. */
static int finalize(void *context) {
  (void)context;
  unplace();
  return SUCCESS;
}

static int start_event(void *context, void **event, void *description) {
  (void)context, (void)description;
  *event = NULL;
  return SUCCESS;
}

static int record_state(void *event, int state, void *arguments) {
  (void)event, (void)state, (void)arguments;
  return SUCCESS;
}

/* struct ncclProfiler of version 5, which NCCL 2.28.7 to 2.30.7 load. */
struct profiler {
  const char *name;
  int (*init)(void **, uint64_t, int *, const char *, int, int, int, void *);
  int (*start)(void *, void **, void *);
  int (*stop)(void *);
  int (*record)(void *, int, void *);
  int (*finalize)(void *);
};

EXPORT const struct profiler ncclProfiler_v5 = {"tccl", init, start_event, nothing, record_state,
                                                finalize};
