/* Somebody else's environment plugin: one answer of its own, the environment's for the rest. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int init(uint8_t major, uint8_t minor, uint8_t patch, const char *suffix) {
  (void)minor, (void)patch, (void)suffix;
  return major != 2;
}
static int finalize(void) { return 0; }
static const char *get(const char *name) {
  return strcmp(name, "NCCL_BUFFSIZE") == 0 ? "2097152" : getenv(name);
}

struct {
  const char *name;
  int (*init)(uint8_t, uint8_t, uint8_t, const char *);
  int (*finalize)(void);
  const char *(*get)(const char *);
} ncclEnvPlugin_v1 = {"other", init, finalize, get};
