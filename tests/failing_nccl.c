/* Stands for an NCCL that fails: TCCL_FAILING_NCCL says how. As "choose" it does not fail, and logs
 * each collective as NCCL does. Each rank leaves its process's number in the folder
 * TCCL_FAILING_NCCL_PIDS. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { char internal[128]; } Id;

int ncclGetVersion(int *version) { *version = 22809; return 0; }
const char *ncclGetErrorString(int code) { return "internal error"; }
const char *ncclGetLastError(void *member) { return "it fails"; }
int ncclGetUniqueId(Id *id) { memset(id, 0, sizeof *id); return 0; }
int ncclCommAbort(void *made) { return 0; }
int cudaSetDevice(int device) { return 0; }
int cudaStreamQuery(void *stream) {
  static int asked;
  return asked++ < 2 ? 600 : 0;
}
int ncclMemAlloc(void **memory, size_t size) { return !(*memory = malloc(size)); }

static int log_choice(const char *name, char *memory, size_t count, int type, void *made,
                      void *stream) {
  FILE *out = fopen(getenv("NCCL_DEBUG_FILE"), "a");
  int last = count >= 1 << 20 ? 3 : 0;
  if (type != 1 || !made || stream) return 4;
  memory[count - 1] = 1;
  fprintf(out, "h:1:1 [0] NCCL INFO %s: %zu Bytes -> Algo %s proto %s channel{Lo..Hi}={0..%d}%s\n",
          name, count, "RING", last ? "SIMPLE" : "LL", last, last ? " cgaClusterSize 4" : "");
  return fclose(out);
}
#define COLLECTIVE(name, others, right)                                                         \
  int nccl##name(char *from, char *to, size_t count, int type, others void *made, void *stream) { \
    return !(right) || from != to || log_choice(#name, to, count, type, made, stream);            \
  }
#define ONE int one,
#define TWO int one, int two,
#define NONE
COLLECTIVE(Broadcast, ONE, one == 0)
COLLECTIVE(Reduce, TWO, one == 0 && two == 0)
COLLECTIVE(AllGather, NONE, 1)
COLLECTIVE(ReduceScatter, ONE, one == 0)
COLLECTIVE(AllReduce, ONE, one == 0)

static void copy(const char *from, const char *to) {
  char text[65536];
  FILE *in = fopen(from, "r"), *out = fopen(to, "w");
  fwrite(text, 1, fread(text, 1, sizeof text, in), out);
  fclose(in);
  fclose(out);
}

int ncclCommInitRankConfig(void **made, int ranks, Id id, int rank, void *config) {
  const char *how = getenv("TCCL_FAILING_NCCL"), *file = getenv("NCCL_DEBUG_FILE");
  char path[4096];
  FILE *out;
  snprintf(path, sizeof path, "%s/%d", getenv("TCCL_FAILING_NCCL_PIDS"), getpid());
  fclose(fopen(path, "w"));
  if (!strcmp(how, "refuse")) return 3;
  if (!strcmp(how, "die") && rank == 1) raise(SIGKILL);
  if (!strcmp(how, "die") || !strcmp(how, "hang")) for (;;) pause();
  out = fopen(file, "w");
  *made = out;
  if (rank == 0 && !strcmp(how, "choose")) {
    copy(getenv("NCCL_GRAPH_FILE"), getenv("NCCL_GRAPH_DUMP_FILE"));
    fputs("h:1:1 [0] NCCL INFO Channel 00/02 : 0 1\nh:1:1 [0] NCCL INFO Channel 01/02 : 0 1\n",
          out);
  } else if (rank == 0)
    fputs("h:1:1 [0] NCCL INFO Channel 00/02 : 0 1\nh:1:1 [0] NCCL INFO Chan", out);
  fclose(out);
  return 0;
}
