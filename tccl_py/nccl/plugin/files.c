/* Files that nobody but root and the caller can write, as a plan names what NCCL opens; digests. */
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

/* BLAKE2b-256 (RFC 7693), as Python's hashlib.blake2b(digest_size=32); little-endian hosts only. */
static const uint64_t START[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};
static const uint8_t ORDER[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static uint64_t turn(uint64_t x, int by) { return x >> by | x << (64 - by); }

static void mix(uint64_t v[16], int a, int b, int c, int d, uint64_t x, uint64_t y) {
  v[a] += v[b] + x;
  v[d] = turn(v[d] ^ v[a], 32);
  v[c] += v[d];
  v[b] = turn(v[b] ^ v[c], 24);
  v[a] += v[b] + y;
  v[d] = turn(v[d] ^ v[a], 16);
  v[c] += v[d];
  v[b] = turn(v[b] ^ v[c], 63);
}

static void compress(uint64_t state[8], const uint8_t block[128], uint64_t total, bool last) {
  uint64_t v[16], m[16];
  memcpy(m, block, sizeof m);
  memcpy(v, state, 64);
  memcpy(v + 8, START, 64);
  v[12] ^= total;
  if (last) v[14] = ~v[14];
  for (int round = 0; round < 12; round++) {
    const uint8_t *s = ORDER[round % 10];
    for (int i = 0; i < 4; i++) mix(v, i, i + 4, i + 8, i + 12, m[s[2 * i]], m[s[2 * i + 1]]);
    for (int i = 0; i < 4; i++)
      mix(v, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, m[s[8 + 2 * i]],
          m[s[9 + 2 * i]]);
  }
  for (int i = 0; i < 8; i++) state[i] ^= v[i] ^ v[i + 8];
}

void digest_of(const void *data, size_t size, uint8_t out[DIGEST_BYTES]) {
  uint64_t state[8];
  uint8_t block[128];
  const uint8_t *at = data;
  memcpy(state, START, sizeof state);
  state[0] ^= 0x01010000 ^ DIGEST_BYTES;
  size_t done = 0;
  for (; size - done > sizeof block; done += sizeof block)
    compress(state, at + done, done + sizeof block, false);
  memset(block, 0, sizeof block);
  if (size > done) memcpy(block, at + done, size - done);
  compress(state, block, size, true);
  memcpy(out, state, DIGEST_BYTES);
}

uint64_t hash_of(const void *data, size_t size) {
  uint8_t digest[DIGEST_BYTES];
  uint64_t hash;
  digest_of(data, size, digest);
  memcpy(&hash, digest, sizeof hash);
  return hash;
}

/* Compute a digest, and compare it with hexadecimal digits. */
bool digest_is(const char *hex, const void *data, size_t size, uint8_t out[DIGEST_BYTES]) {
  char digits[2 * DIGEST_BYTES + 1];
  digest_of(data, size, out);
  for (int i = 0; i < DIGEST_BYTES; i++) sprintf(digits + 2 * i, "%02x", out[i]);
  return strcmp(hex, digits) == 0;
}
