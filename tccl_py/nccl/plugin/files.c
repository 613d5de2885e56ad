/* Reading files that nobody but root and the caller can write: a plan names what NCCL opens. */
#include "plugin.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Write a reason; return false, for `return explain(...)`. */
bool explain(char why[MAX_REASON], const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(why, MAX_REASON, format, arguments);
  va_end(arguments);
  return false;
}

/* As fstat, which is a symbol of glibc 2.33. */
int stat_of(int fd, struct stat *st) {
  return (int)syscall(SYS_newfstatat, fd, "", st, AT_EMPTY_PATH);
}

static bool trusted(int fd, bool folder, const char *name, char why[MAX_REASON]) {
  struct stat st;
  if (stat_of(fd, &st) != 0) return explain(why, "%s: %s", name, strerror(errno));
  if (folder ? !S_ISDIR(st.st_mode) : !S_ISREG(st.st_mode))
    return explain(why, "%s is no plain %s", name, folder ? "folder" : "file");
  if (st.st_uid != 0 && st.st_uid != geteuid())
    return explain(why, "%s belongs to another user", name);
  /* In a sticky folder, such as /tmp, others can add names but not replace the caller's. */
  if ((st.st_mode & (S_IWGRP | S_IWOTH)) && !(folder && (st.st_mode & S_ISVTX)))
    return explain(why, "%s can be written by other users", name);
  return true;
}

/* Open a path below a folder (-1: the root), each name in turn, following no link. */
int open_trusted(int at, const char *path, bool folder, char why[MAX_REASON]) {
  at = at < 0 ? open("/", O_PATH | O_DIRECTORY | O_CLOEXEC) : dup(at);
  bool good = at >= 0 && trusted(at, true, "/", why);
  while (good && *(path += strspn(path, "/"))) {
    char name[256];
    size_t length = strcspn(path, "/");
    good = length < sizeof name && strncmp(path, "..", length) != 0;
    if (!good) explain(why, "a name in the path is too long, . or ..");
    if (!good) break;
    memcpy(name, path, length);
    name[length] = '\0';
    path += length;
    bool inner = folder || path[0] == '/';
    /* A FIFO would block without O_NONBLOCK. */
    int flags = inner ? O_PATH | O_DIRECTORY : O_RDONLY | O_NONBLOCK;
    int next = openat(at, name, flags | O_NOFOLLOW | O_CLOEXEC);
    if (next < 0) explain(why, "%.200s: %s", name, strerror(errno));
    close(at);
    at = next;
    good = at >= 0 && trusted(at, inner, name, why);
  }
  if (good) return at;
  if (at >= 0) close(at);
  return -1;
}

/* Return the whole file with a NUL behind it, or NULL and why. */
char *read_trusted(int folder, const char *path, size_t limit, size_t *size,
                   char why[MAX_REASON]) {
  int fd = open_trusted(folder, path, false, why);
  if (fd < 0) return NULL;
  struct stat st;
  char *data = NULL;
  size_t got = 0;
  if (stat_of(fd, &st) == 0 && st.st_size >= 0 && (size_t)st.st_size <= limit)
    data = malloc((size_t)st.st_size + 1);
  while (data && got <= (size_t)st.st_size) {
    ssize_t part = read(fd, data + got, (size_t)st.st_size + 1 - got);
    if (part > 0) got += (size_t)part;
    else if (part == 0 || errno != EINTR) break;
  }
  close(fd);
  if (data && got == (size_t)st.st_size) {
    data[got] = '\0';
    *size = got;
    return data;
  }
  explain(why, "%s is too large, or changes, or cannot be read", path);
  free(data);
  return NULL;
}

/* Read the first line of a file of /proc or /sys. */
bool read_line(const char *path, char *out, size_t size) {
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  ssize_t got = fd < 0 ? -1 : read(fd, out, size - 1);
  if (fd >= 0) close(fd);
  if (got <= 0) return false;
  out[got] = '\0';
  out[strcspn(out, "\n")] = '\0';
  return true;
}
