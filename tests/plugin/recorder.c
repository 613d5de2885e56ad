/* A plugin that answers from the environment and records what NCCL asks, to make the records in
 * tests/cases/plugin: one line for each call, `THREAD env NAME` or `THREAD net HASH`. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static FILE *record;

static int start(void) {
  const char *path = getenv("RECORD");
  if (!record && path) record = fopen(path, "w");
  return 0;
}
static int init_v1(uint8_t a, uint8_t b, uint8_t c, const char *d) {
  return (void)a, (void)b, (void)c, (void)d, start();
}
static int init_v2(uint8_t a, uint8_t b, uint8_t c, const char *d, void *e) {
  return (void)a, (void)b, (void)c, (void)d, (void)e, start();
}
static int finalize(void) { return 0; }
static const char *get(const char *name) {
  static char own[4096];
  Dl_info info;
  if (record) fprintf(record, "%d env %s\n", (int)gettid(), name), fflush(record);
  if (strcmp(name, "NCCL_NET_PLUGIN") != 0 || !dladdr((void *)start, &info)) return getenv(name);
  snprintf(own, sizeof own, "%s", info.dli_fname);
  return own;
}
static int init(void **a, uint64_t hash, void *b, void *c, void *d) {
  (void)a, (void)b, (void)c, (void)d;
  if (record) fprintf(record, "%d net %016llx\n", (int)gettid(), (unsigned long long)hash);
  return 0;
}
static int devices(int *count) { return *count = 1, 0; }
static int properties(int device, void *out) { return (void)device, (void)out, 2; }
static int end(void *context) { return (void)context, 0; }

struct environment {
  const char *name;
  void *init;
  int (*finalize)(void);
  const char *(*get)(const char *);
} ncclEnvPlugin_v1 = {"recorder", init_v1, finalize, get},
  ncclEnvPlugin_v2 = {"recorder", init_v2, finalize, get};
struct network {
  const char *name;
  int (*init)(void **, uint64_t, void *, void *, void *);
  int (*devices)(int *);
  int (*properties)(int, void *);
  void *transfers[16];
  int (*finalize)(void *);
  void *attributes;
} ncclNetPlugin_v11 = {"recorder", init, devices, properties, {0}, end, 0},
  ncclNetPlugin_v12 = {"recorder", init, devices, properties, {0}, end, 0};
