/* Stands for an NCCL that fails: TCCL_FAILING_NCCL says how. Each rank leaves its process's number
 * in the folder TCCL_FAILING_NCCL_PIDS. */
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
  if (rank == 0) fputs("h:1:1 [0] NCCL INFO Channel 00/02 : 0 1\nh:1:1 [0] NCCL INFO Chan", out);
  fclose(out);
  *made = out;
  return 0;
}
