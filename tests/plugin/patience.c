/* To preload: NCCL asks its sockets again and again, which keeps the cores from the other ranks.
 * The pretended CUDA launches no kernels: here they are launched and do nothing. And NCCL clears
 * buffers that no test fills, 924 MB for a graph file (2.30). */
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#if defined(__x86_64__)
/* The kernel gives clear pages again where a program drops its own. */
static size_t dropped(char *at, size_t size) {
  size_t page = 4096, before = -(size_t)at % page, whole = (size - before) / page * page;
  if (madvise(at + before, whole, MADV_DONTNEED)) return 0;
  memset(at, 0, before);
  return before + whole;
}

void *memset(void *to, int byte, size_t size) {
  static size_t least;
  if (!least) least = (size_t)1 << (getenv("FAKE_PAGES") ? 28 : 16); /* Some tests count pages. */
  size_t done = byte == 0 && size >= least ? dropped(to, size) : 0;
  char *at = (char *)to + done;
  size -= done;
  __asm__ volatile("rep stosb" : "+D"(at), "+c"(size) : "a"(byte) : "memory");
  return to;
}
#endif

static void rest(long result) {
  int error = errno;
  if (result < 0 && (error == EAGAIN || error == EWOULDBLOCK)) usleep(200);
  errno = error;
}

ssize_t recv(int fd, void *data, size_t size, int flags) {
  static ssize_t (*real)(int, void *, size_t, int);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "recv");
  ssize_t result = real(fd, data, size, flags);
  rest(result);
  return result;
}

int accept(int fd, struct sockaddr *address, socklen_t *length) {
  static int (*real)(int, struct sockaddr *, socklen_t *);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "accept");
  int result = real(fd, address, length);
  rest(result);
  return result;
}

static int nothing(void) { return 0; }

/* CUDA's virtual memory, as far as NCCL_CUMEM_ENABLE=1 needs it. */
static int granularity(size_t *size, const void *of, int which) {
  (void)of, (void)which;
  return *size = 1 << 16, 0;
}
static int reserve(void **to, size_t size) {
  *to = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return *to == MAP_FAILED ? 2 : 0;
}

static const struct {
  const char *start;
  int (*function)();
} pretended[] = {
    {"cuLaunchKernel", nothing},     {"cuMemGetAllocationGranularity", granularity},
    {"cuMemAddressReserve", reserve}, {"cuMemCreate", nothing},
    {"cuMemMap", nothing},           {"cuMemSetAccess", nothing},
    {"cuMemRelease", nothing},       {"cuMemUnmap", nothing},
    {"cuMemAddressFree", nothing},
};

int cudaGetDriverEntryPointByVersion(const char *name, void **entry, unsigned version,
                                     unsigned long long flags, int *found) {
  static int (*real)(const char *, void **, unsigned, unsigned long long, int *);
  if (!real)
    *(void **)&real = dlsym(dlopen("libcudart.so.13", RTLD_LAZY), "cudaGetDriverEntryPointByVersion");
  for (size_t i = 0; i < sizeof pretended / sizeof *pretended; i++)
    if (strncmp(name, pretended[i].start, strlen(pretended[i].start)) == 0) {
      *(int (**)())entry = pretended[i].function;
      if (found) *found = 0;
      return 0;
    }
  return real(name, entry, version, flags, found);
}
