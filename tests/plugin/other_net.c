/* Somebody else's network plugin: NCCL assigns it, and it moves nothing. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static int init(void **context, uint64_t hash, void *config, void *logger, void *profiler) {
  (void)hash, (void)config, (void)logger, (void)profiler;
  *context = NULL;
  return 0;
}
static int devices(int *count) { return *count = 1, 0; }
struct properties { /* ncclNetProperties_v11_t */
  char *name, *path;
  uint64_t guid;
  int pointers, global, flush, speed, port;
  float latency;
  int comms, receives, device_type, device_version;
  struct {
    int count, devices[4];
  } parts;
  size_t most[2];
  int requests;
};
static int properties(int device, struct properties *out) {
  (void)device;
  memset(out, 0, sizeof *out);
  *out = (struct properties){.name = (char *)"other0", .guid = 1, .pointers = 1, .speed = 100000,
                             .comms = 1 << 16, .receives = 1, .parts = {1, {0}},
                             .most = {1 << 30, 1 << 30}, .requests = 1};
  return 0;
}
static int unused(void) { return 3; }
static int finalize(void *context) { return (void)context, 0; }

struct {
  const char *name;
  int (*init)(void **, uint64_t, void *, void *, void *);
  int (*devices)(int *);
  int (*properties)(int, struct properties *);
  int (*transfers[15])(void);
  int (*make)(void);
  int (*finalize)(void *);
  int (*attributes)(void);
} ncclNetPlugin_v11 = {"other", init, devices, properties,
                       {unused, unused, unused, unused, unused, unused, unused, unused, unused,
                        unused, unused, unused, unused, unused, unused},
                       NULL, finalize, NULL};
