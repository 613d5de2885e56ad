/* The host, its driver, and the GPU of this thread. */
#include "plugin.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Return the driver's major version: `NVRM version: ... Module  580.95.05  Release ...`. */
static int driver_major(void) {
  char line[512];
  if (!read_line("/proc/driver/nvidia/version", line, sizeof line)) return -1;
  for (char *save, *word = strtok_r(line, " \t", &save); word; word = strtok_r(NULL, " \t", &save)) {
    char *end;
    long major = strtol(word, &end, 10);
    if (end - word >= 3 && *end == '.' && major < 10000) return (int)major;
  }
  return -1;
}

/* Count the NUMA nodes with CPUs in a list such as `0-1,4`. */
static int numa_nodes(void) {
  char line[512];
  int count = 0;
  if (!read_line("/sys/devices/system/node/has_cpu", line, sizeof line)) return 0;
  for (char *save, *part = strtok_r(line, ",", &save); part; part = strtok_r(NULL, ",", &save)) {
    int first, last, fields = sscanf(part, "%d-%d", &first, &last);
    count += fields == 2 ? last - first + 1 : fields == 1;
  }
  return count;
}

/* Check that the plan was made for this host; a rank's GPU is checked when it posts. */
bool host_matches(const struct plan *plan, char why[MAX_REASON]) {
  int driver = plan->driver < 0 ? -1 : driver_major(), numa = plan->numa < 0 ? -1 : numa_nodes();
  if (driver != plan->driver)
    return explain(why, "the plan is for driver %d, not %d", plan->driver, driver);
  if (numa != plan->numa)
    return explain(why, "the plan is for %d NUMA nodes, not %d", plan->numa, numa);
  return true;
}

/* Return NCCL's notion of a host: NCCL_HOSTID, or the name of the host and its boot id. */
uint64_t host_identity(const char *nccl_hostid) {
  char text[1024] = "";
  if (nccl_hostid) return hash_of(nccl_hostid, strlen(nccl_hostid));
  if (gethostname(text, 512) != 0) text[0] = '\0';
  text[511] = '\0';
  size_t length = strlen(text);
  if (!read_line("/proc/sys/kernel/random/boot_id", text + length, sizeof text - length))
    text[length] = '\0';
  return hash_of(text, strlen(text));
}

static void *symbol(void *library, const char *name, const char *older) {
  void *found = dlsym(library, name);
  return found ? found : dlsym(library, older);
}

/* Return the NVML index of the GPU; -1 where NVML does not say. NCCL too keeps NVML open, so that
 * further initialisations only count. */
static int nvml_index(const char *bus) {
  void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL), *device;
  unsigned index;
  if (!library) return -1;
  int (*init)(void), (*by_bus)(const char *, void **), (*index_of)(void *, unsigned *);
  *(void **)&init = symbol(library, "nvmlInit_v2", "nvmlInit");
  *(void **)&by_bus =
      symbol(library, "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetHandleByPciBusId");
  *(void **)&index_of = dlsym(library, "nvmlDeviceGetIndex");
  bool found = init && by_bus && index_of && init() == 0 && by_bus(bus, &device) == 0 &&
               index_of(device, &index) == 0 && index <= MAX_NVML_INDEX;
  return found ? (int)index : -1;
}

/* Find the GPU of this thread's CUDA context among the plan's, through the libcuda that NCCL has
 * loaded; return its place and its NVML index of today, or -1 and why. */
int current_gpu(const struct plan *plan, int *nvml, char why[MAX_REASON]) {
  void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  uint8_t id[16];
  uint64_t bus;
  int device, (*current)(int *), (*bus_of)(char *, int, int), (*uuid_of)(void *, int);
  char name[32] = "", uuid[41];
  if (!library) return explain(why, "libcuda.so.1 is not loaded"), -1;
  *(void **)&current = dlsym(library, "cuCtxGetDevice");
  *(void **)&bus_of = dlsym(library, "cuDeviceGetPCIBusId");
  /* The second version answers with the UUID of a MIG instance, which is no GPU of a plan. */
  *(void **)&uuid_of = symbol(library, "cuDeviceGetUuid_v2", "cuDeviceGetUuid");
  bool found = current && bus_of && uuid_of && current(&device) == 0 &&
               bus_of(name, sizeof name, device) == 0 && parse_bus(name, &bus) &&
               uuid_of(id, device) == 0;
  dlclose(library);
  if (!found) return explain(why, "CUDA does not say which GPU this thread uses"), -1;
  char *to = uuid + sprintf(uuid, "GPU");
  for (int i = 0; i < 16; i++)
    to += sprintf(to, i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", id[i]);
  for (int i = 0; i < plan->gpu_count; i++) {
    const struct gpu *gpu = &plan->gpus[i];
    if (gpu->bus != bus || (strcmp(gpu->uuid, "-") != 0 && strcmp(gpu->uuid, uuid) != 0)) continue;
    *nvml = nvml_index(name);
    return *nvml >= 0 ? i : (explain(why, "NVML does not know GPU %s", name), -1);
  }
  return explain(why, "GPU %s is not the plan's", name), -1;
}
