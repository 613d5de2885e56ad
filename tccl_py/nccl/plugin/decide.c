/* What a communicator gets, from its posts; and the communicator that a thread initialises. */
#include "plugin.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SCANNED_BYTES = 4 << 20, CHUNK = 1 << 16, ALLOCATIONS = 100 };
enum { NOTHING, POSTED, DECIDED };

static const char *const refusals[REFUSALS] = {
    [USER_VARIABLE] = "a variable contradicts the plan or is missing",
    [OTHER_GPU] = "its GPU is not the plan's",
    [NO_MEMORY_FILE] = "it has no file in memory",
    [TWO_RELEASES] = "its process has two releases of NCCL",
};

/* Check one post against this rank's own; return why it means default NCCL, or NULL. */
static const char *objection(const struct plan *plan, const struct post *own,
                             const struct post *post) {
  struct post sealed = *post;
  board_seal(&sealed);
  if (memcmp(&sealed, post, sizeof sealed) != 0) return "the post is damaged";
  if (post->hash != own->hash || post->ranks != own->ranks || post->rank >= own->ranks)
    return "the post is of another communicator";
  if (post->host != own->host) return "it is on another host";
  if (memcmp(post->digest, own->digest, DIGEST_BYTES) != 0 || post->nccl != own->nccl)
    return "it has another index or another NCCL";
  if (post->refusal >= REFUSALS) return "the post is damaged";
  if (post->refusal != AGREES) return refusals[post->refusal];
  if (post->gpu < 0 || post->gpu >= plan->gpu_count || post->nvml < 0 ||
      post->nvml > MAX_NVML_INDEX)
    return "the post is damaged";
  return NULL;
}

/* Return how many posts precede the first mark of a rank that decides. A rank marks before it reads,
 * so all ranks read these alike, even with an NCCL without a barrier before its question. */
size_t posts_before_mark(const struct post *posts, size_t size) {
  size_t count = 0, whole = size / sizeof *posts;
  while (count < whole && !board_is_mark(&posts[count])) count++;
  return count < whole ? count * sizeof *posts : size;
}

/* Decide from nothing but the posts and the plan, which all ranks have alike. */
struct decision decide(const struct plan *plan, const struct post *own, const struct post *posts,
                       size_t size) {
  struct decision decision = {.set = NULL};
  uint64_t gpus = 0, tuned = 1;
  size_t count = size / sizeof *posts;
  if (count > MAX_GPUS || size % sizeof *posts != 0 ||
      (plan->job ? own->ranks != (uint32_t)plan->job : count != own->ranks)) {
    explain(decision.why, "%zu posts for %u ranks", count, own->ranks);
    return decision;
  }
  for (const struct post *post = posts; post < posts + count; post++) {
    /* Ranks of a job that have another NCCL_HOSTID count for another host. */
    if (plan->job && post->host != own->host) continue;
    const char *why = objection(plan, own, post);
    for (const struct post *other = posts; other < post && !why; other++)
      if (post->host == other->host &&
          (post->rank == other->rank || post->gpu == other->gpu || post->nvml == other->nvml))
        why = "it or its GPU is there twice";
    if (why) {
      explain(decision.why, "rank %u: %s", post->rank, why);
      return decision;
    }
    gpus |= UINT64_C(1) << post->gpu;
    decision.nvml[post->gpu] = post->nvml;
    tuned &= post->tuned;
  }
  decision.set = plan_set(plan, gpus);
  decision.table = tuned ? plan_table(plan, gpus) : NULL;
  if (!decision.set) explain(decision.why, "the plan has nothing for these GPUs");
  return decision;
}

/* Write the graph file with today's NVML indices, which a container numbers anew. */
size_t graph_text(const struct plan *plan, const struct decision *decision, char *out,
                  size_t room) {
  const char *from = decision->set->text, *end = from + decision->set->size, *begin;
  size_t size = 0;
  for (int gpu;; size += (size_t)sprintf(out + size, "%x", (unsigned)decision->nvml[gpu])) {
    const char *behind = next_gpu(plan, from, &begin, &gpu), *stop = behind ? begin : end;
    if (size + (size_t)(stop - from) + 4 > room) return 0;
    memcpy(out + size, from, (size_t)(stop - from));
    size += (size_t)(stop - from);
    if (!behind) return size;
    if (gpu < 0) return 0; /* never: names_its_gpus has found all */
    from = behind;
  }
}

/* Room for the largest graph file: each of its tags may grow by a digit. */
static size_t graph_room(const struct plan *plan) { return plan->largest_graph * 5 / 4 + 64; }

/* The communicator that a thread initialises. NCCL asks for its variables on the same thread. */
struct member {
  int phase;
  int board;  /* open from the post to the decision */
  int memory; /* the graph file as NCCL gets it: no change of files reaches it */
  char *mapped;
  char path[32];
  struct post post;
  const struct set *set;
  const struct tune *table;
};
static _Thread_local struct member member = {.board = -1, .memory = -1};
static pthread_key_t at_thread_exit;
static bool has_key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void drop(void *unused) {
  (void)unused;
  forget();
}

static void first_use(void) {
  has_key = pthread_key_create(&at_thread_exit, drop) == 0;
  boards_sweep();
}

static void drop_memory(void) {
  if (member.mapped) munmap(member.mapped, graph_room(active_plan()));
  if (member.memory >= 0) close(member.memory);
  member.mapped = NULL;
  member.memory = -1;
}

/* Forget the communicator; a board that was never decided on goes with its last holder. */
void forget(void) {
  if (member.phase == NOTHING) return;
  if (member.phase == POSTED) board_leave(member.board, member.post.hash, false);
  drop_memory();
  member.phase = NOTHING;
  member.set = NULL;
  member.table = NULL;
}

/* Allocate pages of a file in memory; on older kernels a signal ends that. */
static bool allocate(int fd, size_t size) {
  for (int i = 0; i < ALLOCATIONS; i++) {
    if (fallocate(fd, 0, 0, (off_t)size) == 0) return true;
    if (errno != EINTR) return false;
  }
  return false;
}

/* Make a file in memory with all its pages, so that filling it cannot fail later. */
static bool make_memory(const struct plan *plan) {
  size_t room = graph_room(plan);
  member.memory = (int)syscall(SYS_memfd_create, "tccl-graph", 1u /* MFD_CLOEXEC */);
  if (member.memory >= 0 && allocate(member.memory, room)) {
    snprintf(member.path, sizeof member.path, "/proc/self/fd/%d", member.memory);
    void *mapped = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_SHARED, member.memory, 0);
    member.mapped = mapped == MAP_FAILED ? NULL : mapped;
    if (mapped != MAP_FAILED && access(member.path, R_OK) == 0) return true;
  }
  drop_memory();
  return false;
}

/* Find rank and number of ranks behind netContext in struct ncclComm, where they follow the
 * communicator's hash: {uint64_t commHash; int rank, nRanks;} in 2.28.7 to 2.32.3. No plugin is
 * told the number of ranks before the graph is searched. The nearest place counts: other threads'
 * communicators may lie behind. Reading through /proc/self/mem cannot fault. */
static bool find_ranks(const void *context, uint64_t hash, uint32_t *rank, uint32_t *ranks) {
  char *chunk = malloc(CHUNK + 16);
  int memory = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
  bool found = false;
  for (size_t from = 0; from < SCANNED_BYTES && chunk && memory >= 0 && !found; from += CHUNK) {
    ssize_t got = pread(memory, chunk, CHUNK + 16, (off_t)((uintptr_t)context + from));
    if (got < 16) break;
    for (ssize_t at = 0; at + 16 <= got && !found; at += 8) {
      uint32_t pair[2];
      memcpy(pair, chunk + at + 8, sizeof pair);
      found = memcmp(chunk + at, &hash, 8) == 0 && pair[0] < pair[1];
      if (!found) continue;
      *rank = pair[0];
      *ranks = pair[1];
    }
  }
  if (memory >= 0) close(memory);
  free(chunk);
  return found;
}

static enum refusal identify(const struct plan *plan, struct post *post, char why[MAX_REASON]) {
  if (has_two_releases()) return explain(why, "%s", refusals[TWO_RELEASES]), TWO_RELEASES;
  const char *other = contradiction(plan);
  if (other) return explain(why, "%s", other), USER_VARIABLE;
  post->gpu = current_gpu(plan, &post->nvml, why);
  return post->gpu < 0 ? OTHER_GPU : AGREES;
}

/* A communicator begins on this thread: post its rank. */
void watch(const struct plan *plan, void *context, uint64_t hash) {
  char why[MAX_REASON] = "";
  struct post post = {.hash = hash, .gpu = -1, .nvml = -1, .nccl = nccl_version()};
  pthread_once(&once, first_use);
  forget();
  post.refusal = identify(plan, &post, why);
  if (!find_ranks(context, hash, &post.rank, &post.ranks)) {
    say("default NCCL: this NCCL does not show the number of ranks");
    return;
  }
  /* These are alike on all ranks. */
  uint32_t least = plan->job ? (uint32_t)plan->job : 2;
  uint32_t most = plan->job ? least : (uint32_t)plan->gpu_count;
  if (post.ranks > most)
    say("default NCCL: %u ranks, and the plan has %u GPUs", post.ranks, most);
  if (post.ranks < least || post.ranks > most) return;
  if (post.refusal == AGREES && plan->largest_graph > 0 && !make_memory(plan)) {
    post.refusal = NO_MEMORY_FILE;
    explain(why, "%s", refusals[NO_MEMORY_FILE]);
  }
  post.tuned = tuner_is_asked();
  post.host = host_identity(user_value("NCCL_HOSTID"));
  memcpy(post.digest, plan->digest, DIGEST_BYTES);
  board_seal(&post);
  if (why[0]) say("rank %u of %u refuses the plan: %s", post.rank, post.ranks, why);
  member.board = board_post(&post, why);
  if (member.board < 0) {
    say("default NCCL on all ranks: rank %u of %u %s", post.rank, post.ranks, why);
    drop_memory();
    return;
  }
  member.post = post;
  member.phase = POSTED;
  if (has_key) pthread_setspecific(at_thread_exit, &member);
}

/* All ranks have posted, and NCCL asks for the topology's dump, once per communicator behind its
 * first allgather: decide, and fill the file that was made before. Nothing here can fail on one rank
 * alone. */
void conclude(void) {
  const struct plan *plan = active_plan();
  struct post posts[MAX_GPUS + 2];
  if (member.phase != POSTED) return forget(); /* a child that shares its parent's network */
  board_mark(member.board);
  ssize_t size = pread(member.board, posts, sizeof posts, 0);
  size_t read = posts_before_mark(posts, size < 0 ? 0 : (size_t)size);
  struct decision decision = decide(plan, &member.post, posts, read);
  board_leave(member.board, member.post.hash, true);
  member.phase = DECIDED;
  const struct set *set = decision.set;
  size_t length = 0;
  member.table = decision.table;
  if (set && set->text) {
    length = graph_text(plan, &decision, member.mapped, graph_room(plan));
    if (length == 0 || ftruncate(member.memory, (off_t)length) != 0) set = NULL; /* never */
  }
  member.set = set;
  if (set)
    say("rank %u of %u: %s%s of %s%s%s", member.post.rank, member.post.ranks,
        set->text ? "graph file " : "variables", set->text ? set->name : "", plan->path,
        set->text && plan->give.count > 0 ? ", and variables" : "",
        plan->simulated ? " (simulated)" : "");
  else say("rank %u of %u: default NCCL: %s", member.post.rank, member.post.ranks, decision.why);
  if (!set && !member.table) forget();
}

const char *chosen_graph_file(void) {
  return member.set && member.set->text ? member.path : NULL;
}

const struct tune *chosen_table(uint64_t hash, size_t ranks) {
  bool own = member.phase == DECIDED && member.post.hash == hash && member.post.ranks == ranks;
  if (!own || !member.table) return NULL;
  say("rank %u of %u: tuned by %s", member.post.rank, member.post.ranks, active_plan()->path);
  return member.table;
}

/* Return the NUMA node for a communicator's host buffers on this rank, or -1. */
int chosen_node(uint64_t hash) {
  const struct set *set = member.set;
  return set && set->placed && member.post.hash == hash ? set->nodes[member.post.gpu] : -1;
}

/* Return the value of a variable that this communicator alone gets, or NULL. */
const char *chosen_variable(const char *name) {
  return member.set ? variable_of(&active_plan()->give, name) : NULL;
}
