/* A made-up libcuda.so.1 or libnvidia-ml.so.1, by the name it is linked with: GPU i has bus id
 * 0000:(16 + i):00.0, NVML index i and a UUID of bytes i + 1. */
#include <stdio.h>
#include <string.h>

static _Thread_local int current;
void fake_use(int gpu) { current = gpu; }
int cuCtxGetDevice(int *device) { return *device = current, 0; }
int cuDeviceGetPCIBusId(char *out, int size, int device) {
  return snprintf(out, (size_t)size, "0000:%02X:00.0", 16 + device) < 0;
}
int cuDeviceGetUuid_v2(void *out, int device) { return memset(out, device + 1, 16), 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
  unsigned number;
  if (sscanf(bus, "0000:%x:00.0", &number) != 1) return 2;
  return *device = (void *)(size_t)number, 0;
}
int nvmlDeviceGetIndex(void *device, unsigned *index) {
  return *index = (unsigned)(size_t)device - 16, 0;
}
