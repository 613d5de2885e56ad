/* Preloaded, makes a reader wait after it has read: others may write meanwhile. */
#include <dlfcn.h>
#include <unistd.h>

ssize_t pread(int fd, void *data, size_t size, off_t offset) {
  static ssize_t (*read)(int, void *, size_t, off_t);
  if (!read) *(void **)&read = dlsym(RTLD_NEXT, "pread");
  ssize_t done = read(fd, data, size, offset);
  usleep(200);
  return done;
}
