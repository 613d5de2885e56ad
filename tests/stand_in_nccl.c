/* Stands for NCCL where there is none: communicators of two processes of one host that move bytes
 * between their host memories over a socket. Same functions, same arguments; a stream is ignored,
 * since a call returns when its bytes have come, or are on their way. Its counterpart is NCCL
 * itself, in tests/gpu.
 *
 * TCCL_STAND_IN_NCCL is a folder that takes what each member was told: graph file and variables. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

typedef struct { char internal[128]; } Id;
typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking, cga, minimum, maximum;
} Config;
typedef struct { int sock, rank, failed; } Member;
enum { OK = 0, SYSTEM = 2, ARGUMENT = 4, REMOTE = 6 };
static int listening[65536];

int ncclGetVersion(int *version) { *version = 22809; return OK; }
const char *ncclGetErrorString(int code) {
  return code == REMOTE ? "remote process exited" : "stand-in failed";
}
const char *ncclGetLastError(void *member) { return ""; }

static struct sockaddr_in here(int port) {
  return (struct sockaddr_in){.sin_family = AF_INET,
                              .sin_port = htons(port),
                              .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

int ncclGetUniqueId(Id *id) {
  struct sockaddr_in at = here(0);
  socklen_t size = sizeof at;
  int sock = socket(AF_INET, SOCK_STREAM, 0);
  if (bind(sock, (void *)&at, sizeof at) || listen(sock, 1)) return SYSTEM;
  if (getsockname(sock, (void *)&at, &size)) return SYSTEM;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "%d", ntohs(at.sin_port));
  listening[ntohs(at.sin_port)] = sock;
  return OK;
}

static void tell(int rank, const Config *config) {
  const char *folder = getenv("TCCL_STAND_IN_NCCL"), *graph = getenv("NCCL_GRAPH_FILE");
  const char *names[] = {"NCCL_BUFFSIZE", "NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_READ",
                         "NCCL_HOSTID",   "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"};
  static int count;
  char path[4096], line[4096];
  if (!folder) return;
  snprintf(path, sizeof path, "%s/%d-%d", folder, getpid(), count++);
  FILE *out = fopen(path, "w"), *in = graph ? fopen(graph, "r") : NULL;
  fprintf(out, "rank=%d\nchannels=%d..%d\n", rank, config->minimum, config->maximum);
  for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
    fprintf(out, "%s=%s\n", names[i], getenv(names[i]) ? getenv(names[i]) : "");
  while (in && fgets(line, sizeof line, in)) fputs(line, out);
  if (in) fclose(in);
  fclose(out);
}

int ncclCommInitRankConfig(Member **found, int count, Id id, int rank, const Config *config) {
  int port = atoi(id.internal), sock;
  if (count != 2 || config->magic != 0xcafebeef || config->version < 21800) return ARGUMENT;
  if (config->blocking != 1) return ARGUMENT;
  tell(rank, config);
  if (getenv("TCCL_STAND_IN_REFUSES")) return SYSTEM;
  if (rank == 1) {
    sock = accept(listening[port], NULL, NULL);
    close(listening[port]);
  } else {
    struct sockaddr_in at = here(port);
    sock = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(sock, (void *)&at, sizeof at)) return SYSTEM;
  }
  if (sock < 0) return SYSTEM;
  *found = calloc(1, sizeof **found);
  **found = (Member){.sock = sock, .rank = rank};
  return OK;
}

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Member *member,
                  void *stream) {
  if (type != 1 || root != 0) return ARGUMENT;
  for (size_t done = 0; done < count;) {
    const size_t left = count - done;
    ssize_t step = member->rank == 0
                       ? send(member->sock, (const char *)from + done, left, MSG_NOSIGNAL)
                       : recv(member->sock, (char *)to + done, left, 0);
    if (step <= 0) return member->failed = REMOTE;
    done += step;
  }
  return OK;
}

int ncclCommGetAsyncError(Member *member, int *state) {
  *state = member->failed;
  return OK;
}

int ncclCommAbort(Member *member) {
  shutdown(member->sock, SHUT_RDWR);
  close(member->sock);
  free(member);
  return OK;
}
